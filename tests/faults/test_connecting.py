"""Connections to the broker that do not come about."""

import asyncio
import gc
import logging

import pytest
from yarl import URL

from bridge.amqp.connecting import close_quietly, open_connection
from bridge.errors import BrokerError
from bridge.sandbox.processes import free_ports
from tests.addresses import give_addresses, hold_full_port
from tests.faults.amqp_proxy import open_amqp_proxy, reset_connection
from tests.faults.bench import Bench, eventually, make_settings, running, unfrozen


@pytest.mark.parametrize("greeted", [False, True], ids=["at_once", "after_the_greeting"])
async def test_connection_reset_in_the_handshake(*, greeted: bool) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeted:
            await reader.readexactly(8)
        reset_connection(writer)

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        url = f"amqp://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        settings = make_settings({"rabbitmq.url": [url]}).rabbitmq
        async with unfrozen(2):
            with pytest.raises(BrokerError, match="refused"):
                await open_connection(settings, settings.url[0], name="test")


async def test_a_failed_connection_leaves_nothing_to_collect(bench: Bench) -> None:
    settings = make_settings(bench.values()).rabbitmq
    for spoil in (bench.proxy.refuse, bench.proxy.freeze):
        spoil()
        with pytest.raises(BrokerError):
            await open_connection(
                settings.model_copy(update={"connect_timeout_seconds": 0.2}),
                settings.url[0],
                name="test",
            )
        await bench.proxy.accept()
    bench.proxy.thaw()
    connection = await open_connection(settings, settings.url[0], name="test")
    bench.proxy.freeze()
    await close_quietly(connection)
    bench.proxy.thaw()
    assert connection.is_closed

    # Collected where there is no event loop; an unawaited coroutine fails the test.
    del connection
    await asyncio.to_thread(gc.collect)


async def test_one_of_two_brokers_is_dead(bench: Bench) -> None:
    """Of several URLs the one that works is found, at the start and after a cut."""
    dead = f"amqp://guest:guest@127.0.0.1:{free_ports(1)[0]}/"
    async with bench.worker(rabbitmq__url=[dead, bench.proxy.url]) as live:
        first = await bench.publish(3)
        await bench.until_taken(first)
        bench.proxy.reset()
        await eventually(lambda: not live.worker.consumer.is_registered, what="a loss")
        await live.until_consuming()
        second = await bench.publish(3)
        await bench.until_taken(second)

        assert live.metric("sms_bridge_amqp_connections_total", outcome="refused") >= 1


@pytest.mark.parametrize("other", ["dead", "working"])
async def test_the_fault_of_each_broker_is_told(bench: Bench, other: str) -> None:
    """A refused login is told once by each connection, whatever becomes of the next URL."""
    wrong = URL(bench.broker.url).with_password("wrong")
    dead = f"amqp://guest:guest@127.0.0.1:{free_ports(1)[0]}/"
    values = bench.values(
        rabbitmq__url=[str(wrong), bench.proxy.url if other == "working" else dead]
    )

    async with running(make_settings(values), "worker") as live:

        def tries(outcome: str) -> float:
            return live.metric("sms_bridge_amqp_connections_total", outcome=outcome)

        await eventually(lambda: tries("opened") == 2 or tries("auth_failed") >= 6, what="an end")
        warnings = [
            line.facts["why"]
            for line in live.ears.lines
            if (line.event, line.level) == ("broker_unavailable", logging.WARNING)
        ]

    told = [why for why in warnings if f":{wrong.port} (auth_failed" in why]
    assert len(told) == 2


async def test_a_node_that_hangs_is_overtaken(bench: Bench) -> None:
    async with open_amqp_proxy(bench.broker.url) as hanging:
        urls = {"rabbitmq__url": [hanging.url, bench.proxy.url]}
        hanging.freeze()
        async with (
            asyncio.timeout(30),
            bench.worker(**urls, rabbitmq__connect_timeout_seconds=60) as live,
        ):
            numbers = await bench.publish(3)
            await bench.until_taken(numbers)
            hanging.thaw()
            await eventually(lambda: not hanging.names, what="nothing left open")

            assert live.metric("sms_bridge_amqp_connections_total", outcome="timeout") == 0


async def test_silent_addresses_of_names(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, api = URL(bench.proxy.url), URL(bench.service.url)
    give_addresses(monkeypatch, "broker.test", "127.0.0.2", "127.0.0.1")
    # The stand-in service answers to no other name.
    give_addresses(monkeypatch, "localhost", "127.0.0.2", "127.0.0.1")
    urls = {
        "rabbitmq__url": [str(broker.with_host("broker.test"))],
        "sms_api__base_url": str(api.with_host("localhost")),
    }
    with hold_full_port("127.0.0.2", broker.port or 0), hold_full_port("127.0.0.2", api.port or 0):
        async with bench.worker(**urls) as live:
            numbers = await bench.publish(3)
            await bench.until_taken(numbers)
            await bench.until_settled(live)

            assert live.metric("sms_bridge_amqp_connections_total", outcome="timeout") == 0
    assert bench.extra_posts(numbers) == {}
