"""Which pauses are on: what people are told of them."""

from collections.abc import Iterator

import pytest

from bridge.worker.service.pause_report import PauseReport
from tests.clock import Clock, LeapingWorld
from tests.ears import Ears

BEGIN = 1_900_000_000.0
BEGIN_TEXT = "2030-03-17T17:46:40Z"


@pytest.fixture
def world() -> Iterator[LeapingWorld]:
    """Give metrics to write to."""
    made = LeapingWorld()
    yield made
    made.close()


def test_each_is_told_with_its_begin(world: LeapingWorld, ears: Ears) -> None:
    """Two pauses are told side by side, each since when, and with what the API answered."""
    clock = Clock(BEGIN)
    report = PauseReport(world.metrics, clock=clock)
    report.begin("misconfigured", status=404, code="20003")
    clock.now += 90
    report.begin("operator")

    stored = {"queue": None, "fault": None}
    assert report.facts() == [
        {"reason": "misconfigured", "since": BEGIN_TEXT, "status": 404, "code": "20003", **stored},
        {
            "reason": "operator",
            "since": "2030-03-17T17:48:10Z",
            "status": None,
            "code": None,
            **stored,
        },
    ]
    assert world.value("paused", reason="misconfigured") == 1
    assert world.value("paused", reason="operator") == 1
    assert world.value("paused_timestamp_seconds", reason="misconfigured") == BEGIN
    assert world.value("paused_timestamp_seconds", reason="operator") == BEGIN + 90
    assert len(ears.heard("paused")) == 2


def test_what_is_over_is_not_told(world: LeapingWorld, ears: Ears) -> None:
    """The end of one changes nothing about the other."""
    report = PauseReport(world.metrics, clock=Clock(BEGIN))
    report.begin("outage")
    report.begin("operator")
    report.end("operator")

    assert [pause["reason"] for pause in report.facts()] == ["outage"]
    assert world.value("paused", reason="operator") == 0
    assert world.value("paused_timestamp_seconds", reason="operator") == 0
    assert world.value("paused_timestamp_seconds", reason="outage") == BEGIN
    assert ears.heard("resumed") == [{"reason": "operator"}]


def test_another_reason_takes_the_place_of_one(world: LeapingWorld, ears: Ears) -> None:
    """A pause whose reason changes is told once, since the new reason; it is no end."""
    clock = Clock(BEGIN - 60)
    report = PauseReport(world.metrics, clock=clock)
    report.begin("outage")
    clock.now = BEGIN
    report.turn("outage")
    report.begin("credentials_rejected", status=401)

    assert [(pause["reason"], pause["since"]) for pause in report.facts()] == [
        ("credentials_rejected", BEGIN_TEXT)
    ]
    assert world.value("paused", reason="outage") == 0
    assert ears.heard("resumed") == []
