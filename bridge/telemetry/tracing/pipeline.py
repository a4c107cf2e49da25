"""Records spans and exports them to an OpenTelemetry collector: OTLP, protobuf over HTTP.

Nothing waits for the export: what finds no room, and what the collector does not take, is dropped
and counted. Import this module only where spans are exported: OpenTelemetry takes half a second
to load.

Of the SDK this takes what describes the process, and the exporter. To swap its tracer in, have
`begin` return its spans, sampled with `ParentBased`, and give them to its batch processor.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final, NoReturn
from uuid import uuid4

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from bridge.telemetry.logs import Log
from bridge.telemetry.tracing.batches import Batches
from bridge.telemetry.tracing.exporter import Exporter
from bridge.telemetry.tracing.otlp import SpanWriter
from bridge.telemetry.tracing.recorded import (
    SPAN_ID_BYTES,
    TRACE_ID_BYTES,
    RecordedSpan,
    TraceContext,
    new_id,
)
from bridge.telemetry.tracing.spans import Attributes, Span, SpanKind, SpanLoss
from bridge.telemetry.tracing.trace_headers import TRACEPARENT, TraceHeaders

log = Log(__name__)

# How long the process waits at its end until the last spans are exported.
FLUSH_SECONDS: Final = 3.0
# Between two lines of the log about spans that are dropped.
WARN_SECONDS: Final = 60.0

# Flags of a traceparent: https://www.w3.org/TR/trace-context-2/#trace-flags.
_SAMPLED: Final = 0x01
_OURS_SAMPLED: Final = "03"
# Trace ids that begin here are random, which the second flag says.
_OURS_UNSAMPLED: Final = "02"


class Pipeline:
    """The `Tracer` of one process, and the way of its spans to the collector.

    `lost` is called on the event loop with why and how many spans were dropped. Needs a running
    event loop. The SDK also heeds `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME` and
    `OTEL_EXPORTER_OTLP_HEADERS`, `_CERTIFICATE` and the like.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        sample_ratio: float,
        service: str,
        version: str,
        lost: Callable[[SpanLoss, int], object],
    ) -> None:
        self._sample_ratio = sample_ratio
        self._lost = lost
        self._untold, self._told_at = 0, -WARN_SECONDS
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        writer = SpanWriter(_resource(service, version).attributes, version=version)
        self._exporter = Exporter(endpoint, writer, failed=self._on_failed)
        self._stopped = asyncio.Event()
        self._batches = Batches(
            self._exporter.export, stopped=lambda: self._call(self._stopped.set)
        )

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: TraceHeaders,
        link: TraceHeaders = (),
    ) -> Span:
        """Begin a span, recorded if its parent was sampled, or else as `sample_ratio` has it."""
        if not parent:
            if random.random() >= self._sample_ratio:  # noqa: S311  no secret
                return Span(_unsampled())
            context = TraceContext(new_id(TRACE_ID_BYTES), _OURS_SAMPLED)
            return RecordedSpan(name, kind, attributes, context=context, on_end=self._on_end)
        # In the form that `read_trace` has checked.
        _, trace_id, parent_id, flags = parent[0][1].split("-")
        if not int(flags, 16) & _SAMPLED:
            return Span(parent)
        context = TraceContext(trace_id, flags, parent_id, True, parent[1:])
        span = RecordedSpan(name, kind, attributes, context=context, on_end=self._on_end)
        span.link = link
        return span

    async def run(self) -> NoReturn:
        """Do nothing until cancelled; then export what waits, for `FLUSH_SECONDS` at most."""
        try:
            while True:
                await asyncio.Event().wait()
        finally:
            await self._flush()

    async def _flush(self) -> None:
        self._batches.stop()
        with contextlib.suppress(TimeoutError):
            # Up to Python 3.11.2 `asyncio.timeout` does not end so in a task that is cancelled.
            await asyncio.wait_for(self._stopped.wait(), FLUSH_SECONDS)
        waiting = self._batches.waiting
        self._exporter.shutdown()
        if waiting:
            self._told_at = -WARN_SECONDS
            self._lose("export_failed", waiting)
        # What fails yet is counted already.
        self._is_over = True

    def _on_end(self, span: RecordedSpan) -> None:
        if not self._batches.put(span):
            self._lose("queue_full", 1)

    def _on_failed(self, count: int) -> None:
        """Hand over to the event loop; called in the exporting thread."""
        self._call(self._lose, "export_failed", count)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # A loop that is closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _lose(self, why: SpanLoss, count: int) -> None:
        if self._is_over:
            return
        self._lost(why, count)
        self._untold += count
        now = self._loop.time()
        if now - self._told_at < WARN_SECONDS:
            return
        log.warning(
            "spans_dropped",
            why=why,
            count=self._untold,
            remedy="see that a collector takes OTLP over HTTP at tracing.otlp_endpoint",
        )
        self._untold, self._told_at = 0, now


def _unsampled() -> TraceHeaders:
    """Begin a trace that is not recorded: whoever is told of it must not decide anew."""
    # Most messages are, so both ids are made at once.
    ids = new_id(TRACE_ID_BYTES + SPAN_ID_BYTES)
    trace_id, span_id = ids[: 2 * TRACE_ID_BYTES], ids[2 * TRACE_ID_BYTES :]
    return ((TRACEPARENT, f"00-{trace_id}-{span_id}-{_OURS_UNSAMPLED}"),)


def _resource(service: str, version: str) -> Resource:
    """Say which process this is; what the environment says of it comes first."""
    ours = Resource(
        {
            "service.name": service,
            "service.version": version,
            "service.instance.id": uuid4().hex,
        }
    )
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())
