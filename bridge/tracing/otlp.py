"""Writes spans as OTLP asks for, with OpenTelemetry's own protobuf classes.

Why not the exporter's own encoder: it takes several times as long, and encoding is most of what
a span costs.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import (
    ResourceSpans,
    ScopeSpans,
    Span,
    SpanFlags,
    Status,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, StatusCode

# How many attributes are kept as they were written.
KEPT_ATTRIBUTES: Final = 1024
_LOCAL: Final = int(SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
_REMOTE: Final = _LOCAL | int(SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)


def write_spans(spans: Sequence[ReadableSpan]) -> bytes:
    """Write spans, at least one, of one process and one scope."""
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    of_scope = ScopeSpans(spans=[_span(span) for span in spans])
    if scope is not None:
        of_scope.scope.name, of_scope.scope.version = scope.name, scope.version or ""
    of_resource = ResourceSpans(
        resource=Resource(attributes=_pairs(resource.attributes)), scope_spans=[of_scope]
    )
    written: bytes = ExportTraceServiceRequest(resource_spans=[of_resource]).SerializeToString()
    return written


def _span(span: ReadableSpan) -> Span:
    context, parent = span.context, span.parent
    written = Span(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        parent_span_id=b"" if parent is None else parent.span_id.to_bytes(8, "big"),
        name=span.name,
        # The API counts from 0, the protocol from 1.
        kind=Span.SpanKind.ValueType(span.kind.value + 1),
        start_time_unix_nano=span.start_time or 0,
        end_time_unix_nano=span.end_time or 0,
        flags=_flags(parent),
    )
    if span.status.status_code is StatusCode.ERROR:
        written.status.code = Status.STATUS_CODE_ERROR
    for link in span.links:
        written.links.add(
            trace_id=link.context.trace_id.to_bytes(16, "big"),
            span_id=link.context.span_id.to_bytes(8, "big"),
            flags=_flags(link.context),
        )
    attributes = (span.attributes or {}).items()
    written.MergeFromString(b"".join([_attribute(name, value) for name, value in attributes]))
    return written


@lru_cache(maxsize=KEPT_ATTRIBUTES, typed=True)
def _attribute(name: str, value: object) -> bytes:
    """Write one attribute, to be merged into a span; most come again and again."""
    pair = KeyValue(key=name)
    _put(pair.value, value)
    written: bytes = Span(attributes=[pair]).SerializeToString()
    return written


def _flags(other: SpanContext | None) -> int:
    return _REMOTE if other is not None and other.is_remote else _LOCAL


def _pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    pairs = [KeyValue(key=name) for name in attributes]
    for pair, value in zip(pairs, attributes.values(), strict=True):
        _put(pair.value, value)
    return pairs


def _put(place: AnyValue, value: object) -> None:
    # A bool is an int, too.
    if isinstance(value, bool):
        place.bool_value = value
    elif isinstance(value, str):
        place.string_value = value
    elif isinstance(value, int):
        place.int_value = value
    elif isinstance(value, float):
        place.double_value = value
