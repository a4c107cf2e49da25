"""The demo's account: metrics are compared with what was seen, and drawn as tables."""

from io import StringIO

from rich.console import Console

from bridge.sandbox.demo.report import DemoReport
from bridge.sandbox.demo.traffic import Observed, plan_messages, plan_webhooks
from bridge.telemetry.scrape import Scrape

WORKER = Scrape(
    """\
# TYPE sms_bridge_worker_messages_processed_total counter
sms_bridge_worker_messages_processed_total{queue="q",outcome="sent",reason="none"} 3.0
sms_bridge_worker_messages_processed_total{queue="q",outcome="dead",reason="invalid"} 1.0
sms_bridge_worker_messages_processed_total{queue="q",outcome="dead",reason="refused"} 0.0
sms_bridge_worker_messages_processed_total{queue="q",outcome="retried",reason="uncertain"} 2.0
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
    console.print(report.outbound())
    console.print(report.inbound())

    assert report.seen == Observed()
