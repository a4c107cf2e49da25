"""Copies that no task waits for: who hears of them, and when.

On an event loop whose time leaps to the next timer; the publisher is a stand-in.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import cast

import pytest

from bridge.amqp.publisher import Publisher
from bridge.worker.sorting.move import Move, sorting_entry
from bridge.worker.sorting.targets import Target
from bridge.worker.sorting.written import LATE_SECONDS, Written
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery
from tests.unit.worker.stand_ins import Broker, Channel


class World(LeapingWorld):
    """What is written, and what is heard of it: `late` says after how many seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = Broker(self.loop)
        self.stored: list[list[str]] = []
        self.late: list[tuple[float, str]] = []
        self.written = Written(
            cast("Publisher", self.broker),
            keeps_priority=True,
            on_stored=lambda moves: self.stored.append([name_of(move) for move in moves]),
            on_late=lambda move: self.late.append((self.loop.time() - self.began, name_of(move))),
        )
        self.began = self.loop.time()

    def write(self, name: str) -> Move:
        """Write a copy; it must be possible at once."""
        delivery = make_delivery(name, session=Channel())
        move = Move(delivery, sorting_entry(delivery), Target("q.normal", "normal"))
        assert self.written.write(move)
        return move


def name_of(move: Move) -> str:
    """Return the id of a message."""
    return move.delivery.envelope.key


@pytest.fixture
def world() -> Iterator[World]:
    """Make a world in which nothing is written."""
    with closing(World()) as made:
        yield made


def test_many_are_told_together(world: World) -> None:
    """Their confirms come in one piece, and so may their acks."""

    async def play() -> None:
        for name in "abc":
            world.write(name)
        await asyncio.sleep(1)

    world.run(play())
    assert (world.stored, world.late, len(world.written)) == ([["a", "b", "c"]], [], 0)


def test_each_is_late_after_its_own_time(world: World) -> None:
    """Also what is written when nothing had been for a while."""
    world.broker.faults = ["late", "late"]

    async def play() -> None:
        world.began = world.loop.time()
        world.write("a")
        await asyncio.sleep(3)
        world.write("b")
        await asyncio.sleep(10)
        world.broker.faults = ["late"]
        world.write("c")
        await asyncio.sleep(10)

    world.run(play())
    assert world.late == [(LATE_SECONDS, "a"), (3 + LATE_SECONDS, "b"), (13 + LATE_SECONDS, "c")]
    assert world.stored == []


def test_a_refusal_is_told_at_once(world: World) -> None:
    """Whoever sees to it then need not wait."""
    world.broker.faults = ["nacked"]

    async def play() -> None:
        world.began = world.loop.time()
        world.write("a")
        await asyncio.sleep(1)

    world.run(play())
    assert (world.late, world.stored) == ([(0, "a")], [])


def test_nothing_is_heard_of_what_was_taken_out(world: World) -> None:
    """Whether its confirm comes, or none."""
    world.broker.faults = ["late", "late"]

    async def play() -> None:
        stored, silent = world.write("a"), world.write("b")
        assert world.written.take_out(stored)
        assert world.written.take_out(silent)
        assert not world.written.take_out(silent)
        world.broker.pending[0].set_result("confirmed")
        await asyncio.sleep(2 * LATE_SECONDS)

    world.run(play())
    assert (world.stored, world.late) == ([], [])
