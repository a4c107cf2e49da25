"""Spans that are recorded, until they are written.

They are our own because they are made on the event loop: the SDK's spans take it three times as
long, and its tracer five times as long for a message that is sampled out. They hold what OTLP
asks for, and `otlp` alone knows how it is written.
"""

import random
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from bridge.telemetry.tracing.spans import Attributes, Span, SpanKind
from bridge.telemetry.tracing.trace_headers import TRACEPARENT, TraceHeaders

TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8


class TraceContext(NamedTuple):
    """Where a span stands: in which trace, with which flags, below which other span.

    Ids and flags are in hex as in a traceparent; `parent_id` is empty where a trace begins.
    `tracestate` is that header, if there is one: it is passed on, and not exported, for a
    publisher may write anything into it.
    """

    trace_id: str
    flags: str
    parent_id: str = ""
    is_parent_remote: bool = False
    tracestate: TraceHeaders = ()


class RecordedSpan(Span):
    """A span that is handed to `on_end` when it ends, and does not change any more.

    Times are in nanoseconds since 1970. `link` names another span to refer to, if there is one.
    """

    __slots__ = (
        "_on_end",
        "attributes",
        "begun_at",
        "context",
        "ended_at",
        "is_error",
        "kind",
        "link",
        "name",
        "span_id",
    )

    def __init__(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        context: TraceContext,
        on_end: Callable[["RecordedSpan"], object],
    ) -> None:
        self.span_id = new_id(SPAN_ID_BYTES)
        traceparent = f"00-{context.trace_id}-{self.span_id}-{context.flags}"
        super().__init__(((TRACEPARENT, traceparent), *context.tracestate), context.trace_id)
        self._on_end = on_end
        self.name = name
        self.kind: SpanKind = kind
        self.attributes = attributes
        self.context = context
        self.link: TraceHeaders = ()
        self.is_error = False
        self.begun_at = time.time_ns()
        self.ended_at = 0

    def begin(self, name: str, kind: SpanKind, attributes: Attributes) -> Span:
        """Begin a span within this one, which is recorded, too."""
        trace_id, flags, _, _, tracestate = self.context
        context = TraceContext(trace_id, flags, self.span_id, tracestate=tracestate)
        return RecordedSpan(name, kind, attributes, context=context, on_end=self._on_end)

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End it and hand it over; its status is an error's if there is one."""
        facts = {**self.attributes, **attributes}
        if error is not None:
            facts["error.type"] = error
            self.is_error = True
        self.attributes = facts
        self.ended_at = time.time_ns()
        self._on_end(self)


def new_id(size_bytes: int) -> str:
    """Make up an id, in hex."""
    return random.randbytes(size_bytes).hex()  # noqa: S311  no secret
