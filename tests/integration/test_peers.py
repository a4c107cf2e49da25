"""Workers of one queue hear each other over a real broker, and stand alone where it says no."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aio_pika
import pytest

from bridge.amqp.channels import open_channel
from bridge.amqp.client import ChannelNotFoundEntity, Connection
from bridge.sandbox.broker import Broker
from bridge.telemetry.metrics import Registry, new_registry
from bridge.worker.cluster import exchange as peers_exchange
from bridge.worker.cluster.exchange import REFUSED_SECONDS, ClusterExchange
from bridge.worker.cluster.membership import (
    MAX_REJOIN_SECONDS,
    REMEMBERED,
    Coordination,
    Membership,
    Part,
)
from bridge.worker.cluster.messages import Consumers, Message, RecentQuestion
from bridge.worker.metrics import WorkerMetrics
from tests.accounts import account
from tests.alarms import memory_alarm
from tests.amqp_client import Amqp
from tests.ears import listening
from tests.erlang import evaluate
from tests.integration.conftest import SECONDS, connected, eventually, unique


async def until(check: Callable[[], object], what: str) -> None:
    async def look() -> bool:
        return bool(check())

    await eventually(look, what=what, seconds=20)


async def exchange_is_there(url: str, name: str) -> bool:
    """Ask the broker for an exchange."""
    async with connected(url) as connection:
        channel = await open_channel(connection)
        try:
            await channel.exchange_declare(name, passive=True)
        except ChannelNotFoundEntity:
            return False
    return True


class Listener(Part):
    """Notes what the peers publish."""

    def __init__(self) -> None:
        self.facts_now: dict[str, Any] = {}
        self.heard: list[tuple[str, str]] = []

    def facts(self) -> dict[str, Any]:
        """Return a state that the test chooses."""
        return self.facts_now

    def receive(self, peer: str, message: Message) -> None:
        """Note a word."""
        if isinstance(message, RecentQuestion):
            self.heard.append((peer, message.to))


class Colleague:
    """A worker as far as its peers see it, and what it has heard."""

    def __init__(self, queue: str, *, is_enabled: bool = True) -> None:
        self.registry: Registry = new_registry()
        metrics = WorkerMetrics(self.registry, queue=queue, retry_queues=[], dead="dead")
        self.listener = Listener()
        self.peers = Membership(queue, is_enabled=is_enabled, metrics=metrics)
        self.exchange = ClusterExchange(Coordination(self.peers, [self.listener], metrics=metrics))

    @property
    def heard(self) -> list[tuple[str, str]]:
        """The words that its peers have said."""
        return self.listener.heard

    def say(self, word: str) -> None:
        """Publish something."""
        self.peers.publish(RecentQuestion(to=word, joins=1))

    def value(self, name: str) -> float | None:
        """Read a metric."""
        return self.registry.get_sample_value(f"sms_bridge_worker_{name}")

    async def until_up(self) -> None:
        """Return when it hears and is heard."""
        await until(lambda: self.peers.is_up, what="a place on the exchange")

    async def until_hears(self, *others: "Colleague") -> None:
        """Return when it has heard all of these and no other."""
        ids = {other.peers.worker_id for other in others}
        await until(lambda: self.peers.others(REMEMBERED) == ids, what="its peers")


@asynccontextmanager
async def at_work(colleague: Colleague, url: str) -> AsyncIterator[Connection]:
    async def serve(_connection: Connection) -> None:
        await asyncio.Event().wait()

    async with connected(url) as connection:
        serving = asyncio.create_task(colleague.exchange.beside(serve, connection))
        try:
            yield connection
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture
def queue() -> str:
    """Name the queue that they share."""
    return unique("outbound")


@asynccontextmanager
async def team(queue: str, url: str, size: int) -> AsyncIterator[list[Colleague]]:
    async with AsyncExitStack() as stack:
        colleagues = [Colleague(queue) for _ in range(size)]
        for one in colleagues:
            await stack.enter_async_context(at_work(one, url))
        for one in colleagues:
            await one.until_hears(*(other for other in colleagues if other is not one))
        yield colleagues


async def test_what_one_says_all_others_hear(amqp_url: str, queue: str) -> None:
    """Each of three hears the other two, and not itself."""
    async with team(queue, amqp_url, 3) as (first, *others):
        first.say("Hi")
        await until(lambda: all(other.heard for other in others), what="the word")

        assert [other.heard for other in others] == [[(first.peers.worker_id, "Hi")]] * 2
        assert first.heard == []
        assert first.value("peers") == 2
        assert first.value("coordination_up") == 1


async def test_the_first_of_all_waits_for_nobody(
    amqp_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.worker.cluster.exchange.ACQUAINTING_SECONDS", 3600)
    monkeypatch.setattr("bridge.worker.cluster.membership.MAX_START_SECONDS", 3600)
    first = Colleague(queue)
    async with at_work(first, amqp_url), asyncio.timeout(20):
        await first.peers.until_acquainted()


async def test_who_comes_later_waits_for_answers(
    amqp_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.worker.cluster.exchange.ALONE_SECONDS", 3600)
    monkeypatch.setattr("bridge.worker.cluster.membership.MAX_START_SECONDS", 3600)
    async with team(queue, amqp_url, 1) as (first,):
        await first.until_up()
        newcomer = Colleague(queue)
        async with at_work(newcomer, amqp_url), asyncio.timeout(20):
            await newcomer.peers.until_acquainted()

            assert newcomer.peers.others(REMEMBERED) == {first.peers.worker_id}


async def test_a_newcomer_learns_the_state_of_the_others(amqp_url: str, queue: str) -> None:
    """Each peer publishes its state when a worker joins, to that one alone."""
    async with team(queue, amqp_url, 1) as (first,):
        first.listener.facts_now = {"consumers": Consumers(count=3)}
        # Otherwise the newcomer may hear it join, which says nothing of its state.
        await first.until_up()
        newcomer = Colleague(queue)
        async with at_work(newcomer, amqp_url):
            await newcomer.until_hears(first)

            assert newcomer.peers.peers[first.peers.worker_id].consumers == 3


async def test_who_leaves_is_gone_at_once_and_stays_silent(amqp_url: str, queue: str) -> None:
    """A clean stop is told; what is said after it reaches nobody."""
    async with team(queue, amqp_url, 2) as (first, second):
        await first.peers.leave()
        await until(lambda: not second.peers.others(REMEMBERED), what="the bye")
        first.say("unheard")
        second.say("still here?")
        await until(lambda: first.heard, what="the word")

        assert second.peers.others(REMEMBERED) == set()


async def test_who_leaves_without_a_connection_waits_for_one(amqp_url: str, queue: str) -> None:
    async with team(queue, amqp_url, 1) as (second,):
        first = Colleague(queue)
        async with at_work(first, amqp_url):
            await first.until_hears(second)
            await second.until_hears(first)
        joined = asyncio.create_task(first.peers.until_joined(most_seconds=20))
        async with at_work(first, amqp_url):
            await joined
            assert first.peers.is_up
            await first.peers.leave()
            await until(lambda: not second.peers.others(REMEMBERED), what="the bye")


async def test_who_leaves_waits_no_longer_than_it_may(amqp_url: str, queue: str) -> None:
    """Neither beyond the deadline of its drain, nor where nobody would hear it."""
    async with team(queue, amqp_url, 1) as (second,):
        first = Colleague(queue)
        async with at_work(first, amqp_url):
            await first.until_hears(second)
        async with asyncio.timeout(MAX_REJOIN_SECONDS - 1):
            await first.peers.until_joined(most_seconds=0.1)
            await first.peers.until_joined(most_seconds=-1)
            await Colleague(queue).peers.until_joined(most_seconds=3600)


async def test_what_no_worker_says_is_counted(amqp: Amqp, amqp_url: str, queue: str) -> None:
    async with team(queue, amqp_url, 2) as (first, second):
        exchange = await amqp.channel.get_exchange(f"{queue}.workers", ensure=False)
        told = {"v": 1, "worker_id": second.peers.worker_id, "kind": "Answers", "facts": {"to": 1}}
        for body in (b"rubbish", json.dumps(told).encode()):
            await exchange.publish(aio_pika.Message(body), "")
        await until(lambda: first.value("peer_messages_malformed_total") == 2, what="both")

        assert first.heard == []


async def test_nothing_is_left_on_the_broker(amqp_url: str, queue: str) -> None:
    async with team(queue, amqp_url, 2):
        assert await exchange_is_there(amqp_url, f"{queue}.workers")

    async def is_gone() -> bool:
        return not await exchange_is_there(amqp_url, f"{queue}.workers")

    await eventually(is_gone, what="the exchange's end")


async def test_a_change_during_an_alarm_is_published_after_it(
    managed_broker: Broker, queue: str
) -> None:
    """While the broker blocks publishing, changes are dropped; the next heartbeat has the state."""
    async with team(queue, managed_broker.url, 2) as (first, second):
        second.say("before")
        await until(lambda: first.heard, what="the word before the alarm")
        async with memory_alarm(managed_broker):
            await until(lambda: not second.peers.is_up, what="the block")
            second.say("lost")
            second.listener.facts_now = {"consumers": Consumers(count=7)}
        known = first.peers.peers[second.peers.worker_id]
        await until(lambda: known.consumers == 7, what="the state after the alarm")
        second.say("after")
        await until(lambda: len(first.heard) > 1, what="the word after the alarm")

        assert [word for _, word in first.heard] == ["before", "after"]


async def test_where_coordination_is_off_nothing_is_declared(amqp_url: str, queue: str) -> None:
    """Such a worker asks nothing of the broker, and what it would say is said to nobody."""
    alone = Colleague(queue, is_enabled=False)
    async with at_work(alone, amqp_url):
        alone.say("Hi")

        assert not alone.peers.is_up
        assert not await exchange_is_there(amqp_url, f"{queue}.workers")


async def test_a_worker_that_may_not_join_stands_alone_and_says_so(
    amqp: Amqp, amqp_url: str, queue: str
) -> None:
    in_the_way = await amqp.channel.declare_exchange(f"{queue}.workers", "topic", durable=True)
    alone = Colleague(queue)
    with listening() as ears:
        async with at_work(alone, amqp_url) as connection:
            await until(lambda: ears.heard("peers_not_joined"), what="a warning")
            assert not alone.peers.is_up
            assert alone.value("coordination_up") == 0
            await in_the_way.delete()
            async with asyncio.timeout(REFUSED_SECONDS + 10):
                await alone.until_up()

            assert not connection.is_closed
    (warning,) = ears.heard("peers_not_joined")
    assert warning["exchange"] == f"{queue}.workers"
    assert "received 'fanout' but current is 'topic'" in warning["why"]
    assert "delete an exchange of this name" in warning["remedy"]
    assert "worker.coordination" in warning["remedy"]


async def test_a_worker_whose_place_was_deleted_takes_a_new_one(
    amqp: Amqp, amqp_url: str, queue: str
) -> None:
    async with team(queue, amqp_url, 2) as (first, second):
        exchange = await amqp.channel.get_exchange(f"{queue}.workers", ensure=False)
        await exchange.delete()
        await until(lambda: not (first.peers.is_up or second.peers.is_up), what="deafness")
        await first.until_up()
        await second.until_up()
        first.say("Hi")
        await until(lambda: second.heard, what="the word")


async def test_who_joins_again_leaves_nothing_behind(
    amqp_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Colleague(queue)
    async with at_work(alone, amqp_url) as connection:
        assert connection.transport is not None
        channels = connection.transport.connection.channels
        await alone.until_up()
        with monkeypatch.context() as short_of_time:
            short_of_time.setattr("bridge.worker.cluster.exchange.WRITE_SECONDS", 0)
            alone.say("Hi")
            await until(lambda: alone.peers.joins > 2, what="another join")
        await alone.until_up()

        await until(lambda: len(channels) == 1, what="one channel")


@pytest.mark.parametrize(
    ("write", "read"),
    [(".*", "^nothing$"), (".*", r"^.*\.workers$"), (r"^(?!.*\.workers$)", ".*")],
    ids=["bind", "consume", "speak"],
)
async def test_who_may_not_join_leaves_nothing_behind(
    managed_broker: Broker, queue: str, write: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_exchange, "REFUSED_SECONDS", 0.1)
    # As it is, only sooner.
    assert peers_exchange.QUEUE_ARGUMENTS["x-expires"] <= 60_000
    monkeypatch.setitem(peers_exchange.QUEUE_ARGUMENTS, "x-expires", 1000)
    alone = Colleague(queue)

    async def has_no_queue() -> bool:
        return f"{queue}.workers" not in evaluate(managed_broker, "rabbit_amqqueue:list_names()")

    with listening() as ears, account(managed_broker, ".*", write, read) as url:
        async with at_work(alone, url) as connection:
            await until(lambda: alone.peers.joins > 10, what="ten tries")
            monkeypatch.setattr(peers_exchange, "REFUSED_SECONDS", SECONDS)
            await eventually(has_no_queue, what="no queue")

            assert not connection.is_closed
    told = [line for line in ears.lines if line.event == "peers_not_joined"]
    assert [line.level for line in told].count(logging.WARNING) == 1
