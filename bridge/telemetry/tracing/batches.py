"""Spans that wait for their export, and the thread that exports them in batches.

Why not the SDK's batch processor: it takes its own kind of span alone, and drops the oldest one
where no room is left, counted nowhere that we could read.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from bridge.telemetry.logs import Log
from bridge.telemetry.tracing.recorded import RecordedSpan

log = Log(__name__)

# How many spans may wait, those that are being exported included.
MAX_WAITING_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 512
BATCH_SECONDS: Final = 1.0


class Batches:
    """Takes spans on the event loop, and exports them in a thread that no end of a process awaits.

    `export` is called in that thread, and `stopped` as its last act.
    """

    def __init__(
        self,
        export: Callable[[Sequence[RecordedSpan]], None],
        *,
        stopped: Callable[[], None],
    ) -> None:
        self._export = export
        self._stopped = stopped
        self._waiting: deque[RecordedSpan] = deque()
        # Each is written by one thread alone: the event loop's, and ours.
        self._taken = self._done = 0
        self._wake = threading.Event()
        self._is_stopping = False
        threading.Thread(target=self._run, name="spans", daemon=True).start()

    @property
    def waiting(self) -> int:
        """How many spans were taken, and their export has not ended."""
        return self._taken - self._done

    def put(self, span: RecordedSpan) -> bool:
        """Take a span, unless there is no room; the thread is woken for a full batch only."""
        if self._taken - self._done >= MAX_WAITING_SPANS:
            return False
        self._taken += 1
        self._waiting.append(span)
        if len(self._waiting) == MAX_BATCH_SPANS:
            self._wake.set()
        return True

    def stop(self) -> None:
        """Have what waits exported, and the thread end then."""
        self._is_stopping = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(BATCH_SECONDS)
            self._wake.clear()
            self._export_batch()
            while len(self._waiting) >= MAX_BATCH_SPANS:
                self._export_batch()
        while self._waiting:
            self._export_batch()
        self._stopped()

    def _export_batch(self) -> None:
        count = min(len(self._waiting), MAX_BATCH_SPANS)
        if not count:
            return
        batch = [self._waiting.popleft() for _ in range(count)]
        try:
            self._export(batch)
        except Exception:
            log.exception("internal_error")
        finally:
            self._done += count
