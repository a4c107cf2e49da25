"""Whether to send at all, and what an answer means for its delivery: Retry-After, pause and probe.

A pause means that the fault is not the message's: nothing new is taken but one message at a time,
the probe, which finds out when to go on. While the broker stores nothing, nothing is taken and
nothing sent either: what becomes of it could not be written down. An operator's pause is the same.

`Pace` owns all of this. A delivery meets it before its request goes, in `admit`, and after its
answer: `attribute` says whether the answer is about all or about this message or its sender alone,
`rule` what follows from that.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from bridge.config import RateLimitSettings
from bridge.errors import PublishFault
from bridge.telemetry.logs import Log
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Answer, Fate, PauseReason
from bridge.worker.limits.rates import RateLimits
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Dead, Outcome, Policy, decide, put_off_for
from bridge.worker.pausing.diagnosis import Diagnosis
from bridge.worker.pausing.gate import Gate, SenderGates
from bridge.worker.pausing.halt import Halt
from bridge.worker.pausing.others import Alone, Others
from bridge.worker.pausing.outage import OUTAGE_REQUESTS
from bridge.worker.pausing.pause import Pause, Rank
from bridge.worker.pausing.pauses import Pauses, Unstored

log = Log(__name__)

# How long deliveries that are held when a pause begins wait for the first probe to end it.
PATIENCE_SECONDS: Final = 2.5
# How long a message that was asked for a wait lets others pass once that is over, and how long it
# takes them at most to leave: their answers show whether the wait was for all.
BEHIND_SECONDS: Final = 2.5
LEAVING_SECONDS: Final = 0.05


class Pace:
    """One worker's pace. Times are of the monotonic clock.

    `rates` are its limits, `gate` the wait that the service wants, `pauses` the pauses that are on,
    and `others` share those for a fault of the service or the set-up. Messages are known by key.
    Nothing waits here for its sender's limit for longer than the ladder's first step. `changed` is
    set when more or less should be taken than before.
    """

    def __init__(
        self,
        limit: RateLimitSettings,
        *,
        policy: Policy,
        outage_after_seconds: float,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._metrics = metrics
        self.gate = Gate(clock)
        self._sender_gates = SenderGates(clock)
        self._diagnosis = Diagnosis(
            gate=self.gate, outage_after_seconds=outage_after_seconds, clock=clock
        )
        self._pause: Pause | None = None
        self._resumed_at = 0.0
        # Messages that nothing speaks against: those under way, while it matters, and those that
        # are about to go, at the gate or next to get a slot.
        self._under_way: set[int] = set()
        self._about_to_go = 0
        self._next_answer = asyncio.Event()
        self._is_suspicion_told = False
        metrics.outage_suspected.set_function(lambda: float(self.is_outage_suspected))
        self.others: Others = Alone()
        self.changed = asyncio.Event()
        self.pauses = Pauses(metrics)
        self._unstored = Halt("broker_blocked", self.pauses, notify=self.changed.set)
        self._held = Halt("operator", self.pauses, notify=self.changed.set)
        self.rates = RateLimits(
            limit,
            most_wait_seconds=policy.retry_delays_seconds[0],
            changed=self.changed,
            metrics=metrics,
            clock=clock,
        )

    # What is taken from the queue

    @property
    def paused(self) -> PauseReason | None:
        """Why nothing new is taken, or None; an operator's pause comes before any other."""
        own = None if self._pause is None else self._pause.reason
        return "operator" if self.is_held else own

    @property
    def is_held(self) -> bool:
        """Whether an operator wants nothing to be sent."""
        return self._held.is_on

    @property
    def broker_blocked(self) -> bool:
        """Whether the broker stores nothing now."""
        return self._unstored.is_on

    @property
    def is_holding(self) -> bool:
        """Whether nothing new is taken on purpose, for whatever reason."""
        return self.paused is not None or self.broker_blocked

    @property
    def is_outage_suspected(self) -> bool:
        """Whether enough requests have failed that it is an outage if it lasts; no pause is on."""
        return self._pause is None and self._diagnosis.is_outage_likely

    @property
    def current(self) -> Pause | None:
        """The pause for a fault of the service or the set-up, if there is one."""
        return self._pause

    @property
    def accepted_at(self) -> float | None:
        """When the service last accepted a message of this worker."""
        return self._diagnosis.accepted_at

    @property
    def probes_wanted(self) -> int:
        """How many deliveries to take in a pause, so that there is one to try with."""
        return 0 if self._pause is None or self.is_held else self._pause.probes_wanted

    def share_with(self, consumers: int) -> None:
        """Share the limits with so many workers; one that is paused does not count itself."""
        if not self.is_holding:
            self.rates.share_with(consumers)

    # Before a request goes

    @property
    def is_wary(self) -> bool:
        """Whether `admit` has to be asked before a message goes."""
        return (
            self._held.is_on
            or self._pause is not None
            or self._diagnosis.is_outage_likely
            or self._diagnosis.has_subjects
        )

    @property
    def holds_senders(self) -> bool:
        """Whether `sender_closed_seconds` has to be asked before a message goes."""
        return self._sender_gates.are_any

    def sender_closed_seconds(self, sender: str) -> float:
        """How long a sender has to wait while others go on; zero or less when it does not."""
        return self._sender_gates.closed_seconds(sender)

    def seconds_to_make_room(self, sender: str) -> float:
        """Return how long a message has to stay away for others; 0 when it need not.

        It has to when only its sender was asked for waits: messages of other senders, behind a bulk
        of it, show whether the wait is for all.
        """
        if not self._is_in_the_way(sender):
            return 0.0
        self.gate.note_leaving()
        return self.gate.closed_seconds

    def _is_in_the_way(self, sender: str) -> bool:
        may_leave = self._pause is None and not self.is_held and self.gate.may_leave
        return may_leave and self._diagnosis.is_only_sender(sender)

    async def admit(self, delivery: Delivery, recipient: str, sender: str) -> float | None:
        """Wait until a message may go as far as pauses are concerned, and return None.

        Returns at once, or soon, how many seconds it should stay away when it may not. While it
        looks like an outage, a message that has failed stays away once, so that its attempts are
        not used up before an outage is recognised.
        """
        envelope = delivery.envelope
        has_failed = envelope.attempts > 0 or envelope.uncertain_attempts > 0
        while True:
            away_seconds = await self._probe(delivery, recipient, has_failed=has_failed)
            if away_seconds is not None or self._pause is not None:
                return away_seconds
            if self.is_held or (has_failed and self._is_held_back(envelope)):
                return 0.0
            if not await self._let_others_pass(delivery, recipient, sender):
                return None

    def _is_held_back(self, envelope: Envelope) -> bool:
        # One that comes from such a wait, or from a pause, has been spared.
        return envelope.put_off_for != "paused" and self._diagnosis.may_hold_back(envelope.key)

    async def _probe(self, delivery: Delivery, recipient: str, *, has_failed: bool) -> float | None:
        """Wait for the end of a pause, or to be its probe; return as `admit` does."""
        envelope = delivery.envelope
        if self._diagnosis.is_outage:
            self.pause("outage")
        while (pause := self._pause) is not None and not self.is_held:
            if pause.reason == "rate_limited" and self._diagnosis.is_asked_to_wait(recipient):
                # It would be answered as before; a message to another number shows more.
                return max(0.0, pause.asked_until - self._clock())
            is_suspect = self._diagnosis.is_suspect(envelope.key, recipient)
            is_costly = pause.reason == "outage" and has_failed and self._is_last_try(envelope)
            rank = Rank.RELUCTANT if is_suspect or is_costly else Rank.WILLING
            if pause.claim(envelope.key, rank):
                wait = pause.seconds_to_probe
                if wait <= 0:
                    pause.note_departure()
                    return None
            else:
                wait = PATIENCE_SECONDS - pause.seconds
                # Those behind it may be better probes, and wait for its place.
                if wait <= 0 or rank is not Rank.WILLING or not pause.is_probed_soon:
                    return max(0.0, pause.seconds_to_probe)
            with delivery.waits("probe"):
                await pause.wait_for_change(wait)
        return 0.0 if self.is_held else None

    async def _let_others_pass(self, delivery: Delivery, recipient: str, sender: str) -> bool:
        """Have a message that got a 429 wait behind others; say whether it has waited.

        Were it the first one each time, it would never be known whether the wait is for all. While
        one wait follows the other it goes in the end all the same, not after all others.
        """
        has_waited = False
        counted_to = 0.0
        while delivery.held_seconds <= MAX_HOLD_SECONDS:
            wait = self._seconds_behind(delivery.envelope.key, recipient, sender)
            if wait <= 0 or self._is_in_the_way(sender):
                break
            has_waited = True
            if (since := max(self._clock(), counted_to)) < self.gate.opens_at:
                counted_to = self.gate.opens_at
                self._metrics.throttled.labels("retry_after").inc(counted_to - since)
            self._next_answer.clear()
            with delivery.waits("pace"):
                try:
                    async with asyncio.timeout(wait):
                        await self._next_answer.wait()
                except TimeoutError:
                    pass
        return has_waited

    def _seconds_behind(self, key: str, recipient: str, sender: str) -> float:
        if self._pause is not None or self.is_held or not self._diagnosis.is_subject(key):
            return 0.0
        if self._diagnosis.about(key, recipient, sender) is not None:
            return 0.0
        if (closed := self.gate.closed_seconds) > 0:
            return closed + LEAVING_SECONDS
        if not self._are_others_at_hand:
            return 0.0
        return max(self.gate.opens_at, self._resumed_at) + BEHIND_SECONDS - self._clock()

    def _is_last_try(self, envelope: Envelope) -> bool:
        return self._policy.is_last_try(
            attempts=envelope.attempts, uncertain_attempts=envelope.uncertain_attempts
        )

    @property
    def is_open(self) -> bool:
        """Whether a request may go now, as far as the service and the broker are concerned."""
        return not self._unstored.is_on and (
            self._pause is not None or self.gate.closed_seconds <= 0
        )

    async def until_open(self, key: str) -> None:
        """Wait while the service wants a wait, or the broker stores nothing.

        A pause that begins meanwhile ends the wait, and is for the caller to look at.
        """
        await self._unstored.over()
        is_other = self.line_up(key)
        try:
            while self._pause is None and (closed := self.gate.closed_seconds) > 0:
                self._metrics.throttled.labels("retry_after").inc(closed)
                await asyncio.sleep(closed)
        finally:
            self.leave_line(is_other=is_other)

    def line_up(self, key: str) -> bool:
        """Note that a message is about to go; `leave_line` wants to know what is returned."""
        is_other = not self._diagnosis.is_subject(key)
        self._about_to_go += is_other
        return is_other

    def leave_line(self, *, is_other: bool) -> None:
        """Note that a message goes, or does not go."""
        self._about_to_go -= is_other

    @property
    def _are_others_at_hand(self) -> bool:
        """Whether there are messages whose answers may show that a wait is not for all."""
        return self._about_to_go > 0 or bool(self._under_way)

    def lets_through(self, key: str) -> bool:
        """Whether a message that was admitted may still go: no pause has begun but as its probe."""
        return not self._held.is_on and (self._pause is None or self._pause.probe == key)

    def begin(self, key: str) -> int:
        """Note that a request leaves; `end` and `attribute` want the number that is returned."""
        number = self._diagnosis.begin(key)
        if self._diagnosis.has_subjects and not self._diagnosis.is_subject(key):
            self._under_way.add(number)
        return number

    def end(self, request_number: int) -> None:
        """Note that a request is over, whatever came of it."""
        if self._under_way:
            self._under_way.discard(request_number)

    # After its answer

    def attribute(
        self,
        answer: Answer,
        delivery: Delivery,
        recipient: str,
        sender: str,
        *,
        request_number: int,
    ) -> Answer:
        """Note the answer to a delivery's request, and say what it is about: all, or only that."""
        envelope = delivery.envelope
        return self._diagnosis.attribute(
            answer,
            envelope.key,
            recipient,
            sender,
            request_number=request_number,
            is_known=envelope.put_off_for == "singled_out",
            pause=self._pause,
        )

    def rule(
        self, answer: Answer, delivery: Delivery, recipient: str, sender: str
    ) -> Outcome | None:
        """Learn from an answer that is attributed, and say what becomes of its delivery.

        None says that it is held, and tried again from here: when the service wants a short wait,
        or when it is the probe. What is not the message's own fault burns no attempt of it.
        """
        key = delivery.envelope.key
        self._learn(answer, key, recipient, sender)
        if answer.about == "sender":
            return self._put_off_sender(answer, sender)
        pause, times = self._pause, 1
        match answer.fate:
            # First what most are.
            case Fate.SENT | Fate.REFUSED | Fate.RETRY | Fate.UNCERTAIN | Fate.NOT_SENT:
                is_spared = pause is not None and pause.probe != key and answer.counts_as_outage
                return self._decide(answer, delivery.envelope, is_spared=is_spared)
            case Fate.SLOW_DOWN | Fate.SETUP if answer.about is not None:
                return self._decide(answer, delivery.envelope, is_spared=False)
            case Fate.SLOW_DOWN:
                # Where nothing else is at hand it makes room, once it has had one more try.
                is_in_the_way = self._diagnosis.is_subject_again(key)
                is_in_the_way = is_in_the_way and not self._are_others_at_hand
                can_be_held = pause is None and not is_in_the_way
            case Fate.SETUP | Fate.AMBIGUOUS:
                can_be_held = pause is not None and pause.keep(key)
                if pause is None:
                    times = max(1, self._diagnosis.doubts(key))
        if can_be_held and delivery.held_seconds <= MAX_HOLD_SECONDS:
            return None
        return put_off_for(answer, self._policy, times=times)

    def _put_off_sender(self, answer: Answer, sender: str) -> Outcome:
        """Have all messages of a sender wait on the ladder, unburned, while others go on."""
        wait_seconds = self._sender_gates.close(sender, answer.retry_after_seconds)
        return put_off_for(answer._replace(retry_after_seconds=wait_seconds), self._policy)

    def _decide(self, answer: Answer, envelope: Envelope, *, is_spared: bool) -> Outcome:
        """Say what comes of an attempt; one that is spared for an outage is not burned."""
        outcome = decide(
            answer,
            self._policy,
            attempts=envelope.attempts,
            uncertain_attempts=envelope.uncertain_attempts,
            park=(envelope.on_uncertain or self._policy.on_uncertain) == "park",
        )
        # What may have been sent counts as such even so, and may be the end.
        is_last = isinstance(outcome, Dead) and outcome.uncertain
        return put_off_for(answer, self._policy) if is_spared and not is_last else outcome

    def _learn(self, answer: Answer, key: str, recipient: str, sender: str) -> None:
        """Begin or end a pause, or see that all is well."""
        if self._diagnosis.has_subjects:
            self._next_answer.set()
        if answer.fate is Fate.SENT and self._sender_gates.are_any:
            self._sender_gates.note_acceptance(sender)
        pause = self._pause
        reason = self._diagnosis.learn(
            answer, recipient, pause=None if pause is None else pause.reason
        )
        if reason is not None:
            told = answer if reason == answer.pause else None
            self.pause(
                reason,
                status=told and told.status,
                code=told and told.code,
                seconds=answer.retry_after_seconds or 0.0,
            )
        if answer.fate is Fate.SLOW_DOWN and answer.about is None:
            self.others.note_slow_down()
        self._tell_suspicion()
        if (pause := self._pause) is None:
            return
        if answer.fate is Fate.SENT and pause.reason == "outage":
            self.resume()
        elif pause.probe == key:
            if answer.ends_pause:
                self.resume()
            else:
                pause.note_failure()
                self.others.note_failure()

    def _tell_suspicion(self) -> None:
        """Log once that an outage is suspected, so that messages that have failed wait."""
        if (is_suspected := self.is_outage_suspected) != self._is_suspicion_told:
            self._is_suspicion_told = is_suspected
            if is_suspected:
                log.warning("outage_suspected", failures=OUTAGE_REQUESTS)

    def give_up_probe(self, key: str) -> None:
        """Let another message become the probe, if this one was."""
        if self._pause is not None:
            self._pause.give_up(key)

    # Pauses

    def pause(
        self,
        reason: PauseReason,
        *,
        status: int | None = None,
        code: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Take nothing new until `resume`; a second reason replaces the first.

        `status` and `code` are what the API answered, `seconds` is how long it wants no request.
        """
        since = self._diagnosis.unaccepted_since(reason)
        if self._begin_pause(reason, since, status=status, code=code):
            if self._pause is not None:
                self._pause.asked_until = self._clock() + seconds
            self.others.note_pause()

    def join(self, reason: PauseReason, *, since: float, status: int | None) -> None:
        """Pause as another worker has found out that one has to; `since`: see `Pause`."""
        self._begin_pause(reason, since, status=status)

    def _begin_pause(
        self,
        reason: PauseReason,
        since: float,
        *,
        status: int | None = None,
        code: str | None = None,
    ) -> bool:
        pause = self._pause
        if pause is None:
            pause = self._pause = Pause(
                reason,
                gate=self.gate,
                changed=self.changed,
                is_probed_elsewhere=lambda: self.others.is_probing,
                clock=self._clock,
            )
        elif pause.reason == reason:
            return False
        else:
            self.pauses.turn(pause.reason)
            pause.reason = reason
        pause.unaccepted_since, pause.status = since, status
        self.pauses.begin(reason, status=status, code=code)
        pause.notify()
        return True

    def resume(self) -> None:
        """Take new deliveries again."""
        if (pause := self._pause) is not None:
            self.end_pause()
            self.others.note_end(pause.reason)

    def end_pause(self) -> None:
        """Take new deliveries again, as another worker has found out that one may."""
        if (pause := self._pause) is None:
            return
        self.pauses.end(pause.reason)
        if pause.reason == "outage":
            self.rates.start_slowly(workers=1 + self.others.count)
        self._pause = None
        self._resumed_at = self._clock()
        self._diagnosis.start_anew()
        pause.notify()

    def reopen(self) -> None:
        """End a pause in which the service asked for a time that has passed, if nobody probes."""
        pause = self._pause
        is_over = pause is not None and pause.reason == "rate_limited" and pause.probe is None
        if is_over and self._is_asked_time_over(pause) and not self.others.is_probing:
            self.resume()

    def _is_asked_time_over(self, pause: Pause | None) -> bool:
        asked_until = 0.0 if pause is None else pause.asked_until
        return self.gate.closed_seconds <= 0 and asked_until <= self._clock()

    def renew_key(self) -> None:
        """Probe at once, and forget what is known of messages: the API key has changed."""
        if self._pause is not None:
            self._pause.renew_key()
        self._diagnosis.renew_key()
        self._sender_gates.renew()

    def hold(self) -> None:
        """Take and send nothing until `release`, not even the probe of another pause."""
        self._held.begin()
        if self._pause is not None:
            self._pause.notify()  # A probe that is held waits for its time, up to a minute.

    def release(self) -> None:
        """Go on: the operator has ended the pause."""
        if self.is_held:
            self._diagnosis.forget_outage()
            self._held.end()

    def block(self, queue: str, fault: PublishFault) -> None:
        """Take and send nothing until `unblock`: the broker does not store a copy for a queue."""
        self._unstored.begin(Unstored(queue, fault))

    def unblock(self) -> None:
        """Go on: the broker has stored something."""
        self._unstored.end()
