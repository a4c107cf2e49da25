"""What one reading of an admin port means, beside the one before it."""

import time

from bridge.admin.admin_port import AdminPort, HealthReport, WorkerFacts
from bridge.admin.status.processes import Reading, describe
from bridge.admin.status.report import ProcessReport, RatesReport, WorkerReport
from bridge.telemetry.scrape import Scrape

QUEUE = "q"
PORT = AdminPort("10.0.0.7", 9090)
NAME = AdminPort("workers", 9090)


def reading(
    at: float = 10.0,
    *,
    queue: str = QUEUE,
    started: float = 5.0,
    draining: bool = False,
    **counted: float,
) -> Reading:
    """Make a worker's reading; `counted` are deliveries by outcome."""
    lines = [
        f'sms_bridge_worker_messages_processed_total{{outcome="{outcome}",reason="r"}} {count}'
        for outcome, count in counted.items()
    ]
    lines += [
        f"process_start_time_seconds {started}",
        'sms_bridge_build_info{version="0.1.0"} 1',
        "sms_bridge_amqp_connection_up 1",
    ]
    health = HealthReport(
        status="ok",
        checks={"not_draining": "failing" if draining else "ok", "consumer": "ok"},
        worker=WorkerFacts(queue=queue),
    )
    return Reading(at, health, Scrape("\n".join(lines) + "\n"))


def described(now: Reading, before: Reading | None = None) -> ProcessReport:
    """Describe it as that of our queue."""
    return describe(NAME, PORT, now, before, queue=QUEUE)


def worker(now: Reading, before: Reading | None = None) -> WorkerReport:
    """Describe the worker."""
    found = described(now, before).worker
    assert found is not None
    return found


def test_rates_are_of_the_time_between() -> None:
    """What was counted between two readings, each second."""
    before = reading(10.0, sent=100, retried=10, dead=1)
    now = reading(12.0, sent=300, retried=15, dead=2)

    assert worker(now, before).rates == RatesReport(
        sent_per_second=100.0, retried_per_second=2.5, dead_per_second=0.5
    )
    assert (worker(now).sent, worker(now).retried, worker(now).dead) == (300, {"r": 15}, {"r": 2})


def test_another_process_has_no_rate() -> None:
    """The first reading of a process, after its start or a restart, says no rate."""
    now = reading(12.0, sent=1)

    assert worker(now).rates is None
    assert worker(now, reading(10.0, sent=100, started=4.0)).rates is None


def test_a_worker_of_another_queue_is_not_counted() -> None:
    """It answers, but is not what was asked for, and is told as that."""
    found = described(reading(queue="another", sent=7))

    assert found.fault == "a worker of another queue answers"
    assert (found.worker, found.webhook) == (None, None)


def test_what_fails_is_told() -> None:
    """The checks that fail, the version, and whether it is connected."""
    found = described(reading(draining=True))

    assert (found.name, found.address) == ("workers:9090", "10.0.0.7:9090")
    assert (found.failing, found.version) == (["not_draining"], "0.1.0")
    assert found.is_connected is True


def test_the_age_of_the_oldest() -> None:
    """How long ago the oldest one in hand was published; none is in hand at zero."""
    name = "sms_bridge_worker_oldest_held_message_timestamp_seconds"
    held = reading()._replace(scrape=Scrape(f"{name} {time.time() - 90}\n"))
    none = reading()._replace(scrape=Scrape(f"{name} 0\n"))

    assert worker(held).oldest_seconds in (90.0, 90.1, 90.2)
    assert worker(none).oldest_seconds is None


EVENTS = 'sms_bridge_webhook_events_total{{event_type="t",outcome="{}"}} {}\n'


def test_a_receiver() -> None:
    """Webhooks by what became of them: published, refused, failed; a repeat is none of these."""

    def page(count: int) -> Scrape:
        outcomes = ("published", "unparsed", "duplicate", "invalid_signature", "overloaded")
        return Scrape("".join(EVENTS.format(outcome, count) for outcome in outcomes))

    health = HealthReport(status="ok", checks={"listener": "ok"})
    before, now = Reading(10.0, health, page(0)), Reading(12.0, health, page(4))
    found = described(now, before)

    assert found.worker is None
    assert found.webhook is not None
    assert found.webhook.published_per_second == 4.0
    assert found.webhook.refused_per_second == 2.0
    assert found.webhook.failed_per_second == 2.0
    assert found.webhook.events["duplicate"] == 4
