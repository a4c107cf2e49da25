"""Odd answers of admin ports: `status` shows the fault, or what it can, and its JSON is JSON."""

import asyncio
import json
from typing import Any, Final

import pytest

from bridge.admin.admin_port import AdminPort
from bridge.admin.status import processes
from bridge.admin.status.look import put_together
from bridge.admin.status.processes import ProcessReader
from bridge.admin.status.report import QueueReport
from bridge.cli.status import _print

NUMBER: Final = "+491713920001"
SENT: Final = "sms_bridge_worker_messages_processed_total"
GOOD_HEALTH: Final = json.dumps({"status": "ok", "checks": {}, "worker": {"queue": "q"}})
GOOD_METRICS: Final = f'{SENT}{{outcome="sent",reason="none"}} 7\n'


def worker(**facts: Any) -> str:
    """Write what a worker says of itself."""
    return json.dumps({"status": "ok", "checks": {}, "worker": {"queue": "q", **facts}})


def pause(**facts: Any) -> str:
    """Write what a paused worker says of itself."""
    return worker(paused="outage", pauses=[{"reason": "outage", **facts}])


def note(since: object) -> str:
    """Write what a worker says that an operator has paused."""
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


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@pytest.mark.parametrize(
    ("health", "metrics"),
    [
        *(pytest.param(one, GOOD_METRICS, id=f"health-{name}") for name, one in HEALTH.items()),
        *(pytest.param(GOOD_HEALTH, one, id=f"metrics-{name}") for name, one in METRICS.items()),
    ],
)
async def test_odd_answers(
    health: str, metrics: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both forms are shown, the JSON is JSON, and nothing in them is a number or obeyed."""
    monkeypatch.setattr(processes, "RATE_SECONDS", 0.01)
    pages = {b"/readyz": health, b"/metrics": metrics}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = pages[head.split()[1]].encode("utf-8", "surrogateescape")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = AdminPort("127.0.0.1", server.sockets[0].getsockname()[1])
        reader = ProcessReader([port], queue="q")
        found = await reader.read()
    queues = [QueueReport(name="q", role="requests")]
    status = put_together(queues, found, list(reader.readings.values()), "no answer")
    _print(status, as_json=True)
    as_json = capsys.readouterr().out
    _print(status, as_json=False)
    as_text = capsys.readouterr().out

    json.loads(as_json, parse_constant=_refuse)
    assert NUMBER not in as_json + as_text
    assert "\x1b[2J" not in as_text
