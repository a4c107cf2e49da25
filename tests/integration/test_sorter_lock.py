"""One worker at a time sorts: the broker has the lock, and a worker that has it says so."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from aio_pika.abc import AbstractIncomingMessage

from bridge.amqp.client import Connection
from bridge.worker.ordering import sorter_lock
from bridge.worker.ordering.share import LaneShare
from bridge.worker.ordering.sorter_lock import SorterLock
from tests.ears import listening
from tests.integration.conftest import Amqp, connected, eventually, unique


class Share:
    """What stands in for what peers say of who sorts."""

    def __init__(self) -> None:
        self.is_sorted_elsewhere = False
        self.told: list[bool] = []
        self.waited = 0

    async def until_nobody_sorts(self) -> None:
        """Wait as long as a peer says that it sorts."""
        self.waited += 1
        while self.is_sorted_elsewhere:  # noqa: ASYNC110  tests set it
            await asyncio.sleep(0.01)

    def note_sorting(self, *, sorts: bool) -> None:
        """Note what this worker says."""
        self.told.append(sorts)


class Sorting:
    """A worker that wants the lock."""

    def __init__(self, queue: str) -> None:
        self.share = Share()
        self.lock = SorterLock(queue, cast("LaneShare", self.share))
        self.has_it = asyncio.Event()

    async def serve(self, _connection: Connection) -> None:
        """Sort, until it is cancelled."""
        self.has_it.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def at_work(one: Sorting, url: str) -> AsyncIterator[None]:
    """Have it want the lock, and keep it, on a connection of its own."""
    async with connected(url) as connection:
        holding = asyncio.create_task(one.lock.hold(connection, one.serve))
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)


async def until(check: Callable[[], object], what: str) -> None:
    """Return when something is so."""

    async def look() -> bool:
        return bool(check())

    await eventually(look, what=what)


async def _take(_message: AbstractIncomingMessage) -> None: ...


@pytest.fixture
async def queue(amqp: Amqp) -> AsyncIterator[str]:
    """Declare a main queue that no other test uses."""
    name = unique("sorted")
    await amqp.channel.declare_queue(name, durable=True)
    yield name
    await amqp.delete([name])


async def test_one_at_a_time(amqp_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has the lock when the connection of the one before ends."""
    monkeypatch.setattr(sorter_lock, "TRY_AGAIN_SECONDS", 0.05)
    first, second = Sorting(queue), Sorting(queue)
    async with at_work(second, amqp_url):
        await second.has_it.wait()
        async with at_work(first, amqp_url):
            await until(lambda: first.share.waited > 1, "a try in vain")
            assert not first.has_it.is_set()
            assert first.share.told == []
    async with at_work(first, amqp_url), asyncio.timeout(20):
        await first.has_it.wait()

    assert first.share.told == second.share.told == [True, False]


async def test_none_is_tried_while_a_peer_says_that_it_sorts(amqp_url: str, queue: str) -> None:
    """Each try of another would be an error in the broker's log."""
    one = Sorting(queue)
    one.share.is_sorted_elsewhere = True
    async with at_work(one, amqp_url):
        await until(lambda: one.share.waited, "the wait")
        assert one.lock.is_held_elsewhere
        assert not one.has_it.is_set()
        one.share.is_sorted_elsewhere = False
        async with asyncio.timeout(20):
            await one.has_it.wait()
        # What it still hears of another one says nothing while it has the lock itself.
        one.share.is_sorted_elsewhere = True
        assert not one.lock.is_held_elsewhere


async def test_it_begins_when_nobody_else_takes_from_the_queue(
    amqp: Amqp, amqp_url: str, queue: str
) -> None:
    """What the last one held comes back before its consumer is gone."""
    main = await amqp.channel.get_queue(queue, ensure=False)
    tag = await main.consume(_take)
    one = Sorting(queue)
    async with at_work(one, amqp_url):
        await until(lambda: one.share.told == [True], "the lock")
        assert not one.has_it.is_set()
        await main.cancel(tag)
        async with asyncio.timeout(20):
            await one.has_it.wait()


async def test_somebody_else_is_not_waited_for_for_ever(
    amqp: Amqp, amqp_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, with the remedy, that what he takes keeps no order."""
    monkeypatch.setattr(sorter_lock, "MOST_OTHERS_SECONDS", 0.5)
    main = await amqp.channel.get_queue(queue, ensure=False)
    await main.consume(_take)
    one = Sorting(queue)
    with listening() as ears:
        async with at_work(one, amqp_url), asyncio.timeout(20):
            await one.has_it.wait()

    (warning,) = ears.heard("others_take")
    assert warning["queue"] == queue
    assert "worker.lanes" in warning["remedy"]
