"""W3C trace headers, and the spans that both roles begin and end.

The roles know only this module. Nothing of OpenTelemetry is imported here: `tracing` does that,
and is loaded only if a collector is configured.
"""

import importlib.util
import re
from collections.abc import Mapping
from typing import Final, Literal, Protocol

# Name and value of each header: traceparent, then tracestate if there is one.
TraceHeaders = tuple[tuple[str, str], ...]

# Named as in OpenTelemetry's semantic conventions.
SpanKind = Literal["client", "consumer", "producer", "server"]
Attributes = Mapping[str, str | int | float]
# Why a span was not exported: the queue was full, or the collector did not accept it.
SpanLoss = Literal["queue_full", "export_failed"]

TRACEPARENT: Final = "traceparent"
_TRACEPARENT: Final = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE: Final = re.compile("[ -~]{1,512}")
# A tuple: `isinstance` takes ten times as long with a union.
_ATTRIBUTE_TYPES: Final = (str, int, float)
# The package that must be installed before a span can be exported.
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http"


class Span:
    """An operation within a trace. This class is the no-op: it only passes trace headers on.

    `headers` are added to every message and request that the operation causes. `trace_id` is None
    if the span is not recorded; its attributes then need not be computed. A span is exported when
    it ends; a span that never ends is not exported.
    """

    __slots__ = ("headers", "trace_id")

    def __init__(self, headers: TraceHeaders, trace_id: str | None = None) -> None:
        self.headers = headers
        self.trace_id = trace_id

    def begin(self, name: str, kind: SpanKind, attributes: Attributes) -> "Span":  # noqa: ARG002
        """Begin a child span, which is recorded if this one is."""
        return self

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End the span and add attributes; `error` is one word for the failure, if any."""


class Tracer(Protocol):
    """Begins the first span of a message or webhook and decides whether it is recorded."""

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: TraceHeaders,
        link: TraceHeaders = (),
    ) -> Span:
        """Begin a span below `parent`, whose sampled flag decides whether it is recorded.

        Without a parent, chance decides by `tracing.sample_ratio`. A recorded span links to the
        span that `link` names.
        """


def read_trace(parent: object, state: object) -> TraceHeaders:
    """Return the valid W3C trace headers, to be passed on; drop malformed ones."""
    if not (isinstance(parent, str) and _TRACEPARENT.fullmatch(parent)):
        return ()
    if not (isinstance(state, str) and _TRACESTATE.fullmatch(state)):
        return ((TRACEPARENT, parent),)
    return ((TRACEPARENT, parent), ("tracestate", state))


def known(facts: Mapping[str, object]) -> Attributes:
    """Return the facts that may be span attributes; leave out None, which stands for unknown."""
    return {name: value for name, value in facts.items() if isinstance(value, _ATTRIBUTE_TYPES)}


def is_exporter_installed() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False
