"""One message of a key at a time."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from bridge.worker.delivery import Delivery
from bridge.worker.ordering.turns import Turns
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery
from tests.unit.worker.stand_ins import Channel


class World(LeapingWorld):
    """Deliveries that take a second each; `begun` says which began when."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()
        self.lane = Channel()
        self.begun: list[tuple[float, str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.learn_seconds = 0.0
        self.started = 0.0

    def take(self, name: str, *, key: str = "k", redelivered: bool = False) -> None:
        """Take a delivery, in a task of its own."""
        delivery = make_delivery(
            name,
            redelivered=redelivered,
            session=self.lane,
            clock=self.loop.time,
        )
        place = self.turns.line_up(key)
        taking = self.turns.take_turn(place, delivery, learn=self._learn, work=self._work)
        task = self.loop.create_task(taking)
        task.add_done_callback(lambda _: self.turns.leave(place))
        self.tasks.append(task)

    async def _learn(self, _delivery: Delivery) -> None:
        await asyncio.sleep(self.learn_seconds)

    async def _work(self, delivery: Delivery) -> None:
        self.begun.append((self.loop.time() - self.started, delivery.envelope.key))
        await asyncio.sleep(1)

    async def all_done(self) -> None:
        """Wait for all that was taken."""
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def play(self, *names: str, **facts: Any) -> None:
        """Take deliveries of one key, and wait for their end."""

        async def play() -> None:
            for name in names:
                self.take(name, **facts)
            await self.all_done()

        self.start()
        self.run(play())

    def start(self) -> None:
        """Let its time begin."""
        self.started = self.loop.time()


@pytest.fixture
def world() -> Iterator[World]:
    """Make a world without any delivery."""
    with closing(World()) as made:
        yield made


def test_one_of_a_key_at_a_time(world: World) -> None:
    """In the order in which they came; another key waits for none of them."""

    async def play() -> None:
        for name, key in (("a", "k"), ("b", "k"), ("x", "other"), ("c", "k")):
            world.take(name, key=key)
        await world.all_done()

    world.start()
    world.run(play())

    assert world.begun == [(0, "a"), (0, "x"), (1, "b"), (2, "c")]
    assert world.turns._lines == {}


def test_what_is_cancelled_lets_the_next_one_go(world: World) -> None:
    """Whether it waits or is being worked on; it is not begun later."""

    async def play() -> None:
        for name in "abcd":
            world.take(name)
        await asyncio.sleep(0.5)
        world.tasks[1].cancel()
        world.tasks[0].cancel()
        await world.all_done()

    world.start()
    world.run(play())

    assert world.begun == [(0, "a"), (0.5, "c"), (1.5, "d")]


def test_redeliveries_learn_at_once(world: World) -> None:
    """Three that come again wait together for what others know, not one after the other."""
    world.learn_seconds = 10.0
    world.play("a", "b", "c", redelivered=True)

    assert world.begun == [(10, "a"), (11, "b"), (12, "c")]


def test_one_that_learns_is_not_overtaken(world: World) -> None:
    """It has its place from when it came."""
    world.learn_seconds = 10.0

    async def play() -> None:
        world.take("a", redelivered=True)
        world.take("b")
        await world.all_done()

    world.start()
    world.run(play())

    assert world.begun == [(10, "a"), (11, "b")]


def test_nothing_of_a_session_that_is_over_is_begun(world: World) -> None:
    """It goes back, and all behind it with it."""

    async def play() -> None:
        for name in "abc":
            world.take(name)
        await asyncio.sleep(0.5)
        world.lane.is_over = True
        await world.all_done()

    world.start()
    world.run(play())

    assert world.begun == [(0, "a")]


def test_who_leaves_behind_another_calls_nobody() -> None:
    """Who is the first need not be told of it, and the last not that another one is gone."""
    turns, calls = Turns(), list[str]()
    first, second, third = (turns.line_up("k") for _ in range(3))
    for name, place in (("first", first), ("second", second), ("third", third)):
        place.when_first(partial(calls.append, name))
    turns.leave(second)
    assert calls == []
    turns.leave(first)
    assert calls == ["third"]
    turns.leave(third)
    assert turns._lines == {}
