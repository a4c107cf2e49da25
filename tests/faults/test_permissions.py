"""A user that may do little: a missing permission costs a convenience, never the worker.

RabbitMQ asks for a permission to declare passively since version 4.2.6. Before it a worker knows of
each queue that there is, whatever its user may do.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
from yarl import URL

from bridge.admin.drain import count_waiting
from bridge.admin.pausing import pause, resume
from bridge.amqp.client import ChannelNotFoundEntity
from bridge.errors import BrokerError
from bridge.topology.declarations import worker_topology
from bridge.topology.paused_queue import paused_queue
from bridge.topology.upkeep import provide
from tests.amqp_client import open_amqp
from tests.erlang import binary, evaluate, version
from tests.faults.bench import Bench, Live, eventually, make_settings, open_link, running
from tests.faults.test_receipts import RECEIPTS, post, until_stored
from tests.plain_http import NO_AUTHORITIES

# The first version that asks for it.
ASKS_SINCE = (4, 2, 6)


@asynccontextmanager
async def user(bench: Bench, configure: str, write: str, read: str) -> AsyncIterator[str]:
    """Make a user that may do what these patterns match, and give the URL of its login."""
    name, password = secrets.token_hex(4), secrets.token_hex(4)
    login = ", ".join(map(binary, (name, password, "test")))
    permissions = ", ".join(map(binary, (name, "/", configure, write, read, "test")))
    evaluate(bench.broker, f"rabbit_auth_backend_internal:add_user({login})")
    evaluate(bench.broker, f"rabbit_auth_backend_internal:set_permissions({permissions})")
    try:
        yield str(URL(bench.proxy.url).with_user(name).with_password(password))
    finally:
        delete = f"rabbit_auth_backend_internal:delete_user({binary(name)}, {binary('test')})"
        evaluate(bench.broker, delete)


def is_asked_for(bench: Bench) -> bool:
    """Say whether this broker asks for a permission to declare passively."""
    return tuple(map(int, version(bench.broker).split(".")[:3])) >= ASKS_SINCE


def connections(live: Live) -> float:
    return live.metric("sms_bridge_amqp_connections_total", outcome="opened")


async def test_no_permission_on_the_mark_of_a_pause(bench: Bench) -> None:
    hidden = is_asked_for(bench)
    all_but_the_mark = r"^(?!.*\.paused$)"
    admin = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    async with (
        user(bench, *(all_but_the_mark,) * 3) as url,
        bench.worker(rabbitmq__url=[url]) as live,
    ):
        numbers = await bench.publish(3)
        await bench.until_taken(numbers)
        await pause(admin, "wrong text")
        await eventually(lambda: live.paused == {"operator"}, what="paused")
        held = await bench.publish(3)
        bench.proxy.cut()
        await eventually(lambda: connections(live) >= 4, what="connected again")
        await live.until_linked()
        # It has looked since.
        await asyncio.sleep(6)
        assert live.paused == {"operator"}
        assert bench.service.posts(held) == []
        assert await bench.amqp.count_if_there(paused_queue(bench.queue)) <= 12
        assert await resume(admin)
        await bench.until_taken(held)
        told = live.logged("pause_hidden")
        opened = connections(live)

    assert len(told) == hidden
    assert all(paused_queue(bench.queue) in line["queue"] for line in told)
    assert all("`sms-bridge pause`" in line["why"] for line in told)
    assert opened == 4
    assert bench.sent_twice(numbers + held) == {}


async def test_a_mark_that_is_there_at_the_start_is_heeded(bench: Bench) -> None:
    admin = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    await bench.declare_main()
    numbers = await bench.publish(3)
    await pause(admin, None)
    async with user(bench, *(r"^(?!.*\.paused$)",) * 3) as url:
        settings = make_settings(bench.values(rabbitmq__url=[url]))
        async with running(settings, "worker") as live:
            await eventually(lambda: live.paused == {"operator"}, what="paused")
            assert bench.service.posts(numbers) == []
            assert await resume(admin)
            await bench.until_taken(numbers)


async def test_a_user_that_may_only_consume_and_publish(bench: Bench) -> None:
    hidden = is_asked_for(bench)
    settings = make_settings(bench.values())
    async with open_link(bench, "operator") as connection:
        assert await provide(connection, worker_topology(settings.worker), "declare") == []
    async with (
        user(bench, "^$", r"^amq\.default$", rf"^{bench.queue}(\.urgent)?$") as url,
        bench.worker(rabbitmq__url=[url], rabbitmq__topology="verify") as live,
    ):
        bench.service.misbehave({"to": None, "count": 1, "status": 503})
        numbers = await bench.publish(3)
        await bench.amqp.publish(bench.queue, b"no request")
        await bench.until_taken(numbers)
        await bench.until_dead(1)
        bench.proxy.cut()
        await eventually(lambda: connections(live) >= 4, what="connected again")
        await live.until_linked()
        await bench.until_taken(await bench.publish(1))
        told = {
            event: live.logged(event)
            for event in ("topology_hidden", "topology_not_compared", "queue_sizes_refused")
        }
        opened = connections(live)

    own = {f"{bench.queue}.retry.1s", f"{bench.queue}.retry.2s", bench.dead_queue}
    assert {event: len(lines) for event, lines in told.items()} == {
        "topology_hidden": hidden,
        "topology_not_compared": 1,
        "queue_sizes_refused": hidden,
    }
    assert opened == 4
    if hidden:
        assert own <= set(told["queue_sizes_refused"][0]["queues"])
        assert all(
            f"queue {name}: cannot be checked" in told["topology_hidden"][0]["why"] for name in own
        )


async def test_a_queue_that_may_not_be_counted_is_named(bench: Bench) -> None:
    hidden = is_asked_for(bench)
    async with open_link(bench, "operator") as connection:
        topology = worker_topology(make_settings(bench.values()).worker)
        assert await provide(connection, topology, "declare") == []
    worker = make_settings(bench.values()).worker
    async with (
        user(bench, "^$", r"^amq\.default$", f"^{bench.queue}(\\.dead)?$") as url,
        open_link(bench, "drain", rabbitmq__url=[url]) as connection,
    ):
        counting = count_waiting(connection, worker)
        if hidden:
            with pytest.raises(BrokerError, match=r"retry\.2s: no permission to read; grant it"):
                await counting
        else:
            assert (await counting).total == 0


async def test_a_reason_is_kept_by_a_user_that_may_not_read_it(bench: Bench) -> None:
    admin = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    await bench.declare_main()
    async with user(bench, ".*", ".*", r"^(?!.*\.paused$)") as url:
        paused = await pause(make_settings(bench.values(rabbitmq__url=[url])), "wrong text")
    again = await pause(admin, None)
    assert await resume(admin)

    assert [one.note.reason for one in (paused, again) if one.note] == ["wrong text"] * 2


async def test_no_permission_on_the_exchange_of_outcomes(bench: Bench) -> None:
    exchange = f"{bench.queue}.outcome"
    replies = await bench.amqp.channel.declare_queue(f"{bench.queue}.replies", durable=True)
    bench.service.misbehave(
        {"to": None, "count": 5, "status": 503, "headers": {"Retry-After": "1"}}
    )
    async with (
        user(bench, ".*", r"^(?!.*\.outcome$)", ".*") as url,
        bench.worker(rabbitmq__url=[url], worker__outcome_exchange=exchange) as live,
    ):
        numbers = await bench.publish(20, reply_to=replies.name)
        await bench.until_taken(numbers)
        await bench.until_settled(live)
        lost = partial(
            live.metric, "sms_bridge_amqp_published_total", exchange=exchange, outcome="error"
        )
        await eventually(lambda: lost() == 20, what="20 lost events")
        opened, warned = connections(live), live.logged("exchange_refused")
        told = [*live.logged("outcome_not_published"), *live.logged("broker_lost")]

    assert opened == 2
    assert [line["exchange"] for line in warned] == [exchange]
    assert "ACCESS_REFUSED" in warned[0]["why"]
    assert told == []
    assert bench.sent_twice(numbers) == {}
    assert await bench.amqp.count_if_there(replies.name) == 20


async def test_no_permission_on_the_exchange_of_receipts(bench: Bench) -> None:
    exchange = f"{bench.exchange}.outcome"
    changed = {**RECEIPTS, "worker__outcome_exchange": exchange}
    async with (
        httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES, timeout=30) as client,
        user(bench, ".*", r"^(?!.*\.outcome$)", ".*") as url,
        bench.webhook(rabbitmq__url=[url], **changed) as live,
    ):
        await until_stored(client, live, "first")
        statuses = [await post(client, live, f"m-{number}") for number in range(20)]
        opened, warned = connections(live), live.logged("exchange_refused")

    assert statuses == [200] * 20
    assert opened == 1
    assert [line["exchange"] for line in warned] == [exchange]
    events = await bench.amqp.take_all(bench.exchange)
    assert len({event.headers["sms-bridge-event-id"] for event in events}) == 21


async def test_an_exchange_of_outcomes_that_is_gone(bench: Bench) -> None:
    exchange = f"{bench.queue}.outcome"
    async with bench.worker(worker__outcome_exchange=exchange) as live:
        await bench.amqp.channel.exchange_delete(exchange)
        await bench.until_taken(await bench.publish(3))

        async def is_there() -> bool:
            async with open_amqp(bench.broker.url) as amqp:
                try:
                    await amqp.channel.get_exchange(exchange, ensure=True)
                except ChannelNotFoundEntity:
                    return False
            return True

        await eventually(is_there, what="the exchange")
        queue = await bench.amqp.channel.declare_queue(exchange, durable=True)
        await queue.bind(exchange, "#")

        async def is_told() -> bool:
            await bench.until_taken(await bench.publish(1))
            return await bench.amqp.count_if_there(exchange) > 0

        await eventually(is_told, what="an outcome event")
        opened = connections(live)

    assert opened == 2
