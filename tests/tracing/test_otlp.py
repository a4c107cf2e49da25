"""Spans as OTLP has them on the wire."""

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from bridge.tracing.otlp import write_spans


def _span(attributes: dict[str, str | bool | int | float]) -> ReadableSpan:
    context = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return ReadableSpan(name="one", context=context, resource=Resource({}), attributes=attributes)


def test_an_attribute_keeps_its_type() -> None:
    """Values that Python calls equal are written as what they are, also in spans that follow."""
    values: tuple[bool | int | float | str, ...] = (True, 1, 1.0, "1")
    written = write_spans([_span({"a": value}) for value in (*values, *values)])
    (of_resource,) = ExportTraceServiceRequest.FromString(written).resource_spans
    (of_scope,) = of_resource.scope_spans
    kinds = [span.attributes[0].value.WhichOneof("value") for span in of_scope.spans]

    assert kinds == 2 * ["bool_value", "int_value", "double_value", "string_value"]


def test_attributes_stay_with_their_span() -> None:
    """Each span has all its own attributes, in their order, and none of another's."""
    written = write_spans([_span({"a": 1, "b": 2}), _span({"b": 2}), _span({})])
    (of_resource,) = ExportTraceServiceRequest.FromString(written).resource_spans
    (of_scope,) = of_resource.scope_spans
    names = [[pair.key for pair in span.attributes] for span in of_scope.spans]

    assert names == [["a", "b"], ["b"], []]
