"""Measures counting with the bridge's counters and with prometheus-client's.

    python -m bench.counting

Prints the CPU time of one increment and of one observed duration in nanoseconds, as JSON; each
figure is the minimum of several runs.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry

from bridge.telemetry.counters import CounterChild, HistogramChild

COUNTS: Final = 100_000
RUNS: Final = 10
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SECONDS: Final = 0.07


def _nanoseconds(count: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(RUNS):
        begun = time.process_time()
        for _ in range(COUNTS):
            count()
        least = min(least, time.process_time() - begun)
    return round(least / COUNTS * 1e9)


def main() -> None:
    """Measure, and print."""
    registry = CollectorRegistry()
    counter = prometheus_client.Counter("theirs", "Counted.", ["label"], registry=registry)
    histogram = prometheus_client.Histogram(
        "theirs_seconds", "Noted.", ["label"], buckets=BUCKETS, registry=registry
    )
    # Children that are kept, which is the cheapest way to use them.
    theirs, their_seconds = counter.labels("a"), histogram.labels("a")
    ours, our_seconds = CounterChild(), HistogramChild(BUCKETS)
    results = {
        "sms-bridge": {
            "count": _nanoseconds(ours.inc),
            "note a duration": _nanoseconds(lambda: our_seconds.observe(SECONDS)),
        },
        "prometheus-client": {
            "count": _nanoseconds(theirs.inc),
            "note a duration": _nanoseconds(lambda: their_seconds.observe(SECONDS)),
        },
    }
    json.dump(results, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
