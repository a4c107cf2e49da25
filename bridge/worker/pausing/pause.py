"""One pause: why nothing new is taken, which message is the probe, and when the probe may go.

The probe is another message than the last one where there is one: a message may have a fault of
its own. A better probe takes the place of another.
"""

import asyncio
import random
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.fates import PauseReason
from bridge.worker.pausing.gate import Gate

FIRST_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 60.0
MAX_OUTAGE_PROBE_SECONDS: Final = 15.0
# For messages on their last attempt: an hour of outage makes only a handful of them dead letters.
MAX_LAST_TRY_PROBE_SECONDS: Final = 300.0
# More would only make a number that is too large; these lead beyond the longest wait.
MAX_DOUBLINGS: Final = 9


class Rank(IntEnum):
    """How good a probe is; a better one takes the place of another.

    RELUCTANT: its failure would say nothing new, because it or another message to its recipient
    got an ambiguous status, or would be its end. TRIED: the last probe, held.
    """

    WILLING = 0
    RELUCTANT = 1
    TRIED = 2
    NOBODY = 3


# Two while another message would be the better probe: the one that is held takes up a place.
_PROBES_WANTED: Final = {
    Rank.WILLING: 0,
    Rank.RELUCTANT: 2,
    Rank.TRIED: 2,
    Rank.NOBODY: 1,
}


class _BackOff:
    """When the next probe may go: after a second, then each time after twice as long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start(0)

    def _start(self, failures: int) -> None:
        self._since = self._clock()
        self.failures = failures
        doubled = FIRST_PROBE_SECONDS * 2.0 ** min(failures, MAX_DOUBLINGS)
        self._seconds = min(doubled, MAX_LAST_TRY_PROBE_SECONDS)
        # Probes of many workers are spread.
        self._share = random.uniform(0.8, 1.0)  # noqa: S311

    def double(self) -> None:
        """Wait for twice as long as the last time."""
        self._start(self.failures + 1)

    def catch_up(self, failures: int) -> None:
        """Wait for as long as after so many failures, unless there were as many before."""
        if failures > self.failures:
            self._start(failures)

    def due_at(self, longest_seconds: float) -> float:
        """Return when the wait is over."""
        return self._since + min(self._seconds, longest_seconds) * self._share


class Pause:
    """A pause from its begin to its end; `reason` may change. Messages are known by their key.

    What the service asked for, the time at which `gate` opens, comes before any probe. `changed` is
    set when another number of deliveries is wanted. No message is the probe while
    `is_probed_elsewhere`, by another worker. `unaccepted_since`: a message that was accepted
    later refutes it; `status` is what the API answered. Times are of `clock`.
    """

    def __init__(
        self,
        reason: PauseReason,
        *,
        gate: Gate,
        changed: asyncio.Event,
        is_probed_elsewhere: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self.reason = reason
        self.status: int | None = None
        self.unaccepted_since = clock()
        # When the time is over for which the service wants no request.
        self.asked_until = 0.0
        self._gate = gate
        self._changed = changed
        self._is_probed_elsewhere = is_probed_elsewhere
        self._clock = clock
        self._began_at = clock()
        # Willing probes have a back-off of their own: a new message must not wait because a held
        # one has failed often.
        self._willing = _BackOff(clock)
        self._others = _BackOff(clock)
        self._key_is_new = False
        self._next_change = asyncio.Event()
        self._rank = Rank.NOBODY
        self.probe: str | None = None

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return self._clock() - self._began_at

    @property
    def seconds_to_probe(self) -> float:
        """How long it takes until the probe may go; zero or less when it may."""
        if self._key_is_new:
            return 0.0
        return max(self._due_at, self._gate.opens_at) - self._clock()

    @property
    def is_probed_soon(self) -> bool:
        """Whether the service wants no longer wait than a delivery can be held for."""
        return self._gate.closed_seconds < MAX_HOLD_SECONDS

    @property
    def probes_wanted(self) -> int:
        """How many deliveries to take, so that there is one to probe with."""
        if self._is_probed_elsewhere() or not self.is_probed_soon:
            return 0
        return _PROBES_WANTED[self._rank]

    @property
    def failures(self) -> tuple[int, int]:
        """How many probes have failed that were willing, and how many altogether."""
        return self._willing.failures, self._others.failures

    def claim(self, key: str, rank: Rank) -> bool:
        """Say whether a message is the probe; it becomes it unless a better one is.

        Nor does it if it would wait for too long: another one may have to wait for less.
        """
        if self._is_probed_elsewhere():
            self.give_up(key)
            return False
        if self.probe == key:
            return True
        former = self.probe, self._rank
        if rank >= self._rank:
            return False
        self.probe, self._rank = key, rank
        if self.seconds_to_probe > MAX_HOLD_SECONDS:
            self.probe, self._rank = former
            return False
        self.notify()
        return True

    def keep(self, key: str) -> bool:
        """Say whether a message that the pause is about is the probe; it is where no other is."""
        if self._is_probed_elsewhere():
            self.give_up(key)
            return False
        if self.probe is None:
            self.probe, self._rank = key, Rank.TRIED
            self.notify()
        return self.probe == key

    def note_departure(self) -> None:
        """Note that the probe goes: a new key has its try."""
        self._key_is_new = False

    def note_failure(self) -> None:
        """Note that the probe has not ended the pause: the next one waits for twice as long."""
        if self._rank is Rank.WILLING:
            self._willing.double()
        self._others.double()
        self._rank = Rank.TRIED
        self.notify()

    def catch_up(self, failures: tuple[int, int]) -> None:
        """Note how many probes have failed elsewhere: the next one waits as after those."""
        willing, altogether = failures
        self._willing.catch_up(willing)
        self._others.catch_up(altogether)

    def give_up(self, key: str) -> None:
        """Let another message become the probe, if this one was."""
        if self.probe == key:
            self.probe, self._rank = None, Rank.NOBODY
            self.notify()

    def renew_key(self) -> None:
        """Have the next probe go at once: the API key has changed."""
        self._key_is_new = True
        self.notify()

    def notify(self) -> None:
        """Wake the consumer, and whoever waits in `wait_for_change`."""
        self._changed.set()
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until something about the pause has changed, or `seconds` have passed."""
        change = self._next_change
        try:
            async with asyncio.timeout(seconds):
                await change.wait()
        except TimeoutError:
            pass

    @property
    def _due_at(self) -> float:
        is_outage = self.reason == "outage"
        if self._rank is Rank.WILLING:
            longest = MAX_OUTAGE_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS
            return self._willing.due_at(longest)
        longest = MAX_LAST_TRY_PROBE_SECONDS if is_outage else MAX_PROBE_SECONDS
        return self._others.due_at(longest)
