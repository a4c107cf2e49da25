"""How fast: the buckets, the lines in front of them, and who waits on the ladder instead.

All run on an event loop whose time leaps to the next timer, so that nobody waits.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from bridge.config import RateLimitSettings
from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.limits.rate_limits import (
    FIRST_ROOM,
    MAX_ROOM,
    RateLimits,
    TokenBucket,
)
from tests.clock import Clock, LeapingWorld, in_world
from tests.deliveries import make_delivery
from tests.simulation.windows import most_in

FIRST_STEP = 5.0
NO_LIMIT = RateLimitSettings()


class World(LeapingWorld):
    """Limits, the clock that they go by, and the metrics that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def rates(
        self, limit: RateLimitSettings = NO_LIMIT, *, most_wait: float = FIRST_STEP
    ) -> RateLimits:
        return RateLimits(
            limit,
            most_wait_seconds=most_wait,
            changed=self.changed,
            metrics=self.metrics,
            clock=self.loop.time,
        )

    def turns(self, rates: RateLimits, number: int, sender: str = "A") -> list[float]:
        """Let deliveries wait for their turn together; return when each one went."""
        return self.moments(go(rates, sender) for _ in range(number))


async def go(rates: RateLimits, sender: str = "A", *, until: asyncio.Event | None = None) -> None:
    """Wait for a turn, then for something else if need be, and use the turn."""
    async with rates.token(sender, make_delivery().waits) as token:
        if until is not None:
            await until.wait()
        token.spend()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


# --- The bucket ----------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock(50.0)


@pytest.mark.parametrize(
    ("taken", "idle_seconds", "waits"),
    [
        (0, 0, [0, 0, 0, 0.5, 1.0, 1.5]),
        (3, 1, [0, 0, 0.5]),
        (0, 1e9, [0, 0, 0, 0.5]),
    ],
    ids=["burst, then the rate", "time gives back", "never more than the burst"],
)
def test_bucket(clock: Clock, taken: int, idle_seconds: float, waits: list[float]) -> None:
    """A bucket of two a second and a burst of three."""
    bucket = TokenBucket(2, 3, clock)
    for _ in range(taken):
        bucket.take()
    clock.now += idle_seconds

    assert [bucket.take() for _ in waits] == waits


@pytest.mark.parametrize("per_second", [0.01, 7.5])
def test_bucket_holds_its_rate(clock: Clock, per_second: float) -> None:
    """Over a long time no more goes than the rate allows."""
    bucket = TokenBucket(per_second, 1, clock)
    for _ in range(1000):
        clock.now += bucket.take()

    assert clock.now - 50 == pytest.approx(999 / per_second)


# --- Rate limits ---------------------------------------------------------------------------------


LIMITS: dict[str, tuple[dict[str, float], list[float]]] = {
    "none": ({}, [0.0] * 500),
    "per second": ({"per_second": 2, "burst": 1}, [0, 0.5, 1, 1.5, 2]),
    "a burst is a second's worth": ({"per_second": 3}, [0, 0, 0, 1 / 3]),
    "slow": ({"per_second": 0.1}, [0, 10, 20]),
    "the longer wait of both": ({"per_second": 2, "burst": 1, "per_sender": 1}, [0, 1, 2]),
}


@pytest.mark.parametrize(("limit", "turns"), LIMITS.values(), ids=LIMITS)
def test_limit(world: World, limit: dict[str, float], turns: list[float]) -> None:
    """The limits spread the messages of one sender over time."""
    rates = world.rates(RateLimitSettings.model_validate(limit))

    assert world.turns(rates, len(turns)) == pytest.approx(turns)


def test_limit_per_sender(world: World) -> None:
    """A limit per sender makes one sender wait and no other."""
    rates = world.rates(RateLimitSettings(per_sender=1))
    world.turns(rates, 5, "A")

    assert world.turns(rates, 1, "B") + world.turns(rates, 1, "A") == pytest.approx([0, 1])


def test_waits_for_the_limit_are_counted(world: World) -> None:
    """The time that deliveries wait because of our own limit is counted as such."""
    world.turns(world.rates(RateLimitSettings(per_second=2, burst=1)), 3)

    assert world.value("throttled_seconds_total", cause="local_limit") == pytest.approx(1.5)


def share(rates: RateLimits, *consumers: int) -> None:
    """Have the queue looked at, a second after the other each, until the number counts."""
    for number in consumers:
        rates.share_with(number)
        rates.share_with(number)


@pytest.mark.parametrize(
    ("scope", "consumers", "expected"),
    [
        ("cluster", 4, [4, 8, 12]),
        ("cluster", 1, [1, 2, 3]),
        ("cluster", 0, [1, 2, 3]),
        ("process", 4, [0, 1, 2]),
    ],
)
def test_shared_limit(world: World, scope: Any, consumers: int, expected: list[float]) -> None:
    """A limit of the whole cluster is divided by its consumers, and begins with nothing."""
    rates = world.rates(RateLimitSettings(per_second=1, burst=1, scope=scope))
    share(rates, consumers)

    assert world.turns(rates, 3) == pytest.approx(expected)


def test_changing_number_of_consumers_gives_no_new_burst(world: World) -> None:
    """However often the number of consumers changes, what has been used stays used."""
    rates = world.rates(RateLimitSettings(per_second=1, burst=10, scope="cluster"))
    share(rates, 1)
    world.passes(10)
    world.turns(rates, 10)
    share(rates, 2, 1, 3, 1)

    assert world.turns(rates, 1) == pytest.approx([1])


def test_more_workers_count_at_once_and_fewer_when_seen_twice(world: World) -> None:
    """Workers that start, or come back, together do not see each other at once."""
    rates = world.rates(RateLimitSettings(per_second=60, burst=1, scope="cluster"))
    shares = []
    for seen in (1, 3, 1, 3, 2, 2):
        rates.share_with(seen)
        shares.append(rates.prefetch(10_000) / MAX_HOLD_SECONDS)

    assert shares == [60, 20, 20, 20, 20, 30]


@pytest.mark.parametrize("limit", [{"per_second": 10}, {"per_sender": 10}], ids=str)
def test_nothing_goes_before_the_share_is_known(world: World, limit: dict[str, Any]) -> None:
    """What comes before the number of workers is known waits, and finds no burst then."""
    rates = world.rates(RateLimitSettings(**limit, scope="cluster"))
    world.passes(100)
    world.loop.call_later(3, rates.share_with, 1)
    world.loop.call_later(4, rates.share_with, 2)

    assert world.turns(rates, 3) == pytest.approx([4.2, 4.4, 4.6])


def test_a_share_that_nobody_tells_is_not_awaited_for_ever(world: World) -> None:
    """When the queue cannot be looked at, the limit is held as if there were no other worker."""
    rates = world.rates(RateLimitSettings(per_second=1, scope="cluster"))

    assert world.turns(rates, 2) == pytest.approx([11, 12])


def test_a_new_sender_has_a_burst_after_a_while(world: World) -> None:
    """A sender that comes long after the start of a shared limit goes at once."""
    rates = world.rates(RateLimitSettings(per_sender=1, scope="cluster"))
    share(rates, 1)
    world.passes(0.5)
    early = world.turns(rates, 1, "A")
    world.passes(10)

    assert early + world.turns(rates, 1, "B") == pytest.approx([0.5, 0])


@pytest.mark.parametrize(
    ("limit", "held"),
    [
        (NO_LIMIT, 50),
        (RateLimitSettings(per_second=100), 50),
        (RateLimitSettings(per_second=0.5), 30),
        (RateLimitSettings(per_second=0.01), 1),
    ],
    ids=["none", "fast", "slow", "very slow"],
)
def test_most_held(world: World, limit: RateLimitSettings, held: int) -> None:
    """No more is taken than gets its turn within the longest time that a delivery is held."""
    assert world.rates(limit).prefetch(50) == held


def test_forgotten_sender_is_the_one_longest_silent(world: World) -> None:
    """The sender that is forgotten is neither one that has just sent nor one that waits."""
    rates = world.rates(RateLimitSettings(per_sender=0.001))
    world.turns(rates, 1, "busy")
    for number in range(999):
        world.run(go(rates, str(number)))

    async def wait_and_look() -> float:
        waiting = asyncio.create_task(go(rates, "busy"))
        await asyncio.sleep(0)
        for number in range(1000):
            rates.plan_turn(f"other {number}")
        left = rates.plan_turn("busy")
        waiting.cancel()
        return left

    assert world.run(wait_and_look()) > 900
    assert len(rates._by_sender) == 1000


# --- Lines ---------------------------------------------------------------------------------------


@in_world
async def test_no_tokens_gather_behind_one_that_is_held_up(world: World) -> None:
    """After the first of the line was held up for long, no more than a burst goes at once."""
    rates = world.rates(RateLimitSettings(per_second=1, burst=2))
    free, began, went = asyncio.Event(), world.loop.time(), []

    async def one() -> None:
        await go(rates, until=free)
        went.append(world.loop.time() - began)

    world.loop.call_later(100, free.set)
    await asyncio.gather(*(one() for _ in range(6)))

    assert went == pytest.approx([100, 100, 101, 102, 103, 104])


@pytest.mark.parametrize(("workers", "most"), [(1, 105), (8, 13)])
def test_who_wakes_late_makes_no_second_fuller(world: World, workers: int, most: int) -> None:
    """On a busy machine timers go off late: what went late counts when it goes."""
    rates = world.rates(RateLimitSettings(per_second=100, burst=5, scope="cluster"))
    share(rates, workers)
    chance = random.Random(1)
    world.loop.late_seconds = lambda: chance.expovariate(20)

    assert most_in(world.turns(rates, 600), 1) <= most


def test_time_of_one_that_does_not_go_is_given_to_others(world: World) -> None:
    """Who goes back to the queue while it waits keeps nobody on the ladder."""
    rates = world.rates(RateLimitSettings(per_sender=1))

    async def come_and_give_up() -> None:
        tasks = []
        for _ in range(6):
            assert rates.plan_turn("A") == 0
            tasks.append(asyncio.ensure_future(go(rates)))
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    for _ in range(3):
        world.run(come_and_give_up())
        world.passes(1)


# --- The ladder ----------------------------------------------------------------------------------


def arrive(world: World, rates: RateLimits, number: int, sender: str = "A") -> list[float]:
    """Have so many deliveries come together; return how long each is to wait on the ladder.

    Those that are to wait here do so.
    """

    async def come() -> list[float]:
        seconds = []
        for _ in range(number):
            seconds.append(rates.plan_turn(sender))
            if not seconds[-1]:
                tasks.append(asyncio.ensure_future(go(rates, sender)))
                await asyncio.sleep(0)
        return seconds

    tasks: list[asyncio.Future[None]] = []
    found: list[float] = world.run(come())
    return found


def test_who_is_far_back_waits_on_the_ladder(world: World) -> None:
    """A few of a sender wait here; each of the others is given a time of its own."""
    rates = world.rates(RateLimitSettings(per_sender=2, burst=1))

    assert arrive(world, rates, 14) == pytest.approx([0] * 11 + [5.5, 6, 6.5])


def test_time_that_was_given_is_kept(world: World) -> None:
    """Who comes back from the ladder too early goes up again for the rest, and waits here then."""
    rates = world.rates(RateLimitSettings(per_sender=1))
    arrive(world, rates, 100)

    assert [rates.plan_turn("A", planned_in_seconds=s) for s in (30, 6)] == [30, 6]
    world.passes(60)
    assert rates.plan_turn("A", planned_in_seconds=4) == 0


def test_who_comes_anew_goes_behind_those_on_the_ladder(world: World) -> None:
    """While others wait on the ladder for their time, nobody who comes later is before them."""
    rates = world.rates(RateLimitSettings(per_sender=1))
    last = arrive(world, rates, 100)[-1]
    world.passes(20)

    assert arrive(world, rates, 1) == pytest.approx([last - 20 + 1])


@in_world
async def test_all_that_come_back_at_once_are_spread(world: World) -> None:
    """When others have taken the place, each is given another time."""
    rates = world.rates(RateLimitSettings(per_sender=1))
    back = []

    tasks: list[asyncio.Future[None]] = []
    for _ in range(100):
        back.append(rates.plan_turn("A", planned_in_seconds=0))
        if not back[-1]:
            tasks.append(asyncio.ensure_future(go(rates)))
            await asyncio.sleep(0)

    again = [seconds for seconds in back if seconds]
    assert len(again) > 90
    assert max(again) - min(again) > 80


def test_few_wait_here_though_there_are_many_senders(world: World) -> None:
    """So many deliveries wait for the limits of their senders together; the room grows then."""
    rates = world.rates(RateLimitSettings(per_sender=1))
    before = rates.prefetch(50)
    senders = [str(number) for number in range(FIRST_ROOM + 5)]
    first, second = zip(*(arrive(world, rates, 2, sender) for sender in senders), strict=True)

    # Who need not wait takes up no room.
    assert not any(first)
    assert [wait > 0 for wait in second] == [False] * FIRST_ROOM + [True] * 5
    assert world.changed.is_set()
    assert rates.prefetch(50) > before


def test_room_is_given_up_and_has_an_end(world: World) -> None:
    """The room for who waits follows the need, up to an end and down again."""
    rates = world.rates(RateLimitSettings(per_sender=0.5), most_wait=MAX_HOLD_SECONDS)
    for sender in range(100):
        arrive(world, rates, 25, str(sender))
        rates.prefetch(50)
    most = rates.prefetch(50)
    world.passes(1000)
    world.run(asyncio.sleep(100))

    assert (most, rates.prefetch(50)) == (50 + MAX_ROOM, 50 + FIRST_ROOM)


# --- Urgent ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit",
    [
        RateLimitSettings(per_sender=10, burst=1),
        RateLimitSettings(per_second=10, per_sender=10, burst=1),
    ],
    ids=["sender", "both"],
)
@in_world
async def test_urgent_ones_pass_the_line(world: World, limit: RateLimitSettings) -> None:
    """Whoever waits lets them pass, but for the first in line, who may go at the next token."""
    rates = world.rates(limit)
    went = []

    async def wait(who: str, *, is_urgent: bool) -> None:
        async with rates.token("A", make_delivery().waits, is_urgent=is_urgent) as token:
            token.spend()
            went.append(who)

    others = [asyncio.create_task(wait("o", is_urgent=False)) for _ in range(20)]
    await asyncio.sleep(0.55)
    urgent = [asyncio.create_task(wait("u", is_urgent=True)) for _ in range(3)]
    await asyncio.wait([*others, *urgent])
    assert went.index("u") <= 8
    assert "".join(went[went.index("u") :]).startswith("uuu")


def test_urgent_ones_take_no_time_in_the_plan_of_their_sender(world: World) -> None:
    """A campaign of the same sender is planned for minutes ahead, and holds up no code of it."""
    rates = world.rates(RateLimitSettings(per_sender=1, burst=1))
    planned = [rates.plan_turn("A") for _ in range(100)]

    assert planned[-1] > 90
    assert rates.urgent_retry_queue_seconds("A") == 0
    assert rates.plan_turn("A") == pytest.approx(planned[-1] + 1)


@in_world
async def test_too_many_urgent_ones_wait_on_the_ladder(world: World) -> None:
    """Nobody is held for longer than a minute: the broker ends a channel that holds for long."""
    rates = world.rates(RateLimitSettings(per_second=1, burst=1))
    waiting = [
        asyncio.create_task(wait_urgently(rates)) for _ in range(round(MAX_HOLD_SECONDS) + 5)
    ]
    await asyncio.sleep(0)
    seconds = rates.urgent_retry_queue_seconds("A")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert seconds > MAX_HOLD_SECONDS
    assert rates.urgent_retry_queue_seconds("A") == 0


async def wait_urgently(rates: RateLimits) -> None:
    async with rates.token("A", make_delivery().waits, is_urgent=True) as token:
        token.spend()
