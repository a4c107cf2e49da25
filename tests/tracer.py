"""A tracer that records spans."""

from dataclasses import dataclass, field
from typing import Any

from bridge.telemetry.trace_context import Attributes, Span, SpanKind, TraceHeaders


class Told(Span):
    """A recorded span with its attributes. `within` contains its child spans."""

    __slots__ = ("attributes", "ended", "error", "kind", "link", "name", "parent", "within")

    def __init__(self, name: str, kind: SpanKind, attributes: Attributes, number: int = 1) -> None:
        super().__init__((("traceparent", f"00-{'a' * 32}-{number:016x}-01"),), "a" * 32)
        self.name = name
        self.kind: SpanKind = kind
        self.attributes: dict[str, Any] = dict(attributes)
        self.parent: TraceHeaders = ()
        self.link: TraceHeaders = ()
        self.within: list[Told] = []
        self.ended = 0
        self.error: str | None = None

    def begin(self, name: str, kind: SpanKind, attributes: Attributes) -> Span:
        """Record a child span."""
        number = int(self.headers[0][1].split("-")[2], 16) * 16 + len(self.within)
        self.within.append(Told(name, kind, attributes, number))
        return self.within[-1]

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """Record the final attributes."""
        self.attributes |= attributes
        self.ended += 1
        self.error = error


@dataclass
class KeepingTracer:
    """Records the first span of each trace, or nothing while `is_off`."""

    spans: list[Told] = field(default_factory=list)
    is_off: bool = False

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: TraceHeaders,
        link: TraceHeaders = (),
    ) -> Span:
        """Record a span."""
        if self.is_off:
            return Span(parent or (("traceparent", f"00-{'b' * 32}-{'b' * 16}-00"),))
        span = Told(name, kind, attributes, len(self.spans) + 1)
        span.parent, span.link = parent, link
        self.spans.append(span)
        return span
