"""The lines of `sms-bridge status`."""

import time
from typing import Any, get_args

import pytest

from bridge.admin.admin_port_client import PauseFacts
from bridge.admin.status import (
    BrokerReport,
    DeadLettersReport,
    OperatorPauseReport,
    ProcessReport,
    QueueReport,
    RatesReport,
    ReceiverReport,
    Status,
    WorkerReport,
)
from bridge.cli.status import WIDTH, format_status
from bridge.telemetry.log_format import utc_text
from bridge.worker.fates import PauseReason

QUEUES = (
    QueueReport(name="sms.outbound", role="requests", exists=True, ready=1204, consumers=2),
    QueueReport(name="sms.outbound.retry.5s", role="retry", delay_seconds=5, exists=True, ready=12),
    QueueReport(name="sms.outbound.retry.30s", role="retry", delay_seconds=30, exists=False),
    QueueReport(name="sms.outbound.urgent.retry.5s", role="retry", exists=True, ready=0),
    QueueReport(name="sms.outbound.dead", role="dead_letters", exists=True, ready=31, consumers=0),
)
RATES = RatesReport(sent_per_second=98.2, retried_per_second=0.5, dead_per_second=0.0)


def ago(seconds: float) -> str:
    return utc_text(time.time() - seconds)


def paused(reason: str, *, since: str | None = None, **facts: Any) -> PauseFacts:
    usual: dict[str, Any] = {"status": None, "code": None}
    return PauseFacts(reason=reason, since=since, **usual | facts)


def worker(address: str, *pauses: PauseFacts, **facts: Any) -> ProcessReport:
    failing, is_connected = facts.pop("failing", ()), facts.pop("is_connected", True)
    usual: dict[str, Any] = {
        "queue": "sms.outbound",
        "pauses": pauses,
        "outage_suspected": False,
        "retry_after_seconds": 0.0,
        "is_consuming": True,
        "held": 50,
        "in_flight": 20,
        "oldest_seconds": 3.0,
        "last_sent_at": ago(5400),
        "rates": RATES,
        "sent": 0,
        "retried": {},
        "dead": {},
    }
    return ProcessReport(
        name=address,
        address=address,
        fault=None,
        failing=failing,
        is_connected=is_connected,
        worker=WorkerReport(**usual | facts),
    )


def status(*processes: ProcessReport, **facts: Any) -> Status:
    usual: dict[str, Any] = {
        "at": ago(0),
        "broker": BrokerReport(fault=None, stores=True),
        "queues": QUEUES,
        "queues_from": "broker",
        "queues_at": ago(0),
        "is_paused_by_operator": False,
        "paused_by_operator": None,
        "oldest_seconds": None,
        "rates": RATES,
        "dead_letters": DeadLettersReport(waiting=31, by_reason={}),
        "processes": processes,
    }
    return Status(**usual | facts)


def screen(*processes: ProcessReport, **facts: Any) -> str:
    return "\n".join(line.text for line in format_status(status(*processes, **facts)))


def sentences(*processes: ProcessReport, **facts: Any) -> list[str]:
    joined: list[str] = []
    for line in format_status(status(*processes, **facts)):
        if line.style == "red" and line.text.startswith(" "):
            joined[-1] += " " + line.text.strip()
        elif line.style == "red":
            joined.append(line.text)
    return joined


TWO = (worker("10.0.0.7:9090"), worker("10.0.0.8:9090"))


def test_all_is_well() -> None:
    receiver = ReceiverReport(
        last_event_at=None,
        published_per_second=3.0,
        refused_per_second=0.0,
        failed_per_second=None,
        events={},
    )
    webhook = ProcessReport(
        name="w", address="10.0.0.9:9090", fault=None, is_connected=True, webhook=receiver
    )
    reasons = {"invalid": 1, "refused": 20}
    found = screen(
        *TWO,
        webhook,
        oldest_seconds=75.0,
        dead_letters=DeadLettersReport(waiting=31, by_reason=reasons),
    )
    lines = found.splitlines()

    assert sentences(*TWO, webhook) == []
    assert lines[0].endswith("Z  2 workers: 98.2 sent/s, 0.5 retried/s, 0.0 dead/s")
    assert lines[2:5] == [
        "QUEUE              WAITING  CONSUMERS",
        "sms.outbound         1,204          2  oldest held: 1m",
        "sms.outbound.dead       31          0",
    ]
    assert "in the retry queues: 5s 12, 30s missing, urgent 5s 0" in lines
    assert "dead letters since the workers started: refused 20, invalid 1" in lines
    assert lines[-6:] == [
        "WORKER         HELD  SENT/S  RETRY/S  DEAD/S  LAST  STATE",
        "10.0.0.7:9090    50    98.2      0.5     0.0    1h  ready",
        "10.0.0.8:9090    50    98.2      0.5     0.0    1h  ready",
        "",
        "WEBHOOK        EVENTS/S  REFUSED/S  FAILED/S  LAST  STATE",
        "10.0.0.9:9090       3.0        0.0         -     -  ready",
    ]
    assert len(lines) < 24
    assert max(len(line) for line in lines) <= WIDTH


def test_the_oldest_held_message_is_shown_once() -> None:
    """The age is that of all queues together, so it stands beside the main queue only."""
    urgent = QueueReport(name="sms.outbound.urgent", role="requests", exists=True, ready=0)
    found = screen(*TWO, queues=(QUEUES[0], urgent, *QUEUES[1:]), oldest_seconds=75.0)

    assert [line.split()[0] for line in found.splitlines() if "oldest held" in line] == [
        "sms.outbound"
    ]


def test_an_operators_pause() -> None:
    ones = [worker(f"10.0.0.{last}:9090", paused("operator")) for last in (7, 8)]
    note = OperatorPauseReport(since=ago(2300), reason="wrong text", by="anna@admin-1")
    found = sentences(*ones, is_paused_by_operator=True, paused_by_operator=note)
    bare = sentences(*ones, is_paused_by_operator=True)

    since = f"since {note.since} (38m)"
    assert found == [
        f"PAUSED  every worker, by anna@admin-1 {since}: wrong text; `sms-bridge resume` ends it"
    ]
    assert bare == ["PAUSED  every worker, by an operator; `sms-bridge resume` ends it"]
    assert "paused: operator" in screen(*ones)


@pytest.mark.parametrize("reason", get_args(PauseReason))
def test_workers_own_pauses(reason: PauseReason) -> None:
    first, second = ago(600), ago(60)
    ones = [
        worker("10.0.0.7:9090", paused(reason, since=second)),
        worker("10.0.0.8:9090", paused(reason, since=first, status=402, code="9")),
        worker("10.0.0.9:9090"),
    ]
    (found,) = sentences(*ones)

    assert found.startswith(
        f"PAUSED  2 of 3 workers, {reason} since {first} (10m), status 402, code 9: "
    )
    assert "; " in found


ONE, OTHER = TWO
NO_ANSWER = BrokerReport(fault="no connection to rabbitmq:5672 (refused)", stores=None)


def consumers(count: int) -> list[QueueReport]:
    return [QueueReport(name="q", role="requests", exists=True, ready=0, consumers=count)]


@pytest.mark.parametrize(
    ("processes", "facts", "fault"),
    [
        (
            [ONE, worker("w", retry_after_seconds=12.0)],
            {},
            "SLOWED DOWN  1 of 2 workers, after the service's 429, for another 12s",
        ),
        (
            [ONE, worker("w", outage_suspected=True)],
            {},
            "OUTAGE SUSPECTED  by 1 of 2 workers: requests keep failing",
        ),
        (TWO, {"broker": NO_ANSWER}, "BROKER  no connection to rabbitmq:5672 (refused)"),
        (
            [*TWO, ProcessReport(name="workers:9090", address="10.0.0.9:9090", fault="silent")],
            {},
            "NO ANSWER  10.0.0.9:9090 (workers:9090): silent",
        ),
        (
            [*TWO, ProcessReport(name="nobody:1", address="nobody:1", fault="no address")],
            {},
            "NO ANSWER  nobody:1: no address",
        ),
        (
            [ONE],
            {},
            "NOT SHOWN  1 of 2 workers that consume: name their admin ports with --admin",
        ),
        ([], {"queues": consumers(0), "rates": None}, "NO WORKER  consumes requests"),
        (
            [worker("w", paused("lunch")), OTHER],
            {},
            "PAUSED  1 of 2 workers, lunch: a later version",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults(processes: list[ProcessReport], facts: dict[str, Any], fault: str) -> None:
    (found,) = sentences(*processes, **facts)

    assert found.startswith(fault)


def test_what_a_worker_saw_has_its_age() -> None:
    facts = {"broker": NO_ANSWER, "queues_from": "workers", "queues_at": ago(16)}

    assert "QUEUE              WAITING  CONSUMERS  seen by a worker 16s ago" in screen(
        *TWO, **facts
    )
    # How many consumers there are now is not known.
    assert len(sentences(ONE, **facts)) == 1


def test_the_ended_consumer_of_a_paused_worker_is_no_other_worker() -> None:
    one = worker("10.0.0.7:9090", paused("credentials_rejected"), held=1)
    assert len(sentences(one)) == 1
    assert sentences(worker("10.0.0.7:9090", paused("credentials_rejected"), held=0))[1].startswith(
        "NOT SHOWN  1 of 2 workers"
    )


def test_a_narrow_terminal() -> None:
    note = OperatorPauseReport(since=ago(60), reason="wrong text in the spring campaign")
    found = status(*TWO, is_paused_by_operator=True, paused_by_operator=note)
    lines = [line.text for line in format_status(found, 40)]
    wrong = [line.text for line in format_status(found, 40) if line.style == "red"]
    ladder = next(at for at, line in enumerate(lines) if line.startswith("in the retry queues"))

    assert max(map(len, [*wrong, *lines[ladder : ladder + 2]])) <= 40
    assert "wrong text" in " ".join(line.strip() for line in wrong)


@pytest.mark.parametrize(
    ("pauses", "facts", "state"),
    [
        ((), {"failing": ["not_draining", "consumer"]}, "draining"),
        ((), {"is_connected": False, "failing": ["consumer"]}, "no broker"),
        ((), {"retry_after_seconds": 12.0}, "slowed down"),
        ((), {"is_standby": True}, "standing by"),
        ((paused("lunch"), paused("outage")), {}, "paused: lunch, outage"),
    ],
)
def test_states(pauses: tuple[PauseFacts, ...], facts: dict[str, Any], state: str) -> None:
    lines = screen(worker("10.0.0.7:9090", *pauses, **facts)).splitlines()

    assert lines[-1].endswith(f"  {state}")


def test_nobody_answers() -> None:
    found = screen(
        broker=BrokerReport(fault="no answer", stores=None),
        queues=[QueueReport(name="q", role="requests")],
        queues_from=None,
        queues_at=None,
        rates=None,
        dead_letters=DeadLettersReport(waiting=None, by_reason={}),
    )

    assert "rates unknown: no worker answers" in found
    assert "q            -          -" in found
    assert "dead letters since" not in found


def test_a_terminal_obeys_nothing_of_it() -> None:
    queue = QueueReport(name="q\x1b[2J", role="requests", exists=True, ready=0, consumers=0)

    assert "\x1b" not in screen(*TWO, queues=[queue])
