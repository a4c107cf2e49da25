"""What the roles know of spans, without any library."""

import pytest

from bridge.telemetry.tracing import spans
from bridge.telemetry.tracing.spans import Span, is_exporter_installed, known

HEADERS = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"),)


def test_what_is_not_recorded_is_passed_on_all_the_same() -> None:
    """Within a span that is not recorded everything has its headers, and no trace to look at."""
    span = Span(HEADERS)
    within = span.begin("POST", "client", {})
    within.end({}, error="timeout")

    assert (within.headers, within.trace_id) == (HEADERS, None)


def test_what_is_unknown_is_no_attribute() -> None:
    """None stands for what is not known, and is left out; nothing and no are known."""
    facts = {"status": None, "attempts": 0, "code": "", "redelivered": False, "other": object()}

    assert known(facts) == {"attempts": 0, "code": "", "redelivered": False}


def test_the_extra_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether spans can be exported is known without loading anything."""
    found = is_exporter_installed()
    monkeypatch.setattr(spans, "_EXPORTER", "opentelemetry_of_nobody.exporter")

    assert (found, is_exporter_installed()) == (True, False)
