"""Findings that need no server: certificates, clocks, bindings, settings of the SMS API."""

import time
from email.utils import formatdate
from typing import Any

import pytest

from bridge.admin.checks.findings import SetUp, judge_certificate, judge_clock
from bridge.admin.checks.local import judge_base_url, judge_receipts, judge_repeats
from bridge.admin.checks.management_api import judge_bindings
from bridge.admin.management import clock_skew_seconds
from bridge.config import Settings
from bridge.topology.queue_facts import QueueFacts

DAY_SECONDS = 86400
URL = "https://sms.example.com/webhooks"


@pytest.mark.parametrize(
    ("days", "result", "text"),
    [(13.9, "warn", "expires in 13 days"), (14.1, "ok", "valid until"), (-1, "warn", "in 0 days")],
)
def test_a_certificate_that_ends_soon_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, days: float, result: str, text: str
) -> None:
    # 1 June 2030.
    ends = 1_906_502_400
    monkeypatch.setattr(time, "time", lambda: ends - days * DAY_SECONDS)
    found = judge_certificate("broker", {"notAfter": "Jun  1 00:00:00 2030 GMT"})

    assert (found.result, found.subject) == (result, "broker")
    assert text in found.text
    assert "2030-06-01" in found.text


@pytest.mark.parametrize(
    ("skew_seconds", "told"),
    [
        (None, []),
        (5.0, [("ok", "agrees with the clock of the broker")]),
        (-5.0, [("ok", "agrees with the clock of the broker")]),
        (6.0, [("warn", "6 s behind the clock of the broker: ")]),
        (-6.0, [("warn", "6 s ahead of the clock of the broker: ")]),
    ],
)
def test_five_seconds_are_no_difference(
    skew_seconds: float | None, told: list[tuple[str, str]]
) -> None:
    found = judge_clock("the broker", skew_seconds)

    assert [one.result for one in found] == [result for result, _ in told]
    assert [one.text for one in found if not one.text.startswith(tuple(t for _, t in told))] == []


def test_the_skew_is_read_off_the_date_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.5)

    assert clock_skew_seconds(formatdate(1_000_090, usegmt=True)) == 90.0
    assert [clock_skew_seconds(date) for date in (None, "yesterday")] == [None, None]


@pytest.mark.parametrize(
    ("bound", "result"),
    [
        ([], "fail"),
        ([{"auto_delete": True}, {"exclusive": True}], "fail"),
        ([{}, {"durable": False}], "warn"),
        ([{"arguments": {"x-expires": 5}}], "fail"),
        ([{}, {}], "ok"),
    ],
    ids=str,
)
def test_events_need_a_queue_that_lasts(bound: list[dict[str, Any]], result: str) -> None:
    queues = {f"q{n}": QueueFacts(name=f"q{n}", **given) for n, given in enumerate(bound)}

    assert judge_bindings("x", queues).result == result


def set_up(on_uncertain: str | None = None, **api: Any) -> SetUp:
    values = {"sms_api": api, "worker": {"on_uncertain": on_uncertain}}
    return SetUp(settings=Settings.model_validate(values), roles=["worker"])


@pytest.mark.parametrize(
    ("preset", "on_uncertain", "result"),
    [
        ("twilio", None, "ok"),
        ("twilio", "park", "ok"),
        ("twilio", "retry", "warn"),
        ("telnyx", None, None),
        ("generic", None, None),
    ],
)
def test_why_nothing_is_repeated(preset: str, on_uncertain: str | None, result: str | None) -> None:
    findings = judge_repeats(set_up(on_uncertain, preset=preset))

    assert [finding.result for finding in findings] == ([result] if result else [])
    said = {"ok": "park: a message that may have been sent becomes a dead letter `uncertain`"}
    said["warn"] = "retry: a message that may have been sent becomes up to 3 texts"
    assert all(said[finding.result] in finding.text for finding in findings)


@pytest.mark.parametrize(
    ("preset", "base_url", "warns"),
    [
        ("generic", "https://a.example", False),
        ("generic", "https://a.example/v1", True),
        ("twilio", "https://a.example/2010-04-01", True),
        ("telnyx", None, False),
    ],
)
def test_path_that_is_there_twice(preset: str, base_url: str | None, *, warns: bool) -> None:
    assert bool(judge_base_url(set_up(preset=preset, base_url=base_url))) == warns


@pytest.mark.parametrize(
    ("preset", "webhook", "is_said"),
    [
        ("twilio", {}, True),
        ("telnyx", {"endpoints": [{"path": "/a", "preset": "telnyx"}]}, True),
        ("twilio", {"preset": "twilio", "public_url": URL}, False),
        ("telnyx", {"endpoints": [{"path": "/a", "preset": "telnyx", "public_url": URL}]}, False),
        ("generic", {}, False),
    ],
)
def test_receipts_without_a_message_id(
    preset: str, webhook: dict[str, Any], *, is_said: bool
) -> None:
    settings = Settings.model_validate({"sms_api": {"preset": preset}, "webhook": webhook})
    findings = judge_receipts(SetUp(settings=settings, roles=["worker"]))

    assert [finding.result for finding in findings] == ["ok"] * is_said
    assert all(f"endpoint with preset {preset}" in finding.text for finding in findings)


def test_nothing_is_said_without_a_worker() -> None:
    alone = SetUp(
        settings=Settings.model_validate({"sms_api": {"preset": "twilio"}}), roles=["webhook"]
    )

    assert judge_repeats(alone) == judge_base_url(alone) == judge_receipts(alone) == []
