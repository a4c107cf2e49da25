"""The states of the circuit breaker and the transitions between them; pure.

| state       | meaning                                    | requests                           |
|-------------|--------------------------------------------|------------------------------------|
| CLOSED      | the service takes messages                 | all go                             |
| SUSPECTED   | ten failures in a row: an outage if it     | all go, but a message that has     |
|             | lasts for `worker.outage_after`            | failed waits once on the ladder    |
| RETRY_AFTER | the service has asked for a short wait     | all are held until its end         |
| OPEN        | the service or the set-up has a fault, or  | none; the next message becomes the |
|             | the service has asked for a long wait      | probe                              |
| HALF_OPEN   | the same, and one message is the probe     | the probe alone, when it is due    |

`transition` takes a state, an event, the time and a random number, and returns the next state with
the effects that `CircuitBreaker` has to perform. An operator's pause and a broker that stores
nothing are no states of the service: they stop every request, the probe too, and are flags beside.

The probe is another message than the last one if there is one: a message may have a fault of its
own. A better probe replaces another.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NamedTuple

from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.fates import Answer, Fate, PauseReason
from bridge.worker.service.breaker_events import (
    Answered,
    BrokerBlocked,
    BrokerUnblocked,
    Do,
    Effect,
    Event,
    KeyRenewed,
    MadeRoom,
    OperatorPaused,
    OperatorResumed,
    OutageChecked,
    PauseBegan,
    PauseEnded,
    PauseRefused,
    PauseTurned,
    PeerAskedToWait,
    PeerClosed,
    PeerOpened,
    ProbeGivenUp,
    ProbeHeld,
    ProbeLeft,
    ProbeOffered,
    Rank,
    WaitChecked,
)
from bridge.worker.service.retry_after import RetryAfter

# So many requests in a row must have failed before an outage is suspected.
OUTAGE_REQUESTS: Final = 10
# After so many ambiguous answers in a row, whichever messages got them, the breaker opens.
MAX_AMBIGUOUS_IN_A_ROW: Final = 3
FIRST_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 60.0
MAX_OUTAGE_PROBE_SECONDS: Final = 15.0
# For messages on their last attempt: an hour of outage makes only a handful of them dead letters.
MAX_LAST_TRY_PROBE_SECONDS: Final = 300.0
# Nine doublings lead beyond the longest wait.
MAX_DOUBLINGS: Final = 9
# The shortest wait before a probe, as a share: the probes of many workers are spread.
MIN_SHARE: Final = 0.8


class State(Enum):
    """What the breaker makes of the service; see the table above."""

    CLOSED = "closed"
    SUSPECTED = "suspected"
    RETRY_AFTER = "retry_after"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Two while another message would be the better probe: the held one occupies a place.
_PROBES_WANTED: Final = {Rank.WILLING: 0, Rank.RELUCTANT: 2, Rank.TRIED: 2, Rank.NOBODY: 1}


class BackOff(NamedTuple):
    """The wait before the next probe: a second after the opening, doubled by each failure."""

    since: float
    failures: int
    share: float

    def due_at(self, longest_seconds: float) -> float:
        """Return the end of the wait."""
        doubled = FIRST_PROBE_SECONDS * 2.0 ** min(self.failures, MAX_DOUBLINGS)
        return self.since + min(doubled, longest_seconds) * self.share

    def after(self, failures: int, now: float, chance: float) -> "BackOff":
        """Return the wait after so many failures, unless there were as many before."""
        return _back_off(failures, now, chance) if failures > self.failures else self


def _back_off(failures: int, now: float, chance: float) -> BackOff:
    return BackOff(now, failures, MIN_SHARE + (1.0 - MIN_SHARE) * chance)


class Open(NamedTuple):
    """An open breaker: why it is open, which message is the probe, and when the probe may go.

    `status` is the API's answer that opened it. A message that was accepted after
    `unaccepted_since` refutes the reason. Until `asked_until` the service wants no request.
    Willing probes have a back-off of their own: a new message must not wait because a held one
    has failed often. `is_key_new`: the probe goes at once, with the new API key.
    """

    reason: PauseReason
    opened_at: float
    unaccepted_since: float
    status: int | None
    willing: BackOff
    others: BackOff
    asked_until: float = 0.0
    is_key_new: bool = False
    probe: str | None = None
    rank: Rank = Rank.NOBODY

    @property
    def due_at(self) -> float:
        """When the probe is due, as far as the back-off is concerned."""
        is_outage = self.reason == "outage"
        if self.rank is Rank.WILLING:
            longest = MAX_OUTAGE_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS
            return self.willing.due_at(longest)
        longest = MAX_LAST_TRY_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS
        return self.others.due_at(longest)

    @property
    def failures(self) -> tuple[int, int]:
        """How many willing probes have failed, and how many probes altogether."""
        return self.willing.failures, self.others.failures


class Breaker(NamedTuple):
    """The whole state; each transition makes a new one. Times are of the monotonic clock.

    `accepted_at` is the last acceptance of this worker. Failures count since `counted_since`: the
    start, or the end of a pause. `limited_recipient` is the number of the message that got the
    only 429s since the last acceptance. `closed_at` is the end of the last open state.
    """

    outage_after_seconds: float
    counted_since: float
    accepted_at: float | None = None
    failures: int = 0
    ambiguous: int = 0
    ambiguous_since: float = 0.0
    limited_recipient: str | None = None
    retry_after: RetryAfter = RetryAfter()
    open: Open | None = None
    closed_at: float = 0.0
    is_paused_by_operator: bool = False
    is_broker_blocked: bool = False

    def state_at(self, now: float) -> State:
        """Name the state."""
        if self.open is not None:
            return State.OPEN if self.open.probe is None else State.HALF_OPEN
        if self.failures >= OUTAGE_REQUESTS:
            return State.SUSPECTED
        return State.RETRY_AFTER if self.retry_after.ends_at > now else State.CLOSED

    @property
    def unaccepted_since(self) -> float:
        """Since when the service has accepted nothing."""
        return max(self.counted_since, self.accepted_at or self.counted_since)

    def is_outage(self, now: float) -> bool:
        """Whether a suspected outage has lasted for long enough."""
        lasted = now - self.unaccepted_since >= self.outage_after_seconds
        return lasted and self.failures >= OUTAGE_REQUESTS

    def seconds_to_probe(self, now: float) -> float:
        """Return the wait until the probe may go; zero or less when it may."""
        if self.open is None or self.open.is_key_new:
            return 0.0
        return max(self.open.due_at, self.retry_after.ends_at) - now

    def is_probed_soon(self, now: float) -> bool:
        """Whether the service asks for no longer wait than a delivery can be held for."""
        return self.retry_after.seconds_left(now) < MAX_HOLD_SECONDS

    def probes_wanted(self, now: float, *, is_probed_elsewhere: bool) -> int:
        """Return how many deliveries to take, so that one of them can be the probe."""
        is_idle = self.open is None or self.is_paused_by_operator or is_probed_elsewhere
        if is_idle or self.open is None or not self.is_probed_soon(now):
            return 0
        return _PROBES_WANTED[self.open.rank]

    def is_probe(self, key: str) -> bool:
        """Whether a message is the probe."""
        return self.open is not None and self.open.probe == key


Step = tuple[Breaker, list[Effect]]


def transition(breaker: Breaker, event: Event, now: float, chance: float = 1.0) -> Step:
    """Return the state after an event, and the effects; `chance` is a number from 0 to 1."""
    return _TRANSITIONS[type(event)](breaker, event, now, chance)


def _answered(before: Breaker, event: Answered, now: float, chance: float) -> Step:
    answer = event.answer
    after, reason = _learn(before, event, now, chance)
    effects: list[Effect] = []
    if reason is not None:
        after, effects = _open_for(after, answer, reason, now, chance)
    if answer.fate is Fate.SLOW_DOWN and answer.about is None:
        effects.append(Do.PUBLISH_RETRY_AFTER)
    if before.state_at(now) is not State.SUSPECTED and after.state_at(now) is State.SUSPECTED:
        effects.append(Do.LOG_SUSPICION)
    opened = after.open
    if opened is None:
        return after, effects
    is_probe = opened.probe == event.key
    if (is_probe and answer.ends_pause) or (answer.fate is Fate.SENT and opened.reason == "outage"):
        after, closing = _close(after, opened, now, is_found_here=True)
        return after, effects + closing
    if is_probe:
        after = after._replace(open=_after_failed_probe(opened, now, chance))
        effects += (Do.WAKE, Do.PUBLISH_PROBE_FAILED)
    return after, effects


def _learn(
    before: Breaker, event: Answered, now: float, chance: float
) -> tuple[Breaker, PauseReason | None]:
    """Count an answer; return the reason to open the breaker, if there is one."""
    answer = event.answer
    if answer.fate is Fate.SENT:
        after = before._replace(
            accepted_at=now,
            failures=0,
            ambiguous=0,
            limited_recipient=None,
            retry_after=before.retry_after.after_acceptance(),
        )
        return after, None
    if answer.counts_as_outage:
        after = before._replace(failures=before.failures + 1)
        return after, "outage" if after.is_outage(now) else None
    after = before._replace(failures=0)
    if answer.about is not None:
        return after, None
    match answer.fate:
        case Fate.SLOW_DOWN:
            return _slow_down(after, answer.retry_after_seconds, event.recipient, now, chance)
        case Fate.AMBIGUOUS:
            since = after.ambiguous_since if after.ambiguous else now
            after = after._replace(ambiguous=after.ambiguous + 1, ambiguous_since=since)
            is_due = after.ambiguous >= MAX_AMBIGUOUS_IN_A_ROW or event.is_refused_in_a_row
            return after, answer.pause if is_due else None
        case Fate.SETUP:
            return after, answer.pause
        case Fate.REFUSED | Fate.RETRY | Fate.UNCERTAIN | Fate.NOT_SENT:
            return after, None  # It is about its message alone.


def _slow_down(
    before: Breaker, seconds: float | None, recipient: str, now: float, chance: float
) -> tuple[Breaker, PauseReason | None]:
    """Wait, unless the service has asked for a long wait after messages to one number only.

    Then the breaker opens all the same, and its first probe, which is another message if there is
    one, finds out whether the wait is for all.
    """
    is_limited = before.open is not None and before.open.reason == "rate_limited"
    is_first = before.limited_recipient is None and not is_limited
    is_of_one = is_first or before.limited_recipient == recipient
    after = before._replace(limited_recipient=recipient) if is_first else before
    if is_of_one and (seconds or 0.0) > MAX_HOLD_SECONDS:
        return after, "rate_limited"
    retry_after, wait = after.retry_after.after_429(seconds, now=now, chance=chance)
    return after._replace(retry_after=retry_after), (
        "rate_limited" if wait > MAX_HOLD_SECONDS else None
    )


def _open_for(
    before: Breaker, answer: Answer, reason: PauseReason, now: float, chance: float
) -> Step:
    """Open the breaker for an answer of the service."""
    if reason == "outage":
        since = before.unaccepted_since
    else:
        since = before.ambiguous_since if before.ambiguous else now
    is_told = reason == answer.pause
    status, code = (answer.status, answer.code) if is_told else (None, None)
    after, effects = _open(before, PauseBegan(reason, status, code), since, now, chance)
    if effects and after.open is not None:
        asked_until = now + (answer.retry_after_seconds or 0.0)
        after = after._replace(open=after.open._replace(asked_until=asked_until))
        effects.append(Do.PUBLISH_OPEN)
    return after, effects


def _open(before: Breaker, began: PauseBegan, since: float, now: float, chance: float) -> Step:
    """Open the breaker; a second reason replaces the first, and the same one changes nothing."""
    former = before.open
    if former is None:
        first = _back_off(0, now, chance)
        opened = Open(began.reason, now, since, began.status, willing=first, others=first)
        return before._replace(open=opened), [began, Do.WAKE]
    if former.reason == began.reason:
        return before, []
    opened = former._replace(reason=began.reason, unaccepted_since=since, status=began.status)
    return before._replace(open=opened), [PauseTurned(former.reason), began, Do.WAKE]


def _after_failed_probe(opened: Open, now: float, chance: float) -> Open:
    """Let the next probe wait for twice as long."""
    willing = opened.willing
    if opened.rank is Rank.WILLING:
        willing = _back_off(willing.failures + 1, now, chance)
    others = _back_off(opened.others.failures + 1, now, chance)
    return opened._replace(willing=willing, others=others, rank=Rank.TRIED)


def _close(before: Breaker, opened: Open, now: float, *, is_found_here: bool) -> Step:
    after = before._replace(
        open=None,
        closed_at=now,
        counted_since=now,
        failures=0,
        ambiguous=0,
        limited_recipient=None,
    )
    effects: list[Effect] = [PauseEnded(opened.reason, is_found_here=is_found_here), Do.WAKE]
    if opened.reason == "outage":
        effects.insert(0, Do.START_SLOWLY)
    return after, effects


def _outage_checked(before: Breaker, _event: OutageChecked, now: float, chance: float) -> Step:
    if not before.is_outage(now):
        return before, []
    since = before.unaccepted_since
    after, effects = _open(before, PauseBegan("outage"), since, now, chance)
    if effects and after.open is not None:
        after = after._replace(open=after.open._replace(asked_until=now))
        effects.append(Do.PUBLISH_OPEN)
    return after, effects


def _wait_checked(before: Breaker, event: WaitChecked, now: float, _chance: float) -> Step:
    opened = before.open
    if opened is None or opened.reason != "rate_limited" or opened.probe is not None:
        return before, []
    is_over = before.retry_after.seconds_left(now) <= 0 and opened.asked_until <= now
    if not is_over or event.is_probed_elsewhere:
        return before, []
    return _close(before, opened, now, is_found_here=True)


def _probe_offered(before: Breaker, event: ProbeOffered, now: float, _chance: float) -> Step:
    """Take a better probe, unless it would wait for too long: another may have a shorter wait."""
    opened = before.open
    if opened is None or event.is_probed_elsewhere:
        return _give_up(before, event.key)
    if opened.probe == event.key or event.rank >= opened.rank:
        return before, []
    after = before._replace(open=opened._replace(probe=event.key, rank=event.rank))
    if after.seconds_to_probe(now) > MAX_HOLD_SECONDS:
        return before, []
    return after, [Do.WAKE]


def _probe_held(before: Breaker, event: ProbeHeld, _now: float, _chance: float) -> Step:
    opened = before.open
    if opened is None or event.is_probed_elsewhere:
        return _give_up(before, event.key)
    if opened.probe is not None:
        return before, []
    return before._replace(open=opened._replace(probe=event.key, rank=Rank.TRIED)), [Do.WAKE]


def _probe_left(before: Breaker, _event: ProbeLeft, _now: float, _chance: float) -> Step:
    if before.open is None:
        return before, []
    return before._replace(open=before.open._replace(is_key_new=False)), []


def _probe_given_up(before: Breaker, event: ProbeGivenUp, _now: float, _chance: float) -> Step:
    return _give_up(before, event.key)


def _give_up(before: Breaker, key: str) -> Step:
    if before.open is None or before.open.probe != key:
        return before, []
    return before._replace(open=before.open._replace(probe=None, rank=Rank.NOBODY)), [Do.WAKE]


def _made_room(before: Breaker, _event: MadeRoom, _now: float, _chance: float) -> Step:
    return before._replace(retry_after=before.retry_after.after_leaving()), []


def _key_renewed(before: Breaker, _event: KeyRenewed, _now: float, _chance: float) -> Step:
    after = before._replace(ambiguous=0)
    if after.open is None:
        return after, []
    return after._replace(open=after.open._replace(is_key_new=True)), [Do.WAKE]


def _peer_opened(before: Breaker, event: PeerOpened, now: float, chance: float) -> Step:
    """Open with the other worker, and probe in its rhythm."""
    began = PauseBegan(event.reason, event.status)
    after, effects = _open(before, began, event.unaccepted_since, now, chance)
    if after.open is not None:
        willing, altogether = event.failures
        opened = after.open._replace(
            willing=after.open.willing.after(willing, now, chance),
            others=after.open.others.after(altogether, now, chance),
        )
        after = after._replace(open=opened)
    return after, effects or [Do.WAKE]


def _peer_closed(before: Breaker, _event: PeerClosed, now: float, _chance: float) -> Step:
    if before.open is None:
        return before, []
    return _close(before, before.open, now, is_found_here=False)


def _peer_asked_to_wait(
    before: Breaker, event: PeerAskedToWait, now: float, _chance: float
) -> Step:
    return before._replace(retry_after=before.retry_after.after_peer(event.seconds, now=now)), []


def _operator_paused(before: Breaker, _event: OperatorPaused, _now: float, _chance: float) -> Step:
    if before.is_paused_by_operator:
        return before, []
    return before._replace(is_paused_by_operator=True), [PauseBegan("operator"), Do.WAKE]


def _operator_resumed(before: Breaker, _event: OperatorResumed, now: float, _chance: float) -> Step:
    """Go on; that nothing was accepted meanwhile was not the service's fault."""
    if not before.is_paused_by_operator:
        return before, []
    after = before._replace(is_paused_by_operator=False, failures=0, counted_since=now)
    return after, [PauseEnded("operator"), Do.WAKE]


def _broker_blocked(before: Breaker, event: BrokerBlocked, _now: float, _chance: float) -> Step:
    if before.is_broker_blocked:
        return before, [PauseRefused(event.unstored)]
    began = PauseBegan("broker_blocked", unstored=event.unstored)
    return before._replace(is_broker_blocked=True), [began, Do.WAKE]


def _broker_unblocked(
    before: Breaker, _event: BrokerUnblocked, _now: float, _chance: float
) -> Step:
    if not before.is_broker_blocked:
        return before, []
    return before._replace(is_broker_blocked=False), [PauseEnded("broker_blocked"), Do.WAKE]


_TRANSITIONS: Final[dict[type[Any], Callable[[Breaker, Any, float, float], Step]]] = {
    Answered: _answered,
    OutageChecked: _outage_checked,
    WaitChecked: _wait_checked,
    ProbeOffered: _probe_offered,
    ProbeHeld: _probe_held,
    ProbeLeft: _probe_left,
    ProbeGivenUp: _probe_given_up,
    MadeRoom: _made_room,
    KeyRenewed: _key_renewed,
    PeerOpened: _peer_opened,
    PeerClosed: _peer_closed,
    PeerAskedToWait: _peer_asked_to_wait,
    OperatorPaused: _operator_paused,
    OperatorResumed: _operator_resumed,
    BrokerBlocked: _broker_blocked,
    BrokerUnblocked: _broker_unblocked,
}
