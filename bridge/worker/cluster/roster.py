"""Which other workers of the queue are there, and when each was heard last."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from bridge.telemetry.logs import Log
from bridge.worker.cluster.beats import BEAT_SECONDS, PRESENT, REMEMBERED, Silence

log = Log(__name__)

# Who looks after the roster does so each second; after a longer gap this process has been frozen,
# or had no CPU time, and heard nobody.
MAX_GAP_SECONDS: Final = 3.0
# Far more than share a queue. Of more, those that were heard last are known.
MAX_PEERS: Final = 1000


class _Heard(NamedTuple):
    """When a peer was heard last, and how often it says that it is there, if it tells."""

    at: float
    beat_seconds: float | None

    def is_within(self, silence: Silence, now: float) -> bool:
        return now - self.at <= silence.seconds_at(self.beat_seconds or BEAT_SECONDS)


class Roster:
    """Peers by their id.

    Its time stands still while this worker itself cannot hear: a peer that is silent then need not
    be gone. It cannot hear before the first `resume`; from then on call `tidy` each second.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaf_since: float | None = clock()
        self._deaf_seconds = 0.0
        self._tidied_at = clock()
        # In the order in which they were heard last.
        self._heard: dict[str, _Heard] = {}
        self._present: set[str] = set()

    def others(self, silence: Silence) -> frozenset[str]:
        """Return who did not leave, and was silent for no longer than so."""
        now = self._now()
        return frozenset(one for one, heard in self._heard.items() if heard.is_within(silence, now))

    def beats(self) -> list[float | None]:
        """Return how often each that is there says so, in seconds; None for one that never did."""
        now = self._now()
        return [one.beat_seconds for one in self._heard.values() if one.is_within(PRESENT, now)]

    def note(self, worker_id: str, beat_seconds: float | None = None) -> None:
        """Note that a peer was heard, and how often it is to be heard if it says so."""
        before = self._heard.pop(worker_id, None)
        if beat_seconds is None and before is not None:
            beat_seconds = before.beat_seconds
        self._heard[worker_id] = _Heard(self._now(), beat_seconds)
        if len(self._heard) > MAX_PEERS:
            self._forget(next(iter(self._heard)))
        if worker_id not in self._present:
            self._present.add(worker_id)
            log.info("peer_present", peer=worker_id)

    def leave(self, worker_id: str) -> None:
        """Note that a peer has said that it ends."""
        if self._heard.pop(worker_id, None) is not None:
            self._part_with(worker_id, why="it has stopped")

    def tidy(self) -> None:
        """Log who has fallen silent, and forget who has been silent for long."""
        gap_seconds = self._clock() - self._tidied_at
        if gap_seconds > MAX_GAP_SECONDS:
            self._deaf_seconds += gap_seconds
        self._tidied_at = self._clock()
        now = self._now()
        for worker_id, heard in list(self._heard.items()):
            if not heard.is_within(PRESENT, now):
                self._part_with(worker_id, why="it is silent")
            if not heard.is_within(REMEMBERED, now):
                self._forget(worker_id)

    def pause(self) -> None:
        """Stop the time: this worker hears nobody."""
        if self._deaf_since is None:
            self._deaf_since = self._clock()

    def resume(self) -> None:
        """Let the time go on."""
        if self._deaf_since is not None:
            self._deaf_seconds += self._clock() - self._deaf_since
            self._deaf_since = None
            self._tidied_at = self._clock()

    def _forget(self, worker_id: str) -> None:
        del self._heard[worker_id]
        self._present.discard(worker_id)

    def _part_with(self, worker_id: str, *, why: str) -> None:
        if worker_id in self._present:
            self._present.discard(worker_id)
            log.info("peer_gone", peer=worker_id, why=why)

    def _now(self) -> float:
        now = self._clock() if self._deaf_since is None else self._deaf_since
        return now - self._deaf_seconds
