"""How a status is put together, of which the broker or the workers may say nothing."""

from typing import Any

from bridge.admin.admin_port import HealthReport, PauseFacts, WorkerFacts
from bridge.admin.pausing import Paused
from bridge.admin.status.look import BrokerReading, put_together
from bridge.admin.status.processes import Reading
from bridge.admin.status.report import (
    OperatorPauseReport,
    ProcessReport,
    QueueReport,
    RatesReport,
    Status,
    WorkerReport,
)
from bridge.telemetry.scrape import Scrape
from bridge.topology.paused_queue import Note
from bridge.topology.queue_sizes import QueueSizes

QUEUES = [
    QueueReport(name="q", role="requests"),
    QueueReport(name="q.retry.5s", role="retry", delay_seconds=5.0),
    QueueReport(name="q.dead", role="dead_letters"),
]
SIZES = {"q": QueueSizes(7, 2), "q.retry.5s": QueueSizes(0, 0, exists=False), "q.dead": None}
NOTE = Note("wrong text", 1_896_059_520.0)
SHOWN_NOTE = OperatorPauseReport(since="2030-01-31T03:12:00Z", reason="wrong text")
SILENT = "no connection"
OPERATORS = PauseFacts(reason="operator", since=None, status=None, code=None)


def broker(*, paused: Paused | None = None, is_paused: bool | None = False) -> BrokerReading:
    """Make what a broker says."""
    return BrokerReading(SIZES, refused=[], stores=True, is_paused=is_paused, paused=paused)


def process(**facts: Any) -> ProcessReport:
    """Make a worker's process."""
    usual: dict[str, Any] = {
        "queue": "q",
        "pauses": (),
        "outage_suspected": False,
        "retry_after_seconds": 0.0,
        "is_consuming": True,
        "held": 0,
        "in_flight": 0,
        "oldest_seconds": None,
        "last_sent_at": None,
        "rates": None,
        "sent": 0,
        "retried": {},
        "dead": {},
    }
    return ProcessReport(
        name="w:1", address="w:1", fault=None, worker=WorkerReport(**usual | facts)
    )


def saw(at: float, ready: int, note: Note | None = None) -> Reading:
    """Make the reading of a worker that has read the queues at some moment."""
    page = (
        f"sms_bridge_worker_queue_stats_timestamp_seconds {at}\n"
        f'sms_bridge_worker_queue_messages_ready{{queue="q"}} {ready}\n'
        'sms_bridge_worker_queue_consumers{queue="q"} 3\n'
    )
    facts = WorkerFacts(queue="q").model_copy(update={"paused_by_operator": note})
    return Reading(0.0, HealthReport(status="ok", checks={}, worker=facts), Scrape(page))


def sizes(status: Status) -> list[tuple[bool | None, int | None, int | None]]:
    """Return what is told of each queue."""
    return [(one.exists, one.ready, one.consumers) for one in status.queues]


def test_queues_as_the_broker_says() -> None:
    """Its word counts; a queue that is missing, and one that cannot be read, are told apart."""
    status = put_together(QUEUES, [], [saw(1_900_000_000, 99)], broker())

    assert status.queues_from == "broker"
    assert sizes(status) == [(True, 7, 2), (False, None, None), (None, None, None)]


def test_queues_as_a_worker_saw_them() -> None:
    """Without the broker, what the workers read last is told, with when that was."""
    readings = [saw(1_900_000_000, 5), saw(1_900_000_060, 6), saw(0, 0)]
    status = put_together(QUEUES, [], readings, SILENT)

    assert (status.queues_from, status.queues_at) == ("workers", "2030-03-17T17:47:40Z")
    assert sizes(status) == [(None, 6, 3), (None, None, None), (None, None, None)]
    assert status.broker.fault == SILENT


def test_nothing_is_made_up() -> None:
    """When nobody answers nothing is known, and no zero is told."""
    status = put_together(QUEUES, [], [], SILENT)

    assert (status.queues_from, status.queues_at) == (None, None)
    assert sizes(status) == [(None, None, None)] * 3
    assert (status.rates, status.oldest_seconds, status.is_paused_by_operator) == (None, None, None)
    assert (status.dead_letters.waiting, status.broker.stores) == (None, None)


def test_workers_are_added_up() -> None:
    """Rates and dead letters of all, and the oldest message that any of them holds."""
    rates = RatesReport(sent_per_second=1.5, retried_per_second=0.1, dead_per_second=0.0)
    workers = [
        process(rates=rates, dead={"refused": 2}, oldest_seconds=3.0),
        process(rates=rates, dead={"refused": 1, "invalid": 4}, oldest_seconds=9.0),
        process(),
    ]
    status = put_together(QUEUES, workers, [], SILENT)

    assert status.rates == RatesReport(
        sent_per_second=3.0, retried_per_second=0.2, dead_per_second=0.0
    )
    assert status.dead_letters.by_reason == {"refused": 3, "invalid": 4}
    assert status.oldest_seconds == 9.0


def test_an_operators_pause_is_the_brokers_to_tell() -> None:
    """The broker has it; what a worker has not heard yet changes nothing."""
    paused = put_together(QUEUES, [process()], [], broker(paused=Paused(NOTE), is_paused=True))
    resumed = put_together(QUEUES, [process(pauses=(OPERATORS,))], [saw(1, 0, NOTE)], broker())

    assert (paused.is_paused_by_operator, paused.paused_by_operator) == (True, SHOWN_NOTE)
    assert (resumed.is_paused_by_operator, resumed.paused_by_operator) == (False, None)


def test_without_the_broker_a_worker_tells_it() -> None:
    """A worker that heeds it knows; that none does proves nothing."""
    heeding = put_together(QUEUES, [process(pauses=(OPERATORS,))], [saw(1, 0, NOTE)], SILENT)
    unsure = put_together(QUEUES, [process(pauses=(OPERATORS,))], [], broker(is_paused=None))
    unknown = put_together(QUEUES, [process()], [saw(1, 0)], broker(is_paused=None))

    assert (unsure.is_paused_by_operator, unsure.paused_by_operator) == (True, None)
    assert (heeding.is_paused_by_operator, heeding.paused_by_operator) == (True, SHOWN_NOTE)
    assert (unknown.is_paused_by_operator, unknown.paused_by_operator) == (None, None)
