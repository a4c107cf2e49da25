"""The demo's account: metrics are compared with what was seen, and drawn as tables."""

import math
from io import StringIO

import pytest
from rich.console import Console

from bridge.sandbox.demo.report import DemoReport, percentile
from bridge.sandbox.demo.traffic import Observed, plan_messages, plan_webhooks
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


def test_accepts_metrics_that_agree() -> None:
    """Metrics that count what was seen cause no complaint."""
    report = DemoReport([], [])
    report.worker, report.webhook, report.webhook_before = WORKER, WEBHOOK, WEBHOOK_BEFORE
    report.seen.accepted += ["a", "b", "c"]
    report.seen.dead += [("d", "invalid")]
    report.seen.answers |= {"x": [200, 200], "y": [401], "z": [200]}
    report.seen.events += [("x", "other"), ("z", "unparsed")]

    assert report.check_metrics() == []


def test_finds_metrics_that_disagree() -> None:
    """Metrics that count anything else than what was seen are told, one line for each role."""
    report = DemoReport([], [])
    report.worker, report.webhook = WORKER, WEBHOOK

    assert len(report.check_metrics()) == 2


def test_sums_up_a_run_in_which_nothing_was_seen() -> None:
    """The summary can be drawn however early a run has failed."""
    report = DemoReport(plan_messages(50, run="ab"), plan_webhooks(20, run="ab"))
    console = Console(file=StringIO(), width=110)
    for part in report.tables():
        console.print(part)
    assert isinstance(console.file, StringIO)

    assert report.seen == Observed()
    assert "nan" not in console.file.getvalue()
