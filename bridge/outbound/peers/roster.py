"""Which other workers of the queue are there, and when each was heard last."""

import time
from collections.abc import Callable
from typing import Final

from bridge.logs import Log

log = Log(__name__)

# Who was silent for longer is taken to be gone: five beats.
PRESENT_SECONDS: Final = 5.0
# Who was silent for longer is forgotten.
REMEMBERED_SECONDS: Final = 60.0
# Who looks after the roster does so each second; after a longer gap this process has been frozen,
# or had no CPU time, and heard nobody.
MAX_GAP_SECONDS: Final = 3.0
# Far more than share a queue. Of more, those that were heard last are known.
MAX_PEERS: Final = 1000


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
        self._heard: dict[str, float] = {}
        self._present: set[str] = set()

    def others(self, within_seconds: float) -> frozenset[str]:
        """Return who was heard within the last so many seconds, at most 60, and did not leave."""
        since = self._now() - within_seconds
        return frozenset(one for one, at in self._heard.items() if at >= since)

    def note(self, worker_id: str) -> None:
        """Note that a peer was heard."""
        self._heard.pop(worker_id, None)
        self._heard[worker_id] = self._now()
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
        for worker_id, at in list(self._heard.items()):
            if at < now - PRESENT_SECONDS:
                self._part_with(worker_id, why="it is silent")
            if at < now - REMEMBERED_SECONDS:
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
