"""The deliveries that are held, and of which consumers they are."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.config import WorkerSettings
from bridge.worker.delivery import Delivery
from bridge.worker.held import HeldDeliveries
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery


class World(LeapingWorld):
    """Held deliveries, each until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldDeliveries(
            WorkerSettings(queue="q"), process=self._process, metrics=self.metrics
        )
        self._ends: dict[Delivery, asyncio.Event] = {}

    async def _process(self, delivery: Delivery) -> None:
        await self._ends[delivery].wait()

    def take(self, session: object) -> Delivery:
        """Take a delivery."""
        delivery = make_delivery(session=session)
        self._ends[delivery] = asyncio.Event()
        self.held.take(delivery)
        return delivery

    async def let_go(self, delivery: Delivery) -> None:
        """End the work on a delivery."""
        self._ends[delivery].set()
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def world() -> Iterator[World]:
    """Give a world at some moment."""
    made = World()
    yield made
    made.close()


def make_session() -> Any:
    """Make what stands for a session that lasts."""
    return SimpleNamespace(is_over=False, channel=SimpleNamespace(is_closed=False))


def test_cancelled_consumers_count_as_long_as_something_of_theirs_is_held(world: World) -> None:
    """Each that was given something and has not seen all of it acked is one; others are none."""

    async def story() -> None:
        held, session = world.held, make_session()
        held.note_cancel("q")
        assert held.cancelled_consumers == 0
        first, second = world.take(session), world.take(session)
        assert held.cancelled_consumers == 0
        held.note_cancel("q")
        held.note_cancel("q")
        third = world.take(session)
        held.note_cancel("q.urgent")
        held.note_cancel("q")
        assert held.cancelled_consumers == 2
        await world.let_go(first)
        assert held.cancelled_consumers == 2
        await world.let_go(second)
        assert held.cancelled_consumers == 1
        await world.let_go(third)
        assert held.cancelled_consumers == 0

    world.run(story())


def test_no_consumer_outlives_its_session(world: World) -> None:
    """With the channel all of its consumers end, whatever is still worked on."""

    async def story() -> None:
        session = make_session()
        delivery = world.take(session)
        world.held.note_cancel("q")
        session.channel.is_closed = True
        assert world.held.cancelled_consumers == 0
        await world.let_go(delivery)

    world.run(story())
