"""A node that is cut off from its cluster keeps its connections, but delivers nothing."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from bridge.amqp import majority
from bridge.amqp import publisher as publisher_module
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.errors import PublishError
from bridge.sandbox.broker import Broker
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from tests.erlang import version
from tests.faults.amqp_proxy import (
    ACK,
    CHANNEL_CLOSE,
    DECLARE,
    Method,
    Pipe,
    Sender,
    Trap,
    open_amqp_proxy,
)
from tests.faults.bench import (
    CONSUME_LINK,
    PUBLISH_LINK,
    Bench,
    Live,
    Service,
    eventually,
    make_settings,
    open_bench,
    open_link,
    post_event,
    running,
)
from tests.rabbitmq_cluster import Cluster, private_cluster

WATCH_LINK = "worker watch"


def lost(live: Live) -> list[tuple[str, str]]:
    return [(line["link"], line["why"]) for line in live.logged("broker_lost")]


async def test_a_node_that_declares_no_queue_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle worker cannot see that nothing is delivered, so it tries to declare a queue."""
    monkeypatch.setattr(majority, "_WITH_KHEPRI", (3,))
    urls = [bench.proxy.url, bench.broker.url]
    async with bench.worker(rabbitmq__url=urls, rabbitmq__heartbeat_seconds=2) as live:
        await live.until_consuming()
        bench.proxy.trap("client", DECLARE, "drop", again=True, link=WATCH_LINK)
        await eventually(lambda: lost(live), what="another node")
        await live.until_consuming()
        numbers = await bench.publish(3)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert lost(live) == [
            (CONSUME_LINK, "this node cannot declare a queue, but another node can")
        ]


async def test_a_node_is_kept_if_no_other_is_better(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the metadata of a cluster has no leader, no node declares a queue.

    Each declare names another queue: one that a node cut off could not delete stays locked.
    """
    monkeypatch.setattr(majority, "_WITH_KHEPRI", (3,))
    dropped: dict[str, list[bytes]] = {"here": [], "other": []}

    def drop(at: str, frame: bytes) -> bytes:
        dropped[at].append(frame)
        return b""

    async with open_amqp_proxy(bench.broker.url) as other:
        urls = [bench.proxy.url, other.url]
        async with bench.worker(rabbitmq__url=urls, rabbitmq__heartbeat_seconds=1) as live:
            await live.until_consuming()
            for at, proxy in (("here", bench.proxy), ("other", other)):
                proxy.trap("client", DECLARE, partial(drop, at), again=True, link=WATCH_LINK)
            await eventually(lambda: len(dropped["other"]) > 2, what="three looks elsewhere")
            numbers = await bench.publish(3)
            await bench.until_taken(numbers)
            await bench.until_settled(live)

            assert lost(live) == []
            assert len(set(dropped["other"])) == len(dropped["other"])


async def test_the_only_node_is_not_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other one, and the queue would be declared in vain."""
    monkeypatch.setattr(majority, "_WITH_KHEPRI", (3,))
    async with bench.worker(rabbitmq__heartbeat_seconds=1) as live:
        await live.until_consuming()
        bench.proxy.trap("client", DECLARE, "drop", again=True, link=CONSUME_LINK)
        bench.proxy.trap("broker", ACK, "drop", again=True, link=PUBLISH_LINK)
        bench.service.misbehave({"status": 425, "count": 1})
        numbers = await bench.publish(1)
        await eventually(lambda: len(live.logged("confirms_overdue")) > 1, what="no confirm")
        bench.proxy.traps.clear()
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert lost(live) == []


async def test_a_node_that_confirms_late_is_not_left_for_ever(bench: Bench) -> None:
    """Each node would be left before it confirms, and the copies would never end."""
    urls = [bench.proxy.url, bench.proxy.url.replace("127.0.0.1", "localhost")]
    bench.proxy.traps.append(Late(3))
    bench.service.misbehave({"status": 425, "count": 1})
    async with bench.worker(rabbitmq__url=urls, rabbitmq__heartbeat_seconds=1) as live:
        numbers = await bench.publish(1)
        await eventually(lambda: lost(live), what="another node")
        await eventually(lambda: live.logged("delivery"), what="a stored copy")
        bench.proxy.traps.clear()
        await bench.until_taken(numbers)
        await bench.until_settled(live)
    assert bench.sent_twice(numbers) == {}


class Late(Trap):
    """Passes each confirm on after some seconds, unless its channel is closed by then."""

    def __init__(self, seconds: float) -> None:
        super().__init__("broker", ACK, self._delay, again=True, link=PUBLISH_LINK)
        self._seconds = seconds
        self._closes = Counter[tuple[Pipe, int]]()
        self._last: tuple[Pipe, int] | None = None

    def takes(self, pipe: Pipe, sender: Sender, channel: int, method: Method) -> bool:
        self._last = pipe, channel
        self._closes[self._last] += (sender, method) == ("client", CHANNEL_CLOSE)
        return super().takes(pipe, sender, channel, method)

    def _delay(self, frame: bytes) -> bytes:
        assert self._last is not None
        place, closes = self._last, self._closes[self._last]

        def write() -> None:
            pipe, _ = place
            if self._closes[place] == closes and not pipe._client.is_closing():
                pipe._client.write(frame)

        asyncio.get_running_loop().call_later(self._seconds, write)
        return b""


async def test_a_node_that_confirms_others_is_not_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One publish waits, perhaps because its queue has no leader, but the node is well."""
    monkeypatch.setattr(publisher_module, "OVERDUE_SECONDS", 4.0)
    await bench.declare_main()
    metrics = BridgeMetrics(
        new_registry(), component="worker", version="0", revision="0", exchanges=("default",)
    )
    publisher = Publisher(metrics, timeout_seconds=10, leave_after_seconds=2)
    lost_confirm = bench.proxy.trap("broker", ACK, "drop")

    async def publish(number: int) -> None:
        properties = Properties(message_id=str(number))
        with contextlib.suppress(PublishError):
            await publisher.publish(
                b"", exchange="", routing_key=bench.queue, properties=properties
            )

    async with open_link(bench, "publish") as connection:
        serving = asyncio.create_task(publisher.serve(connection))
        await publisher._main.opened.wait()
        channel = publisher._main.channel
        waiting = asyncio.create_task(publish(0))
        await lost_confirm.sprung.wait()
        numbers = itertools.count(1)

        async def is_replaced() -> bool:
            await publish(next(numbers))
            return serving.done() or publisher._main.channel is not channel

        await eventually(is_replaced, what="another channel")
        assert not serving.done()
        serving.cancel()
        await asyncio.gather(serving, waiting, return_exceptions=True)


async def test_a_node_that_answers_no_publish_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time without an answer counts from one channel to the next."""
    monkeypatch.setattr(publisher_module, "FIRST_CONFIRM_SECONDS", 0.5)
    urls = [bench.proxy.url, bench.broker.url]
    bench.proxy.trap("broker", ACK, "drop", again=True, link=PUBLISH_LINK)
    bench.service.misbehave({"status": 425, "count": 1})
    async with bench.worker(rabbitmq__url=urls, rabbitmq__heartbeat_seconds=3) as live:
        numbers = await bench.publish(1)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        # Channels that wait for 0.5, 1 and 2 s, and for the rest of two heartbeats.
        assert 1 <= len(live.logged("confirms_overdue")) <= 4
        ((link, why),) = lost(live)
        assert link == PUBLISH_LINK
        assert why.startswith("the node has answered no publish for ")
    assert bench.sent_twice(numbers) == {}


@pytest.fixture
def cluster(broker: Broker) -> Iterator[Cluster]:
    if tuple(map(int, version(broker).split(".")[:2])) < majority._WITH_KHEPRI:
        pytest.skip("an earlier node that is cut off closes its connections")
    with private_cluster() as nodes:
        nodes.join()
        yield nodes


async def test_a_real_node_is_cut_off(
    cluster: Cluster, service: Service, client: httpx.AsyncClient
) -> None:
    """The bridge sends and stores over the other nodes, long before the cluster is whole again."""
    cut_off, other, _ = cluster.nodes
    async with open_bench(other, service) as bench:
        settings = {
            "rabbitmq__url": cluster.urls,
            "rabbitmq__heartbeat_seconds": 2,
            "worker__redelivery_wait": "1s",
        }
        roles = make_settings(bench.values(**settings))
        async with bench.worker(**settings) as worker, running(roles, "webhook") as receiver:
            await receiver.until_linked()
            first = await bench.publish(3)
            await bench.until_taken(first)
            await asyncio.to_thread(cluster.cut_off, cut_off)
            # RabbitMQ keeps what it delivers until then for the consumer that is cut off.
            await eventually(lambda: lost(worker), what="another node")
            await worker.until_consuming()
            numbers = await bench.publish(3)
            await bench.until_taken(numbers)

            async def is_stored() -> bool:
                answer, _ = await post_event(client, receiver.webhook_url, "after")
                return answer.status_code == 200

            await eventually(is_stored, what="a stored event")
            assert lost(receiver)
            await asyncio.to_thread(cluster.heal, cut_off)
            await bench.until_settled(worker)
        assert bench.sent_twice([*first, *numbers]) == {}
