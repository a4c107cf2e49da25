"""Trace headers and the no-op span, without any library."""

import pytest

from bridge.telemetry import trace_context
from bridge.telemetry.trace_context import Span, is_exporter_installed, known, read_trace

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


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BAD_PARENTS: dict[str, object] = {
    "none": None,
    "empty": "",
    "capital letters": TRACEPARENT.upper(),
    "too short": TRACEPARENT[:-1],
    "too long": TRACEPARENT + "0",
    "newline": TRACEPARENT + "\n",
    "second header": TRACEPARENT + "\r\nAuthorization: x",
    "bytes": TRACEPARENT.encode(),
    "number": 1,
    "no trace": "00-" + "0" * 32 + "-b7ad6b7169203331-01",
    "no parent": "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
    "version that cannot be": "ff" + TRACEPARENT[2:],
}


@pytest.mark.parametrize("parent", BAD_PARENTS.values(), ids=BAD_PARENTS)
def test_trace_that_is_none(parent: object) -> None:
    """What is no trace parent is left out, and the state with it."""
    assert read_trace(parent, "a=1") == ()


@pytest.mark.parametrize(
    "state",
    [None, "", "a=1\r\nX: y", "é=1", "a" * 513, b"a=1", 1],
    ids=["none", "empty", "line break", "not ASCII", "long", "bytes", "number"],
)
def test_trace_state_that_is_none(state: object) -> None:
    """What is no trace state is left out, and the parent stays."""
    assert read_trace(TRACEPARENT, state) == (("traceparent", TRACEPARENT),)
