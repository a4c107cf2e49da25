"""The lines of `sms-bridge status`."""

import time
from typing import Any, get_args

import pytest

from bridge.admin.admin_port import PauseFacts
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
        "sms.outbound         1,204          2  oldest in hand: 1m",
        "sms.outbound.dead       31          0",
    ]
    assert "on the retry ladder: 5s 12, 30s missing, urgent 5s 0" in lines
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


def test_an_operators_pause() -> None:
    ones = [worker(f"10.0.0.{last}:9090", paused("operator")) for last in (7, 8)]
    note = OperatorPauseReport(since=ago(2300), reason="wrong text")
    found = sentences(*ones, is_paused_by_operator=True, paused_by_operator=note)
    bare = sentences(*ones, is_paused_by_operator=True)

    since = f"since {note.since} (38m)"
    assert found == [
        f"PAUSED  every worker, by an operator {since}: wrong text; `sms-bridge resume` ends it"
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


def test_a_pause_of_a_later_version() -> None:
    one = worker("10.0.0.7:9090", paused("lunch"), paused("outage"))

    assert sentences(one)[0].startswith("PAUSED  1 of 1 worker, lunch: a later version")
    assert "paused: lunch, outage" in screen(one)


def test_what_the_service_asked_for() -> None:
    slow = worker("10.0.0.8:9090", retry_after_seconds=12.0)

    assert sentences(TWO[0], slow) == [
        "SLOWED DOWN  1 of 2 workers, by a 429 of the service, for 12s more"
    ]
    assert "slowed down" in screen(slow)


def test_one_is_active() -> None:
    active = worker("10.0.0.7:9090", is_standby=False)
    other = worker("10.0.0.8:9090", is_standby=True)
    lines = screen(active, other).splitlines()

    assert any(line.startswith("10.0.0.7") and line.endswith("active") for line in lines)
    assert any(line.startswith("10.0.0.8") and line.endswith("standing by") for line in lines)


def test_a_suspected_outage() -> None:
    suspecting = worker("10.0.0.8:9090", outage_suspected=True)

    assert sentences(TWO[0], suspecting) == [
        "OUTAGE SUSPECTED  1 of 2 workers, where request after request fails"
    ]


def test_the_broker_is_silent() -> None:
    fault = BrokerReport(fault="no connection to rabbitmq:5672 (refused)", stores=None)
    facts = {"broker": fault, "queues_from": "workers", "queues_at": ago(16)}
    found = screen(*TWO, **facts)

    assert sentences(*TWO, **facts) == ["BROKER  no connection to rabbitmq:5672 (refused)"]
    assert "QUEUE              WAITING  CONSUMERS  as a worker saw it 16s ago" in found


def test_the_broker_stores_nothing() -> None:
    (found,) = sentences(*TWO, broker=BrokerReport(fault=None, stores=False))

    assert found.startswith("BROKER  takes no messages")


def test_ports_that_do_not_answer() -> None:
    silent = ProcessReport(name="workers:9090", address="10.0.0.9:9090", fault="no connection")
    unknown = ProcessReport(name="nobody:1", address="nobody:1", fault="the name has no address")

    assert sentences(*TWO, silent, unknown) == [
        "NO ANSWER  10.0.0.9:9090 (workers:9090): no connection",
        "NO ANSWER  nobody:1: the name has no address",
    ]


def test_workers_that_nobody_named() -> None:
    assert sentences(TWO[0]) == [
        "NOT SHOWN  1 of 2 workers that consume: name their admin ports with --admin"
    ]
    assert sentences(TWO[0], queues_from="workers") == []
    three = QueueReport(name="q", role="requests", exists=True, ready=0, consumers=3)
    assert sentences(*TWO, queues=[three])[0].startswith("NOT SHOWN  1 of 3 workers")
    nobody = QueueReport(name="q", role="requests", exists=True, ready=0, consumers=0)
    assert sentences(queues=[nobody], rates=None)[0].startswith("NO WORKER  takes requests")


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
    ladder = next(at for at, line in enumerate(lines) if line.startswith("on the retry ladder"))

    assert max(map(len, [*wrong, *lines[ladder : ladder + 2]])) <= 40
    assert "wrong text" in " ".join(line.strip() for line in wrong)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"failing": ["not_draining", "consumer"]}, "draining"),
        ({"is_connected": False, "failing": ["consumer"]}, "no broker"),
        ({"failing": ["consumer"]}, "not ready: consumer"),
    ],
)
def test_states(facts: dict[str, object], state: str) -> None:
    assert screen(worker("10.0.0.7:9090", **facts)).splitlines()[-1].endswith(f"  {state}")


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
