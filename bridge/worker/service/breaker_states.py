"""The states of the circuit breaker and the transitions between them; pure.

| state       | meaning                                    | requests                           |
|-------------|--------------------------------------------|------------------------------------|
| CLOSED      | the service accepts messages               | all are sent                       |
| SUSPECTED   | ten failures in a row: an outage if this   | all are sent, but a message that   |
|             | lasts for `worker.outage_after`            | failed waits once in a retry queue |
| RETRY_AFTER | the service has asked for a short wait     | none until the wait ends           |
| OPEN        | the service or the set-up has a fault, or  | none; the next message becomes the |
|             | the service has asked for a long wait      | probe                              |
| HALF_OPEN   | the same, and one message is the probe     | only the probe, when it is due     |

A breaker that opens has tripped, for the reason in `ServiceState.trip`; a reset closes it. Each
transition is a method of `ServiceState` that returns the next state. `CircuitBreaker` keeps the
state, and derives logs, cluster messages and wake-ups from the difference between two states.

The probe should be another message than the last one, because a message may have a fault of its
own. A better probe replaces the current one.
"""

from enum import Enum, IntEnum
from typing import Final, NamedTuple

from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.fates import Answer, Fate, PauseReason
from bridge.worker.service.retry_after import RetryAfter

# An outage is suspected after this many failed requests in a row.
OUTAGE_REQUESTS: Final = 10
# The breaker opens after this many ambiguous answers in a row, whichever messages received them.
MAX_AMBIGUOUS_IN_A_ROW: Final = 3
FIRST_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 60.0
MAX_OUTAGE_PROBE_SECONDS: Final = 15.0
# For messages on their last attempt: one hour of outage turns only a few into dead letters.
MAX_LAST_ATTEMPT_PROBE_SECONDS: Final = 300.0
# Nine doublings exceed the longest wait.
MAX_DOUBLINGS: Final = 9
# Smallest random share of the wait that a probe really waits; it spreads the workers' probes.
MIN_SHARE: Final = 0.8


class BreakerPhase(Enum):
    """The breaker's view of the service; see the table above."""

    CLOSED = "closed"
    SUSPECTED = "suspected"
    RETRY_AFTER = "retry_after"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Rank(IntEnum):
    """How good a probe is; a better one, with a lower rank, replaces another.

    RELUCTANT: the probe's failure would prove nothing new, because the message or another one to
    its number received an ambiguous status; or it would make the message a dead letter. TRIED: the
    last probe, which waits here to be sent again. NOBODY: there is no probe.
    """

    WILLING = 0
    RELUCTANT = 1
    TRIED = 2
    NOBODY = 3


# Two while another message would be the better probe, because the waiting probe occupies a place.
_PROBES_WANTED: Final = {Rank.WILLING: 0, Rank.RELUCTANT: 2, Rank.TRIED: 2, Rank.NOBODY: 1}


class BackOff(NamedTuple):
    """The wait before the next probe: one second after opening, doubled by each failure."""

    since: float
    failures: int
    share: float

    def due_at(self, longest_seconds: float) -> float:
        """Return the end of the wait."""
        doubled = FIRST_PROBE_SECONDS * 2.0 ** min(self.failures, MAX_DOUBLINGS)
        return self.since + min(doubled, longest_seconds) * self.share

    def after(self, failures: int, now: float, chance: float) -> "BackOff":
        """Return the wait after `failures` failures; unchanged unless they are more than before."""
        return _back_off(failures, now, chance) if failures > self.failures else self


def _back_off(failures: int, now: float, chance: float) -> BackOff:
    return BackOff(now, failures, MIN_SHARE + (1.0 - MIN_SHARE) * chance)


class Trip(NamedTuple):
    """The data of an open breaker: why it is open, which message is the probe, when it is due.

    `status` and `code` are those of the answer that tripped it. An acceptance after
    `unaccepted_since` refutes the reason. Until `asked_until` the service wants no request. Willing
    probes have a back-off of their own: a new message should not wait long because a waiting probe
    has failed often. `is_key_new`: the API key has changed, and the probe is sent at once.
    """

    reason: PauseReason
    tripped_at: float
    unaccepted_since: float
    willing: BackOff
    others: BackOff
    status: int | None = None
    code: str | None = None
    asked_until: float = 0.0
    is_key_new: bool = False
    probe: str | None = None
    rank: Rank = Rank.NOBODY

    @property
    def due_at(self) -> float:
        """When the back-off allows the probe."""
        is_outage = self.reason == "outage"
        if self.rank is Rank.WILLING:
            longest = MAX_OUTAGE_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS
            return self.willing.due_at(longest)
        longest = MAX_LAST_ATTEMPT_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS
        return self.others.due_at(longest)

    @property
    def failures(self) -> tuple[int, int]:
        """Number of failed willing probes, and of all failed probes."""
        return self.willing.failures, self.others.failures

    def after_failed_probe(self, now: float, chance: float) -> "Trip":
        """Double the wait before the next probe."""
        willing = self.willing
        if self.rank is Rank.WILLING:
            willing = _back_off(willing.failures + 1, now, chance)
        others = _back_off(self.others.failures + 1, now, chance)
        return self._replace(willing=willing, others=others, rank=Rank.TRIED)


class ServiceState(NamedTuple):
    """State of the breaker; transitions return a new one. Times are of the monotonic clock.

    `accepted_at` is this worker's last acceptance. Failures count since `counted_since`: the start,
    or the end of a pause. `limited_recipient` is the number of the message that received the only
    429s since the last acceptance. `reset_at` is when the breaker last closed.
    """

    outage_after_seconds: float
    counted_since: float
    accepted_at: float | None = None
    failures: int = 0
    ambiguous: int = 0
    ambiguous_since: float = 0.0
    limited_recipient: str | None = None
    retry_after: RetryAfter = RetryAfter()
    trip: Trip | None = None
    reset_at: float = 0.0

    def phase_at(self, now: float) -> BreakerPhase:
        if self.trip is not None:
            return BreakerPhase.OPEN if self.trip.probe is None else BreakerPhase.HALF_OPEN
        if self.failures >= OUTAGE_REQUESTS:
            return BreakerPhase.SUSPECTED
        return BreakerPhase.RETRY_AFTER if self.retry_after.ends_at > now else BreakerPhase.CLOSED

    @property
    def unaccepted_since(self) -> float:
        """Time of the last acceptance, or of the start of counting if that is later."""
        return max(self.counted_since, self.accepted_at or self.counted_since)

    def is_outage(self, now: float) -> bool:
        """Whether a suspected outage has lasted long enough."""
        lasted = now - self.unaccepted_since >= self.outage_after_seconds
        return lasted and self.failures >= OUTAGE_REQUESTS

    def seconds_to_probe(self, now: float) -> float:
        """Return the wait until the probe may be sent; zero or less if it may be now."""
        if self.trip is None or self.trip.is_key_new:
            return 0.0
        return max(self.trip.due_at, self.retry_after.ends_at) - now

    def is_probed_soon(self, now: float) -> bool:
        """Whether the wait that the service asks for is short enough to keep a probe here."""
        return self.retry_after.seconds_left(now) < MAX_HOLD_SECONDS

    def probes_wanted(self, now: float, *, elsewhere: bool) -> int:
        """Return how many deliveries to prefetch, so that one of them can be the probe."""
        if self.trip is None or elsewhere or not self.is_probed_soon(now):
            return 0
        return _PROBES_WANTED[self.trip.rank]

    def is_probe(self, key: str) -> bool:
        return self.trip is not None and self.trip.probe == key

    # Transitions. `chance` is a number from 0 to 1. `elsewhere`: another worker sends the probe.

    def after_answer(
        self,
        answer: Answer,
        key: str,
        recipient: str,
        now: float,
        chance: float,
        *,
        is_refused_in_a_row: bool = False,
    ) -> "ServiceState":
        """Apply an answer, after the classifier has decided what it concerns.

        `is_refused_in_a_row`: message after message received the same unknown refusal.
        """
        after, reason = self._learn(
            answer, recipient, now, chance, is_refused_in_a_row=is_refused_in_a_row
        )
        if reason is not None:
            after = after.after_trip(answer, reason, now, chance)
        trip = after.trip
        if trip is None:
            return after
        is_probe = trip.probe == key
        is_refuted = answer.fate is Fate.SENT and trip.reason == "outage"
        if (is_probe and answer.ends_pause) or is_refuted:
            return after.after_reset(now)
        return after._replace(trip=trip.after_failed_probe(now, chance)) if is_probe else after

    def _learn(
        self,
        answer: Answer,
        recipient: str,
        now: float,
        chance: float,
        *,
        is_refused_in_a_row: bool,
    ) -> tuple["ServiceState", PauseReason | None]:
        """Count an answer; return the reason to open the breaker, if there is one."""
        if answer.fate is Fate.SENT:
            after = self._replace(
                accepted_at=now,
                failures=0,
                ambiguous=0,
                limited_recipient=None,
                retry_after=self.retry_after.after_acceptance(),
            )
            return after, None
        if answer.counts_as_outage:
            after = self._replace(failures=self.failures + 1)
            return after, "outage" if after.is_outage(now) else None
        after = self._replace(failures=0)
        if answer.about is not None:
            return after, None
        match answer.fate:
            case Fate.SLOW_DOWN:
                return after.slowed_down(answer.retry_after_seconds, recipient, now, chance)
            case Fate.AMBIGUOUS:
                since = after.ambiguous_since if after.ambiguous else now
                after = after._replace(ambiguous=after.ambiguous + 1, ambiguous_since=since)
                is_due = after.ambiguous >= MAX_AMBIGUOUS_IN_A_ROW or is_refused_in_a_row
                return after, answer.pause if is_due else None
            case Fate.SETUP:
                return after, answer.pause
            case Fate.REFUSED | Fate.RETRY | Fate.UNCERTAIN | Fate.NOT_SENT:
                return after, None  # This concerns its message alone.

    def slowed_down(
        self, seconds: float | None, recipient: str, now: float, chance: float
    ) -> tuple["ServiceState", PauseReason | None]:
        """Wait, or open the breaker if the service has asked for a long wait.

        After 429s to one number only, a long wait does not delay the probe. The probe is another
        message if there is one, and its answer shows whether the wait is for all.
        """
        is_limited = self.trip is not None and self.trip.reason == "rate_limited"
        is_first = self.limited_recipient is None and not is_limited
        is_of_one = is_first or self.limited_recipient == recipient
        after = self._replace(limited_recipient=recipient) if is_first else self
        if is_of_one and (seconds or 0.0) > MAX_HOLD_SECONDS:
            return after, "rate_limited"
        retry_after, wait = after.retry_after.after_429(seconds, now=now, chance=chance)
        return after._replace(retry_after=retry_after), (
            "rate_limited" if wait > MAX_HOLD_SECONDS else None
        )

    def after_trip(
        self, answer: Answer, reason: PauseReason, now: float, chance: float
    ) -> "ServiceState":
        """Trip because of the service's answer."""
        since = self.ambiguous_since if self.ambiguous else now
        if reason == "outage":
            since = self.unaccepted_since
        is_told = reason == answer.pause
        return self._tripped(
            reason,
            since,
            now,
            chance,
            status=answer.status if is_told else None,
            code=answer.code if is_told else None,
            asked_until=now + (answer.retry_after_seconds or 0.0),
        )

    def _tripped(
        self,
        reason: PauseReason,
        since: float,
        now: float,
        chance: float,
        *,
        status: int | None = None,
        code: str | None = None,
        asked_until: float = 0.0,
    ) -> "ServiceState":
        """Trip. A second reason replaces the first; the same reason changes nothing."""
        former = self.trip
        if former is None:
            first = _back_off(0, now, chance)
            former = Trip(reason, now, since, willing=first, others=first)
        elif former.reason == reason:
            return self
        trip = former._replace(
            reason=reason,
            unaccepted_since=since,
            status=status,
            code=code,
            asked_until=asked_until or former.asked_until,
        )
        return self._replace(trip=trip)

    def after_reset(self, now: float) -> "ServiceState":
        """Close, and restart all counts of failures."""
        if self.trip is None:
            return self
        return self._replace(
            trip=None,
            reset_at=now,
            counted_since=now,
            failures=0,
            ambiguous=0,
            limited_recipient=None,
        )

    def after_lasting_failures(self, now: float, chance: float) -> "ServiceState":
        """Trip if a suspected outage has lasted long enough."""
        if not self.is_outage(now):
            return self
        return self._tripped("outage", self.unaccepted_since, now, chance, asked_until=now)

    def after_passed_wait(self, now: float, *, elsewhere: bool) -> "ServiceState":
        """Close if the only reason was a long wait that is over, and no probe is under way."""
        trip = self.trip
        if trip is None or trip.reason != "rate_limited" or trip.probe is not None:
            return self
        is_over = self.retry_after.seconds_left(now) <= 0 and trip.asked_until <= now
        return self.after_reset(now) if is_over and not elsewhere else self

    def with_probe(self, key: str, rank: Rank, now: float, *, elsewhere: bool) -> "ServiceState":
        """Make a message the probe if it is a better one and would not wait for too long."""
        trip = self.trip
        if trip is None or elsewhere:
            return self.without_probe(key)
        if trip.probe == key or rank >= trip.rank:
            return self
        after = self._replace(trip=trip._replace(probe=key, rank=rank))
        return self if after.seconds_to_probe(now) > MAX_HOLD_SECONDS else after

    def with_held_probe(self, key: str, *, elsewhere: bool) -> "ServiceState":
        """Make this message, whose answer shows the fault, the probe if there is none."""
        trip = self.trip
        if trip is None or elsewhere:
            return self.without_probe(key)
        if trip.probe is not None:
            return self
        return self._replace(trip=trip._replace(probe=key, rank=Rank.TRIED))

    def without_probe(self, key: str) -> "ServiceState":
        """Stop using a message as the probe, so that another one can be."""
        if self.trip is None or self.trip.probe != key:
            return self
        return self._replace(trip=self.trip._replace(probe=None, rank=Rank.NOBODY))

    def after_probe_left(self) -> "ServiceState":
        """Note that the probe is sent: a new API key has been tried."""
        if self.trip is None or not self.trip.is_key_new:
            return self
        return self._replace(trip=self.trip._replace(is_key_new=False))

    def after_leaving(self) -> "ServiceState":
        """Note that a message has moved to a retry queue to make room for other senders."""
        return self._replace(retry_after=self.retry_after.after_leaving())

    def with_new_key(self) -> "ServiceState":
        """Send the probe at once: the API key has changed."""
        trip = None if self.trip is None else self.trip._replace(is_key_new=True)
        return self._replace(ambiguous=0, trip=trip)

    def after_trip_of_peer(
        self,
        reason: PauseReason,
        unaccepted_since: float,
        now: float,
        chance: float,
        *,
        status: int | None = None,
        failures: tuple[int, int] = (0, 0),
    ) -> "ServiceState":
        """Trip with another worker and use its back-off; `failures`: see `Trip.failures`."""
        after = self._tripped(reason, unaccepted_since, now, chance, status=status)
        if after.trip is None:
            return after
        willing, altogether = failures
        trip = after.trip._replace(
            willing=after.trip.willing.after(willing, now, chance),
            others=after.trip.others.after(altogether, now, chance),
        )
        return after._replace(trip=trip)

    def after_peers_wait(self, seconds: float, now: float) -> "ServiceState":
        """Wait, because the service has asked another worker to wait."""
        return self._replace(retry_after=self.retry_after.after_peer(seconds, now=now))
