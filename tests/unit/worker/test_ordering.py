"""One message of a key at a time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from bridge.amqp.properties import Properties
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import ORDERING_KEY
from bridge.worker.ordering import Turns, ordering_key
from tests.clock import LeapingWorld, in_world
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
        delivery = make_delivery(
            name,
            properties=Properties(headers={ORDERING_KEY: key}),
            redelivered=redelivered,
            session=self.lane,
            clock=self.loop.time,
        )
        taking = self.turns.take_turn(delivery, learn=self._learn, work=self._work)
        self.tasks.append(self.loop.create_task(taking))

    async def _learn(self, _delivery: Delivery) -> None:
        await asyncio.sleep(self.learn_seconds)

    async def _work(self, delivery: Delivery) -> None:
        self.begun.append((self.loop.time() - self.started, delivery.envelope.key))
        await asyncio.sleep(1)

    def cancel(self, *numbers: int) -> None:
        """Cancel the tasks of deliveries, numbered from 0 as they were taken."""
        for number in numbers:
            self.tasks[number].cancel()

    async def all_done(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def work_off(
        self, *names: str, meanwhile: Callable[[], object] | None = None, **facts: Any
    ) -> None:
        """Take deliveries of one key, call `meanwhile` after 0.5 s, and wait for their end."""

        async def play() -> None:
            for name in names:
                self.take(name, **facts)
            if meanwhile is not None:
                await asyncio.sleep(0.5)
                meanwhile()
            await self.all_done()

        self.start()
        self.run(play())

    def start(self) -> None:
        self.started = self.loop.time()


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World()) as made:
        yield made


@in_world
async def test_one_of_a_key_at_a_time(world: World) -> None:
    """In the order in which they came; another key waits for none of them."""
    world.start()
    for name, key in (("a", "k"), ("b", "k"), ("x", "other"), ("c", "k")):
        world.take(name, key=key)
    await world.all_done()

    assert world.begun == [(0, "a"), (0, "x"), (1, "b"), (2, "c")]
    assert world.turns._lines == {}


def test_what_is_cancelled_lets_the_next_one_go(world: World) -> None:
    """Whether it waits or is being worked on; it is not begun later."""
    world.work_off(*"abcd", meanwhile=lambda: world.cancel(1, 0))

    assert world.begun == [(0, "a"), (0.5, "c"), (1.5, "d")]


def test_redeliveries_learn_at_once(world: World) -> None:
    """Three that come again wait together for what others know, not one after the other."""
    world.learn_seconds = 10.0
    world.work_off("a", "b", "c", redelivered=True)

    assert world.begun == [(10, "a"), (11, "b"), (12, "c")]


@in_world
async def test_one_that_learns_is_not_overtaken(world: World) -> None:
    """It has its place from when it came."""
    world.learn_seconds = 10.0

    world.start()
    world.take("a", redelivered=True)
    world.take("b")
    await world.all_done()

    assert world.begun == [(10, "a"), (11, "b")]


def test_nothing_of_a_session_that_is_over_is_begun(world: World) -> None:
    """It goes back, and all behind it with it."""
    world.work_off(*"abc", meanwhile=lambda: setattr(world.lane, "is_over", True))

    assert world.begun == [(0, "a")]


def test_a_place_in_the_middle_that_leaves_calls_nobody(world: World) -> None:
    """The one behind it waits until all before it are gone."""
    world.work_off(*"abc", meanwhile=lambda: world.cancel(1))

    assert world.begun == [(0, "a"), (1, "c")]
    assert world.turns._lines == {}


NUMBER = "+491713920001"
BODY = b'{"to":"%s","from":"Acme","text":"Hi"}' % NUMBER.encode()


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        (None, NUMBER),
        ({}, NUMBER),
        ({ORDERING_KEY: "order 7"}, "order 7"),
        ({ORDERING_KEY: b"order 7"}, "order 7"),
        ({ORDERING_KEY: ""}, NUMBER),
        ({ORDERING_KEY: 7}, NUMBER),
    ],
)
def test_the_key_that_is_named_comes_before_the_number(
    headers: dict[str, Any] | None, key: str
) -> None:
    """A text that the publisher set, else the recipient."""
    delivery = make_delivery(properties=Properties(headers=headers), body=BODY)
    assert ordering_key(delivery) == key


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[]", b"7", b"{}", b'{"to": 7}', b"[" * 100_000, b'"\xff"', b"9" * 5000],
)
def test_a_message_that_cannot_be_read_has_the_empty_key(body: bytes) -> None:
    """It is found invalid when its turn comes."""
    assert ordering_key(make_delivery(body=body)) == ""
