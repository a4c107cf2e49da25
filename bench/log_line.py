"""What the line costs that the bridge logs for each delivery, beside the standard library's.

    python -m bench.log_line

Prints the microseconds of CPU time of each, as JSON on standard error, those of the writing thread
included; the lines go to standard output, which should be a file or the null device.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Final

from bench.lineup import OURS
from bridge.telemetry.log_setup import LineWriter, configure_logging
from bridge.telemetry.logs import Log
from bridge.telemetry.metrics import BridgeMetrics, new_registry

STANDARD: Final = "`logging` and `json`"
# No more than may wait for the writing thread, or lines would be dropped, which is cheaper.
LINES: Final = 5_000
RUNS: Final = 10
PAUSE_SECONDS: Final = 0.1

LogLine = Callable[[int], None]


class _StandardFormatter(logging.Formatter):
    """What everybody writes first."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **record.__dict__["facts"],
        }
        return json.dumps(line)


def _standard_log() -> LogLine:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_StandardFormatter())
    log = logging.getLogger("standard")
    log.propagate = False
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lambda number: log.info(
        "delivery",
        extra={
            "facts": {
                "message_id": f"id-{number:08d}",
                "outcome": "sent",
                "detail": "accepted",
                "status": 202,
                "attempts": 1,
                "seconds": round(number / 7, 4),
            }
        },
    )


def _our_log() -> LogLine:
    metrics = BridgeMetrics(
        new_registry(), component="worker", version="", revision="", exchanges=()
    )
    writer = LineWriter(sys.stdout, dropped=metrics.log_lines_dropped.inc)
    configure_logging(
        "info",
        "json",
        stream=writer,
        count=lambda level: metrics.log_records.labels(level).inc(),
        finish=writer.finish,
    )
    log = Log("bridge.worker.settle")
    return lambda number: log.info(
        "delivery",
        message_id=f"id-{number:08d}",
        outcome="sent",
        reason=None,
        detail="accepted",
        status=202,
        attempts=1,
        redelivered=None,
        seconds=round(number / 7, 4),
    )


def _microseconds(log: LogLine) -> float:
    begun = time.process_time()
    for number in range(LINES):
        log(number)
    # The writing thread ends its part.
    time.sleep(PAUSE_SECONDS)
    return (time.process_time() - begun) / LINES * 1e6


def main() -> None:
    """Measure in turn, and print the least of each, which is what nothing has disturbed."""
    logs = {OURS: _our_log(), STANDARD: _standard_log()}
    least = {name: min(_microseconds(log) for _ in range(RUNS)) for name, log in logs.items()}
    sys.stderr.write(json.dumps(least))


if __name__ == "__main__":
    main()
