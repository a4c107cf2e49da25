"""The line in front of a limit: who goes when, who passes whom, and what is given back."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from bridge.worker.limits.capacity import URGENT_IN_A_ROW
from bridge.worker.limits.rate_limits import RateToken, TokenBucket, WaitingLine
from tests.clock import LeapingWorld, in_world


class World(LeapingWorld):
    """A line with one token a second, and who went when."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(TokenBucket(1.0, 1.0, self.loop.time))
        self.went: list[str] = []

    async def go(self, name: str) -> None:
        """Wait for a turn and use it; a name that begins with u is urgent."""
        token = RateToken()
        await token.wait_in(self.line, is_urgent=name.startswith("u"))
        token.spend()
        self.went.append(name)

    async def all_go(self, *names: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.go(name)) for name in names]
        await asyncio.sleep(0)
        return tasks


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World()) as made:
        yield made


def test_the_urgent_pass_all_but_the_first(world: World) -> None:
    """Whoever is the first of the line stays it; the others keep their order."""

    async def play() -> None:
        await world.go("before")
        tasks = await world.all_go("a", "b", "c", "u1", "u2")
        await asyncio.wait(tasks)

    assert world.seconds(play()) == pytest.approx(5)
    assert world.went == ["before", "a", "u1", "u2", "b", "c"]


@in_world
async def test_a_flood_of_urgent_ones_starves_nobody(world: World) -> None:
    """Each ninth that goes is none of them."""
    urgent = [f"u{n}" for n in range(2 * URGENT_IN_A_ROW)]
    await world.go("before")
    tasks = await world.all_go("first", "a", "b", *urgent)
    await asyncio.wait(tasks)
    assert world.went.index("a") == 2 + URGENT_IN_A_ROW
    assert world.went.index("b") == 3 + 2 * URGENT_IN_A_ROW


@in_world
async def test_the_wait_that_is_told_is_that_of_the_class(world: World) -> None:
    """An urgent one waits for urgent ones and for the first, not for the line."""
    await world.go("before")
    tasks = await world.all_go("a", "b", "c")
    assert world.line.wait_seconds() == pytest.approx(4)
    assert world.line.urgent_wait_seconds() == pytest.approx(2)
    tasks += await world.all_go("u")
    assert world.line.wait_seconds() == pytest.approx(5)
    assert world.line.urgent_wait_seconds() == pytest.approx(3)
    await asyncio.wait(tasks)
    assert world.line.urgent_wait_seconds() == world.line.wait_seconds() == pytest.approx(1)


@pytest.mark.parametrize("who", ["a", "u", "b"], ids=["first", "urgent", "other"])
def test_who_gives_up_holds_nobody_up(world: World, who: str) -> None:
    """Neither the first, nor one that waits to be it, of whichever class, is counted any more."""

    async def play() -> None:
        await world.go("before")
        names = ["a", "u", "b"]
        tasks = dict(zip(names, await world.all_go(*names), strict=True))
        tasks[who].cancel()
        await asyncio.wait(tasks.values())
        assert not world.line.waiting
        assert world.line.urgent_wait_seconds() == pytest.approx(1)

    assert world.seconds(play()) == pytest.approx(3 - 1)
    assert who not in world.went


def test_a_token_that_is_given_back_is_there_for_the_next(world: World) -> None:
    """Whoever stays after all takes none, and lets the next one be the first."""

    async def play() -> None:
        token = RateToken()
        await token.wait_in(world.line, is_urgent=False)
        (task,) = await world.all_go("next")
        assert not task.done()
        token.give_back()
        await task
        assert not token.is_spent

    assert world.seconds(play()) == 0
    assert world.line.wait_seconds() == pytest.approx(1)
