"""An operator's pause beside other trouble: the broker's, the service's, or all day long."""

import asyncio
import time
from typing import Any

import pytest
from yarl import URL

from bridge.admin.pausing import find_pause, pause, resume
from bridge.amqp.connecting import NEXT_LOGIN_SECONDS, close_quietly, open_first_connection
from bridge.errors import BrokerError
from bridge.topology.paused_queue import PROBE_SECONDS, paused_queue, probe
from tests.alarms import memory_alarm
from tests.amqp_client import open_amqp
from tests.erlang import binary, evaluate
from tests.faults.amqp_proxy import CHANNEL_CLOSE, PUBLISH, Method
from tests.faults.bench import Bench, eventually, make_settings, open_link

REASON = "wrong text"


async def test_the_broker_is_killed_in_a_pause(bench: Bench) -> None:
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    async with bench.worker() as live:
        await pause(settings, REASON)
        await eventually(lambda: live.paused == {"operator"}, what="paused")
        numbers = await bench.publish(5)
        await asyncio.to_thread(bench.broker.flush)
        await asyncio.to_thread(bench.broker.kill)
        await eventually(lambda: live.logged("broker_lost"), what="a lost broker")
        await asyncio.to_thread(bench.broker.start)
        await live.until_linked()
        connection = await open_first_connection(settings.rabbitmq, name="test")
        found = await find_pause(connection, bench.queue)
        await close_quietly(connection)
        assert found is not None
        assert found.note is not None
        assert found.note.reason == REASON
        assert live.paused == {"operator"}
        assert bench.service.posts(numbers) == []

        assert await resume(settings)
        await bench.until_taken(numbers)
        assert bench.sent_twice(numbers) == {}


async def test_a_pause_needs_no_broker_that_stores(bench: Bench) -> None:
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    async with bench.worker() as live:
        numbers = await bench.publish(3)
        await bench.until_taken(numbers)
        async with memory_alarm(bench.broker):
            async with asyncio.timeout(20):
                paused = await pause(settings, REASON)
            assert paused.note is None
            await eventually(lambda: live.paused == {"operator"}, what="paused")
            assert await resume(settings)
            await eventually(lambda: not live.paused, what="resumed")


async def test_asking_all_day_is_no_error(bench: Bench) -> None:
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    name = paused_queue(bench.queue)

    def errors() -> int:
        logs = bench.broker._folder.rglob("*.log")
        return sum(log.read_text(errors="replace").count(f"no queue '{name}'") for log in logs)

    async with bench.worker():
        connection = await open_first_connection(settings.rabbitmq, name="test")
        # Looked at on its connection, once.
        await asyncio.sleep(1.5)
        before = errors()
        await asyncio.sleep(3)
        assert errors() == before > 0
        assert await probe(connection, bench.queue) is False
        await pause(settings, None)
        assert await probe(connection, bench.queue)
        await resume(settings)
        await close_quietly(connection)


@pytest.mark.parametrize("late", [PUBLISH, CHANNEL_CLOSE], ids=["at_the_probe", "at_its_end"])
async def test_a_late_answer_ends_no_connection(bench: Bench, late: Method) -> None:
    async with open_link(bench, "test") as connection:
        assert connection.transport is not None
        channels = connection.transport.connection.channels
        assert await probe(connection, bench.queue) is False
        await eventually(lambda: not channels, what="no channel")
        bench.proxy.trap("client", late, "pass", also=lambda: bench.proxy.freeze("broker"))
        await probe(connection, bench.queue)
        await asyncio.sleep(PROBE_SECONDS)
        bench.proxy.thaw()

        await eventually(lambda: not channels, what="no channel")
        assert await probe(connection, bench.queue) is False


async def test_a_node_that_hangs_holds_up_no_command(bench: Bench) -> None:
    settings = make_settings(bench.values(rabbitmq__url=[bench.proxy.url, bench.broker.url]))
    bench.proxy.freeze()
    async with asyncio.timeout(2 * NEXT_LOGIN_SECONDS + 1):
        assert (await pause(settings, REASON)).is_new
        assert await resume(settings)


def add_virtual_host(bench: Bench, name: str) -> None:
    """Add a virtual host in which the usual user may do everything."""
    permissions = ", ".join(map(binary, ("guest", name, ".*", ".*", ".*", "test")))
    evaluate(bench.broker, f"rabbit_vhost:add({binary(name)}, {binary('test')})")
    evaluate(bench.broker, f"rabbit_auth_backend_internal:set_permissions({permissions})")


async def test_a_node_that_knows_of_no_pause(bench: Bench) -> None:
    elsewhere = URL(bench.broker.url).with_path("/elsewhere")
    add_virtual_host(bench, "elsewhere")
    urls = [str(elsewhere), bench.broker.url]
    await pause(make_settings(bench.values(rabbitmq__url=urls[1:])), REASON)
    settings = make_settings(bench.values(rabbitmq__url=urls))

    assert await resume(settings)
    assert not await resume(settings)


async def test_a_resume_that_no_node_answers(bench: Bench) -> None:
    """Each is named with its fault, and none with its login."""
    urls = [f"amqp://someone:a-password@127.0.0.1:{port}/" for port in (1, 2)]

    with pytest.raises(BrokerError) as caught:
        await resume(make_settings(bench.values(rabbitmq__url=urls)))

    assert all(f"no connection to 127.0.0.1:{port} (refused)" in str(caught.value) for port in "12")
    assert "a-password" not in str(caught.value)


async def test_a_node_that_does_not_know_yet(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is not over because the node that a worker goes to has not heard of it.

    One that is just back from a partition knows of it some seconds later; what no node knows for
    longer has been ended.
    """
    stale_seconds = 4
    monkeypatch.setattr("bridge.worker.operator_pause.STALE_SECONDS", stale_seconds)
    elsewhere = str(URL(bench.broker.url).with_path("/stale"))
    add_virtual_host(bench, "stale")
    async with (
        bench.worker(rabbitmq__url=[bench.proxy.url, elsewhere]) as live,
        open_amqp(elsewhere) as bench.amqp,
    ):
        await pause(make_settings(bench.values(rabbitmq__url=[bench.broker.url])), REASON)
        await eventually(lambda: live.paused == {"operator"}, what="paused")
        bench.proxy.refuse()
        connected = f"127.0.0.1:{URL(elsewhere).port}"
        await eventually(
            lambda: [one for one in live.logged("broker_connected") if one["host"] == connected],
            what="the other node",
        )
        since = time.monotonic()
        await bench.declare_main()
        numbers = await bench.publish(3)
        await bench.until_taken(numbers)

        assert time.monotonic() - since >= stale_seconds


async def test_looking_does_not_end_a_pause(bench: Bench) -> None:
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    await pause(settings, REASON)
    connection = await open_first_connection(settings.rabbitmq, name="test")
    for _ in range(50):
        found = await find_pause(connection, bench.queue)
        assert found is not None
        assert found.note is not None
    await close_quietly(connection)
    await resume(settings)


@pytest.mark.parametrize(
    ("reason", "fault"),
    [
        ("outage", {"status": 500, "count": None}),
        # Longer than a delivery is held for: the worker pauses until it is over.
        ("rate_limited", {"status": 429, "headers": {"Retry-After": "62"}}),
    ],
)
async def test_over_a_pause_of_the_workers_own(
    bench: Bench, reason: str, fault: dict[str, Any]
) -> None:
    """No probe goes while an operator wants a pause; both are told; at its end the other is on."""
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    await bench.declare_main()
    numbers = await bench.publish(15)
    bench.service.misbehave(fault)
    async with bench.worker(worker__outage_after="1s", worker__max_uncertain_attempts=50) as live:
        await eventually(lambda: live.paused == {reason}, what="paused")
        await pause(settings, REASON)
        await eventually(lambda: live.paused == {reason, "operator"}, what="paused twice")
        in_flight = "sms_bridge_worker_provider_requests_in_flight"
        await eventually(lambda: live.metric(in_flight) == 0, what="nothing in flight")
        before = len(bench.service.posts(numbers))
        await asyncio.sleep(4)
        assert len(bench.service.posts(numbers)) == before

        bench.service.behave()
        assert await resume(settings)
        await eventually(lambda: "operator" not in live.paused, what="resumed")
        if reason == "rate_limited":
            # The service asked for it, and an operator's end of a pause is not the service's.
            assert live.paused == {reason}
            await asyncio.sleep(2)
            assert len(bench.service.posts(numbers)) == before
        else:
            await bench.until_taken(numbers)
            assert live.paused == set()
            assert bench.sent_twice(numbers) == {}
