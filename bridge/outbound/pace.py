"""Whether to send at all: Retry-After, pause and probe.

A pause means that the fault is not the message's: nothing new is taken but one message at a time,
the probe, which finds out when to go on. It is another one than the last probe where there is
one: a message may have a fault of its own. While the broker stores nothing, nothing is taken and
nothing sent either: what becomes of a message could not be written down.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from bridge.config import RateLimitSettings
from bridge.logs import Log
from bridge.outbound.evidence import Evidence
from bridge.outbound.fates import Answer, Fate, PauseReason
from bridge.outbound.metrics import WorkerMetrics
from bridge.outbound.rates import MAX_HOLD_SECONDS, RateLimits

log = Log(__name__)

OUTAGE_REQUESTS: Final = 10
FIRST_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 60.0
MAX_OUTAGE_PROBE_SECONDS: Final = 15.0
# For messages that have no attempt left to lose: an outage of an hour costs a handful of them.
MAX_LAST_TRY_PROBE_SECONDS: Final = 300.0
# Ambiguous answers in a row, whichever messages got them.
MAX_DOUBTS: Final = 3
# What is held when a pause begins waits so long for the first probe to end it.
PATIENCE_SECONDS: Final = 2.5
FIRST_SLOW_DOWN_SECONDS: Final = 1.0
# With these the service speaks of messages again, whatever it says.
_ABOUT_MESSAGES: Final = {Fate.SENT, Fate.REFUSED, Fate.RETRY}


class _Rank(IntEnum):
    """How good a probe is; a better one takes the place of another.

    RELUCTANT: its failure would say nothing new, because it or another message to its recipient
    got an ambiguous status, or would be its end. TRIED: the last probe, held.
    """

    WILLING = 0
    RELUCTANT = 1
    TRIED = 2
    NOBODY = 3


_PROBES_WANTED: Final = {
    _Rank.WILLING: 0,
    _Rank.RELUCTANT: 2,
    _Rank.TRIED: 2,
    _Rank.NOBODY: 1,
}


class _BackOff:
    """When the next probe may go: after a second, then each time after twice as long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start(FIRST_PROBE_SECONDS)

    def _start(self, seconds: float) -> None:
        self._since = self._clock()
        self._seconds = seconds
        self._share = random.uniform(0.8, 1.0)  # noqa: S311

    def double(self) -> None:
        """Wait for twice as long as the last time."""
        self._start(min(2 * self._seconds, MAX_LAST_TRY_PROBE_SECONDS))

    def due_at(self, longest_seconds: float) -> float:
        """Return when the wait is over."""
        return self._since + min(self._seconds, longest_seconds) * self._share


@dataclass(slots=True)
class _Pause:
    """Why and since when nothing new is taken, and which message is the probe, by its key.

    Willing probes have a back-off of their own: however often a held one has failed, a message
    that comes has not to wait for it.
    """

    reason: PauseReason
    began_at: float
    willing: _BackOff
    others: _BackOff
    probe: str | None = None
    rank: _Rank = _Rank.NOBODY

    @property
    def due_at(self) -> float:
        """When the probe may go."""
        is_outage = self.reason == "outage"
        if self.rank is _Rank.WILLING:
            longest = MAX_OUTAGE_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS
            return self.willing.due_at(longest)
        return self.others.due_at(MAX_LAST_TRY_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS)

    def note_failure(self) -> None:
        """Note that the probe has not ended the pause."""
        if self.rank is _Rank.WILLING:
            self.willing.double()
        self.others.double()
        self.rank = _Rank.TRIED


class Pace:
    """One worker's pace; `rates` are its limits. Times are of the monotonic clock.

    Messages are known by their key. `first_step_seconds` is the ladder's first step: nothing waits
    longer for its sender's limit.
    """

    def __init__(
        self,
        limit: RateLimitSettings,
        *,
        outage_after_seconds: float,
        first_step_seconds: float,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._outage_after_seconds = outage_after_seconds
        self._gate_opens_at = 0.0
        self._slow_downs = 0
        self._failures = 0
        self._last_accepted_at = clock()
        self._evidence = Evidence()
        self._doubts = 0
        self._pause: _Pause | None = None
        self._stirred = asyncio.Event()
        self._key_is_new = False
        self._storing = asyncio.Event()
        self._storing.set()
        self.changed = asyncio.Event()
        self.rates = RateLimits(
            limit,
            most_wait_seconds=first_step_seconds,
            changed=self.changed,
            metrics=metrics,
            clock=clock,
        )

    @property
    def paused(self) -> PauseReason | None:
        """Why nothing new is taken, or None."""
        return None if self._pause is None else self._pause.reason

    @property
    def broker_blocked(self) -> bool:
        """Whether the broker stores nothing now."""
        return not self._storing.is_set()

    @property
    def is_holding(self) -> bool:
        """Whether nothing new is taken on purpose, for whatever reason."""
        return self._pause is not None or self.broker_blocked

    @property
    def probes_wanted(self) -> int:
        """How many deliveries to take in a pause, so that there is one to try with.

        Two while the probe had better be another message: the one that is held takes up a place.
        """
        if self._pause is None or not self._opens_soon:
            return 0
        return _PROBES_WANTED[self._pause.rank]

    @property
    def _opens_soon(self) -> bool:
        return self._gate_opens_at - self._clock() < MAX_HOLD_SECONDS

    @property
    def is_open(self) -> bool:
        """Whether a request may go now, as far as the service and the broker are concerned."""
        return self._storing.is_set() and (self._pause is not None or self._closed_seconds <= 0)

    async def until_open(self) -> None:
        """Wait while the service wants a wait, or the broker stores nothing.

        A pause that begins meanwhile ends the wait, and is for the caller to look at.
        """
        await self._storing.wait()
        while self._pause is None and (closed := self._closed_seconds) > 0:
            self._metrics.throttled.labels("retry_after").inc(closed)
            await asyncio.sleep(closed)

    @property
    def _closed_seconds(self) -> float:
        return self._gate_opens_at - self._clock()

    def share_with(self, consumers: int) -> None:
        """Share the limits with so many workers; one that is paused does not count itself."""
        if not self.is_holding:
            self.rates.share_with(consumers)

    def begin(self, key: str) -> int:
        """Note that a request leaves; `note` wants the number that is returned."""
        return self._evidence.begin(key)

    def note(self, answer: Answer, *, key: str, recipient: str, began: int) -> Answer:
        """Learn from an answer: close the gate, begin or end a pause, or see that all is well.

        Returns what the answer means: one that is ambiguous may turn out to be the message's own.
        """
        if answer.fate is Fate.AMBIGUOUS:
            answer = self._weigh(answer, key, recipient, began)
        if answer.counts_as_outage:
            self._failures += 1
            self._look_for_outage()
        else:
            self._failures = 0
            self._note_answer(answer, key, recipient, began)
        pause = self._pause
        if pause is not None and pause.probe == key:
            if answer.fate in _ABOUT_MESSAGES and not answer.counts_as_outage:
                self.resume()
            else:
                pause.note_failure()
                self._stir()
        return answer

    def _weigh(self, answer: Answer, key: str, recipient: str, began: int) -> Answer:
        is_proven = self._evidence.suspect(key, recipient, began=began)
        # In a pause it is not certain that the set-up is as it was when the evidence was found.
        if not is_proven or self._pause is not None:
            return answer
        detail = f"{answer.detail}, twice, and took another message between"
        return answer._replace(fate=Fate.REFUSED, pause=None, detail=detail)

    def _note_answer(self, answer: Answer, key: str, recipient: str, began: int) -> None:
        match answer.fate:
            case Fate.SENT:
                self._slow_downs = self._doubts = 0
                self._last_accepted_at = self._clock()
                self._evidence.accept(key, recipient, began=began)
                if self.paused == "outage":
                    self.resume()
            case Fate.REFUSED:
                self._evidence.clear(key)
            case Fate.SLOW_DOWN:
                self._slow_down(answer.retry_after_seconds)
            case Fate.AMBIGUOUS if answer.pause is not None:
                self._doubts += 1
                if self._doubts >= MAX_DOUBTS:
                    self.pause(answer.pause, status=answer.status)
            case Fate.SETUP if answer.pause is not None:
                self.pause(answer.pause, status=answer.status)

    def put_off_times(self, key: str) -> int:
        """Return how many times a message with an ambiguous status goes up the ladder for it."""
        return 1 if self._pause is not None else max(1, self._evidence.times(key))

    @property
    def is_wary(self) -> bool:
        """Whether `admit` has to be asked before a message goes."""
        return self._pause is not None or self._failures >= OUTAGE_REQUESTS

    async def admit(
        self, key: str, recipient: str, *, has_failed: bool, is_last_try: bool
    ) -> float | None:
        """Wait until a message may go as far as pauses are concerned, and return None.

        Returns at once, or soon, how many seconds it should stay away when it may not.
        `has_failed` says that an attempt of it was burned, `is_last_try` that no more than one is
        left. While it looks like an outage such messages wait, so that it does not use them up
        before it is recognised.
        """
        self._look_for_outage()
        while (pause := self._pause) is not None:
            is_suspect = self._evidence.is_suspect(key, recipient)
            is_costly = pause.reason == "outage" and has_failed and is_last_try
            rank = _Rank.RELUCTANT if is_suspect or is_costly else _Rank.WILLING
            if self._claim(pause, key, rank):
                wait = self._seconds_to_probe(pause)
                if wait <= 0:
                    self._key_is_new = False
                    return None
            else:
                wait = pause.began_at + PATIENCE_SECONDS - self._clock()
                # Those behind it may be better probes, and wait for its place.
                if wait <= 0 or rank is not _Rank.WILLING or not self._opens_soon:
                    return max(0.0, self._seconds_to_probe(pause))
            await self._stirred_within(wait)
        return 0.0 if has_failed and self._failures >= OUTAGE_REQUESTS else None

    def _claim(self, pause: _Pause, key: str, rank: _Rank) -> bool:
        """Make a message the probe, unless a better one is, or it would wait too long."""
        if pause.probe == key:
            return True
        former = pause.probe, pause.rank
        if rank >= pause.rank:
            return False
        pause.probe, pause.rank = key, rank
        if self._seconds_to_probe(pause) > MAX_HOLD_SECONDS:
            pause.probe, pause.rank = former
            return False
        self._stir()
        return True

    def _seconds_to_probe(self, pause: _Pause) -> float:
        if self._key_is_new:
            return 0.0
        # What the service asked for comes first.
        return max(pause.due_at, self._gate_opens_at) - self._clock()

    def keep_probe(self, key: str) -> bool:
        """Say whether a message that a pause is about is to be held, and tried again from here."""
        pause = self._pause
        if pause is None:
            return False
        if pause.probe is None:
            pause.probe, pause.rank = key, _Rank.TRIED
            self._stir()
        return pause.probe == key

    def is_probe(self, key: str) -> bool:
        """Whether this message is the probe of a pause."""
        return self._pause is not None and self._pause.probe == key

    def release_probe(self, key: str) -> None:
        """Let another message become the probe."""
        if self._pause is not None and self._pause.probe == key:
            self._pause.probe, self._pause.rank = None, _Rank.NOBODY
            self._stir()

    def _look_for_outage(self) -> None:
        if self._failures >= OUTAGE_REQUESTS:
            silent = self._clock() - self._last_accepted_at
            if silent >= self._outage_after_seconds:
                self.pause("outage")

    def pause(self, reason: PauseReason, *, status: int | None = None) -> None:
        """Take nothing new until `resume`; a second reason replaces the first.

        `status` is what the API answered, for the log.
        """
        pause = self._pause
        if pause is None:
            self._key_is_new = False
            willing, others = _BackOff(self._clock), _BackOff(self._clock)
            self._pause = _Pause(reason, self._clock(), willing, others)
        elif pause.reason == reason:
            return
        else:
            self._metrics.paused.labels(pause.reason).set(0)
            pause.reason = reason
        self._metrics.paused.labels(reason).set(1)
        self._metrics.pauses.labels(reason).inc()
        log.warning("paused", reason=reason, status=status)
        self._stir()

    def resume(self) -> None:
        """Take new deliveries again."""
        pause = self._pause
        if pause is None:
            return
        log.info("resumed", reason=pause.reason)
        if pause.reason == "outage":
            self.rates.start_slowly()
        self._metrics.paused.labels(pause.reason).set(0)
        self._pause = None
        self._failures = self._doubts = 0
        self._last_accepted_at = self._clock()
        self._stir()

    def _stir(self) -> None:
        """Wake the consumer, and who waits in `admit`."""
        self.changed.set()
        self._stirred.set()
        self._stirred = asyncio.Event()

    async def _stirred_within(self, seconds: float) -> None:
        stirred = self._stirred
        try:
            async with asyncio.timeout(seconds):
                await stirred.wait()
        except TimeoutError:
            pass

    def block(self) -> None:
        """Take and send nothing until `unblock`: the broker stores nothing."""
        if self._storing.is_set():
            self._storing.clear()
            self._metrics.paused.labels("broker_blocked").set(1)
            self._metrics.pauses.labels("broker_blocked").inc()
            log.warning("paused", reason="broker_blocked")
            self.changed.set()

    def unblock(self) -> None:
        """Go on: the broker has stored something."""
        if not self._storing.is_set():
            self._storing.set()
            self._metrics.paused.labels("broker_blocked").set(0)
            log.info("resumed", reason="broker_blocked")
            self.changed.set()

    def renew_key(self) -> None:
        """Probe at once, and forget what is known of messages: the API key has changed."""
        self._key_is_new = True
        self._doubts = 0
        self._evidence.renew()
        self._stir()

    def reopen(self) -> None:
        """End a pause in which the service asked for a time that has passed, if nobody probes."""
        pause = self._pause
        is_open = self._gate_opens_at <= self._clock()
        if pause is not None and pause.reason == "rate_limited" and pause.probe is None and is_open:
            self.resume()

    def _slow_down(self, retry_after_seconds: float | None) -> None:
        now = self._clock()
        if self._gate_opens_at <= now:
            # Of many answers at once only the first makes the own back-off grow.
            self._slow_downs += 1
        own = FIRST_SLOW_DOWN_SECONDS * 2.0 ** min(self._slow_downs - 1, 6)
        wait = retry_after_seconds or min(own, MAX_HOLD_SECONDS)
        if wait > MAX_HOLD_SECONDS:
            self.pause("rate_limited")
        # Jitter upwards only: too early is refused again.
        opens_at = now + wait * random.uniform(1.0, 1.1)  # noqa: S311
        self._gate_opens_at = max(self._gate_opens_at, opens_at)
