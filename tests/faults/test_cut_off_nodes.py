"""A node that is cut off from its cluster keeps its connections, but delivers nothing."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from bridge.amqp import majority
from bridge.amqp import publisher as publisher_module
from bridge.sandbox.broker import Broker
from tests.faults.amqp_proxy import ACK, DECLARE
from tests.faults.bench import (
    CONSUME_LINK,
    PUBLISH_LINK,
    Bench,
    Live,
    Service,
    eventually,
    make_settings,
    open_bench,
    post_event,
    running,
)
from tests.rabbitmq_cluster import Cluster, private_cluster


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
        bench.proxy.trap("client", DECLARE, "drop", again=True, link=CONSUME_LINK)
        await eventually(lambda: lost(live), what="another node")
        await live.until_consuming()
        numbers = await bench.publish(3)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert lost(live) == [(CONSUME_LINK, "the node declares no queue; it may be cut off")]


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


async def test_a_node_that_answers_no_publish_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "FIRST_CONFIRM_SECONDS", 0.5)
    urls = [bench.proxy.url, bench.broker.url]
    bench.proxy.trap("broker", ACK, "drop", again=True, link=PUBLISH_LINK)
    bench.service.misbehave({"status": 425, "count": 1})
    async with bench.worker(
        rabbitmq__url=urls, rabbitmq__heartbeat_seconds=1, rabbitmq__publish_timeout_seconds=0.5
    ) as live:
        numbers = await bench.publish(1)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        ((link, why),) = lost(live)
        assert link == PUBLISH_LINK
        assert why.startswith("the node has answered no publish for ")
    assert bench.sent_twice(numbers) == {}


@pytest.fixture
def cluster(broker: Broker) -> Iterator[Cluster]:
    version = broker.ctl("version").split()[-1].split(".")
    if tuple(map(int, version[:2])) < majority._WITH_KHEPRI:
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
