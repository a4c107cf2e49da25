"""Trace headers and the no-op span, without any library."""

import pytest

from bridge.telemetry import trace_context
from bridge.telemetry.trace_context import Span, is_exporter_installed, known

HEADERS = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"),)


def test_a_span_that_is_not_recorded_passes_headers_on() -> None:
    """Its child spans have the same headers, and no trace id."""
    span = Span(HEADERS)
    child = span.begin("POST", "client", {})
    child.end({}, error="timeout")

    assert (child.headers, child.trace_id) == (HEADERS, None)


def test_unknown_facts_are_no_attributes() -> None:
    """None stands for unknown and is left out; zero, False and an empty text are facts."""
    facts = {"status": None, "attempts": 0, "code": "", "redelivered": False, "other": object()}

    assert known(facts) == {"attempts": 0, "code": "", "redelivered": False}


def test_a_missing_extra_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check loads nothing."""
    found = is_exporter_installed()
    monkeypatch.setattr(trace_context, "_EXPORTER", "opentelemetry_of_nobody.exporter")

    assert (found, is_exporter_installed()) == (True, False)
