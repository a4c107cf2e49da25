"""A private RabbitMQ: it answers, keeps durable messages over a kill, and is gone at exit."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

import aio_pika
import pytest

from bridge.errors import BrokerError
from bridge.sandbox import broker as broker_module
from bridge.sandbox.broker import URL_VARIABLE, Broker, answers_amqp, private_broker

QUEUE = "kept"
DEADLINE_SECONDS = 10


@dataclass
class Life:
    """What was seen of one broker, from its start to its exit."""

    answered: bool
    version: str
    first_folder: str
    survivor: bytes
    pids: tuple[int, int]
    answered_while_paused: bool
    answers_after_exit: bool
    groups_after_exit: list[int]
    folder_left: bool


@pytest.fixture(scope="module")
def life() -> Life:
    """Run one broker through a kill and a pause."""
    with private_broker() as broker:
        groups = [broker.pid, _pid_of_epmd(broker)]
        answered = answers_amqp(broker.url)
        seen = "string:join([rabbit_misc:version(), hd(code:get_path())], [32])."
        version, first_folder = json.loads(broker.ctl("eval", seen)).split()
        asyncio.run(_publish(broker.url, b"durable"))
        broker.flush()
        broker.kill()
        broker.start()
        survivor = asyncio.run(_get(broker.url))
        groups.append(broker.pid)
        broker.pause()
        answered_while_paused = answers_amqp(broker.url)
        broker.resume()
    return Life(
        answered=answered,
        version=version,
        first_folder=first_folder,
        survivor=survivor,
        pids=(groups[0], groups[2]),
        answered_while_paused=answered_while_paused,
        answers_after_exit=answers_amqp(broker.url),
        groups_after_exit=[group for group in groups if _runs(group)],
        folder_left=broker._folder.exists(),
    )


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
def test_answers_an_amqp_handshake(life: Life) -> None:
    """The broker that was started answers at its URL."""
    assert life.answered


@pytest.mark.slow
def test_runs_the_control_tool_on_its_own_node(life: Life) -> None:
    """The control tool reaches the private node and returns what it prints."""
    assert tuple(int(part) for part in life.version.split(".")[:2]) >= (3, 10)


@pytest.mark.slow
def test_looks_for_its_code_where_most_of_it_is(life: Life) -> None:
    """RabbitMQ's own folder comes first, and none of a plugin that is not enabled before it."""
    assert Path(life.first_folder).parent.name.split("-")[0] == "rabbit"


@pytest.mark.slow
def test_keeps_durable_messages_over_a_kill(life: Life) -> None:
    """A persistent message is there after SIGKILL and a new start, in a new process."""
    assert life.survivor == b"durable"
    assert life.pids[0] != life.pids[1]


@pytest.mark.slow
def test_a_paused_broker_does_not_answer(life: Life) -> None:
    """A frozen broker takes connections and says nothing."""
    assert not life.answered_while_paused


@pytest.mark.slow
def test_leaves_nothing_behind(life: Life) -> None:
    """After the exit no process, no open port and no folder is left."""
    assert not life.answers_after_exit
    assert life.groups_after_exit == []
    assert not life.folder_left


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a server program the error is one sentence that says what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(broker_module, "_PACKAGE_FOLDERS", ())

    advice = r"apt-get install rabbitmq-server.*" + URL_VARIABLE
    with pytest.raises(BrokerError, match=advice), private_broker():
        pass
