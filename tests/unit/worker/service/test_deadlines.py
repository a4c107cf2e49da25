"""Many deadlines behind one timer: each holds, in whatever order they come and go.

All run on an event loop whose time leaps to the next timer.
"""

import asyncio
from collections.abc import Iterator

import pytest

from bridge.worker.service.transport import Deadlines
from tests.clock import LeapingWorld, in_world


class Exchange:
    """Notes after how long it expired, and is done then."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.expired: float | None = None

    def expire(self) -> None:
        self.expired = self.world.loop.time() - self.world.began
        self.world.deadlines.remove(self)


class World(LeapingWorld):
    """Deadlines, and the moment at which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.loop.time()
        self.deadlines = Deadlines(clock=self.loop.time)

    def begin(self, *seconds: float) -> list[Exchange]:
        begun = [Exchange(self) for _ in seconds]
        for one, own in zip(begun, seconds, strict=True):
            self.deadlines.add(one, self.loop.time() + own)
        return begun


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.parametrize("seconds", [(20, 21, 22), (22, 21, 20), (20, 20, 5), (5, 20, 10)])
@in_world
async def test_each_expires_at_its_deadline(world: World, seconds: tuple[float, ...]) -> None:
    """None waits for the deadline of one that began before it, and none goes before its own."""
    begun = world.begin(*seconds)
    await asyncio.sleep(60)

    assert [one.expired for one in begun] == [*seconds]


@in_world
async def test_what_is_done_does_not_expire(world: World) -> None:
    """One that is done in time is left alone, and those after it have their deadlines."""
    first, second = world.begin(5, 20)
    world.deadlines.remove(first)
    await asyncio.sleep(10)
    (third,) = world.begin(20)
    await asyncio.sleep(60)

    assert [one.expired for one in [first, second, third]] == [None, 20, 30]


@in_world
async def test_one_timer_for_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are done in time, there is one timer, and none when all are done."""
    timers = []
    call_at = world.loop.call_at

    def count(when: float, *args: object, **facts: object) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, *args, **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(world.loop, "call_at", count)
    for _ in range(100):
        for one in world.begin(20, 21):
            world.deadlines.remove(one)
    monkeypatch.undo()
    await asyncio.sleep(60)

    assert timers == [world.began + 20]
