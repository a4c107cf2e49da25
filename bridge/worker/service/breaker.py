"""The circuit breaker between the worker and one SMS service.

`admit` lets a message be sent or makes it wait, `record` decides its outcome from the classified
answer. `breaker_states` has the rules; this module keeps the state, and performs the effects of a
change.

While the breaker is open, only the probe is sent: one message whose answer shows whether the
service accepts messages again.
"""

import random
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from bridge.config import WorkerSettings
from bridge.telemetry.logs import Log
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery, WaitCause
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Answer, Fate, PauseReason
from bridge.worker.limits.rate_limits import RateLimits
from bridge.worker.outcomes import Dead, Outcome, Policy, Retried, decide, put_off, put_off_for
from bridge.worker.pauses import PauseReport, WakeUp
from bridge.worker.request import SendRequest
from bridge.worker.service.breaker_states import (
    OUTAGE_REQUESTS,
    BreakerPhase,
    Rank,
    ServiceState,
    Trip,
)
from bridge.worker.service.failure_classifier import FailureClassifier
from bridge.worker.service.retry_after import SenderRetryAfter

log = Log(__name__)

# How long messages already here wait for the first probe to close the breaker.
PATIENCE_SECONDS: Final = 2.5
# How long a message with a 429 waits for others after the wait is over, and the time those need to
# be sent: their answers show whether the wait is for all.
BEHIND_SECONDS: Final = 2.5
LEAVING_SECONDS: Final = 0.05
# Maximum number of messages delayed during a suspected outage.
MAX_HELD_BACK: Final = 10_000

News = Literal["opened", "probe_failed", "retry_after", "leaving"]


class Cluster(Protocol):
    """The breakers of the other workers, as this worker's breaker sees them."""

    @property
    def others(self) -> int:
        """Number of other workers."""

    @property
    def is_probing(self) -> bool:
        """Whether another worker sends the probe, so that this one does not."""

    def publish(self, news: News, state: ServiceState) -> None:
        """Publish this worker's findings, or that it stops consuming."""

    def publish_closed(self, reason: PauseReason) -> None:
        """Publish that the service accepts messages again."""


class WaitHere(NamedTuple):
    """A message waits here: until the state changes, but at most for `seconds`."""

    cause: WaitCause
    seconds: float


class CircuitBreaker:
    """One worker's circuit breaker for one SMS service. Times are of the monotonic clock.

    `rates` start slowly after an outage; `cluster` shares findings between all workers. `chance`
    returns a number from 0 to 1.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        rates: RateLimits,
        cluster: Cluster,
        report: PauseReport,
        wake_up: WakeUp,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.classifier = FailureClassifier()
        self.rates = rates
        self._policy = Policy.of(settings)
        self._cluster = cluster
        self._report = report
        self._wake_up = wake_up
        self._clock = clock
        self._chance = chance
        self._sender_waits = SenderRetryAfter()
        self._state = ServiceState(settings.outage_after, counted_since=clock())
        # Copies of values that are read for each message, because reading the state takes longer.
        self._accepted_at: float | None = None
        self._is_calm = True
        self._is_healthy = True
        self._retry_after_ends_at = 0.0
        self._held_back: set[str] = set()

    # The state

    @property
    def state(self) -> ServiceState:
        """The current state, including the last acceptance."""
        if self._state.accepted_at != self._accepted_at:
            self._state = self._state._replace(accepted_at=self._accepted_at)
        return self._state

    @property
    def trip(self) -> Trip | None:
        """Why it is open, and its probe; None if it is closed."""
        return self._state.trip

    @property
    def pause_reason(self) -> PauseReason | None:
        """Why it is open; None if it is closed."""
        return None if self._state.trip is None else self._state.trip.reason

    @property
    def is_outage_suspected(self) -> bool:
        """Whether enough requests have failed in a row that an outage is likely."""
        return self._state.phase_at(self._clock()) is BreakerPhase.SUSPECTED

    @property
    def retry_after_seconds(self) -> float:
        """Seconds until the service accepts requests again; zero if it does now."""
        return max(0.0, self._state.retry_after.seconds_left(self._clock()))

    @property
    def probes_wanted(self) -> int:
        """Number of deliveries to prefetch, while the breaker is open, to find a probe."""
        return self._state.probes_wanted(self._clock(), elsewhere=self._cluster.is_probing)

    # Before a request is sent

    @property
    def admits_all(self) -> bool:
        """Whether every message may be sent now, so that `admit` need not be called."""
        is_clear = self._is_calm and not self.classifier.is_counting
        return is_clear and self._sender_waits.is_empty and not self._is_told_to_wait

    @property
    def _is_told_to_wait(self) -> bool:
        # The clock is read only if there was a wait.
        ends_at = self._retry_after_ends_at
        return ends_at > 0.0 and self._state.trip is None and ends_at > self._clock()

    def admits(self, key: str) -> bool:
        """Whether a message that was allowed may still be sent."""
        trip = self._state.trip
        return not self._is_told_to_wait if trip is None else trip.probe == key

    def admit(self, delivery: Delivery, request: SendRequest) -> Retried | WaitHere | None:
        """Return None if a message may be sent now, else whether it waits here or leaves.

        The message may become the probe. A retry means that it waits in a retry queue. During a
        suspected outage a message that has failed is delayed once, so that its attempts do not all
        count before the outage is certain.
        """
        wait = self._wait_of_sender(request.sender)
        if wait is not None or self.admits_all:
            return wait
        self._become(self.state.after_lasting_failures(self._clock(), self._chance()))
        envelope = delivery.envelope
        has_failed = envelope.attempts > 0 or envelope.uncertain_attempts > 0
        if self._state.trip is not None:
            return self._admit_as_probe(self._state.trip, envelope, request.to, has_failed)
        if has_failed and self._hold_back(envelope):
            return self._postpone(0.0)
        return self._admit_after_wait(delivery, request)

    def _wait_of_sender(self, sender: str) -> Retried | None:
        """Send a message to a retry queue while its sender has to wait and others continue."""
        if self._sender_waits.is_empty:
            return None
        seconds = self._sender_waits.seconds_left(sender, now=self._clock())
        if seconds <= 0:
            return None
        detail = "the SMS API asked its sender to wait"
        return put_off("rate_limited", self._policy, detail=detail, wait_seconds=seconds)

    def _postpone(self, seconds: float) -> Retried:
        trip = self._state.trip
        why = "an outage is suspected" if trip is None else trip.reason
        detail = f"the worker is paused: {why}"
        return put_off("paused", self._policy, detail=detail, wait_seconds=seconds)

    def _hold_back(self, envelope: Envelope) -> bool:
        """Delay a message that has failed, once, until an outage is certain; False if not now."""
        # A message that returns from such a delay, or from a pause, is not delayed again.
        if envelope.put_off_for == "paused" or self._state.failures < OUTAGE_REQUESTS:
            return False
        if envelope.key in self._held_back or len(self._held_back) >= MAX_HELD_BACK:
            return False
        self._held_back.add(envelope.key)
        return True

    def _admit_as_probe(
        self,
        trip: Trip,
        envelope: Envelope,
        recipient: str,
        has_failed: bool,  # noqa: FBT001
    ) -> Retried | WaitHere | None:
        """Make a message the probe if it is a good one; return None if it is, and due."""
        key, now = envelope.key, self._clock()
        if trip.reason == "rate_limited" and recipient == self._state.limited_recipient:
            # It would get the same answer; a message to another number proves more.
            return self._postpone(max(0.0, trip.asked_until - now))
        is_suspect = self.classifier.is_suspect(key, recipient)
        is_costly = trip.reason == "outage" and has_failed
        is_costly = is_costly and self._policy.is_last_attempt(
            attempts=envelope.attempts, uncertain_attempts=envelope.uncertain_attempts
        )
        rank = Rank.RELUCTANT if is_suspect or is_costly else Rank.WILLING
        self._become(self.state.with_probe(key, rank, now, elsewhere=self._cluster.is_probing))
        seconds_to_probe = self._state.seconds_to_probe(now)
        if self._state.is_probe(key):
            if seconds_to_probe > 0:
                return WaitHere("probe", seconds_to_probe)
            self._become(self.state.after_probe_left())
            return None
        patience = PATIENCE_SECONDS - (now - trip.tripped_at)
        if patience > 0 and rank is Rank.WILLING and self._state.is_probed_soon(now):
            return WaitHere("probe", patience)
        # Messages behind it may be better probes, and need its place.
        return self._postpone(max(0.0, seconds_to_probe))

    def _admit_after_wait(
        self, delivery: Delivery, request: SendRequest
    ) -> Retried | WaitHere | None:
        """Wait for the end of `Retry-After`; a message that received a 429 waits behind others.

        If it went first each time, nothing would show whether the wait is for all. It does not wait
        behind all others, so that it is sent eventually even if one wait follows another.
        """
        key, now = delivery.envelope.key, self._clock()
        is_only_sender = self.classifier.is_only_sender(request.sender)
        if is_only_sender and self._state.retry_after.lets_leave(now):
            # Messages of other senders, behind many of this one, show whether the wait is for all.
            self._become(self.state.after_leaving())
            detail = "the SMS API asked for a wait; messages of other senders go first"
            delay_seconds = self._policy.longest_within(self.retry_after_seconds)
            return Retried("rate_limited", delay_seconds, detail)
        if delivery.held_seconds <= MAX_HOLD_SECONDS:
            behind = self._seconds_behind(key, request, now)
            if behind > 0:
                return WaitHere("retry_after", behind)
        left = self._retry_after_ends_at - now
        if left <= 0:
            return None
        self.classifier.expect(key)
        return WaitHere("retry_after", left)

    def _seconds_behind(self, key: str, request: SendRequest, now: float) -> float:
        if not self.classifier.is_subject(key):
            return 0.0
        if self.classifier.about(key, request.to, request.sender) is not None:
            return 0.0
        if (left := self._retry_after_ends_at - now) > 0:
            return left + LEAVING_SECONDS
        if not self.classifier.others:
            return 0.0
        return max(self._retry_after_ends_at, self._state.reset_at) + BEHIND_SECONDS - now

    # After the answer

    def record(self, answer: Answer, delivery: Delivery, request: SendRequest) -> Outcome | None:
        """Apply a classified answer, and return the outcome of its delivery.

        None means that the delivery waits here, because the service wants a short wait or because
        it is the probe. A fault that is not the message's own does not count as an attempt.
        """
        envelope = delivery.envelope
        is_clear = not self.classifier.is_counting and self._sender_waits.is_empty
        if answer.fate is Fate.SENT and self._is_healthy and is_clear:
            # The path of nearly every message: the acceptance changes nothing.
            self._accepted_at = self._clock()
            return self._decide(answer, envelope, is_spared=False)
        key = envelope.key
        self._learn(answer, key, request)
        if answer.about == "sender":
            return self._put_off_sender(answer, request.sender)
        trip, times = self._state.trip, 1
        match answer.fate:
            case Fate.SENT | Fate.REFUSED | Fate.RETRY | Fate.UNCERTAIN | Fate.NOT_SENT:
                is_spared = trip is not None and trip.probe != key and answer.counts_as_outage
                return self._decide(answer, envelope, is_spared=is_spared)
            case Fate.SLOW_DOWN | Fate.SETUP if answer.about is not None:
                return self._decide(answer, envelope, is_spared=False)
            case Fate.SLOW_DOWN:
                # If no other message is about to be sent, this one moves to a retry queue after one
                # more POST, to make room for others.
                is_in_the_way = self.classifier.is_subject_again(key)
                is_in_the_way = is_in_the_way and not self.classifier.others
                can_be_held = trip is None and not is_in_the_way
            case Fate.SETUP | Fate.AMBIGUOUS:
                elsewhere = self._cluster.is_probing
                self._become(self.state.with_held_probe(key, elsewhere=elsewhere))
                can_be_held = self._state.is_probe(key)
                if trip is None:
                    times = max(1, self.classifier.ambiguous_answers(key))
        if can_be_held and delivery.held_seconds <= MAX_HOLD_SECONDS:
            return None
        return put_off_for(answer, self._policy, times=times)

    def _put_off_sender(self, answer: Answer, sender: str) -> Outcome:
        """Send a sender's messages to a retry queue, uncounted, while other senders continue."""
        wait_seconds = self._sender_waits.extend(
            sender, answer.retry_after_seconds, now=self._clock(), chance=self._chance()
        )
        return put_off_for(answer._replace(retry_after_seconds=wait_seconds), self._policy)

    def _decide(self, answer: Answer, envelope: Envelope, *, is_spared: bool) -> Outcome:
        """Return the outcome of a delivery; with `is_spared` (an outage) no attempt counts."""
        outcome = decide(
            answer,
            self._policy,
            attempts=envelope.attempts,
            uncertain_attempts=envelope.uncertain_attempts,
            park=(envelope.on_uncertain or self._policy.on_uncertain) == "park",
        )
        # If the message may have been sent, the attempt counts even then, and may be the last.
        is_last = isinstance(outcome, Dead) and outcome.uncertain
        return put_off_for(answer, self._policy) if is_spared and not is_last else outcome

    def _learn(self, answer: Answer, key: str, request: SendRequest) -> None:
        if self.classifier.is_counting:
            self._wake_up.messages()
        if answer.fate is Fate.SENT:
            self._sender_waits.accept(request.sender)
        in_a_row = self.classifier.is_refused_in_a_row
        self._become(
            self.state.after_answer(
                answer, key, request.to, self._clock(), self._chance(), is_refused_in_a_row=in_a_row
            )
        )

    def give_up_probe(self, key: str) -> None:
        """Stop using a message as the probe, so that another one can be."""
        if self._state.trip is not None:
            self._become(self.state.without_probe(key))

    # Events from elsewhere

    def end_passed_wait(self) -> None:
        """Close if the service asked for a wait that is over, and no worker sends a probe."""
        if self._state.trip is not None:
            elsewhere = self._cluster.is_probing
            self._become(self.state.after_passed_wait(self._clock(), elsewhere=elsewhere))

    def renew_key(self) -> None:
        """Send the probe at once, and forget all evidence: the API key has changed."""
        self.classifier.renew_key()
        self._sender_waits.clear()
        self._become(self.state.with_new_key())

    def peer_opened(
        self,
        reason: PauseReason,
        unaccepted_since: float,
        *,
        status: int | None = None,
        failures: tuple[int, int] = (0, 0),
    ) -> None:
        """Trip, or stay open, with another worker; `failures`: see `Trip.failures`."""
        after = self.state.after_trip_of_peer(
            reason,
            unaccepted_since,
            self._clock(),
            self._chance(),
            status=status,
            failures=failures,
        )
        self._become(after, is_from_peer=True)

    def peer_closed(self) -> None:
        """Close: another worker has found that the service accepts messages again."""
        self._become(self.state.after_reset(self._clock()), is_from_peer=True)

    def peer_asked_to_wait(self, seconds: float) -> None:
        """Wait, because the service has asked another worker to wait."""
        self._become(self.state.after_peers_wait(seconds, self._clock()))

    def leave(self) -> None:
        """Let another worker send the probe: this one stops consuming."""
        self._cluster.publish("leaving", self.state)

    def wake(self) -> None:
        """Have the consumer and all waiting messages check the state again."""
        self._wake_up.all()

    # State changes

    def _become(self, after: ServiceState, *, is_from_peer: bool = False) -> None:
        """Switch to the next state, and perform the effects of the change."""
        before, self._state = self._state, after
        self._accepted_at = after.accepted_at
        self._retry_after_ends_at = after.retry_after.ends_at
        is_suspected = after.failures >= OUTAGE_REQUESTS
        self._is_calm = after.trip is None and not is_suspected
        self._is_healthy = (
            self._is_calm
            and not after.failures
            and not after.ambiguous
            and not after.retry_after.slow_downs
            and after.limited_recipient is None
        )
        if self._held_back and not is_suspected:
            self._held_back.clear()
        if is_suspected and before.failures < OUTAGE_REQUESTS and after.trip is None:
            log.warning("outage_suspected", failures=OUTAGE_REQUESTS)
        if after.trip is not before.trip:
            self._follow_change(before.trip, after.trip, is_from_peer=is_from_peer)
        if after.retry_after.asked_until != before.retry_after.asked_until:
            self._cluster.publish("retry_after", after)

    def _follow_change(
        self, before: Trip | None, after: Trip | None, *, is_from_peer: bool
    ) -> None:
        """Report, wake and publish after the breaker has tripped, changed its probe or closed."""
        if after is None:
            assert before is not None  # noqa: S101  one of them is open
            self._end(before.reason, is_from_peer=is_from_peer)
            self.wake()
            return
        is_new = before is None or before.reason != after.reason
        if is_new:
            if before is not None:
                self._report.turn(before.reason)
            self._report.begin(after.reason, status=after.status, code=after.code)
        self.wake()
        if is_from_peer:
            return
        if is_new:
            self._cluster.publish("opened", self._state)
        if before is not None and after.others.failures > before.others.failures:
            self._cluster.publish("probe_failed", self._state)

    def _end(self, reason: PauseReason, *, is_from_peer: bool) -> None:
        if reason == "outage":
            self.rates.start_slowly(workers=1 + self._cluster.others)
        self._report.end(reason)
        self.classifier.forget_refusals()
        if not is_from_peer:
            self._cluster.publish_closed(reason)
