"""How many requests should be in flight: the limit that follows the API.

It meets an API that is simulated on a clock that leaps, so that nobody waits.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.worker.fates import Answer, Fate, judge_failure, judge_status
from bridge.worker.limits.adaptive_limit import (
    FIRST_HELD,
    FIRST_LIMIT,
    FIRST_TRIAL_SECONDS,
    AdaptiveLimit,
)
from tests.clock import Clock

MAXIMUM = 200
LATENCY_SECONDS = 0.2
# After a 429 the worker sends nothing for a while.
GATE_SECONDS = 1.0
SENT = Answer(fate=Fate.SENT, result="success", status=202, detail="accepted")


def status(code: int) -> Answer:
    return judge_status(code, retry_after_seconds=None)


REFUSED = status(429)
LOST = judge_failure("answer_timeout")


# --- An API on a clock that leaps ----------------------------------------------------------------


@dataclass
class World:
    """A worker with a full queue, and an API with so many slots that refuses beyond `most`."""

    slots: int
    most: int = 10_000
    latency: Callable[[], float] = lambda: LATENCY_SECONDS

    def __post_init__(self) -> None:
        self._clock = Clock(0.0)
        self.limit = AdaptiveLimit(MAXIMUM, clock=self._clock)
        self.sent = self.refused = 0
        self.limits: list[int] = []
        self._events: list[tuple[float, int, Answer | None, float]] = []
        self._serial = itertools.count()
        self._in_flight = self._busy = 0
        self._waiting: deque[float] = deque()
        self._opens_at = 0.0

    def pass_seconds(self, seconds: float) -> float:
        """Let time pass; return how many messages were sent in each second."""
        before, until = self.sent, self._clock.now + seconds
        self._send()
        while self._events and self._events[0][0] <= until:
            self._clock.now, _, answer, began = heapq.heappop(self._events)
            if answer is not None:
                self._finish(answer, began)
            self._send()
        self._clock.now = until
        return (self.sent - before) / seconds

    def _send(self) -> None:
        if self._clock.now < self._opens_at:
            return
        while self._in_flight < self.limit.limit:
            self._in_flight += 1
            began = self.limit.begin()
            if self._busy + len(self._waiting) >= self.most:
                self._later(0.0, REFUSED, began)
            else:
                self._waiting.append(began)
                self._work()

    def _work(self) -> None:
        while self._waiting and self._busy < self.slots:
            self._busy += 1
            self._later(self.latency(), SENT, self._waiting.popleft())

    def _finish(self, answer: Answer, began: float) -> None:
        self._in_flight -= 1
        if answer is SENT:
            self.sent += 1
            self._busy -= 1
            self._work()
        else:
            self.refused += 1
            self._opens_at = self._clock.now + GATE_SECONDS
            self._later(GATE_SECONDS, None, 0.0)
        self.limit.end(began, answer)
        self.limits.append(self.limit.limit)

    def _later(self, seconds: float, answer: Answer | None, began: float) -> None:
        event = (self._clock.now + seconds, next(self._serial), answer, began)
        heapq.heappush(self._events, event)


@pytest.mark.parametrize("slots", [1, 3, 20, 150])
def test_limit_keeps_the_api_busy(slots: int) -> None:
    """It finds the level at which the latency starts to climb, and a short queue stays there."""
    world = World(slots)
    world.pass_seconds(15)

    rate = world.pass_seconds(45)

    assert rate >= 0.95 * slots / LATENCY_SECONDS
    assert world.limit.limit <= 1.5 * slots + 5


def test_limit_starts_low_and_grows_fast() -> None:
    """No more than a few go at first; the maximum is reached within seconds."""
    world = World(1000)
    world.pass_seconds(LATENCY_SECONDS / 2)
    assert world.limit.limit == FIRST_LIMIT

    world.pass_seconds(4)

    assert world.limit.limit == MAXIMUM


def test_limit_follows_the_capacity() -> None:
    """After each change of the API it soon sends within a tenth of what the API takes."""
    world = World(40, most=80)
    for slots, most in ((40, 80), (10, 20), (100, 200), (20, 20)):
        world.slots, world.most = slots, most
        world.pass_seconds(15)

        rate = world.pass_seconds(40)

        assert rate >= 0.9 * slots / LATENCY_SECONDS, f"{slots} at once"


def test_limit_leaves_a_refused_level() -> None:
    """Within a minute and a little it finds that an API refuses no more what it refused."""
    world = World(20, most=20)
    world.pass_seconds(300)
    world.slots = world.most = 150
    world.pass_seconds(75)

    assert world.pass_seconds(40) >= 0.9 * 150 / LATENCY_SECONDS


def test_a_refused_level_is_rarely_tried() -> None:
    """An API that lets nothing wait refuses a few to show its level, then one a minute."""
    world = World(10, most=10)
    world.pass_seconds(60)
    assert world.refused <= 10
    before = world.refused

    rate = world.pass_seconds(600)

    assert world.refused - before <= 12
    assert rate >= 0.95 * 10 / LATENCY_SECONDS


def test_a_slow_api_is_not_punished() -> None:
    """Latency that is high from the start is no reason to send less."""
    world = World(100, latency=lambda: 5.0)
    world.pass_seconds(200)

    assert world.pass_seconds(200) >= 0.9 * 100 / 5


def test_an_api_that_becomes_slower_is_not_punished() -> None:
    """Latency that stays when less is sent is the API's own, and the limit grows again."""
    world = World(100)
    world.pass_seconds(30)
    world.latency = lambda: 3 * LATENCY_SECONDS
    world.pass_seconds(20)

    assert world.pass_seconds(40) >= 0.9 * 100 / (3 * LATENCY_SECONDS)


def test_an_api_that_becomes_faster_is_not_flooded() -> None:
    """The queue at the API becomes as short again as with the latency that it had first."""
    world = World(40, latency=lambda: 2 * LATENCY_SECONDS)
    world.pass_seconds(30)
    before = world.limit.limit
    world.latency = lambda: LATENCY_SECONDS
    world.pass_seconds(120)

    assert world.limit.limit == pytest.approx(before, abs=5)


@pytest.mark.parametrize("slots", [10, 40, 100])
def test_latency_that_varies(slots: int) -> None:
    """Latency that varies of itself, as widely as a queue's, is not taken for one."""
    chance = random.Random(slots)
    world = World(slots, latency=lambda: chance.expovariate(1 / LATENCY_SECONDS))
    world.pass_seconds(20)

    assert world.pass_seconds(100) >= 0.8 * slots / LATENCY_SECONDS


def test_unused_limit_does_not_grow() -> None:
    """A worker with little to do learns nothing, and raises nothing."""
    clock = Clock(0.0)
    limit = AdaptiveLimit(MAXIMUM, clock=clock)
    for _ in range(1000):
        began = limit.begin()
        clock.now += 0.1
        limit.end(began, SENT)

    assert limit.limit == FIRST_LIMIT


# --- Refusals ------------------------------------------------------------------------------------


def grown(clock: Clock) -> AdaptiveLimit:
    limit = AdaptiveLimit(64, clock=clock)
    while limit.limit < 64:
        answer_all(limit, clock, SENT)
    return limit


def answer_all(limit: AdaptiveLimit, clock: Clock, answer: Answer) -> None:
    """Have as many requests in flight as may be, and answer all of them."""
    begun = [limit.begin() for _ in range(limit.limit)]
    clock.now += LATENCY_SECONDS
    for began in begun:
        limit.end(began, answer)


@pytest.mark.parametrize("answer", [status(429), status(503), status(504), LOST])
def test_limit_is_halved_once_a_round_trip(answer: Answer) -> None:
    """However many requests in flight are refused, the limit is halved once, and then again."""
    clock = Clock()
    limit = grown(clock)

    answer_all(limit, clock, answer)
    assert limit.limit == 32
    clock.now += 1
    answer_all(limit, clock, answer)

    assert limit.limit == 16


@pytest.mark.parametrize("answer", [status(400), status(401), status(500), None])
def test_other_answers_change_nothing(answer: Answer | None) -> None:
    """What says nothing of the load is no reason to send less."""
    clock = Clock()
    limit = grown(clock)
    for _ in range(100):
        began = limit.begin()
        clock.now += 1
        limit.end(began, answer)

    assert limit.limit == 64


def test_an_outage_is_forgotten() -> None:
    """When all is refused at any level, the limit starts low, and grows as it did at first."""
    clock = Clock()
    limit = grown(clock)
    for _ in range(7):
        clock.now += 0.1
        answer_all(limit, clock, REFUSED)
    assert limit.limit == 1

    started = clock.now
    while limit.limit < 64:
        answer_all(limit, clock, SENT)

    assert clock.now - started < FIRST_TRIAL_SECONDS / 2


# --- What is held --------------------------------------------------------------------------------


def test_more_is_held_than_is_sent_at_once() -> None:
    """There is always a delivery to send, the hold changes rarely, and it is bounded."""
    clock = Clock()
    limit = AdaptiveLimit(MAXIMUM, clock=clock)
    held = []
    for size in (*range(1, MAXIMUM + 1), *range(MAXIMUM, 0, -1)):
        limit.limit = size
        held.append(limit.prefetch())
        assert min(MAXIMUM, 1.5 * size) <= held[-1] <= max(FIRST_HELD, 8 * size)

    changes = sum(one != other for one, other in itertools.pairwise(held))
    assert changes == 4


@given(
    st.integers(min_value=1, max_value=300),
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "sent", "refused", "lost", "cancelled"]),
            st.floats(min_value=0, max_value=100),
        ),
        max_size=300,
    ),
)
def test_limit_stays_within_its_bounds(maximum: int, steps: list[tuple[str, float]]) -> None:
    """Whatever happens, the limit is from 1 to the maximum, and what is held not less."""
    clock = Clock()
    limit = AdaptiveLimit(maximum, clock=clock)
    answers = {"sent": SENT, "refused": REFUSED, "lost": LOST, "cancelled": None}
    begun: list[float] = []
    for what, seconds in steps:
        if what == "begin":
            begun += [limit.begin() for _ in range(limit.limit)]
        else:
            for began in begun[::2]:
                limit.end(began, answers[what])
            del begun[::2]
        clock.now += seconds

        assert 1 <= limit.limit <= maximum
        assert limit.limit <= limit.prefetch() <= maximum
