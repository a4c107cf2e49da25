"""Whether to send at all: Retry-After, outages, pauses, probes.

All run on an event loop whose time leaps to the next timer, so that nobody waits.
"""

from collections.abc import Callable, Iterator

import httpx
import pytest

from bridge.config import RateLimitSettings
from bridge.fates import Answer, PauseReason, judge_failure, judge_status
from bridge.pace import Pace
from bridge.rates import MAX_HOLD_SECONDS
from tests.clock import LeapingWorld
from tests.ears import Ears

OUTAGE_AFTER = 10.0
FIRST_STEP = 5.0
NO_LIMIT = RateLimitSettings()
# Chance is left in: what holds, holds in each of so many runs.
RUNS = 60


class World(LeapingWorld):
    """A pace, the clock that it goes by, and the metrics that it writes."""

    def pace(self, limit: RateLimitSettings = NO_LIMIT) -> Pace:
        """Make a pace on this world's clock."""
        return Pace(
            limit,
            outage_after_seconds=OUTAGE_AFTER,
            first_step_seconds=FIRST_STEP,
            metrics=self.metrics,
            clock=self.loop.time,
        )

    def turns(self, pace: Pace, number: int, sender: str = "A") -> list[float]:
        """Let deliveries wait for their turn together; return when each one went."""

        async def one() -> None:
            async with pace.rates.turn(sender) as turn:
                await pace.until_open()
                turn.is_used = True

        return self.moments(one() for _ in range(number))


@pytest.fixture
def world() -> Iterator[World]:
    """Give a world at some moment."""
    made = World()
    yield made
    made.close()


def status(code: int, *, wait: float | None = None) -> Answer:
    """Make the answer of a status."""
    return judge_status(code, retry_after_seconds=wait, key_has_just_worked=False)


ACCEPTED = status(200)
FAILED = status(500)
LOST = judge_failure(httpx.ReadTimeout("x"))


def note(pace: Pace, answer: Answer, times: int = 1) -> None:
    """Tell of an answer, some times."""
    for _ in range(times):
        pace.note(answer)


def down(world: World, limit: RateLimitSettings = NO_LIMIT) -> Pace:
    """Make a pace that is paused for an outage."""
    pace = world.pace(limit)
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
    world.loop.call_later(3, pace.note, status(429, wait=20))

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
    waits = world.turns(pace, 1) if pace.paused is None else [world.seconds(probe_wait(pace))]

    assert waits[0] <= 66


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
    note(world.pace(), status(410))

    assert ears.heard("paused") == [{"reason": "misconfigured", "status": 410}]


async def probe_wait(pace: Pace) -> None:
    """Wait as the probe does."""
    await pace.wait_before_probe()


def test_probe_of_a_long_wait_is_not_early(world: World) -> None:
    """The probe after a long wait does not go before the service wants it."""
    waits = []
    for _ in range(RUNS):
        pace = world.pace()
        note(pace, status(429, wait=600))
        waits.append(world.seconds(probe_wait(pace)))

    assert min(waits) >= 600


def test_429_of_the_probe_is_honoured(world: World) -> None:
    """When the probe is answered with another long wait, the next probe waits for it."""
    waits = []
    for _ in range(RUNS):
        pace = world.pace()
        note(pace, status(429, wait=600))
        world.run(probe_wait(pace))
        note(pace, status(429, wait=300))
        waits.append(world.seconds(probe_wait(pace)))

    assert min(waits) >= 300


# --- Outages -------------------------------------------------------------------------------------


OUTAGES = {
    "500": FAILED,
    "502": status(502),
    "503": status(503),
    "503 with Retry-After": status(503, wait=1),
    "521": status(521),
    "read time-out": LOST,
    "connect time-out": judge_failure(httpx.ConnectTimeout("x")),
    "refused": judge_failure(httpx.ConnectError("x")),
    "reset": judge_failure(httpx.ReadError("x")),
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
        (status(404), "misconfigured"),
        (status(302), "misconfigured"),
    ],
    ids=["401", "402", "404", "302"],
)
def test_fault_of_the_setup_pauses(world: World, answer: Answer, reason: str) -> None:
    """The first answer that tells of a fault of the set-up pauses the worker."""
    pace = world.pace()
    note(pace, answer)

    assert pace.paused == reason


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


def test_resumed(world: World) -> None:
    """After a pause nothing is shown of it."""
    pace = world.pace()
    pace.pause("misconfigured")
    pace.resume()

    assert (pace.paused, world.value("paused", reason="misconfigured")) == (None, 0)


def test_resume_without_a_pause(world: World) -> None:
    """To resume what was not paused changes nothing."""
    pace = world.pace()
    pace.resume()

    assert not pace.changed.is_set()


CHANGES: dict[str, Callable[[Pace], object]] = {
    "pause": lambda pace: pace.pause("operator"),
    "block": Pace.block,
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
    pace.claim_probe("d")


ENDS: dict[str, tuple[Callable[[Pace], object], Callable[[Pace], object]]] = {
    "resume": (lambda pace: pace.pause("operator"), Pace.resume),
    "unblock": (Pace.block, Pace.unblock),
    "probe taken": (lambda pace: pace.pause("operator"), lambda pace: pace.claim_probe("d")),
    "probe given up": (
        pause_with_probe,
        lambda pace: pace.release_probe("d"),
    ),
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


# --- The probe -----------------------------------------------------------------------------------


def paused(world: World, reason: PauseReason = "misconfigured") -> Pace:
    """Make a pace that is paused."""
    pace = world.pace()
    pace.pause(reason)
    return pace


def test_no_probe_without_a_pause(world: World) -> None:
    """While nothing is wrong there is no probe."""
    pace = world.pace()

    assert (pace.claim_probe("first"), pace.is_probe("first"), pace.needs_probe) == (
        False,
        False,
        False,
    )


def test_first_delivery_is_the_probe(world: World) -> None:
    """In a pause the first delivery that asks is the probe, and stays it."""
    pace = paused(world)

    assert [pace.claim_probe("first"), pace.claim_probe("second"), pace.claim_probe("first")] == [
        True,
        False,
        True,
    ]


def test_probe_is_needed(world: World) -> None:
    """A pause needs a probe until it has one."""
    pace = paused(world)
    before = pace.needs_probe
    pace.claim_probe("first")

    assert (before, pace.needs_probe) == (True, False)


def test_next_delivery_becomes_the_probe(world: World) -> None:
    """When the probe is settled the next delivery becomes it."""
    pace = paused(world)
    pace.claim_probe("first")
    pace.release_probe("first")

    assert (pace.needs_probe, pace.claim_probe("second")) == (True, True)


def test_only_the_probe_can_give_up(world: World) -> None:
    """Another delivery that ends does not take the probe's place away."""
    pace = paused(world)
    pace.claim_probe("first")
    pace.release_probe("second")

    assert pace.is_probe("first")


def test_probe_ends_with_the_pause(world: World) -> None:
    """After a pause there is no probe, and the next pause chooses anew."""
    pace = paused(world)
    pace.claim_probe("first")
    pace.resume()
    pace.pause("misconfigured")

    assert (pace.is_probe("first"), pace.needs_probe) == (False, True)


def waits_of(world: World, pace: Pace, number: int) -> list[float]:
    """Wait for probes, one after the other, and return how long each one waited."""
    return [world.seconds(probe_wait(pace)) for _ in range(number)]


def fits(waits: list[float], steps: list[float]) -> bool:
    """Say whether waits are these steps, each shortened by a little chance or not."""
    pairs = zip(waits, steps, strict=True)
    return all(step * 0.5 <= wait <= step * 1.001 + 0.001 for wait, step in pairs)


def test_probes_of_an_outage(world: World) -> None:
    """The first probe goes after a second, the next ones after twice as long, up to 15 s."""
    assert fits(waits_of(world, down(world), 8), [1, 2, 4, 8, 15, 15, 15, 15])


def test_probes_of_a_pause(world: World) -> None:
    """In a pause for a fault of the set-up the waits double up to a minute."""
    waits = waits_of(world, paused(world), 9)

    assert fits(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60])


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


@pytest.mark.parametrize("before", [status(404), status(429, wait=900)], ids=["404", "429"])
def test_outage_after_another_pause_is_probed_as_an_outage(world: World, before: Answer) -> None:
    """A pause that turns into an outage is probed at least every 15 s from then on."""
    pace = world.pace()
    note(pace, before)
    waits_of(world, pace, 8)
    pace.pause("outage")

    assert max(waits_of(world, pace, 3)) <= 15


def test_nudge_ends_the_wait(world: World) -> None:
    """A changed key ends the wait for the next probe."""
    pace = paused(world)
    waits_of(world, pace, 8)
    world.loop.call_later(3, pace.nudge)

    assert waits_of(world, pace, 1) == pytest.approx([3])


def test_nudge_ends_one_wait(world: World) -> None:
    """A changed key is tried once; if it does not help the waits go on."""
    pace = paused(world)
    waits_of(world, pace, 8)
    world.loop.call_later(3, pace.nudge)
    waits_of(world, pace, 1)

    assert waits_of(world, pace, 1)[0] >= 30


def test_nudge_just_before_the_wait(world: World) -> None:
    """A key that changed in the pause, while the probe was under way, is tried at once."""
    pace = paused(world)
    waits_of(world, pace, 8)
    pace.nudge()

    assert waits_of(world, pace, 1) == [0]


def test_old_nudge_does_not_hurry_a_later_pause(world: World) -> None:
    """A key that changed long before a pause does not make its first probe go at once."""
    pace = world.pace()
    pace.nudge()
    world.passes(3600)
    note(pace, status(429, wait=600))

    assert waits_of(world, pace, 1)[0] > 1


# --- A broker that stores nothing ----------------------------------------------------------------


def test_blocked_worker_sends_nothing(world: World) -> None:
    """While the broker stores nothing no delivery has its turn."""
    pace = world.pace()
    pace.block()
    world.loop.call_later(7, pace.unblock)

    assert world.turns(pace, 3) == pytest.approx([7, 7, 7])


def test_blocked_is_told(world: World) -> None:
    """That the broker stores nothing is known, shown and counted, once."""
    pace = world.pace()
    pace.block()
    pace.block()

    assert (
        pace.broker_blocked,
        world.value("paused", reason="broker_blocked"),
        world.value("pauses_total", reason="broker_blocked"),
    ) == (True, 1, 1)


def test_unblocked(world: World) -> None:
    """When the broker stores again nothing is left of it."""
    pace = world.pace()
    pace.block()
    pace.unblock()

    assert (pace.broker_blocked, world.value("paused", reason="broker_blocked")) == (False, 0)


def test_unblock_without_a_block(world: World) -> None:
    """To unblock what was not blocked changes nothing."""
    pace = world.pace()
    pace.unblock()

    assert not pace.changed.is_set()


def test_pause_outlives_a_block(world: World) -> None:
    """A pause for another reason goes on when the broker stores again."""
    pace = paused(world)
    pace.block()
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
