"""What is said of the SMS API without asking it."""

from typing import Any

import pytest

from bridge.admin.checks.findings import SetUp
from bridge.admin.checks.local import judge_base_url, judge_repeats
from bridge.config import Settings


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
        ("generic", "https://a.example/sms", False),
        ("generic", "https://a.example/v1", True),
        ("generic", "https://a.example/v1/messages", True),
        ("twilio", "https://a.example/v1", False),
        ("twilio", "https://a.example/2010-04-01", True),
        ("telnyx", None, False),
    ],
)
def test_path_that_is_there_twice(preset: str, base_url: str | None, *, warns: bool) -> None:
    assert bool(judge_base_url(set_up(preset=preset, base_url=base_url))) == warns


def test_nothing_is_said_without_a_worker() -> None:
    alone = SetUp(
        settings=Settings.model_validate({"sms_api": {"preset": "twilio"}}), roles=["webhook"]
    )

    assert judge_repeats(alone) == judge_base_url(alone) == []
