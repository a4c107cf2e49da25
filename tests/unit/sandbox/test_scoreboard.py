"""The demo's account: metrics are read, summed up and compared with what was seen."""

import math
from io import StringIO

import pytest
from rich.console import Console

from bridge.sandbox.scoreboard import (
    Summary,
    check_webhook_metrics,
    check_worker_metrics,
    percentile,
)
from bridge.sandbox.traffic import Seen, plan_requests, plan_webhooks
from bridge.telemetry.scrape import Scrape

WORKER = Scrape(
    """\
# TYPE sms_bridge_worker_messages_processed_total counter
sms_bridge_worker_messages_processed_total{queue="q",outcome="sent",reason="none"} 3.0
sms_bridge_worker_messages_processed_total{queue="q",outcome="dead",reason="invalid"} 1.0
sms_bridge_worker_messages_processed_total{queue="q",outcome="dead",reason="refused"} 0.0
sms_bridge_worker_messages_processed_total{queue="q",outcome="retried",reason="uncertain"} 2.0
# TYPE latency_seconds histogram
latency_seconds_bucket{queue="q",le="0.5"} 2.0
latency_seconds_bucket{queue="q",le="1.0"} 3.0
latency_seconds_bucket{queue="q",le="+Inf"} 3.0
latency_seconds_sum{queue="q"} 1.5
latency_seconds_count{queue="q"} 3.0
"""
)
WEBHOOK_BEFORE = Scrape(
    """\
# TYPE sms_bridge_webhook_events_total counter
sms_bridge_webhook_events_total{event_type="other",outcome="published"} 1.0
"""
)
WEBHOOK = Scrape(
    """\
# TYPE sms_bridge_webhook_events_total counter
sms_bridge_webhook_events_total{event_type="other",outcome="published"} 2.0
sms_bridge_webhook_events_total{event_type="other",outcome="unparsed"} 1.0
sms_bridge_webhook_events_total{event_type="other",outcome="duplicate"} 1.0
sms_bridge_webhook_events_total{event_type="unknown",outcome="invalid_signature"} 1.0
"""
)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, 0.1), (0.25, 0.05), (0.75, 0.55), (1.0, 1.0)],
)
def test_interpolates_in_a_bucket(share: float, expected: float) -> None:
    """A percentile inside a bucket is taken as if observations were spread evenly over it."""
    buckets = [(0.1, 50.0), (1.0, 100.0), (math.inf, 100.0)]

    assert percentile(share, buckets) == pytest.approx(expected)


def test_knows_only_the_lower_bound_of_the_last_bucket() -> None:
    """A percentile above the highest bound is given as that bound."""
    assert percentile(0.99, [(1.0, 1.0), (math.inf, 100.0)]) == 1.0


@pytest.mark.parametrize("buckets", [[], [(1.0, 0.0), (math.inf, 0.0)]])
def test_has_no_percentile_of_nothing(buckets: list[tuple[float, float]]) -> None:
    """Without an observation there is no percentile."""
    assert math.isnan(percentile(0.5, buckets))


def test_reads_a_histogram() -> None:
    """The buckets of a histogram come in ascending order of their bounds."""
    assert WORKER.buckets("latency_seconds") == [(0.5, 2.0), (1.0, 3.0), (math.inf, 3.0)]


def test_accepts_metrics_that_agree() -> None:
    """Metrics that count what was seen cause no complaint."""
    seen = Seen(
        accepted=["a", "b", "c"],
        dead=[("d", "invalid")],
        answers={"x": [200, 200], "y": [401], "z": [200]},
        events=[("x", "other"), ("z", "unparsed")],
    )

    assert check_worker_metrics(WORKER, seen) == []
    assert check_webhook_metrics(WEBHOOK, seen, before=WEBHOOK_BEFORE) == []


def test_finds_metrics_that_disagree() -> None:
    """Metrics that count anything else than what was seen are told, one line for each role."""
    assert len(check_worker_metrics(WORKER, Seen())) == 1
    assert len(check_webhook_metrics(WEBHOOK, Seen(), before=Scrape())) == 1


def test_sums_up_a_run_in_which_nothing_was_seen() -> None:
    """The summary can be drawn however early a run has failed."""
    summary = Summary(
        Scrape(),
        Scrape(),
        Seen(),
        requests=plan_requests(50, run="ab"),
        webhooks=plan_webhooks(20, run="ab"),
    )
    console = Console(file=StringIO(), width=110)
    for part in summary.parts():
        console.print(part)
    assert isinstance(console.file, StringIO)

    assert "nan" not in console.file.getvalue()
