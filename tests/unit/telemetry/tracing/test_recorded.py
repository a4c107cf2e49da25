"""What a recorded span costs: the calls that it takes, which no other process disturbs."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from bridge.telemetry.tracing.batches import MAX_BATCH_SPANS, Batches
from bridge.telemetry.tracing.otlp import SpanWriter
from bridge.telemetry.tracing.recorded import RecordedSpan, TraceContext

CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "01")
# With the SDK's own spans and batch processor it is 134, with its encoder 97.
MAX_CALLS_OF_A_SPAN = 20
MAX_CALLS_OF_WRITING = 20


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the calls of this thread, of Python's functions and of C's, by their module."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            calls[frame.f_globals["__name__"]] += 1
        elif event == "c_call":
            calls[str(getattr(function, "__module__", None))] += 1

    # A search for garbage would call what other tests have left.
    gc.disable()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def make_spans(count: int, on_end: Callable[[RecordedSpan], object]) -> None:
    """Begin and end spans, as many as asked for, each with its POST."""
    for number in range(count // 2):
        span = RecordedSpan("process", "consumer", {"a": 1}, context=CONTEXT, on_end=on_end)
        span.begin("POST", "client", {"b": "c"}).end({"status": 202})
        span.end({"messaging.message.id": f"message-{number}"})


@pytest.fixture
def batches() -> Iterator[Batches]:
    """Export nothing, in batches."""
    made = Batches(lambda _: None, stopped=lambda: None)
    yield made
    made.stop()


def test_a_span_takes_few_calls(batches: Batches) -> None:
    """From its begin to its place in the queue, and without waking a thread."""
    spans = MAX_BATCH_SPANS // 2
    with counted_calls() as calls:
        make_spans(spans, batches.put)

    assert calls.total() / spans <= MAX_CALLS_OF_A_SPAN
    assert not calls["threading"]


def test_writing_takes_few_calls() -> None:
    """What spans have in common is written once for all of them."""
    spans: list[RecordedSpan] = []
    make_spans(MAX_BATCH_SPANS, spans.append)
    writer = SpanWriter({"service.name": "sms-bridge"}, version="1")
    writer.write(spans[:2])
    with counted_calls() as calls:
        writer.write(spans)

    assert calls.total() / len(spans) <= MAX_CALLS_OF_WRITING
