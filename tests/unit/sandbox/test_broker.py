"""A private RabbitMQ: it answers, keeps durable messages over a kill, and is gone at exit."""

import asyncio
import json
import os
from pathlib import Path

import aio_pika
import pytest

from bridge.errors import BrokerError
from bridge.sandbox import broker as broker_module
from bridge.sandbox.broker import URL_VARIABLE, Broker, answers_amqp, private_broker

QUEUE = "kept"
DEADLINE_SECONDS = 10


def _pid_of_epmd(broker: Broker) -> int:
    assert broker._epmd._child is not None
    return broker._epmd._child.pid


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def _publish(url: str, body: bytes) -> None:
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        await aio_pika.connect(url) as connection,
        connection.channel() as channel,
    ):
        await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, QUEUE)


async def _get(url: str) -> bytes:
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        await aio_pika.connect(url) as connection,
        connection.channel() as channel,
    ):
        queue = await channel.get_queue(QUEUE)
        async with queue.iterator(no_ack=True) as messages:
            async for message in messages:
                return message.body
    raise AssertionError


@pytest.mark.slow
def test_a_broker_keeps_durable_messages_over_a_kill_and_leaves_nothing_behind() -> None:
    """One broker, through a kill and a pause, until no process, port or folder of it is left."""
    with private_broker() as broker:
        groups = [broker.pid, _pid_of_epmd(broker)]
        assert answers_amqp(broker.url)
        seen = "string:join([rabbit_misc:version(), hd(code:get_path())], [32])."
        version, first_folder = json.loads(broker.ctl("eval", seen)).split()
        asyncio.run(_publish(broker.url, b"durable"))
        broker.flush()
        broker.kill()
        broker.start()
        assert asyncio.run(_get(broker.url)) == b"durable"
        groups.append(broker.pid)
        broker.pause()
        assert not answers_amqp(broker.url)
        broker.resume()

    assert tuple(int(part) for part in version.split(".")[:2]) >= (3, 10)
    # RabbitMQ's own folder comes first, and no plugin that is not enabled before it.
    assert Path(first_folder).parent.name.split("-")[0] == "rabbit"
    assert groups[0] != groups[2]
    assert not answers_amqp(broker.url)
    assert [group for group in groups if _runs(group)] == []
    assert not broker._folder.exists()


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a server program the error is one sentence that says what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(broker_module, "_PACKAGE_FOLDERS", ())

    advice = r"apt-get install rabbitmq-server.*" + URL_VARIABLE
    with pytest.raises(BrokerError, match=advice), private_broker():
        pass
