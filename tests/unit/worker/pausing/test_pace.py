"""Whether to send at all: Retry-After, outages, pauses, probes.

All run on an event loop whose time leaps to the next timer, so that nobody waits.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bridge.config import RateLimitSettings
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery
from bridge.worker.fates import Answer, PauseReason, judge_failure, judge_status
from bridge.worker.outcomes import Dead, Outcome, Policy, Retried, Sent
from bridge.worker.pausing.outage import OUTAGE_REQUESTS
from bridge.worker.pausing.pace import BEHIND_SECONDS, PATIENCE_SECONDS, Pace
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery
from tests.ears import Ears

OUTAGE_AFTER = 10.0
FIRST_STEP = 5.0
POLICY = Policy(
    max_attempts=6, max_uncertain_attempts=3, retry_delays_seconds=(FIRST_STEP, 30.0, 120.0)
)
NO_LIMIT = RateLimitSettings()
# Chance is left in: what holds, holds in each of so many runs.
RUNS = 60


class World(LeapingWorld):
    """A pace, the clock that it goes by, and the metrics that it writes."""

    def pace(self, limit: RateLimitSettings = NO_LIMIT, policy: Policy = POLICY) -> Pace:
        """Make a pace on this world's clock."""
        return Pace(
            limit,
            policy=policy,
            outage_after_seconds=OUTAGE_AFTER,
            metrics=self.metrics,
            clock=self.loop.time,
        )

    def turns(self, pace: Pace, number: int, sender: str = "A") -> list[float]:
        """Let deliveries wait for their turn together; return when each one went."""

        async def one() -> None:
            async with pace.rates.token(sender, make_delivery().waits) as token:
                await pace.until_open(fresh())
                token.spend()

        return self.moments(one() for _ in range(number))


@pytest.fixture
def world() -> Iterator[World]:
    """Give a world at some moment."""
    made = World()
    yield made
    made.close()


def status(code: int, *, wait: float | None = None) -> Answer:
    """Make the answer of a status."""
    return judge_status(code, retry_after_seconds=wait)


ACCEPTED = status(200)
FAILED = status(500)
NOT_FOUND = status(404)
FORBIDDEN = status(403)
LOST = judge_failure("answer_timeout")


_serials = itertools.count(1)


def fresh() -> str:
    """Make up the key of a message that nobody knows."""
    return f"m{next(_serials)}"


def rule(
    pace: Pace, answer: Answer, key: str, to: str = "", sender: str = "A", **envelope: Any
) -> Outcome | None:
    """Send a message, and return what its answer means; `to` is its own number if unnamed."""
    return ruled(pace, answer, make_delivery(key, **envelope), to, sender)


def ruled(
    pace: Pace,
    answer: Answer,
    delivery: Delivery,
    to: str = "",
    sender: str = "A",
    *,
    began: int | None = None,
) -> Outcome | None:
    """Say what the answer to a delivery means, of a request that begins now or `began` before."""
    key = delivery.envelope.key
    number = pace.begin(key) if began is None else began
    pace.end(number)
    answer = pace.attribute(answer, delivery, to or key, sender, request_number=number)
    return pace.rule(answer, delivery, to or key, sender)


def note(pace: Pace, answer: Answer, times: int = 1) -> None:
    """Have messages that nobody knows answered so, each settled before the next one."""
    for _ in range(times):
        key = fresh()
        rule(pace, answer, key)
        pace.give_up_probe(key)


def down(world: World, policy: Policy = POLICY) -> Pace:
    """Make a pace that is paused for an outage."""
    pace = world.pace(policy=policy)
    world.passes(OUTAGE_AFTER)
    note(pace, FAILED, 10)
    assert pace.paused == "outage"
    return pace


# --- A limit that is shared -----------------------------------------------------------------------


def test_paused_worker_keeps_its_share(world: World) -> None:
    """A worker that is paused, and so no consumer, counts on the others to come back."""
    pace = world.pace(RateLimitSettings(per_second=1, burst=5, scope="cluster"))
    for consumers in (5, 5):
        pace.share_with(consumers)
    pace.pause("operator")
    for consumers in (0, 0):
        pace.share_with(consumers)
    pace.resume()

    assert world.turns(pace, 2) == pytest.approx([5, 10])


# --- Retry-After ---------------------------------------------------------------------------------


def ask_for_long(pace: Pace, seconds: float) -> None:
    """Have messages to two numbers answered 429 with a wait that nothing can be held for."""
    note(pace, status(429, wait=seconds), 2)


@pytest.mark.parametrize("asked", [0.5, 3, 30, 50])
def test_wait_that_was_asked_for(world: World, asked: float) -> None:
    """After a 429 nothing goes before the service wants it, and not much later."""
    waits = []
    for _ in range(RUNS):
        pace = world.pace()
        note(pace, status(429, wait=asked))
        waits += world.turns(pace, 1)

    assert asked <= min(waits) <= max(waits) <= asked * 1.1 + 0.001


def test_all_slots_stop(world: World) -> None:
    """While the service wants a wait, no delivery at all goes."""
    pace = world.pace()
    note(pace, status(429, wait=5))

    assert min(world.turns(pace, 20)) >= 5


def test_longer_wait_counts(world: World) -> None:
    """A shorter wait that is asked for later does not shorten the one before."""
    pace = world.pace()
    note(pace, status(429, wait=30))
    note(pace, status(429, wait=1))

    assert world.turns(pace, 1)[0] >= 30


def test_wait_is_prolonged_for_those_who_wait(world: World) -> None:
    """Who waits already waits on when the service asks for more."""
    pace = world.pace()
    note(pace, status(429, wait=5))
    world.loop.call_later(3, note, pace, status(429, wait=20))

    assert world.turns(pace, 1)[0] >= 23


def test_waits_for_the_service_are_counted(world: World) -> None:
    """The time that deliveries wait because of the service is counted as such."""
    pace = world.pace()
    note(pace, status(429, wait=5))
    world.turns(pace, 2)

    counted = world.value("throttled_seconds_total", cause="retry_after")

    assert counted is not None
    assert 10 <= counted <= 11


def test_own_back_off(world: World) -> None:
    """Without a wait that was asked for, our own doubles from one second."""
    pace = world.pace()
    waits = []
    for _ in range(6):
        note(pace, status(429))
        waits += world.turns(pace, 1)

    assert all(
        step <= wait <= step * 1.1 + 0.001
        for step, wait in zip([1, 2, 4, 8, 16, 32], waits, strict=True)
    )


def test_own_back_off_has_an_end(world: World) -> None:
    """Our own back-off does not grow beyond a minute."""
    pace = world.pace()
    for _ in range(20):
        note(pace, status(429))
        world.passes(70)
    note(pace, status(429))

    assert pace.paused is None
    assert world.turns(pace, 1)[0] <= 66


def test_many_429_at_once_count_once(world: World) -> None:
    """Of many 429 that answer requests in flight together, one makes the back-off grow."""
    pace = world.pace()
    note(pace, status(429), 50)
    world.turns(pace, 1)
    note(pace, status(429), 50)

    assert world.turns(pace, 1)[0] <= 2.2 + 0.001


def test_acceptance_ends_the_back_off(world: World) -> None:
    """After an acceptance our own back-off begins with one second again."""
    pace = world.pace()
    for _ in range(4):
        note(pace, status(429))
        world.turns(pace, 1)
    note(pace, ACCEPTED)
    note(pace, status(429))

    assert world.turns(pace, 1)[0] <= 1.1 + 0.001


def test_no_wait_asked_for_is_no_leave_to_hammer(world: World) -> None:
    """A service that says 429 and `Retry-After: 0` each time is not asked without a pause."""
    pace = world.pace()
    for _ in range(5):
        note(pace, status(429, wait=0))
        world.turns(pace, 1)
    note(pace, status(429, wait=0))

    assert world.turns(pace, 1)[0] > 0


def test_short_wait_is_no_pause(world: World) -> None:
    """A wait that a delivery can be held for is no pause."""
    pace = world.pace()
    note(pace, status(429, wait=MAX_HOLD_SECONDS / 1.2))

    assert pace.paused is None


def test_long_wait_is_a_pause(world: World) -> None:
    """A wait that is too long to hold deliveries for is a pause."""
    pace = world.pace()
    note(pace, status(429, wait=MAX_HOLD_SECONDS + 1))

    assert pace.paused == "rate_limited"


def test_the_log_says_with_what_status_a_pause_began(world: World, ears: Ears) -> None:
    """The line of a pause has the status that the API answered with."""
    note(world.pace(), status(426))

    assert ears.heard("paused") == [{"reason": "misconfigured", "status": 426}]


def test_the_log_says_with_what_code_a_pause_began(world: World, ears: Ears) -> None:
    """Behind a 200 only the service's own code tells why; nobody has that message's line yet."""
    answer = status(402)._replace(status=200, code="9")
    note(world.pace(), answer)

    assert ears.heard("paused") == [{"reason": "insufficient_funds", "status": 200, "code": "9"}]


def admit(
    pace: Pace, key: str = "m", to: str = "", *, attempts: int = 0
) -> Coroutine[Any, Any, float | None]:
    """Ask whether a message may go; `to` is its own number if unnamed."""
    return pace.admit(make_delivery(key, attempts=attempts), to or key, "A")


def is_probe(pace: Pace, key: str) -> bool:
    """Say whether a message is the probe of a pause."""
    return pace.paused is not None and pace.lets_through(key)


def test_nothing_is_held_for_a_long_wait(world: World) -> None:
    """In a wait that is too long to hold anything a message learns when to come again."""
    for _ in range(RUNS):
        pace = world.pace()
        ask_for_long(pace, 600)
        before = world.loop.time()

        assert (world.run(admit(pace)), pace.probes_wanted) == (pytest.approx(630, abs=30), 0)
        assert world.loop.time() == before


def test_long_wait_that_is_over_needs_no_probe(world: World) -> None:
    """A worker that nobody sends anything to goes on when the time that was asked for is over."""
    pace = world.pace()
    ask_for_long(pace, 600)
    world.passes(599)
    pace.reopen()
    early = pace.paused
    world.passes(62)
    pace.reopen()

    assert (early, pace.paused) == ("rate_limited", None)


def test_long_wait_is_not_over_before_its_probe(world: World) -> None:
    """Whoever waits to probe finds out whether the service takes anything again."""
    pace = world.pace()
    ask_for_long(pace, 600)
    # Of a tenth more at most the last minute is left.
    world.passes(600)
    world.run(admit(pace))
    world.passes(62)
    pace.reopen()

    assert pace.paused == "rate_limited"


def test_only_a_wait_that_was_asked_for_is_over_by_itself(world: World) -> None:
    """Other pauses end with a probe, however long they last, and none is no pause to end."""
    pace = world.pace()
    pace.reopen()
    assert not pace.changed.is_set()

    pace.pause("misconfigured")
    world.passes(100_000)
    pace.reopen()
    assert pace.paused == "misconfigured"


def test_probe_of_a_long_wait_is_not_early(world: World) -> None:
    """The probe after a long wait does not go before the service wants it."""
    waits = []
    for _ in range(RUNS):
        pace = world.pace()
        ask_for_long(pace, 600)
        asked = world.loop.time()
        while (away := world.run(admit(pace))) is not None:
            world.passes(away - 1)
        waits.append(world.loop.time() - asked)

    assert 600 <= min(waits) <= max(waits) <= 661


def test_429_of_the_probe_is_honoured(world: World) -> None:
    """When the probe is answered with another long wait, the next probe waits for it."""
    for _ in range(RUNS):
        pace = world.pace()
        ask_for_long(pace, 600)
        world.passes(600)
        world.run(admit(pace))
        note(pace, status(429, wait=300))

        assert world.run(admit(pace, "next")) >= 300


# --- Outages -------------------------------------------------------------------------------------


OUTAGES = {
    "500": FAILED,
    "502": status(502),
    "503": status(503),
    "503 with Retry-After": status(503, wait=1),
    "521": status(521),
    "read time-out": LOST,
    "connect time-out": judge_failure("connect_timeout"),
    "refused": judge_failure("connect_failed"),
    "reset": judge_failure("connection_lost"),
}


@pytest.mark.parametrize("answer", OUTAGES.values(), ids=OUTAGES)
def test_outage(world: World, answer: Answer) -> None:
    """Ten failures in a row, and nothing accepted for ten seconds, are an outage."""
    pace = world.pace()
    world.passes(OUTAGE_AFTER)
    note(pace, answer, 10)

    assert pace.paused == "outage"


def test_nine_failures_are_no_outage(world: World) -> None:
    """A few failures are the messages' own, however long they take."""
    pace = world.pace()
    world.passes(1000)
    note(pace, FAILED, 9)

    assert pace.paused is None


def test_short_burst_is_no_outage(world: World) -> None:
    """Many failures within a moment are no outage yet."""
    pace = world.pace()
    note(pace, ACCEPTED)
    world.passes(OUTAGE_AFTER - 0.1)
    note(pace, FAILED, 1000)

    assert pace.paused is None


def test_burst_that_lasts_is_an_outage(world: World) -> None:
    """When the failures last, the first one after the time is over shows the outage."""
    pace = world.pace()
    note(pace, ACCEPTED)
    note(pace, FAILED, 50)
    world.passes(OUTAGE_AFTER)
    note(pace, FAILED)

    assert pace.paused == "outage"


BETWEEN = {
    "acceptance": ACCEPTED,
    "refusal": status(400),
    "conflict": status(409),
    "429": status(429, wait=0),
}


@pytest.mark.parametrize("answer", BETWEEN.values(), ids=BETWEEN)
def test_failures_must_be_in_a_row(world: World, answer: Answer) -> None:
    """An answer that is no failure of the service starts the count anew."""
    pace = world.pace()
    note(pace, FAILED, 9)
    note(pace, answer)
    world.passes(OUTAGE_AFTER)
    note(pace, FAILED, 9)

    assert pace.paused is None


@pytest.mark.parametrize("code", [400, 408, 409, 422, 429])
def test_other_answers_are_no_outage(world: World, code: int) -> None:
    """However many messages are refused, the service is there."""
    pace = world.pace()
    world.passes(OUTAGE_AFTER)
    note(pace, status(code, wait=0), 100)

    assert pace.paused is None


def test_acceptance_ends_an_outage(world: World) -> None:
    """The first acceptance ends the outage."""
    pace = down(world)
    note(pace, ACCEPTED)

    assert pace.paused is None


def test_outage_is_counted_anew(world: World) -> None:
    """After an outage it takes ten failures and ten seconds again."""
    pace = down(world)
    note(pace, ACCEPTED)
    note(pace, FAILED, 100)

    assert pace.paused is None


def test_acceptance_does_not_end_another_pause(world: World) -> None:
    """A request in flight that is accepted late says nothing about a key refused since."""
    pace = world.pace()
    note(pace, status(401))
    note(pace, ACCEPTED)

    assert pace.paused == "credentials_rejected"


# --- Pauses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(401), "credentials_rejected"),
        (status(402), "insufficient_funds"),
        (status(426), "misconfigured"),
        (status(302), "misconfigured"),
    ],
    ids=["401", "402", "426", "302"],
)
def test_fault_of_the_setup_pauses(world: World, answer: Answer, reason: str) -> None:
    """The first answer that tells of a fault of the set-up pauses the worker."""
    pace = world.pace()
    note(pace, answer)

    assert pace.paused == reason


@pytest.mark.parametrize(
    "answer",
    [status(401), status(402), status(402)._replace(status=200, code="7", by_code=True)],
    ids=["401", "402", "by code"],
)
def test_fault_of_the_setup_may_be_one_messages(world: World, answer: Answer) -> None:
    """A message that gets such an answer again, after another one was taken, holds up no other.

    It goes up the ladder alone, uses up its attempts, and so does another one to its number.
    """
    pace = world.pace()
    assert rule(pace, answer, "own", "bad") is None
    rule(pace, ACCEPTED, "other")
    pace.resume()
    outcomes = [rule(pace, answer, key, "bad", attempts=2) for key in ("own", "next", "own")]
    assert [reason(outcome) for outcome in outcomes] == ["singled_out"] * 3
    assert [delay(outcome) for outcome in outcomes] == [120.0] * 3
    assert not pace.is_holding
    last = rule(pace, answer, "own", "bad", attempts=5)
    assert reason(last) == "exhausted"
    # For a message to another number it is new.
    rule(pace, answer, "new")
    assert pace.is_holding


@pytest.mark.parametrize("code", [407, 426, 511, 302])
def test_some_faults_of_the_setup_are_never_one_messages(world: World, code: int) -> None:
    """What a proxy answers, or another address, speaks of no message, whatever was taken."""
    pace = world.pace()
    rule(pace, status(code), "own")
    rule(pace, ACCEPTED, "other")
    pace.resume()

    assert rule(pace, status(code), "own") is None
    assert pace.paused is not None


def test_pause_is_shown(world: World) -> None:
    """A pause is 1 in the metrics, and counted."""
    world.pace().pause("misconfigured")

    assert (
        world.value("paused", reason="misconfigured"),
        world.value("pauses_total", reason="misconfigured"),
    ) == (1, 1)


def test_same_reason_again_is_the_same_pause(world: World) -> None:
    """A pause that is told again is counted once."""
    pace = world.pace()
    note(pace, status(401), 5)

    assert world.value("pauses_total", reason="credentials_rejected") == 1


def test_second_reason_replaces_the_first(world: World) -> None:
    """There is one reason at a time, the last one."""
    pace = world.pace()
    pace.pause("misconfigured")
    pace.pause("credentials_rejected")

    assert (
        pace.paused,
        world.value("paused", reason="misconfigured"),
        world.value("paused", reason="credentials_rejected"),
    ) == ("credentials_rejected", 0, 1)


def test_resumed(world: World, ears: Ears) -> None:
    """After a pause nothing is shown of it, and the log says that it is over."""
    pace = world.pace()
    pace.pause("misconfigured")
    pace.resume()

    assert (pace.paused, world.value("paused", reason="misconfigured")) == (None, 0)
    assert ears.heard("resumed") == [{"reason": "misconfigured"}]


def test_failures_before_a_pause_count_for_no_later_one(world: World) -> None:
    """After a pause both an outage and a doubt about the set-up have to be seen from the start."""
    pace = world.pace()
    note(pace, FORBIDDEN, 2)
    note(pace, FAILED, 9)
    pace.pause("operator")
    pace.resume()
    world.passes(OUTAGE_AFTER)
    note(pace, FORBIDDEN, 2)
    assert pace.paused is None

    note(pace, FAILED, 9)
    assert pace.paused is None


def test_resume_without_a_pause(world: World) -> None:
    """To resume what was not paused changes nothing."""
    pace = world.pace()
    pace.resume()

    assert not pace.changed.is_set()


def block(pace: Pace) -> None:
    """Have the broker refuse a dead letter."""
    pace.block("sms.outbound.dead", "nacked")


CHANGES: dict[str, Callable[[Pace], object]] = {
    "pause": lambda pace: pace.pause("operator"),
    "block": block,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_wakes_the_consumer(world: World, change: Callable[[Pace], object]) -> None:
    """What changes how much is taken wakes the consumer."""
    pace = world.pace()
    change(pace)

    assert pace.changed.is_set()


def pause_with_probe(pace: Pace) -> None:
    """Pause, and have a probe."""
    pace.pause("operator")
    rule(pace, NOT_FOUND, "d")


ENDS: dict[str, tuple[Callable[[Pace], object], Callable[[Pace], object]]] = {
    "resume": (lambda pace: pace.pause("operator"), Pace.resume),
    "unblock": (block, Pace.unblock),
    "probe taken": (lambda pace: pace.pause("operator"), lambda pace: rule(pace, NOT_FOUND, "d")),
    "probe given up": (pause_with_probe, lambda pace: pace.give_up_probe("d")),
    "probe failed": (pause_with_probe, lambda pace: rule(pace, NOT_FOUND, "d")),
}


@pytest.mark.parametrize(("before", "change"), ENDS.values(), ids=ENDS)
def test_end_wakes_the_consumer(
    world: World, before: Callable[[Pace], object], change: Callable[[Pace], object]
) -> None:
    """What lets more be taken, or a new probe, wakes the consumer."""
    pace = world.pace()
    before(pace)
    pace.changed.clear()
    change(pace)

    assert pace.changed.is_set()


def reason(outcome: Outcome | None) -> str | None:
    """Return why a message is put off or dead, `held` when it is tried again from here."""
    return "held" if outcome is None else getattr(outcome, "reason", None)


def delay(outcome: Outcome | None) -> float | None:
    """Return how long a message waits on the ladder, None when it does not."""
    return outcome.delay_seconds if isinstance(outcome, Retried) else None


# --- The probe -----------------------------------------------------------------------------------


def paused(world: World, reason: PauseReason = "misconfigured") -> Pace:
    """Make a pace that is paused."""
    pace = world.pace()
    pace.pause(reason)
    return pace


def claims(world: World, pace: Pace, key: str, to: str = "", *, attempts: int = 0) -> bool:
    """Say whether a message that asks is the probe then; it may go, or waits."""

    async def ask() -> bool:
        asking = asyncio.ensure_future(admit(pace, key, to, attempts=attempts))
        await asyncio.sleep(0)
        asking.cancel()
        return is_probe(pace, key)

    found: bool = world.run(ask())
    return found


def fails(pace: Pace, key: str) -> None:
    """Tell that the probe has found things as they were."""
    rule(pace, FAILED if pace.paused == "outage" else status(302), key)


def waits_of(world: World, pace: Pace, number: int, key: str | None = None) -> list[float]:
    """Fail with probes, each a message of its own or all the same; return how long each waited."""
    waits = []
    for _ in range(number):
        probe = key or fresh()
        waits.append(world.seconds(admit(pace, probe)))
        assert is_probe(pace, probe)
        fails(pace, probe)
        if key is None:
            pace.give_up_probe(probe)
    return waits


def fits(waits: list[float], steps: list[float]) -> bool:
    """Say whether waits are these steps, each shortened by a little chance or not."""
    pairs = zip(waits, steps, strict=True)
    return all(step * 0.8 - 0.001 <= wait <= step + 0.001 for wait, step in pairs)


def test_no_probe_without_a_pause(world: World) -> None:
    """While nothing is wrong there is no probe, and everything may go."""
    pace = world.pace()

    assert (pace.is_wary, pace.lets_through("m"), pace.probes_wanted) == (False, True, 0)
    assert world.run(admit(pace)) is None


def test_first_message_is_the_probe(world: World) -> None:
    """In a pause the first message that asks is the probe, and stays it."""
    pace = paused(world)

    assert [claims(world, pace, key) for key in ("first", "second", "first")] == [True, False, True]


def test_probe_is_needed(world: World) -> None:
    """A pause needs a probe until it has one."""
    pace = paused(world)
    before = pace.probes_wanted
    claims(world, pace, "first")

    assert (before, pace.probes_wanted) == (1, 0)


def test_next_message_becomes_the_probe(world: World) -> None:
    """When the probe is settled the next message becomes it."""
    pace = paused(world)
    claims(world, pace, "first")
    pace.give_up_probe("first")

    assert (pace.probes_wanted, claims(world, pace, "second")) == (1, True)


def test_only_the_probe_can_give_up(world: World) -> None:
    """Another message that ends does not take the probe's place away."""
    pace = paused(world)
    claims(world, pace, "first")
    pace.give_up_probe("second")

    assert is_probe(pace, "first")


def test_probe_ends_with_the_pause(world: World) -> None:
    """After a pause there is no probe, and the next pause chooses anew."""
    pace = paused(world)
    claims(world, pace, "first")
    pace.resume()
    pace.pause("misconfigured")

    assert (is_probe(pace, "first"), pace.probes_wanted) == (False, 1)


def test_probe_is_another_message_than_the_last(world: World) -> None:
    """When a probe has failed, another message takes its place, and it goes away itself."""
    pace = paused(world)
    waits_of(world, pace, 1, "first")
    wanted = pace.probes_wanted
    replaced = world.run(_both(pace, "first", "second"))

    assert (wanted, is_probe(pace, "second")) == (2, True)
    assert replaced is not None


async def _both(pace: Pace, held: str, comes: str) -> float | None:
    """Let a message come while the last probe is held; return what that one is told."""
    holding = asyncio.ensure_future(admit(pace, held))
    await asyncio.sleep(0)
    assert await admit(pace, comes) is None
    return await holding


def test_lone_probe_is_tried_again(world: World) -> None:
    """Where there is no other message, the last probe is the next one."""
    assert fits(waits_of(world, paused(world), 8, "only"), [1, 2, 4, 8, 16, 32, 60, 60])


def test_message_that_began_a_pause_is_held(world: World) -> None:
    """The message whose answer began the pause is tried again after a second, if no other is."""
    pace = paused(world)

    assert rule(pace, status(302), "first") is None
    assert rule(pace, status(302), "second") is not None
    assert fits(waits_of(world, pace, 3, "first"), [1, 2, 4])


def test_held_message_goes_on_when_the_first_probe_succeeds(world: World) -> None:
    """What was held when a pause began waits for the first probe, not on the ladder."""
    pace = paused(world)
    world.loop.call_later(1.2, pace.resume)

    async def everybody() -> list[float | None]:
        return await asyncio.gather(*(admit(pace, fresh()) for _ in range(50)))

    assert world.seconds(everybody()) == pytest.approx(1.2)


def test_held_message_does_not_wait_long(world: World) -> None:
    """When the first probe fails, what was held goes away; later nothing waits at all."""
    pace = paused(world)
    waits_of(world, pace, 1)
    claims(world, pace, "probe")
    waited = world.seconds(admit(pace, "held"))

    assert waited <= PATIENCE_SECONDS
    assert world.seconds(admit(pace, "late")) == 0
    assert world.run(admit(pace, "late")) is not None


@pytest.mark.parametrize(
    "answer",
    [status(200), status(400), status(409)],
    ids=["accepted", "refused", "conflict"],
)
def test_answer_about_the_probe_ends_the_pause(world: World, answer: Answer) -> None:
    """When the service speaks about messages again, the pause is over."""
    pace = paused(world)
    world.run(admit(pace, "probe"))
    rule(pace, answer, "probe")

    assert pace.paused is None


@pytest.mark.parametrize(
    "answer",
    [status(302), status(401), status(404), status(429), status(500), status(503, wait=1), LOST],
    ids=["302", "401", "404", "429", "500", "503", "lost"],
)
def test_other_answer_of_the_probe_ends_no_pause(world: World, answer: Answer) -> None:
    """What does not speak about the message leaves the pause, and the waits double."""
    pace = paused(world)
    world.run(admit(pace, "probe"))
    rule(pace, answer, "probe")
    pace.give_up_probe("probe")

    assert pace.paused is not None
    assert world.seconds(admit(pace, "next")) >= 1.6


def test_probes_of_an_outage(world: World) -> None:
    """The first probe goes after a second, the next ones after twice as long, up to 15 s."""
    assert fits(waits_of(world, down(world), 8), [1, 2, 4, 8, 15, 15, 15, 15])


def test_probes_of_a_pause(world: World) -> None:
    """In a pause for a fault of the set-up the waits double up to a minute."""
    waits = waits_of(world, paused(world), 9)

    assert fits(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60])


def test_first_probe_is_a_second_after_the_pause(world: World) -> None:
    """A message that comes later in the pause does not wait for a second of its own."""
    pace = paused(world)
    world.passes(5)

    assert world.seconds(admit(pace)) == 0


def test_probes_are_spread(world: World) -> None:
    """The probes of many workers do not all go at the same moment."""
    waits = {round(waits_of(world, paused(world), 1)[0], 6) for _ in range(RUNS)}

    assert len(waits) > RUNS / 2


def test_each_pause_begins_anew(world: World) -> None:
    """The waits of a new pause begin with a second again."""
    pace = paused(world)
    waits_of(world, pace, 9)
    pace.resume()
    pace.pause("misconfigured")

    assert fits(waits_of(world, pace, 2), [1, 2])


@pytest.mark.parametrize("before", [status(302), status(429, wait=900)], ids=["302", "429"])
def test_outage_after_another_pause_is_probed_as_an_outage(world: World, before: Answer) -> None:
    """A pause that turns into an outage is probed at least every 15 s from then on."""
    pace = world.pace()
    note(pace, before)
    world.passes(1000)
    if pace.paused == "misconfigured":
        waits_of(world, pace, 8)
    pace.pause("outage")

    assert max(waits_of(world, pace, 3)) <= 15


def test_new_key_ends_the_wait(world: World) -> None:
    """A changed key ends the wait for the next probe."""
    pace = paused(world)
    waits_of(world, pace, 8)
    world.loop.call_later(3, pace.renew_key)

    assert waits_of(world, pace, 1) == pytest.approx([3])


def test_new_key_ends_the_wait_of_a_held_probe(world: World) -> None:
    """A changed key ends the wait of the last probe where there is no other message."""
    pace = paused(world)
    waits_of(world, pace, 8, "only")
    world.loop.call_later(3, pace.renew_key)

    assert waits_of(world, pace, 1, "only") == pytest.approx([3])


def test_new_key_ends_one_wait(world: World) -> None:
    """A changed key is tried once; if it does not help the waits go on."""
    pace = paused(world)
    waits_of(world, pace, 8)
    world.loop.call_later(3, pace.renew_key)
    waits_of(world, pace, 1)

    assert waits_of(world, pace, 1)[0] >= 30


def test_new_key_while_the_probe_is_under_way(world: World) -> None:
    """A key that changed in the pause, while the old one was being tried, is tried at once."""
    pace = paused(world)
    waits_of(world, pace, 8)
    world.run(admit(pace, "probe"))
    pace.renew_key()
    fails(pace, "probe")

    assert waits_of(world, pace, 1, "probe") == [0]


def test_old_new_key_does_not_hurry_a_later_pause(world: World) -> None:
    """A key that changed long before a pause does not make its first probe go at once."""
    pace = world.pace()
    pace.renew_key()
    world.passes(3600)
    pace.pause("misconfigured")

    assert waits_of(world, pace, 1)[0] >= 0.8


# --- Outages and the attempts of messages ---------------------------------------------------------

ONE_TRY = Policy(
    max_attempts=1, max_uncertain_attempts=1, retry_delays_seconds=POLICY.retry_delays_seconds
)


def test_what_has_failed_waits_while_it_looks_like_an_outage(world: World) -> None:
    """After ten failures only messages that have not failed yet find out whether it is one."""
    pace = world.pace()
    note(pace, ACCEPTED)
    note(pace, FAILED, 10)

    assert pace.paused is None
    assert world.run(admit(pace, "new")) is None
    assert world.run(admit(pace, "failed", attempts=1)) == 0
    note(pace, ACCEPTED)
    assert world.run(admit(pace, "failed", attempts=1)) is None


def test_outage_is_seen_without_another_failure(world: World) -> None:
    """When nothing was accepted for ten seconds after ten failures, nothing more need fail."""
    pace = world.pace()
    note(pace, ACCEPTED)
    note(pace, FAILED, 10)
    world.passes(OUTAGE_AFTER)
    claims(world, pace, "m")

    assert pace.paused == "outage"


def test_last_try_is_kept_while_others_can_probe(world: World) -> None:
    """A message whose next failure is its end leaves its place to one that has attempts left."""
    pace = down(world, ONE_TRY)
    claims(world, pace, "last", attempts=1)
    wanted = pace.probes_wanted

    assert (wanted, claims(world, pace, "first")) == (2, True)
    assert not claims(world, pace, "another last", attempts=1)


def test_last_try_is_not_held_for_long(world: World) -> None:
    """A message that would wait for minutes as the probe is none, and another may be."""
    pace = down(world)
    waits_of(world, pace, 8)
    away = world.run(admit(pace, "last", attempts=5))

    assert away is not None
    assert away > MAX_HOLD_SECONDS
    assert (is_probe(pace, "last"), pace.probes_wanted) == (False, 1)


def test_an_hour_of_failures_costs_a_handful(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all that is left has one attempt left, an hour's probes are few.

    The random part of their distance is as short as it can be.
    """
    monkeypatch.setattr("random.uniform", lambda least, _: least)
    pace, dead = down(world), 0
    end = world.loop.time() + 3600
    while world.loop.time() < end:
        key = fresh()
        away = world.run(admit(pace, key, attempts=5))
        if away is None:
            fails(pace, key)
            dead += 1
        else:
            world.passes(away)
        pace.give_up_probe(key)

    assert dead <= 22


def test_a_suspected_outage_holds_a_message_once(world: World) -> None:
    """However long `worker.outage_after` is, a message waits one more step, and no second one."""
    pace = world.pace()
    note(pace, ACCEPTED)
    note(pace, FAILED, 10)

    assert [world.run(admit(pace, "m", attempts=1)) for _ in range(3)] == [0, None, None]
    waited = pace.admit(make_delivery("n", attempts=1, put_off_for="paused"), "n", "A")
    assert world.run(waited) is None
    # In another one it may wait again.
    note(pace, ACCEPTED)
    note(pace, FAILED, 10)
    assert world.run(admit(pace, "m", attempts=1)) == 0


def test_suspected_outage_is_shown(world: World, ears: Ears) -> None:
    """It is seen in the metrics and told once, until it is refuted or becomes a pause."""
    pace = world.pace()
    note(pace, ACCEPTED)
    note(pace, FAILED, 9)
    assert not pace.is_outage_suspected
    note(pace, FAILED, 5)
    assert (pace.is_outage_suspected, world.value("outage_suspected")) == (True, 1)
    assert ears.heard("outage_suspected") == [{"failures": OUTAGE_REQUESTS}]

    world.passes(OUTAGE_AFTER)
    note(pace, FAILED)
    assert (pace.paused, world.value("outage_suspected")) == ("outage", 0)


# --- Ambiguous answers ----------------------------------------------------------------------------


def test_three_doubts_in_a_row_pause(world: World) -> None:
    """Three ambiguous answers with no acceptance between them pause the worker."""
    pace = world.pace()
    reasons = []
    for _ in range(3):
        note(pace, FORBIDDEN)
        reasons.append(pace.paused)

    assert reasons == [None, None, "credentials_rejected"]


def test_log_has_the_status_of_the_last_doubt(world: World, ears: Ears) -> None:
    """The line of the pause says what the API answered."""
    note(world.pace(), FORBIDDEN, 3)

    assert ears.heard("paused") == [{"reason": "credentials_rejected", "status": 403}]


def test_three_doubts_about_one_message_pause(world: World) -> None:
    """It need not be three messages: one that is alone cannot be told from the set-up."""
    pace = world.pace()
    for _ in range(3):
        rule(pace, NOT_FOUND, "only")

    assert pace.paused == "misconfigured"


@pytest.mark.parametrize("between", [status(400), status(409), FAILED], ids=["400", "409", "500"])
def test_only_an_acceptance_ends_a_row_of_doubts(world: World, between: Answer) -> None:
    """Other answers than acceptances prove nothing about key and path."""
    pace = world.pace()
    for _ in range(3):
        note(pace, NOT_FOUND)
        note(pace, between)

    assert pace.paused == "misconfigured"


def test_acceptance_ends_a_row_of_doubts(world: World) -> None:
    """As long as messages are accepted between them, ambiguous answers pause nothing."""
    pace = world.pace()
    for _ in range(10):
        note(pace, NOT_FOUND, 2)
        note(pace, ACCEPTED)

    assert pace.paused is None


def test_refusals_that_are_proven_are_no_doubts(world: World) -> None:
    """However many messages are refused on evidence, nothing pauses."""
    pace = world.pace()
    for number in range(5):
        rule(pace, NOT_FOUND, f"bad{number}")
        note(pace, ACCEPTED)
    outcomes = [rule(pace, NOT_FOUND, f"bad{number}") for number in range(5)]

    assert [isinstance(outcome, Dead) for outcome in outcomes] == [True] * 5
    assert pace.paused is None


def test_doubts_are_counted_anew(world: World) -> None:
    """After a pause, and with a new key, it takes three doubts again."""
    pace = world.pace()
    note(pace, FORBIDDEN, 3)
    pace.resume()
    note(pace, FORBIDDEN, 2)
    pace.renew_key()
    note(pace, FORBIDDEN, 2)

    assert pace.paused is None


@pytest.mark.parametrize("ends", ["new key", "refused"])
def test_doubts_about_a_message_end(world: World, ends: str) -> None:
    """With a new key, or another answer about it, a message starts anew."""
    pace = world.pace()
    rule(pace, FORBIDDEN, "m")
    if ends == "new key":
        pace.renew_key()
    else:
        rule(pace, status(400), "m")
    note(pace, ACCEPTED)

    assert reason(rule(pace, FORBIDDEN, "m")) == "ambiguous"


def test_refusal_that_is_proven_says_so(world: World) -> None:
    """The dead letter tells on what evidence, and the set-up is not suspected any more."""
    pace = world.pace()
    rule(pace, NOT_FOUND, "bad")
    note(pace, ACCEPTED)

    assert rule(pace, NOT_FOUND, "bad") == Dead(
        reason="refused",
        detail="the SMS API answered 404, twice, and took another message between",
        status=404,
        burned=True,
    )


def test_new_key_ends_a_row_of_doubts(world: World) -> None:
    """What was answered to the old key says nothing about the new one."""
    pace = world.pace()
    note(pace, FORBIDDEN, 2)
    pace.renew_key()
    note(pace, FORBIDDEN, 2)
    assert pace.paused is None

    note(pace, FORBIDDEN)
    assert pace.paused == "credentials_rejected"


def test_nothing_is_refused_in_a_pause(world: World) -> None:
    """While the set-up is in doubt evidence of before convicts nobody."""
    pace = world.pace()
    rule(pace, FORBIDDEN, "bad")
    note(pace, ACCEPTED)
    note(pace, FORBIDDEN, 3)

    rule(pace, FORBIDDEN, "probe")
    assert reason(rule(pace, FORBIDDEN, "bad")) == "ambiguous"


def test_key_revoked_under_load(world: World) -> None:
    """When fifty requests in flight are answered 403 at once, all are put off and none is dead."""
    pace = world.pace()
    note(pace, ACCEPTED)
    messages = [make_delivery(fresh()) for _ in range(50)]
    late = make_delivery("late")
    began = [pace.begin(message.envelope.key) for message in messages]
    late_began = pace.begin("late")
    for _ in range(2):
        outcomes = [
            ruled(pace, FORBIDDEN, message, began=moment)
            for message, moment in zip(messages, began, strict=True)
        ]
        # The one that is held is the probe.
        assert {reason(outcome) for outcome in outcomes} == {"ambiguous", "held"}
        # It was sent before the key was revoked, by a slow backend.
        ruled(pace, ACCEPTED, late, began=late_began)
        began = [pace.begin(message.envelope.key) for message in messages]

    assert pace.paused == "credentials_rejected"


def test_steps_grow_until_a_pause(world: World) -> None:
    """The steps of the ladder grow with each ambiguous answer; in a pause they do not."""
    pace = world.pace()
    outcomes = [rule(pace, NOT_FOUND, "bad") for _ in range(3)]
    assert [delay(outcome) for outcome in outcomes] == [5, 30, None]

    assert pace.paused == "misconfigured"
    assert [delay(rule(pace, NOT_FOUND, "worse")) for _ in range(3)] == [5, 5, 5]


def test_suspect_leaves_its_place_to_others(world: World) -> None:
    """However often a bad message has been probed with, another one goes at once."""
    pace = world.pace()
    for _ in range(3):
        rule(pace, NOT_FOUND, "bad")
    for _ in range(8):
        world.run(admit(pace, "bad"))
        rule(pace, NOT_FOUND, "bad")

    assert pace.probes_wanted == 2
    assert world.seconds(admit(pace, "good")) == 0
    assert is_probe(pace, "good")


def test_many_messages_to_a_bad_number_are_no_probes(world: World) -> None:
    """Messages to a number that is answered 404 go away at once, and leave the way to others."""
    pace = world.pace()
    for key in ("one", "two", "three"):
        rule(pace, NOT_FOUND, key, "bad")
    claims(world, pace, "four", to="bad")
    waited = [world.seconds(admit(pace, fresh(), "bad")) for _ in range(20)]

    assert (waited, pace.probes_wanted) == ([0] * 20, 2)
    assert claims(world, pace, "good")


def test_suspect_that_comes_back_does_not_take_the_place_of_others(world: World) -> None:
    """A message that has had an ambiguous answer is a probe only if there is no other."""
    pace = world.pace()
    for key in ("one", "two", "three"):
        rule(pace, NOT_FOUND, key)
        pace.give_up_probe(key)

    assert claims(world, pace, "one")
    assert pace.probes_wanted == 2
    assert not claims(world, pace, "two")
    assert claims(world, pace, "good")
    assert not claims(world, pace, "three")


# --- Limits of one message, and of one sender -----------------------------------------------------

LIMITED = status(429, wait=20)


def test_limit_of_one_number(world: World) -> None:
    """A message that gets a 429 again while others are taken goes up the ladder alone."""
    pace = world.pace()
    assert rule(pace, LIMITED, "bad") is None
    world.passes(30)
    note(pace, ACCEPTED, 3)
    again = rule(pace, LIMITED, "bad")

    assert isinstance(again, Retried)
    assert (again.reason, again.burned, again.delay_seconds) == ("singled_out", True, 30.0)
    # Nobody waits for it, nor for another message to its number.
    assert reason(rule(pace, LIMITED, "next", "bad")) == "singled_out"
    assert pace.is_open
    assert reason(rule(pace, LIMITED, "bad", attempts=5)) == "exhausted"


def test_limit_for_all_is_no_messages_own(world: World) -> None:
    """However often a message gets a 429, it is not its own while others get many as well."""
    pace = world.pace()
    for _ in range(20):
        assert reason(rule(pace, status(429), "unlucky")) in {"held", "rate_limited"}
        note(pace, status(429), 2)
        world.passes(120)
        note(pace, ACCEPTED, 10)


def test_limit_for_all_after_a_message_was_singled_out(world: World) -> None:
    """A message that was singled out burns no attempt when others get many such answers by now."""
    pace = world.pace()
    rule(pace, LIMITED, "bad")
    note(pace, ACCEPTED, 20)
    assert reason(rule(pace, LIMITED, "bad")) == "singled_out"
    note(pace, status(429), 5)
    outcome = rule(pace, LIMITED, "bad", put_off_for="singled_out", attempts=1)

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.burned) == ("rate_limited", False)
    assert not pace.is_open


def test_limited_message_makes_room_for_others(world: World) -> None:
    """A message that gets a 429 again, with nothing else at hand, is held no more."""
    pace = world.pace()
    assert rule(pace, LIMITED, "bad") is None
    world.passes(30)
    other = pace.line_up("other")
    assert rule(pace, LIMITED, "bad") is None
    pace.leave_line(is_other=other)
    world.passes(30)
    outcome = rule(pace, LIMITED, "bad")

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.burned) == ("rate_limited", False)


def test_few_limited_numbers_are_told_from_a_limit_for_all(world: World) -> None:
    """Three numbers with limits of their own do not hide each other among many that are taken."""
    pace = world.pace()
    bad = ("one", "two", "three")
    for key in bad:
        rule(pace, LIMITED, key)
    world.passes(30)
    note(pace, ACCEPTED, 30)

    assert [reason(rule(pace, LIMITED, key)) for key in bad] == ["singled_out"] * 3


def test_limit_of_one_sender(world: World) -> None:
    """When only other senders' messages are taken, its sender alone waits, unburned."""
    pace = world.pace()
    rule(pace, LIMITED, "first", sender="slow")
    world.passes(30)
    for _ in range(3):
        rule(pace, ACCEPTED, fresh(), sender="fast")
    outcome = rule(pace, LIMITED, "second", sender="slow")

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.burned) == ("rate_limited", False)
    assert 20 <= pace.sender_closed_seconds("slow") <= 22
    assert pace.sender_closed_seconds("fast") == 0
    assert pace.is_open
    # The first message of the sender that is taken ends its wait.
    rule(pace, ACCEPTED, "third", sender="slow")
    assert not pace.holds_senders


def test_a_sender_that_is_taken_since_is_not_the_limited_one(world: World) -> None:
    """A limit for all, long after one number of a sender had to wait, is not that sender's."""
    pace = world.pace()
    rule(pace, LIMITED, "bad")
    world.passes(30)
    for _ in range(100):
        rule(pace, ACCEPTED, fresh())
        rule(pace, ACCEPTED, fresh(), sender="B")
    rule(pace, LIMITED, "later")

    assert not pace.is_open
    assert not pace.holds_senders


def test_a_number_that_is_answered_otherwise_is_not_the_limited_one(world: World) -> None:
    """A limit for all, long after a number that had to wait was refused, is not the number's."""
    pace = world.pace()
    rule(pace, LIMITED, "first", "bad")
    world.passes(30)
    note(pace, ACCEPTED, 100)
    rule(pace, status(422), "first", "bad")
    assert not pace.is_wary

    assert rule(pace, LIMITED, "second", "bad") is None
    assert not pace.is_open


def test_code_that_speaks_of_a_sender(world: World) -> None:
    """A code that is known to be about the sender holds that sender at once, longer each time."""
    answer = status(429)._replace(status=400, code="21611", by_code=True, about="sender")
    pace, waits = world.pace(), []
    for _ in range(8):
        assert reason(rule(pace, answer, fresh(), sender="slow")) == "rate_limited"
        waits.append(pace.sender_closed_seconds("slow"))
        world.passes(70)

    assert all(
        step <= wait <= step * 1.1 + 0.001
        for wait, step in zip(waits, [1, 2, 4, 8, 16, 32, 60, 60], strict=True)
    )
    assert pace.is_open
    assert pace.paused is None


def test_long_wait_of_one_number_is_checked(world: World) -> None:
    """A long wait that one number is asked for is checked with another one after a second."""
    pace = world.pace()
    assert delay(rule(pace, status(429, wait=900), "bad")) == 120.0
    assert pace.paused == "rate_limited"
    pace.reopen()
    assert pace.paused == "rate_limited"

    assert 0.8 <= world.seconds(admit(pace, "good")) <= 1
    rule(pace, ACCEPTED, "good")
    assert not pace.is_holding
    assert reason(rule(pace, status(429, wait=900), "bad")) == "singled_out"


def test_long_wait_of_one_number_is_kept_when_another_is_asked_for_it(world: World) -> None:
    """When the message that checks it gets a 429 too, the wait is for all."""
    pace = world.pace()
    rule(pace, status(429, wait=600), "bad")
    # It is not asked for the same number before its time.
    assert world.run(admit(pace, "another", to="bad")) == pytest.approx(600)
    world.run(admit(pace, "other"))
    rule(pace, status(429, wait=600), "other")
    pace.give_up_probe("other")

    assert pace.probes_wanted == 0
    assert world.run(admit(pace, "next")) == pytest.approx(630, abs=30)


def test_long_wait_of_one_number_ends_without_another_message(world: World) -> None:
    """Where nothing else is sent, the pause is over when the time has passed."""
    pace = world.pace()
    rule(pace, status(429, wait=600), "bad")
    pace.give_up_probe("bad")
    world.passes(599)
    pace.reopen()
    assert pace.paused == "rate_limited"

    world.passes(2)
    pace.reopen()
    assert pace.paused is None


def test_limited_message_goes_behind_others(world: World) -> None:
    """After the wait others go first, so that their answers show whether it is for all."""
    pace, left = world.pace(), []
    rule(pace, status(429, wait=5), "bad")

    async def go(key: str) -> None:
        await pace.admit(make_delivery(key, clock=world.loop.time), key, "A")
        await pace.until_open(key)
        number = pace.begin(key)
        await asyncio.sleep(0.3)
        left.append(key)
        pace.end(number)
        answer = status(429, wait=5) if key == "bad" else ACCEPTED
        delivery = make_delivery(key)
        answer = pace.attribute(answer, delivery, key, "A", request_number=number)
        pace.rule(answer, delivery, key, "A")

    async def both() -> None:
        await asyncio.gather(go("bad"), go("good"))

    assert world.seconds(both()) < 5.5 + 2 * 0.3 + 0.1
    assert left == ["good", "bad"]
    assert pace.is_open


def test_limited_message_that_is_alone_does_not_wait_for_others(world: World) -> None:
    """Where nothing else is sent, a message goes as soon as the wait is over."""
    pace = world.pace()
    rule(pace, status(429, wait=5), "only")

    assert world.seconds(admit(pace, "only")) <= 5.5 + 0.1


def test_limited_message_does_not_wait_for_others_for_long(world: World) -> None:
    """Others that are answered late hold it up for some seconds at most."""
    pace = world.pace()
    rule(pace, status(429, wait=5), "bad")
    pace.begin("slow")

    assert world.seconds(admit(pace, "bad")) <= 5.5 + BEHIND_SECONDS + 0.1


def test_limited_message_does_not_wait_through_one_wait_after_the_other(world: World) -> None:
    """Under a limit for all that is never over for long, a message is not held after all others."""
    pace = world.pace()
    rule(pace, status(429, wait=1), "bad")

    async def others() -> None:
        for _ in range(200):
            await asyncio.sleep(1)
            note(pace, status(429, wait=1))
            pace.begin(fresh())

    async def both() -> None:
        busy = asyncio.create_task(others())
        await pace.admit(make_delivery("bad", clock=world.loop.time), "bad", "A")
        busy.cancel()

    assert world.seconds(both()) <= MAX_HOLD_SECONDS + 2


def test_other_worker_has_singled_it_out(world: World) -> None:
    """A copy says that another worker has found out: nobody waits here for its first 429."""
    pace = world.pace()
    outcome = rule(pace, LIMITED, "bad", put_off_for="singled_out", attempts=1)

    assert reason(outcome) == "singled_out"
    assert pace.is_open


def test_503_of_one_message_is_no_outage(world: World) -> None:
    """A 503 with a wait that one message gets again, while others are taken, is its own."""
    pace = world.pace()
    rule(pace, status(503, wait=5), "bad")
    note(pace, ACCEPTED)

    assert reason(rule(pace, status(503, wait=5), "bad")) == "singled_out"


def test_nobody_is_singled_out_in_a_pause(world: World) -> None:
    """While the set-up is in doubt what was taken before proves nothing."""
    pace = world.pace()
    rule(pace, LIMITED, "bad")
    note(pace, ACCEPTED)
    pace.pause("misconfigured")

    assert reason(rule(pace, LIMITED, "bad")) == "rate_limited"


# --- A refusal that nobody knows ------------------------------------------------------------------

UNKNOWN = status(400)._replace(code="4711")


def test_same_unknown_refusal_in_a_row(world: World) -> None:
    """The tenth message that is refused with the same unknown code is put off, and all pauses."""
    pace = world.pace()
    outcomes = [rule(pace, UNKNOWN, fresh()) for _ in range(12)]

    assert [reason(outcome) for outcome in outcomes] == [
        *["refused"] * 9,
        "held",
        *["ambiguous"] * 2,
    ]
    assert pace.paused == "misconfigured"


@pytest.mark.parametrize(
    "between",
    [ACCEPTED, status(400)._replace(code="4712"), status(400)._replace(code="1", by_code=True)],
    ids=["accepted", "another code", "a known code"],
)
def test_refusals_must_be_in_a_row(world: World, between: Answer) -> None:
    """What shows that the service looks at each message starts the count anew."""
    pace = world.pace()
    note(pace, UNKNOWN, 9)
    note(pace, between)
    note(pace, UNKNOWN, 8)

    assert pace.paused is None


@pytest.mark.parametrize(
    "answer",
    [status(400), status(422), UNKNOWN._replace(by_code=True)],
    ids=["400", "422", "a known code"],
)
def test_known_refusals_are_the_messages_own(world: World, answer: Answer) -> None:
    """However many messages get one, they are refused."""
    pace = world.pace()

    assert {reason(rule(pace, answer, fresh())) for _ in range(30)} == {"refused"}


def test_unknown_status_without_a_code_is_an_unknown_refusal(world: World) -> None:
    """Where no code is given the status stands for it."""
    pace = world.pace()
    note(pace, status(418), 10)

    assert pace.paused == "misconfigured"


def test_one_message_again_and_again_is_no_row(world: World) -> None:
    """It takes ten messages."""
    pace = world.pace()
    for _ in range(30):
        rule(pace, UNKNOWN, "same")

    assert pace.paused is None


def test_probe_that_is_refused_so_ends_no_pause(world: World) -> None:
    """Neither here, nor where another worker has begun the pause with the same status."""
    here, elsewhere = world.pace(), world.pace()
    note(here, UNKNOWN, 10)
    elsewhere.join("misconfigured", since=world.loop.time(), status=400)
    for pace in (here, elsewhere):
        world.run(admit(pace, "probe"))
        assert reason(rule(pace, UNKNOWN, "probe")) == "held"
        assert pace.paused == "misconfigured"


# --- A broker that stores nothing ----------------------------------------------------------------


def test_blocked_worker_sends_nothing(world: World) -> None:
    """While the broker stores nothing no delivery has its turn."""
    pace = world.pace()
    block(pace)
    world.loop.call_later(7, pace.unblock)

    assert world.turns(pace, 3) == pytest.approx([7, 7, 7])


def test_blocked_is_told(world: World, ears: Ears) -> None:
    """That the broker stores nothing is known, shown, counted and logged, once."""
    pace = world.pace()
    block(pace)
    block(pace)

    assert (
        pace.broker_blocked,
        world.value("paused", reason="broker_blocked"),
        world.value("pauses_total", reason="broker_blocked"),
    ) == (True, 1, 1)
    assert ears.heard("paused") == [
        {"reason": "broker_blocked", "queue": "sms.outbound.dead", "fault": "nacked"}
    ]


def test_what_is_not_stored_by_now_is_told(world: World) -> None:
    """While it lasts the facts name the queue and the fault that came last."""
    pace = world.pace()
    pace.block("sms.outbound.retry.5s", "timeout")
    block(pace)
    (facts,) = pace.pauses.facts()

    assert (facts["queue"], facts["fault"]) == ("sms.outbound.dead", "nacked")


def test_unblocked(world: World, ears: Ears) -> None:
    """When the broker stores again nothing is left of it, and the log says so."""
    pace = world.pace()
    block(pace)
    pace.unblock()

    assert (pace.broker_blocked, world.value("paused", reason="broker_blocked")) == (False, 0)
    assert ears.heard("resumed") == [{"reason": "broker_blocked"}]


def test_unblock_without_a_block(world: World) -> None:
    """To unblock what was not blocked changes nothing."""
    pace = world.pace()
    pace.unblock()

    assert not pace.changed.is_set()


def test_pause_outlives_a_block(world: World) -> None:
    """A pause for another reason goes on when the broker stores again."""
    pace = paused(world)
    block(pace)
    pace.unblock()

    assert (pace.paused, world.value("paused", reason="misconfigured")) == ("misconfigured", 1)


# --- After an outage -----------------------------------------------------------------------------


def back(world: World) -> Pace:
    """Make a pace that has just come back from an outage."""
    pace = down(world)
    note(pace, ACCEPTED)
    return pace


def test_slow_start(world: World) -> None:
    """After an outage the service is not met by everything at once."""
    pace = back(world)

    assert sum(when < 1 for when in world.turns(pace, 100)) <= 25


def test_slow_start_grows_for_those_who_wait(world: World) -> None:
    """Who waits already after an outage goes at the rate that doubles, not at that of its begin."""
    went = world.turns(back(world), 150)

    assert [sum(when < second for when in went) > 10 * 2**second for second in (2, 3)] == [True] * 2
    assert went[-1] < 5


def test_slow_start_ends(world: World) -> None:
    """A while after an outage everything goes at full speed again."""
    pace = back(world)
    world.turns(pace, 1)
    world.passes(11)
    world.turns(pace, 1)

    assert world.turns(pace, 500) == [0] * 500


@pytest.mark.parametrize("seconds", [0, 5, 60, 3600, 86400 * 30])
def test_quiet_time_after_an_outage(world: World, seconds: float) -> None:
    """However quiet it is after an outage, the next message has its turn."""
    pace = back(world)
    world.passes(seconds)

    assert world.turns(pace, 1)[0] <= 1


def test_no_slow_start_after_other_pauses(world: World) -> None:
    """After a repaired set-up the service is as strong as ever."""
    pace = paused(world)
    pace.resume()

    assert world.turns(pace, 500) == [0] * 500


# --- What an answer means for its delivery --------------------------------------------------------


def test_acceptance_is_sent(world: World) -> None:
    """An accepted message is sent."""
    assert rule(world.pace(), status(202), "m") == Sent(status=202)


def test_short_slow_down_holds_the_message(world: World) -> None:
    """After a 429 with a wait that it can be held for, a message is tried again from here."""
    assert rule(world.pace(), status(429, wait=30), "m") is None


def test_slow_down_does_not_hold_a_message_for_ever(world: World) -> None:
    """A message that has been held for a minute goes to the ladder, unburned."""
    outcomes = []
    for held_seconds in (MAX_HOLD_SECONDS, MAX_HOLD_SECONDS + 1):
        pace, delivery = world.pace(), make_delivery("m", clock=world.loop.time)
        world.passes(held_seconds)
        outcomes.append(ruled(pace, status(429), delivery))

    assert outcomes == [None, Retried("rate_limited", 5.0, "the SMS API answered 429", status=429)]


def test_slow_down_holds_nothing_in_a_pause(world: World) -> None:
    """A 429 with a wait that begins a pause, or in another one, sends its message to the ladder."""
    long = rule(world.pace(), status(429, wait=120), "m")
    short = rule(paused(world), status(429, wait=3), "m")

    assert long == Retried("rate_limited", 120.0, "the SMS API answered 429", status=429)
    assert short == Retried("rate_limited", 5.0, "the SMS API answered 429", status=429)


def test_slow_down_after_doubts_takes_the_first_step(world: World) -> None:
    """Only ambiguous answers make the step grow, whatever else a message was answered."""
    pace = world.pace()
    delivery = make_delivery("m", clock=world.loop.time)
    for _ in range(2):
        ruled(pace, NOT_FOUND, delivery)
    world.passes(MAX_HOLD_SECONDS + 1)

    assert delay(ruled(pace, status(429), delivery)) == 5


@pytest.mark.parametrize("answer", [status(302), NOT_FOUND], ids=["302", "404"])
def test_fault_of_the_setup_holds_the_probe(world: World, answer: Answer) -> None:
    """In a pause one message with such an answer is held as the probe, the others go away."""
    pace = paused(world)

    assert rule(pace, answer, "first") is None
    assert rule(pace, answer, "first") is None
    assert delay(rule(pace, answer, "second")) == 5


def test_probe_is_not_held_for_ever(world: World) -> None:
    """A probe that has been held for more than a minute goes to the ladder, unburned."""
    pace, delivery = paused(world), make_delivery("m", clock=world.loop.time)
    world.passes(MAX_HOLD_SECONDS + 1)

    assert ruled(pace, status(302), delivery) == Retried(
        "paused", 5.0, "the SMS API answered 302", status=302
    )


def test_failure_burns_an_attempt(world: World) -> None:
    """Without a pause a message that the service failed on has one attempt less."""
    outcome = rule(world.pace(), FAILED, "m")

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.burned, outcome.uncertain) == ("uncertain", True, True)


@pytest.mark.parametrize(
    ("answer", "attempts", "uncertain"),
    [(FAILED, 4, True), (LOST, 4, True), (status(503, wait=1), 5, False)],
    ids=["500", "lost", "503 with Retry-After"],
)
def test_failure_in_a_pause_burns_nothing(
    world: World, answer: Answer, attempts: int, *, uncertain: bool
) -> None:
    """In a pause a failure of the service burns no attempt; what may have been sent is counted."""
    outcome = rule(down(world), answer, "m", attempts=attempts)

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.burned, outcome.uncertain) == ("paused", False, uncertain)


def test_last_uncertain_attempt_ends_in_a_pause_too(world: World) -> None:
    """What may have been sent too often is dead, pause or not."""
    outcome = rule(down(world), FAILED, "m", uncertain_attempts=2)

    assert isinstance(outcome, Dead)
    assert outcome.reason == "uncertain"


def test_probe_burns_its_attempt(world: World) -> None:
    """The probe of an outage pays for what it finds out."""
    pace = down(world)
    world.run(admit(pace, "probe"))
    outcome = rule(pace, FAILED, "probe")

    assert isinstance(outcome, Retried)
    assert outcome.burned


def test_answer_about_the_message_counts_in_a_pause(world: World) -> None:
    """A message in flight that is refused when a pause has begun is dead."""
    outcome = rule(paused(world), status(400), "m")

    assert isinstance(outcome, Dead)
    assert outcome.reason == "refused"


@pytest.mark.parametrize(
    ("worker", "message", "ends"),
    [
        ("retry", None, Retried),
        ("park", None, Dead),
        ("retry", "park", Dead),
        ("park", "retry", Retried),
    ],
)
def test_parking(world: World, worker: Any, message: Any, ends: type[Outcome]) -> None:
    """What may have been sent is dead at once where the message, or else the worker, says so."""
    pace = world.pace(policy=dataclasses.replace(POLICY, on_uncertain=worker))

    assert isinstance(rule(pace, LOST, "m", on_uncertain=message), ends)


def test_acceptance_ends_what_is_known_of_a_message(world: World) -> None:
    """A message that was accepted between is no suspect: its next doubtful answer is its first."""
    pace = world.pace()
    rule(pace, NOT_FOUND, "m")
    rule(pace, ACCEPTED, "m")

    assert rule(pace, NOT_FOUND, "m") == Retried(
        "ambiguous", 5.0, "the SMS API answered 404", status=404
    )


def test_first_probe_waits_though_no_key_is_new(world: World) -> None:
    """The first pause of a worker that has had one key all along begins with a wait."""
    pace = paused(world)

    assert claims(world, pace, "m")
    assert world.seconds(admit(pace, "m")) >= 0.8


def test_wait_to_probe_is_measured(world: World) -> None:
    """What a message waits for in a pause is the probe; without a pause it waits for nothing."""
    pace, delivery = world.pace(), make_delivery("m", clock=world.loop.time)
    world.run(pace.admit(delivery, "m", "A"))
    assert delivery.waited_seconds == {}

    pace.pause("misconfigured")
    waited = world.seconds(pace.admit(delivery, "m", "A"))
    assert delivery.waited_seconds == {"probe": pytest.approx(waited)}


# --- An operator's pause --------------------------------------------------------------------------


def test_held_is_told(world: World, ears: Ears) -> None:
    """That an operator has paused the worker is known, shown, counted and logged, once."""
    pace = world.pace()
    pace.hold()
    pace.hold()

    assert (
        pace.paused,
        pace.is_holding,
        world.value("paused", reason="operator"),
        world.value("pauses_total", reason="operator"),
    ) == ("operator", True, 1, 1)
    assert ears.heard("paused") == [{"reason": "operator"}]


def test_released(world: World, ears: Ears) -> None:
    """When the operator ends it nothing is left of it; without a pause nothing is changed."""
    pace = world.pace()
    pace.release()
    pace.hold()
    pace.release()

    assert (pace.paused, world.value("paused", reason="operator")) == (None, 0)
    assert not pace.is_wary
    assert pace.lets_through("a")
    assert ears.heard("resumed") == [{"reason": "operator"}]


def test_held_worker_takes_no_probe(world: World) -> None:
    """In an operator's pause nothing goes, not even the probe of another pause, which goes on."""

    def seen() -> tuple[PauseReason | None, int]:
        return pace.paused, pace.probes_wanted

    pace = world.pace()
    pace.pause("outage")
    pace.hold()
    assert seen() == ("operator", 0)
    assert not pace.lets_through("a")

    pace.release()
    assert seen() == ("outage", 1)


def test_held_worker_admits_nothing(world: World) -> None:
    """What is taken and not posted learns at once to come again, in another pause too."""
    pace = world.pace()
    pace.hold()
    before = world.loop.time()
    assert pace.is_wary
    assert world.run(admit(pace)) == 0
    assert not pace.lets_through("m")

    pace.pause("outage")
    assert world.run(admit(pace)) == 0
    assert world.loop.time() == before


def test_an_operators_pause_ends_the_wait_of_a_held_probe(world: World) -> None:
    """What waits to be the probe of another pause goes away at once when an operator pauses."""
    pace = paused(world)
    waits_of(world, pace, 8, "only")
    world.loop.call_later(3, pace.hold)
    before = world.loop.time()

    assert world.run(admit(pace, "only")) == 0
    assert world.loop.time() == pytest.approx(before + 3)


def test_operators_pause_is_no_outage(world: World) -> None:
    """That nothing was accepted in it does not make the first failures after it an outage."""
    pace = world.pace()
    for _ in range(OUTAGE_REQUESTS - 1):
        note(pace, status(500))
    pace.hold()
    world.run(asyncio.sleep(3600))
    pace.release()
    note(pace, status(500))

    assert pace.paused is None
