"""What the roles say of the things that they trace; nothing of OpenTelemetry is imported here.

Without a tracer, a role has nothing to do with spans. With one, it begins a span for each message
and each webhook; most of them are not recorded, and cost next to nothing.
"""

import importlib.util
from collections.abc import Mapping
from typing import Final, Literal, Protocol

from bridge.telemetry.tracing.trace_headers import TraceHeaders

# As the semantic conventions of OpenTelemetry call them.
SpanKind = Literal["client", "consumer", "producer", "server"]
Attributes = Mapping[str, str | int | float]
# Why a span was not exported: too many wait, or the collector did not take it.
SpanLoss = Literal["queue_full", "export_failed"]

# A tuple, because a union takes ten times as long to look at.
_VALUES: Final = (str, int, float)
# What has to be installed before a span can be exported.
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http"


class Span:
    """Something that takes time, and is part of a trace; one of this class is not recorded.

    `headers` are passed on with whatever it causes. `trace_id` is None when it is not recorded:
    then its attributes need not be put together. One that is not ended is not exported.
    """

    __slots__ = ("headers", "trace_id")

    def __init__(self, headers: TraceHeaders, trace_id: str | None = None) -> None:
        self.headers = headers
        self.trace_id = trace_id

    def begin(self, name: str, kind: SpanKind, attributes: Attributes) -> "Span":  # noqa: ARG002
        """Begin a span within this one; recorded if this one is."""
        return self

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End it, with what is known only now; `error` is a word for what failed, if anything."""


class Tracer(Protocol):
    """Begins the first span of a message or a webhook, and decides whether it is recorded."""

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: TraceHeaders,
        link: TraceHeaders = (),
    ) -> Span:
        """Begin a span below its parent's, which decides whether it is recorded.

        Without a parent, chance decides by `tracing.sample_ratio`. A recorded span refers to the
        one that `link` names.
        """


def known(facts: Mapping[str, object]) -> Attributes:
    """Return as attributes the facts that are known: None stands for what is not."""
    return {name: value for name, value in facts.items() if isinstance(value, _VALUES)}


def is_exporter_installed() -> bool:
    """Whether the extra `tracing` is there."""
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False
