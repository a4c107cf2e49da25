"""Writes spans as OTLP asks for, with OpenTelemetry's own protobuf classes as far as they pay.

Why not the exporter's own encoder: it takes many times as long, and encoding is most of what a
span costs. What comes again and again is written once and kept; ids and times, which never do, are
put between by ourselves. Protobuf allows for that: a message is the sequence of its fields, in any
order, and a nested one stands behind its tag and its length
(https://protobuf.dev/programming-guides/encoding/).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import (
    ResourceSpans,
    ScopeSpans,
    Span,
    SpanFlags,
    Status,
)

from bridge.telemetry.tracing.recorded import SPAN_ID_BYTES, TRACE_ID_BYTES, RecordedSpan
from bridge.telemetry.tracing.spans import SpanKind
from bridge.telemetry.tracing.trace_headers import TraceHeaders

# How many attributes are kept as they were written.
KEPT_ATTRIBUTES: Final = 1024
# Of what else most spans have in common there are as many as queues, exchanges and endpoints.
KEPT_NAMES: Final = 256
_LOCAL: Final = int(SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
_REMOTE: Final = _LOCAL | int(SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
_KINDS: Final = {
    "client": Span.SPAN_KIND_CLIENT,
    "consumer": Span.SPAN_KIND_CONSUMER,
    "producer": Span.SPAN_KIND_PRODUCER,
    "server": Span.SPAN_KIND_SERVER,
}

# Protobuf's types on the wire.
_FIXED_64: Final = 1
_LENGTH_FIRST: Final = 2
_MORE: Final = 0x80


def _tag(field: int, wire_type: int) -> bytes:
    """Return what stands before the value of a field, whose number is below 16."""
    return bytes((field << 3 | wire_type,))


_TRACE_ID: Final = _tag(Span.TRACE_ID_FIELD_NUMBER, _LENGTH_FIRST) + bytes((TRACE_ID_BYTES,))
_SPAN_ID: Final = _tag(Span.SPAN_ID_FIELD_NUMBER, _LENGTH_FIRST) + bytes((SPAN_ID_BYTES,))
_PARENT_ID: Final = _tag(Span.PARENT_SPAN_ID_FIELD_NUMBER, _LENGTH_FIRST) + bytes((SPAN_ID_BYTES,))
_BEGUN_AT: Final = _tag(Span.START_TIME_UNIX_NANO_FIELD_NUMBER, _FIXED_64)
_ENDED_AT: Final = _tag(Span.END_TIME_UNIX_NANO_FIELD_NUMBER, _FIXED_64)
_SPANS: Final = _tag(ScopeSpans.SPANS_FIELD_NUMBER, _LENGTH_FIRST)
_SCOPE_SPANS: Final = _tag(ResourceSpans.SCOPE_SPANS_FIELD_NUMBER, _LENGTH_FIRST)
_RESOURCE_SPANS: Final = _tag(ExportTraceServiceRequest.RESOURCE_SPANS_FIELD_NUMBER, _LENGTH_FIRST)
_DOUBLE: Final = Struct("<d")
_IDS_AND_TIMES: Final = Struct(f"<2s{TRACE_ID_BYTES}s2s{SPAN_ID_BYTES}scQcQ")


class SpanWriter:
    """Writes the spans of one process, which `resource` describes."""

    def __init__(self, resource: Mapping[str, Any], *, version: str) -> None:
        scope = InstrumentationScope(name="sms-bridge", version=version)
        described = Resource(attributes=[_pair(*one) for one in resource.items()])
        self._scope = _written(ScopeSpans(scope=scope))
        self._resource = _written(ResourceSpans(resource=described))

    def write(self, spans: Sequence[RecordedSpan]) -> bytes:
        """Write spans that have ended as one request."""
        of_scope = b"".join([self._scope, *[_nested(_SPANS, _span(span)) for span in spans]])
        return _nested(_RESOURCE_SPANS, self._resource + _nested(_SCOPE_SPANS, of_scope))


def _span(span: RecordedSpan) -> bytes:
    context = span.context
    parts = [
        _IDS_AND_TIMES.pack(
            _TRACE_ID,
            bytes.fromhex(context.trace_id),
            _SPAN_ID,
            bytes.fromhex(span.span_id),
            _BEGUN_AT,
            span.begun_at,
            _ENDED_AT,
            span.ended_at,
        ),
        _named(span.name, span.kind, context.is_parent_remote, span.is_error),
    ]
    if context.parent_id:
        parts += (_PARENT_ID, bytes.fromhex(context.parent_id))
    if span.link:
        parts.append(_link(span.link))
    parts += [
        # Hardly any is measured twice.
        _before_float(name) + _DOUBLE.pack(value)
        if type(value) is float
        else _attribute(name, value)
        for name, value in span.attributes.items()
    ]
    return b"".join(parts)


@lru_cache(maxsize=KEPT_NAMES)
def _named(name: str, kind: SpanKind, is_parent_remote: bool, is_error: bool) -> bytes:  # noqa: FBT001  cached
    """Write what many spans have in common."""
    span = Span(name=name, kind=_KINDS[kind], flags=_REMOTE if is_parent_remote else _LOCAL)
    if is_error:
        span.status.code = Status.STATUS_CODE_ERROR
    return _written(span)


def _link(headers: TraceHeaders) -> bytes:
    """Write a link to the span that headers name, in the form that `read_trace` has checked."""
    _, trace_id, span_id, _ = headers[0][1].split("-")
    link = Span.Link(
        trace_id=bytes.fromhex(trace_id), span_id=bytes.fromhex(span_id), flags=_REMOTE
    )
    return _written(Span(links=[link]))


@lru_cache(maxsize=KEPT_NAMES)
def _before_float(name: str) -> bytes:
    """Write an attribute but for its number, which comes last."""
    return _attribute(name, 0.0)[: -_DOUBLE.size]


@lru_cache(maxsize=KEPT_ATTRIBUTES, typed=True)
def _attribute(name: str, value: object) -> bytes:
    """Write one attribute of a span; most come again and again."""
    return _written(Span(attributes=[_pair(name, value)]))


def _pair(name: str, value: object) -> KeyValue:
    pair = KeyValue(key=name)
    try:
        _put(pair.value, value)
    except ValueError:
        # An integer beyond 64 bits, such as a publisher's count of attempts and one more, or half
        # of a surrogate pair: neither may cost the other spans of its batch.
        pair.value.string_value = ascii(value)
    return pair


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


def _nested(tag: bytes, message: bytes) -> bytes:
    """Put a message into another: behind its length in groups of seven bits, the lowest first."""
    length = bytearray()
    rest = len(message)
    while rest >= _MORE:
        length.append(rest % _MORE | _MORE)
        rest //= _MORE
    length.append(rest)
    return b"".join((tag, length, message))


def _written(message: Span | ScopeSpans | ResourceSpans) -> bytes:
    written: bytes = message.SerializeToString()
    return written
