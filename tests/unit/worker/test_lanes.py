"""Order per recipient: who goes first, and who goes up the ladder behind whom."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bridge.errors import BrokerError
from bridge.worker import lanes
from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.lanes import LOOK_AT_LANES, MAX_LATE_SECONDS, Lanes, Place
from bridge.worker.outcomes import Policy
from tests.clock import Clock
from tests.deliveries import make_delivery

KEY = "+491713920001"
FIRST_STEP = 5.0
POLICY = Policy(
    max_attempts=6, max_uncertain_attempts=3, retry_delays_seconds=(FIRST_STEP, 30.0, 120.0)
)


@pytest.fixture
def clock() -> Clock:
    """Give a clock that stands still."""
    return Clock()


@pytest.fixture
def line(clock: Clock) -> Lanes:
    """Give empty lanes."""
    return Lanes(POLICY, clock=clock)


@asynccontextmanager
async def place_of(line: Lanes, message: str, key: str = KEY) -> AsyncIterator[Place]:
    """Wait for a message's place."""
    async with line.place(key, make_delivery(message)) as place:
        yield place


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def go(line: Lanes, message: str, key: str = KEY, *, may_wait: bool = True) -> float | None:
    """Be the first and settle the message, unless it has to wait on the ladder; return the step."""

    async def process() -> float | None:
        async with line.place(key, make_delivery(message), may_wait=may_wait) as place:
            if place.behind_seconds is not None:
                place.stay_ahead(place.behind_seconds)
            return place.behind_seconds

    # As in the worker: each delivery has a task, which ends when it is settled.
    return await asyncio.create_task(process())


async def go_at_once(line: Lanes, message: str) -> float | None:
    """Settle a message without waiting for one that is held; return the step of the ladder."""
    return await go(line, message, may_wait=False)


async def fail(
    line: Lanes,
    message: str,
    step: float,
    key: str = KEY,
    *,
    published: asyncio.Event | None = None,
) -> None:
    """Be the first and go up the ladder, when the copy has been `published`."""

    async def process() -> None:
        async with place_of(line, message, key) as place:
            assert place.behind_seconds is None
            place.stay_ahead(step)
        if published is not None:
            await published.wait()

    await asyncio.create_task(process())
    await settle()


async def test_settled_message_holds_up_nobody(line: Lanes) -> None:
    """One after the other has its place."""
    assert [await go(line, message) for message in "abc"] == [None, None, None]


async def test_messages_of_a_key_do_not_overlap(line: Lanes) -> None:
    """The second waits for the first; one of another key does not."""
    async with place_of(line, "a"):
        second = asyncio.create_task(go(line, "b"))
        assert await go(line, "c", key="another") is None
        assert not second.done()
    assert await second is None


async def test_the_wait_for_those_before_it_is_measured(line: Lanes) -> None:
    """Who is behind another waits for `order`, and may be given back to the queue meanwhile."""
    clock, second = Clock(), make_delivery("b")
    second.clock = clock

    async def go_second() -> None:
        async with line.place(KEY, second):
            assert second.waiting_for is None

    async with place_of(line, "a"):
        waiting = asyncio.create_task(go_second())
        await settle()
        assert second.may_be_given_back
        clock.now += 3.0
    await waiting

    assert second.waited_seconds == {"order": 3.0}


async def test_nobody_passes_one_on_the_ladder(line: Lanes) -> None:
    """Those behind go up behind it, and go after it."""
    await fail(line, "a", 30.0)

    assert await go(line, "b") == 30.0
    assert await go(line, "a") is None
    assert await go(line, "b") is None


async def test_latecomer_does_not_pass_those_behind(line: Lanes) -> None:
    """One that comes while another still waits behind the first goes behind both."""
    await fail(line, "a", 30.0)
    await go(line, "b")
    await go(line, "a")

    assert await go(line, "c") == 30.0
    assert await go(line, "b") is None
    assert await go(line, "c") is None


async def test_place_is_kept_over_several_steps(line: Lanes) -> None:
    """The first stays the first, whichever step it is on."""
    await fail(line, "a", 5.0)
    await go(line, "b")
    await fail(line, "a", 30.0)

    assert await go(line, "b") == 30.0


@pytest.mark.parametrize(
    ("step", "passed", "expected"),
    [
        (120.0, 0.5, 120.0),
        (120.0, 4.0, 120.0),
        (120.0, 6.0, 30.0),
        (120.0, 100.0, FIRST_STEP),
        (30.0, 29.9, FIRST_STEP),
        (30.0, 40.0, FIRST_STEP),
    ],
)
async def test_who_comes_late_waits_for_what_is_left(
    line: Lanes, clock: Clock, step: float, passed: float, expected: float
) -> None:
    """One that comes while the first is on its step goes up a shorter one; late by 5 s at most."""
    await fail(line, "a", step)
    clock.now += passed

    assert await go(line, "b") == expected


async def test_nobody_goes_up_before_the_first(line: Lanes, clock: Clock) -> None:
    """Those behind wait until the copy of the first is there; its step begins with that."""
    published = asyncio.Event()
    first = asyncio.create_task(fail(line, "a", 30.0, published=published))
    await settle()
    second = asyncio.create_task(go(line, "b"))
    await settle()
    assert not second.done()

    clock.now += 20
    published.set()
    await first

    assert await second == 30.0


async def test_a_copy_that_cannot_be_published_holds_nobody_for_long(
    line: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind go up when the copy of the first is not there in time."""
    monkeypatch.setattr(lanes, "MAX_HOLD_SECONDS", 0.01)
    first = asyncio.create_task(fail(line, "a", 30.0, published=asyncio.Event()))
    await settle()

    assert await go(line, "b") == 30.0
    first.cancel()


async def test_an_error_gives_the_place_up(line: Lanes) -> None:
    """A message with which something went wrong holds up nobody."""
    with pytest.raises(RuntimeError):
        async with place_of(line, "a"):
            raise RuntimeError

    assert await go(line, "b") is None


async def test_cancelled_wait_keeps_its_place(line: Lanes) -> None:
    """A delivery that is given back while it waits comes again, and nobody passes it."""
    async with place_of(line, "a"):
        second = asyncio.create_task(go(line, "b"))
        await settle()
        second.cancel()
        await asyncio.wait({second})

    assert await go(line, "c") == FIRST_STEP
    assert await go(line, "b") is None
    assert await go(line, "c") is None


@pytest.mark.parametrize("reason", [BrokerError("gone"), asyncio.CancelledError()])
async def test_what_goes_back_to_the_queue_stays_ahead(line: Lanes, reason: BaseException) -> None:
    """It comes again while those behind it are on the ladder."""
    await fail(line, "a", 30.0)
    await go(line, "b")
    with pytest.raises(type(reason)):
        async with place_of(line, "a"):
            raise reason

    assert await go(line, "a") is None
    assert await go(line, "b") is None


async def test_what_another_worker_has_taken_is_given_up_soon(line: Lanes, clock: Clock) -> None:
    """What went back to the queue and does not come again holds up its number for a minute."""
    with pytest.raises(BrokerError):
        async with place_of(line, "a"):
            raise BrokerError("gone")
    clock.now += MAX_HOLD_SECONDS - 1
    assert await go(line, "b") == FIRST_STEP
    clock.now += 1

    assert await go(line, "b") is None


async def test_late_one_that_is_back_keeps_its_place(line: Lanes, clock: Clock) -> None:
    """One that comes back later than it was expected is not given up while it waits."""
    await fail(line, "a", 30.0)
    clock.now += 30 + MAX_LATE_SECONDS - 1
    async with place_of(line, "a"):
        clock.now += 2
        second = asyncio.create_task(go(line, "b"))
        await settle()
        assert not second.done()
        assert await go_at_once(line, "c") == FIRST_STEP
    assert await second is None


async def test_nobody_waits_who_must_not(line: Lanes) -> None:
    """Who does not wait goes up behind one that is held at once, and keeps its place."""
    async with place_of(line, "a"):
        assert await go_at_once(line, "b") == FIRST_STEP
    assert await go_at_once(line, "c") == FIRST_STEP
    assert await go_at_once(line, "b") is None


async def test_wait_ends_before_a_delivery_is_held_for_long(
    line: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not become the first goes to the ladder, and keeps its place."""
    monkeypatch.setattr(lanes, "MAX_HOLD_SECONDS", 0.01)

    async with place_of(line, "a"):
        assert await go(line, "b") == FIRST_STEP
    assert await go(line, "c") == FIRST_STEP
    assert await go(line, "b") is None


async def test_one_that_does_not_come_back_is_given_up(line: Lanes, clock: Clock) -> None:
    """A message that somebody took out of the ladder does not hold up its number for ever."""
    await fail(line, "a", 30.0)
    clock.now += 30 + MAX_LATE_SECONDS

    assert await go(line, "b") is None


async def test_those_that_do_not_come_back_are_forgotten(line: Lanes, clock: Clock) -> None:
    """What another worker took from the ladder is not kept for weeks; each message has some go."""
    for number in range(3 * LOOK_AT_LANES):
        await fail(line, f"first of {number}", 30.0, f"{number}")
    clock.now += 30 + MAX_LATE_SECONDS
    left = []
    for _ in range(3):
        await go(line, "another", "another number")
        left.append(line._messages)

    assert left == [2 * LOOK_AT_LANES, LOOK_AT_LANES, 0]
    assert not line._lanes


async def test_one_on_the_ladder_keeps_nothing_of_its_work(line: Lanes) -> None:
    """The task that has settled it, which is most of what it takes, is let go at its end."""
    await fail(line, "a", 30.0)

    (record,) = line._lanes[KEY].order.values()
    assert record.leaving is None


async def test_two_of_one_id(line: Lanes) -> None:
    """Two messages that were given one id both have their place."""
    async with place_of(line, "a"):
        second = asyncio.create_task(go(line, "a"))
        await asyncio.sleep(0)

    assert await second is None
    assert await go(line, "b") is None


async def test_oldest_are_forgotten_for_room(line: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is bounded; what is forgotten is the oldest key."""
    monkeypatch.setattr(lanes, "MAX_MESSAGES", 2)
    for key in ("one", "two", "three"):
        await fail(line, f"first of {key}", 30.0, key)

    assert await go(line, "second", "one") is None
    assert await go(line, "second", "three") == 30.0
