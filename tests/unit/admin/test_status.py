"""What `sms-bridge status` reads of admin ports and of the broker, and puts together."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from bridge.admin import status
from bridge.admin.admin_port_client import AdminPort, HealthReport, PauseFacts, WorkerFacts
from bridge.admin.status import (
    MAX_PORTS,
    BrokerReport,
    OperatorPauseReport,
    ProcessReport,
    QueueReport,
    QueueView,
    RatesReport,
    Reading,
    Status,
    StatusReader,
    WorkerReport,
    describe,
    put_together,
)
from bridge.cli.status import _print
from bridge.config import Settings
from bridge.errors import BridgeError
from bridge.telemetry.scrape import Scrape
from bridge.topology.paused_queue import Note

# No broker answers there.
SETTINGS: Final = Settings.model_validate(
    {"rabbitmq": {"url": "amqp://127.0.0.1:1/"}, "worker": {"queue": "q"}}
)
NUMBER: Final = "+491713920001"
SENT: Final = "sms_bridge_worker_messages_processed_total"
GOOD_HEALTH: Final = json.dumps({"status": "ok", "checks": {}, "worker": {"queue": "q"}})
GOOD_METRICS: Final = f'{SENT}{{outcome="sent",reason="none"}} 7\n'


def worker(**facts: Any) -> str:
    return json.dumps({"status": "ok", "checks": {}, "worker": {"queue": "q", **facts}})


def pause(**facts: Any) -> str:
    return worker(paused="outage", pauses=[{"reason": "outage", **facts}])


def note(since: object) -> str:
    return worker(paused="operator", paused_by_operator={"reason": None, "since": since})


HEALTH: Final = {
    "nothing": "",
    "null": "null",
    "cut": GOOD_HEALTH[:-3],
    "deep": "[" * 100_000,
    "deep-worker": '{"status": "ok", "checks": {}, "worker": ' + '{"a":' * 100_000,
    "deep-note": worker(paused_by_operator=0)[:-3] + "[" * 150 + "]" * 150 + "}}",
    "half-a-surrogate": GOOD_HEALTH.replace('"q"', '"\\ud800"'),
    "nan-wait": worker(retry_after_seconds=float("nan")),
    "infinite-wait": worker(retry_after_seconds=float("inf")),
    "huge-wait": worker(retry_after_seconds=1e300),
    "negative-wait": worker(retry_after_seconds=-5),
    "text-wait": worker(retry_after_seconds="soon"),
    "no-such-month": pause(since="2030-13-31T03:12:00Z"),
    "no-such-day": pause(since="2030-02-31T03:12:00Z"),
    "no-such-hour": pause(since="2030-01-31T25:12:00Z"),
    "leap-second": pause(since="2030-01-31T23:59:60Z"),
    "year-0": pause(since="0000-01-01T00:00:00Z"),
    "year-1": pause(since="0001-01-01T00:00:00Z"),
    "year-9999": pause(since="9999-12-31T23:59:59Z"),
    "digits-of-another-script": pause(since="\u0662\u0660\u0663\u0660-01-31T03:12:00Z"),
    "huge-status": pause(status=10**400),
    "negative-status": pause(status=-1),
    "note-of-year-1": note("0001-01-01T00:00:00Z"),
    "note-of-year-9999": note("9999-12-31T23:59:59Z"),
    "note-without-a-date": note(["2030"]),
    "number-as-queue": worker(queue=NUMBER),
    "many-checks": json.dumps({"status": "ok", "checks": {f"c{'x' * i}": "ok" for i in range(39)}}),
    "very-many-checks": json.dumps(
        {"status": "ok", "checks": {f"c{a}{b}": "ok" for a in "abcdefgh" for b in "abcdefgh"}}
    ),
}
METRICS: Final = {
    "nothing": "",
    "no-bytes-of-text": "\udcff\udcfe",
    "nan": f'{SENT}{{outcome="sent",reason="none"}} NaN\n',
    "infinite": f'{SENT}{{outcome="sent",reason="none"}} +Inf\n',
    "minus-infinite": f'{SENT}{{outcome="sent",reason="none"}} -Inf\n',
    "huge": f'{SENT}{{outcome="sent",reason="none"}} 1e308\n' * 3,
    "negative": f'{SENT}{{outcome="sent",reason="none"}} -7\n',
    "no-labels": f"{SENT} 7\n",
    "no-reason": f'{SENT}{{outcome="dead"}} 7\n',
    "number-as-reason": f'{SENT}{{outcome="dead",reason="{NUMBER}"}} 7\n',
    "escape-as-reason": f'{SENT}{{outcome="dead",reason="\x1b[2J"}} 7\n',
    "number-as-outcome": f'sms_bridge_webhook_events_total{{outcome="{NUMBER}"}} 7\n',
    "no-outcome": "sms_bridge_webhook_events_total 7\n",
    "late": "sms_bridge_worker_last_sent_timestamp_seconds 1e18\n",
    "very-late": "sms_bridge_worker_last_sent_timestamp_seconds 253402300800\n",
    "never": "sms_bridge_worker_last_sent_timestamp_seconds NaN\n",
    "early": "sms_bridge_worker_last_sent_timestamp_seconds -1e12\n",
    "oldest-nan": "sms_bridge_worker_oldest_held_message_timestamp_seconds NaN\n",
    "oldest-infinite": "sms_bridge_worker_oldest_held_message_timestamp_seconds +Inf\n",
    "held-nan": "sms_bridge_worker_messages_in_progress NaN\n",
    "held-infinite": "sms_bridge_worker_messages_in_progress +Inf\n",
    "event-late": 'sms_bridge_webhook_events_total{outcome="published"} 1\n'
    "sms_bridge_webhook_last_event_timestamp_seconds 1e30\n",
    "ready-nan": 'sms_bridge_worker_queue_messages_ready{queue="q",role="main"} NaN\n'
    "sms_bridge_worker_queue_stats_timestamp_seconds 1700000000\n",
    "ready-huge": 'sms_bridge_worker_queue_messages_ready{queue="q",role="main"} 1e400\n'
    "sms_bridge_worker_queue_stats_timestamp_seconds 1700000000\n",
    "stats-late": "sms_bridge_worker_queue_stats_timestamp_seconds 1e300\n",
    "consumers-nan": 'sms_bridge_worker_queue_consumers{queue="q"} NaN\n'
    "sms_bridge_worker_queue_stats_timestamp_seconds 1700000000\n",
    "number-as-version": f'sms_bridge_build_info{{version="{NUMBER} {NUMBER}"}} 1\n',
    "no-version": "sms_bridge_build_info 1\n",
    "start-nan": f"{GOOD_METRICS}process_start_time_seconds NaN\n",
    "no-value": f'{SENT}{{outcome="sent"\n',
    "unended-quote": f'{SENT}{{outcome="sent\n',
    "nameless": '{outcome="sent"} 7\n',
    "odd-type": f"# TYPE {SENT} nonsense\n{GOOD_METRICS}",
    "half-a-type": f"# TYPE\n# HELP\n# TYPE {SENT}\n",
}


@pytest.fixture(autouse=True)
def two_readings_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "RATE_SECONDS", 0.01)


@asynccontextmanager
async def a_role(answer: Callable[[str], bytes]) -> AsyncIterator[AdminPort]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        writer.write(answer(head.split()[1].decode()))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield AdminPort("127.0.0.1", server.sockets[0].getsockname()[1])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@pytest.mark.parametrize(
    ("health", "metrics"),
    [
        *(pytest.param(one, GOOD_METRICS, id=f"health-{name}") for name, one in HEALTH.items()),
        *(pytest.param(GOOD_HEALTH, one, id=f"metrics-{name}") for name, one in METRICS.items()),
    ],
)
async def test_odd_answers(health: str, metrics: str, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {"/readyz": health, "/metrics": metrics}
    async with a_role(lambda page: pages[page].encode("utf-8", "surrogateescape")) as port:
        found = await StatusReader(SETTINGS, [port]).read()
    _print(found, as_json=True)
    as_json = capsys.readouterr().out
    _print(found, as_json=False)
    as_text = capsys.readouterr().out

    json.loads(as_json, parse_constant=_refuse)
    assert NUMBER not in as_json + as_text
    assert "\x1b[2J" not in as_text


# Which ports are asked, and how often


def counting(asked: list[str]) -> Callable[[str], bytes]:
    def answer(page: str) -> bytes:
        asked.append(page)
        if page == "/readyz":
            return GOOD_HEALTH.encode()
        return f'{SENT}{{outcome="sent",reason="none"}} {asked.count(page)}\n'.encode()

    return answer


async def test_the_first_time_a_port_is_asked_twice() -> None:
    asked: list[str] = []
    async with a_role(counting(asked)) as port:
        reader = StatusReader(SETTINGS, [port])
        first = await reader.read()
        asked_at_first = len(asked)
        second = await reader.read()

    assert (asked_at_first, len(asked)) == (4, 6)
    for found, sent in ((first, 2), (second, 3)):
        ((_, worker),) = found.workers
        assert worker.sent == sent
        assert worker.rates is not None
        assert worker.rates.sent_per_second > 0


async def test_an_address_is_asked_once() -> None:
    asked: list[str] = []
    async with a_role(counting(asked)) as port:
        names = [AdminPort(host, port.port) for host in ("localhost", port.host, "nobody.invalid")]
        unknown, found = (await StatusReader(SETTINGS, names).read()).processes

    assert (unknown.address, unknown.fault) == (str(names[2]), "the name has no address")
    assert (found.name, found.address, found.fault) == (str(names[0]), str(port), None)
    assert len(asked) == 4


async def test_a_name_of_too_many_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses(name: AdminPort) -> list[AdminPort]:
        return [AdminPort(f"127.0.{n // 256}.{n % 256}", name.port) for n in range(MAX_PORTS + 1)]

    monkeypatch.setattr(status, "addresses_of", addresses)
    with pytest.raises(BridgeError, match="more than 256 addresses"):
        await StatusReader(SETTINGS, [AdminPort("many", 9)]).read()


# One reading of a role, beside the one before it

QUEUES = [
    QueueReport(name="q", role="requests"),
    QueueReport(name="q.retry.5s", role="retry", delay_seconds=5.0),
    QueueReport(name="q.dead", role="dead_letters"),
]
PORT = AdminPort("10.0.0.7", 9090)
NAME = AdminPort("workers", 9090)


def reading(
    at: float = 10.0,
    *,
    queue: str = "q",
    started: float = 5.0,
    draining: bool = False,
    **counted: float,
) -> Reading:
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
    return describe(NAME, PORT, now, before, QUEUES)[0]


def described_worker(now: Reading, before: Reading | None = None) -> WorkerReport:
    found = described(now, before).worker
    assert found is not None
    return found


def test_a_later_version_may_say_more() -> None:
    """A version that may not be shown is left out, and a label may have digits."""
    page = f'sms_bridge_build_info{{version="1 000"}} 1\n{SENT}{{outcome="dead",reason="r_2"}} 1\n'
    now = reading()._replace(scrape=Scrape(page))

    assert described(now).version is None
    assert described_worker(now).dead == {"r_2": 1}


def test_rates_are_of_the_time_between() -> None:
    before = reading(10.0, sent=100, retried=10, dead=1)
    now = reading(12.0, sent=300, retried=15, dead=2)

    assert described_worker(now, before).rates == RatesReport(
        sent_per_second=100.0, retried_per_second=2.5, dead_per_second=0.5
    )
    alone = described_worker(now)
    assert (alone.sent, alone.retried, alone.dead, alone.rates) == (300, {"r": 15}, {"r": 2}, None)
    # Another process.
    assert described_worker(now, reading(10.0, sent=100, started=4.0)).rates is None


def test_a_worker_of_another_queue_is_not_counted() -> None:
    found = described(reading(queue="another", sent=7))

    assert found.fault == "a worker of another queue answers"
    assert (found.worker, found.webhook) == (None, None)


def test_what_fails_is_told() -> None:
    found = described(reading(draining=True))

    assert (found.name, found.address) == ("workers:9090", "10.0.0.7:9090")
    assert (found.failing, found.version) == (["not_draining"], "0.1.0")
    assert found.is_connected is True


def test_the_age_of_the_oldest() -> None:
    name = "sms_bridge_worker_oldest_held_message_timestamp_seconds"
    held = reading()._replace(scrape=Scrape(f"{name} {time.time() - 90}\n"))
    none = reading()._replace(scrape=Scrape(f"{name} 0\n"))

    assert described_worker(held).oldest_seconds in (90.0, 90.1, 90.2)
    assert described_worker(none).oldest_seconds is None


EVENTS = 'sms_bridge_webhook_events_total{{event_type="t",outcome="{}"}} {}\n'


def test_a_receiver() -> None:
    def page(count: int) -> Scrape:
        outcomes = ("published", "unparsed", "duplicate", "invalid_signature", "overloaded")
        events = "".join(EVENTS.format(outcome, count) for outcome in outcomes)
        last = "sms_bridge_webhook_last_event_timestamp_seconds"
        moments = f'{last}{{event_type="a"}} 1900000000\n{last}{{event_type="b"}} 1900000060\n'
        return Scrape(events + moments)

    health = HealthReport(status="ok", checks={"listener": "ok"})
    before, now = Reading(10.0, health, page(0)), Reading(12.0, health, page(4))
    found = described(now, before)

    assert found.worker is None
    assert found.webhook is not None
    assert found.webhook.last_event_at == "2030-03-17T17:47:40Z"
    assert found.webhook.published_per_second == 4.0
    assert found.webhook.refused_per_second == 2.0
    assert found.webhook.failed_per_second == 2.0
    assert found.webhook.events["duplicate"] == 4


# The status

NOTE = Note("wrong text", 1_896_059_520.0, "anna@admin-1")
SHOWN_NOTE = OperatorPauseReport(
    since="2030-01-31T03:12:00Z", reason="wrong text", by="anna@admin-1"
)
SILENT = BrokerReport(fault="no connection", stores=None)
ANSWERS = BrokerReport(fault=None, stores=True)
RATES = RatesReport(sent_per_second=1.5, retried_per_second=0.1, dead_per_second=0.0)


def seen(
    at: float, ready: int | None, note: Note | None = None, **facts: Any
) -> tuple[ProcessReport, QueueView | None]:
    page = f"sms_bridge_worker_queue_stats_timestamp_seconds {at}\n"
    if ready is not None:
        page += f'sms_bridge_worker_queue_messages_ready{{queue="q"}} {ready}\n'
        page += 'sms_bridge_worker_queue_consumers{queue="q"} 3\n'
    pauses = (PauseFacts(reason="operator"),) if note is not None else ()
    worker = WorkerFacts(queue="q", pauses=pauses).model_copy(update={"paused_by_operator": note})
    health = HealthReport(status="ok", checks={}, worker=worker)
    report, view = describe(NAME, PORT, Reading(0.0, health, Scrape(page)), None, QUEUES)
    assert report.worker is not None
    changed = report.worker.model_copy(update=facts)
    return report.model_copy(update={"worker": changed}), view


def sizes(found: Status) -> list[tuple[bool | None, int | None, int | None]]:
    return [(one.exists, one.ready, one.consumers) for one in found.queues]


def test_queues_as_a_worker_saw_them() -> None:
    workers = [seen(1_900_000_000, 5), seen(1_900_000_060, 6), seen(0, None)]
    found = put_together(QUEUES, SILENT, None, workers)

    assert (found.queues_from, found.queues_at) == ("workers", "2030-03-17T17:47:40Z")
    assert sizes(found) == [(None, 6, 3), (None, None, None), (None, None, None)]
    assert found.broker.fault == "no connection"


def test_the_broker_has_the_last_word() -> None:
    view = QueueView("2030-03-17T17:46:40Z", [QUEUES[0].model_copy(update={"ready": 7})], False)
    resumed = put_together(QUEUES, ANSWERS, view, [seen(1_900_000_060, 99, NOTE)])
    paused = put_together(QUEUES, ANSWERS, view._replace(is_paused=True, note=NOTE), [seen(0, 0)])

    assert (resumed.queues_from, sizes(resumed)) == ("broker", [(None, 7, None)])
    assert (resumed.is_paused_by_operator, resumed.paused_by_operator) == (False, None)
    assert (paused.is_paused_by_operator, paused.paused_by_operator) == (True, SHOWN_NOTE)


def test_without_the_broker_a_worker_tells_of_a_pause() -> None:
    obeying = put_together(QUEUES, SILENT, None, [seen(0, 0), seen(1, 0, NOTE)])
    view = QueueView("2030-03-17T17:46:40Z", QUEUES)
    unsure = put_together(QUEUES, ANSWERS, view, [seen(1, 0, NOTE)])
    unknown = put_together(QUEUES, ANSWERS, view, [seen(1, 0)])

    assert (obeying.is_paused_by_operator, obeying.paused_by_operator) == (True, SHOWN_NOTE)
    assert (unsure.is_paused_by_operator, unsure.paused_by_operator) == (True, SHOWN_NOTE)
    assert (unknown.is_paused_by_operator, unknown.paused_by_operator) == (None, None)


def test_nothing_is_made_up() -> None:
    found = put_together(QUEUES, SILENT, None, [])

    assert (found.queues_from, found.queues_at) == (None, None)
    assert sizes(found) == [(None, None, None)] * 3
    assert (found.rates, found.oldest_seconds, found.is_paused_by_operator) == (None, None, None)
    assert (found.dead_letters.waiting, found.broker.stores) == (None, None)


def test_workers_are_added_up() -> None:
    workers = [
        seen(0, 0, rates=RATES, dead={"refused": 2}, oldest_seconds=3.0, stored=7, returned=2),
        seen(0, 0, rates=RATES, dead={"refused": 1, "invalid": 4}, oldest_seconds=9.0, returned=4),
        seen(0, 0),
    ]
    found = put_together(QUEUES, SILENT, None, workers)

    assert found.rates == RatesReport(
        sent_per_second=3.0, retried_per_second=0.2, dead_per_second=0.0
    )
    assert found.dead_letters.by_reason == {"refused": 3, "invalid": 4}
    assert found.oldest_seconds == 9.0
    assert found.ladder is not None
    assert found.ladder.not_back == 1
