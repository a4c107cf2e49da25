"""Queues and exchanges that others have declared their own way: used, or said to be of no use."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from bridge.topology import upkeep
from tests.amqp_client import open_amqp
from tests.faults.bench import SECONDS, Bench, Live, eventually, make_settings, post_event, running
from tests.plain_http import NO_AUTHORITIES

DIFFERENCES = "sms_bridge_topology_differences"
OPENED = "sms_bridge_amqp_connections_total"
QUORUM = {"x-queue-type": "quorum"}


async def declare(bench: Bench, queue: str, arguments: dict[str, Any], **options: Any) -> None:
    given = {"durable": True, **options}
    await bench.amqp.channel.declare_queue(queue, arguments=arguments, **given)


@asynccontextmanager
async def starting(bench: Bench) -> AsyncIterator[Live]:
    """Run a worker that may not be able to consume."""
    async with running(make_settings(bench.values()), "worker") as live:
        yield live


@pytest.mark.parametrize(
    ("arguments", "options", "costs"),
    [
        pytest.param({"x-max-priority": 5}, {}, ["x-max-priority is 5", "disk"], id="classic"),
        pytest.param(
            QUORUM | {"x-message-ttl": 600_000, "x-dead-letter-exchange": "elsewhere"},
            {},
            ["dead-lettered after 600 s (message-ttl), without the bridge, to elsewhere"],
            id="ttl-and-dead-letters",
        ),
        pytest.param(
            QUORUM | {"x-max-length": 1000, "x-delivery-limit": 5},
            {},
            ["drop-head", "returned 6 times is dropped"],
            id="limits",
        ),
        pytest.param(
            {"x-expires": 600_000, "x-single-active-consumer": True},
            {"auto_delete": True},
            ["unused for 600 s", "one worker at a time", "its last consumer"],
            id="gone-when-unused",
        ),
        pytest.param({}, {"durable": False}, ["gone after a restart"], id="not-durable"),
    ],
)
async def test_the_queue_of_a_publisher_is_used_as_it_is(
    bench: Bench, arguments: dict[str, Any], options: dict[str, Any], costs: list[str]
) -> None:
    await declare(bench, bench.queue, arguments, **options)
    async with bench.worker() as live:
        await bench.until_taken(await bench.publish(3))
        await bench.until_settled(live)
        (warning,) = live.logged("topology_differs")
        differing = live.metric(DIFFERENCES, entity=f"queue {bench.queue}")
        opened = live.metric(OPENED, outcome="opened")

    assert [cost for cost in costs if cost not in warning["why"]] == []
    assert f"queue {bench.queue}: " in warning["why"]
    wanted = {**arguments, **options}
    same = wanted.get("x-queue-type") == "quorum"
    assert differing == len(wanted) - same + (0 if same else 1)
    assert (opened, live.logged("broker_lost")) == (2, [])


@pytest.mark.parametrize("which", ["retry.1s", "dead"])
async def test_our_own_queues_have_to_be_right(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(upkeep, "LOG_AGAIN_SECONDS", 0.5)
    queue = f"{bench.queue}.{which}"
    await declare(bench, queue, {"x-message-ttl": 5000})
    async with starting(bench) as live:
        await eventually(lambda: len(live.logged("topology_unusable")) >= 3, what="told again")
        told = {line["why"] for line in live.logged("topology_unusable")}
        consuming = live.worker.consumer.is_registered
        ready = live.metric("sms_bridge_ready")
        differing = live.metric(DIFFERENCES, entity=f"queue {queue}")
        await bench.amqp.channel.queue_delete(queue)
        await live.until_consuming()
        await bench.until_taken(await bench.publish(1))
        opened = live.metric(OPENED, outcome="opened")
        healed = live.metric(DIFFERENCES)

    assert (consuming, ready, opened, healed) == (False, 0, 2, 0)
    assert differing > 0
    (why,) = told
    assert queue in why
    # The broker says `classic` of a queue that was declared without a type since RabbitMQ 4.0.
    assert re.search("x-queue-type is (not set|classic) and must be quorum", why)
    assert "delete and re-create it" in why
    assert len(live.logged("topology_usable")) == 1


async def test_a_queue_that_is_locked_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A main queue that another connection has for itself is waited for on one connection."""
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.1)
    async with open_amqp(bench.broker.url) as other:
        await other.channel.declare_queue(bench.queue, exclusive=True)
        async with starting(bench) as live:
            await eventually(lambda: live.logged("topology_unusable"), what="told")
            await other.channel.queue_delete(bench.queue)
            await live.until_consuming()
            opened = live.metric(OPENED, outcome="opened")
            (told,) = live.logged("topology_unusable")

    assert opened == 2
    assert "exclusive" in told["why"]


async def test_a_stream_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.1)
    await declare(bench, bench.queue, {"x-queue-type": "stream"})
    async with starting(bench) as live:
        await eventually(lambda: live.logged("topology_unusable"), what="told")
        ready = live.metric("sms_bridge_ready")
        await bench.amqp.channel.queue_delete(bench.queue)
        await live.until_consuming()
        await bench.until_taken(await bench.publish(1))
        opened = live.metric(OPENED, outcome="opened")
        (told,) = live.logged("topology_unusable")

    assert (ready, opened, live.logged("broker_lost")) == (0, 2, [])
    assert f"queue {bench.queue}: it is a stream" in told["why"]
    assert "worker.queue" in told["why"]


async def test_a_retry_queue_that_turns_out_wrong_stops_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(upkeep, "LOG_AGAIN_SECONDS", 0.5)
    retry = f"{bench.queue}.retry.1s"
    async with bench.worker() as live:
        for queue in (bench.dead_queue, retry):
            await bench.amqp.channel.queue_delete(queue)
        await declare(bench, retry, {})
        await bench.amqp.publish(bench.queue, b"no request")
        # The missing one is made again, and no copy holds the worker up any more.
        await eventually(lambda: live.logged("topology_unusable"), what="told")
        await bench.until_settled(live)
        numbers, told = await bench.publish(1), len(live.logged("topology_unusable"))
        again = told + 2
        await eventually(lambda: len(live.logged("topology_unusable")) >= again, what="told again")
        taken = bench.service.taken(numbers)
        await bench.amqp.channel.queue_delete(retry)
        await bench.until_taken(numbers)
        opened = live.metric(OPENED, outcome="opened")

    assert (taken, opened) == ([], 2)
    assert len(await bench.dead_letters()) == 1


@pytest.mark.parametrize(
    ("kind", "options", "costs"),
    [
        pytest.param("topic", {"durable": False}, ["durable is False"], id="not-durable"),
        pytest.param("fanout", {"auto_delete": True}, ["type is fanout", "auto_delete"], id="kind"),
    ],
)
async def test_the_exchange_and_queue_of_a_subscriber_are_used_as_they_are(
    bench: Bench, kind: str, options: dict[str, Any], costs: list[str]
) -> None:
    await declare(bench, bench.exchange, {"x-message-ttl": 600_000})
    given = {"durable": True, **options}
    await bench.amqp.channel.declare_exchange(bench.exchange, kind, **given)
    async with (
        bench.webhook() as live,
        httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES) as client,
    ):
        answer, _ = await post_event(client, live.webhook_url, "one")
        (warning,) = live.logged("topology_differs")
        opened = live.metric(OPENED, outcome="opened")
        entities = {
            entity: live.metric(DIFFERENCES, entity=f"{entity} {bench.exchange}")
            for entity in ("queue", "exchange")
        }

    assert (answer.status_code, opened) == (200, 1)
    assert await bench.amqp.count_if_there(bench.exchange) == 1
    assert [cost for cost in costs if cost not in warning["why"]] == []
    assert "dropped after 600 s" in warning["why"]
    assert entities == {"queue": 2, "exchange": len(costs)}


async def test_what_differs_is_said_once(bench: Bench) -> None:
    """A new connection says nothing again of what has not changed."""
    await declare(bench, bench.queue, {})
    async with bench.worker() as live:
        bench.proxy.cut()
        opened = {"outcome": "opened"}
        await eventually(lambda: live.metric(OPENED, **opened) >= 4, what="connected again")
        await live.until_consuming(SECONDS)
        await asyncio.sleep(0)
        warnings = live.logged("topology_differs")

    assert len(warnings) == 1
