"""Spans as OTLP has them on the wire."""

import itertools
from collections.abc import Sequence

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from bridge.telemetry.tracing.otlp import SpanWriter
from bridge.telemetry.tracing.recorded import RecordedSpan, TraceContext
from bridge.telemetry.tracing.spans import Attributes

TRACE = "0af7651916cd43dd8448eb211c80319c"
OTHER = (("traceparent", f"00-{'c' * 32}-{'d' * 16}-01"),)
RESOURCE = {"service.name": "sms-bridge", "long": "x" * 500}
ATTRIBUTES: Attributes = {
    "": "",
    "text": "grüße",
    "long": "x" * 20_000,
    "integer": 2**40,
    "negative": -1,
    "float": 1.5,
    "yes": True,
}
CONTEXTS = [
    TraceContext(TRACE, "03"),
    TraceContext(TRACE, "01", "00f067aa0ba902b7", is_parent_remote=True),
    TraceContext("0" * 31 + "1", "01", "00f067aa0ba902b7"),
]


def make_span(
    attributes: Attributes,
    context: TraceContext = CONTEXTS[0],
    *,
    error: str | None = None,
    is_linked: bool = False,
) -> RecordedSpan:
    """Begin and end a span."""
    made: list[RecordedSpan] = []
    span = RecordedSpan("POST", "client", attributes, context=context, on_end=made.append)
    if is_linked:
        span.link = OTHER
    span.end({}, error=error)
    return made[0]


def written(*spans: RecordedSpan) -> ExportTraceServiceRequest:
    """Write spans, and read them with OpenTelemetry's own classes."""
    read = ExportTraceServiceRequest()
    read.ParseFromString(SpanWriter(RESOURCE, version="1").write(spans))
    return read


def read_written(*spans: RecordedSpan) -> list[trace_pb2.Span]:
    """Return spans as they arrive."""
    (of_resource,) = written(*spans).resource_spans
    (of_scope,) = of_resource.scope_spans
    return list(of_scope.spans)


def as_sdk_span(span: RecordedSpan) -> ReadableSpan:
    """Make the SDK's own span of one of ours."""
    context = span.context
    trace_id, flags = int(context.trace_id, 16), TraceFlags(int(context.flags, 16))

    def name(span_id: str, *, is_remote: bool) -> SpanContext:
        return SpanContext(trace_id, int(span_id, 16), is_remote, flags)

    is_child, is_remote = bool(context.parent_id), context.is_parent_remote
    linked = SpanContext(int("c" * 32, 16), int("d" * 16, 16), is_remote=True)
    return ReadableSpan(
        span.name,
        context=name(span.span_id, is_remote=False),
        parent=name(context.parent_id, is_remote=is_remote) if is_child else None,
        resource=Resource(RESOURCE),
        attributes=span.attributes,
        links=(Link(linked),) if span.link else (),
        kind=SpanKind.CLIENT,
        status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
        start_time=span.begun_at,
        end_time=span.ended_at,
        instrumentation_scope=InstrumentationScope("sms-bridge", "1"),
    )


@pytest.mark.parametrize("attributes", [{}, ATTRIBUTES], ids=["bare", "with attributes"])
def test_what_is_written_is_what_the_sdk_writes(attributes: Attributes) -> None:
    """OpenTelemetry's own encoder says the same of the same spans."""
    spans = [
        make_span(attributes, context, error=error, is_linked=is_linked)
        for context, error, is_linked in itertools.product(
            CONTEXTS, (None, "timeout"), (False, True)
        )
    ]
    theirs = encode_spans([as_sdk_span(span) for span in spans])
    for span in theirs.resource_spans[0].scope_spans[0].spans:
        # It writes the status that stands for none; ours leaves it out, which means the same.
        if not span.status.code:
            span.ClearField("status")

    assert written(*spans) == theirs


def test_an_attribute_keeps_its_type() -> None:
    """Values that Python calls equal are written as what they are, also in spans that follow."""
    values: tuple[bool | int | float | str, ...] = (True, 1, 1.0, "1")
    spans = read_written(*[make_span({"a": value}) for value in (*values, *values)])
    kinds = [span.attributes[0].value.WhichOneof("value") for span in spans]

    assert kinds == 2 * ["bool_value", "int_value", "double_value", "string_value"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(2**63, str(2**63)), (-(2**63) - 1, str(-(2**63) - 1)), ("\ud800", r"'\ud800'")],
    ids=["beyond 64 bits", "below them", "half a pair"],
)
def test_a_value_that_protobuf_has_no_place_for(value: int | str, text: str) -> None:
    """It is written as a text, and costs neither its own span nor the others of the batch."""
    spans = read_written(make_span({"a": value}), make_span({"b": 2**63 - 1}))
    values = [span.attributes[0].value for span in spans]

    assert [values[0].string_value, values[1].int_value] == [text, 2**63 - 1]


def test_attributes_stay_with_their_span() -> None:
    """Each span has all its own attributes, in their order, and none of another's."""
    spans = read_written(make_span({"a": 1, "b": 2}), make_span({"b": 2}), make_span({}))
    names = [[pair.key for pair in span.attributes] for span in spans]

    assert names == [["a", "b"], ["b"], []]


@pytest.mark.parametrize(
    "lengths", [range(300), range(16_084, 16_384), [3_000_000]], ids=["short", "long", "huge"]
)
def test_a_span_of_any_length_is_read_back(lengths: Sequence[int]) -> None:
    """Its length takes one byte more at each power of 128."""
    spans = read_written(*[make_span({"text": "x" * length}) for length in lengths])

    assert [len(span.attributes[0].value.string_value) for span in spans] == list(lengths)
