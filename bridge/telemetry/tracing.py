"""Records spans with OpenTelemetry's SDK and exports them to a collector: OTLP over HTTP.

No message waits for an export: spans that find the queue full, and spans that the collector does
not accept, are dropped and counted. Import this module only if a collector is configured, because
OpenTelemetry takes half a second to load.

The sampling decision is made here and not by a sampler of the SDK: most messages are sampled out,
and the SDK's tracer takes several times as long for each of them.
"""

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import Sequence
from typing import Any, Final, NoReturn
from uuid import uuid4

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from bridge.telemetry.counters import Counter
from bridge.telemetry.logs import Log
from bridge.telemetry.trace_context import (
    TRACEPARENT,
    Attributes,
    Span,
    SpanKind,
    SpanLoss,
    TraceHeaders,
)

log = Log(__name__)

# Spans that may wait for their export, including the batch that is being exported.
MAX_WAITING_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 512
BATCH_SECONDS: Final = 1.0
# Timeout of the export of one batch, retries included.
EXPORT_SECONDS: Final = 5.0
# How long the process waits for the last spans to be exported before it ends.
FLUSH_SECONDS: Final = 3.0
# Minimum interval between two log lines about dropped spans.
WARN_SECONDS: Final = 60.0
# The path that the OTLP specification appends to a collector's address.
TRACES_PATH: Final = "/v1/traces"
# Limit of the bytes that are read of an answer's body; a connection with more bytes is closed.
MAX_ANSWER_BYTES: Final = 65536
REDIRECTS: Final = range(300, 400)

_KINDS: Final[dict[SpanKind, trace.SpanKind]] = {
    "client": trace.SpanKind.CLIENT,
    "consumer": trace.SpanKind.CONSUMER,
    "producer": trace.SpanKind.PRODUCER,
    "server": trace.SpanKind.SERVER,
}
# The trace id is random, and the trace not sampled:
# https://www.w3.org/TR/trace-context-2/#trace-flags.
_UNSAMPLED_FLAGS: Final = "02"


class OtlpTracer:
    """The `Tracer` of a process. Counts dropped spans in `dropped`, by reason.

    Needs a running event loop. The SDK also reads OpenTelemetry's own environment variables, such
    as `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME` and `OTEL_EXPORTER_OTLP_HEADERS`.
    """

    def __init__(
        self, endpoint: str, *, sample_ratio: float, service: str, version: str, dropped: Counter
    ) -> None:
        self._sample_ratio = sample_ratio
        self._losses = _SpanLosses(dropped)
        self._exporter = _Exporter(endpoint, self._losses)
        self._processor = _BoundedProcessor(self._exporter, self._losses)
        # The SDK's own exit handler would wait for the collector for half a minute.
        provider = TracerProvider(
            ALWAYS_ON, _describe_process(service, version), shutdown_on_exit=False
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("sms-bridge", version)

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: TraceHeaders,
        link: TraceHeaders = (),
    ) -> Span:
        """Begin a span, recorded if its parent was sampled or, without a parent, by chance."""
        context = Context()
        if parent:
            remote = _read_context(parent)
            if not remote.trace_flags.sampled:
                return Span(parent)
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote), context)
        elif random.random() >= self._sample_ratio:  # noqa: S311  no secret
            return Span(_make_unsampled())
        links = [trace.Link(_read_context(link))] if link else ()
        span = self._tracer.start_span(name, context, _KINDS[kind], attributes, links)
        if not span.is_recording():  # OTEL_SDK_DISABLED
            return Span(parent)
        return _RecordedSpan(span, self._tracer, parent[1:])

    async def run(self) -> NoReturn:
        """Wait to be cancelled; then export the waiting spans, for `FLUSH_SECONDS` at most."""
        try:
            while True:
                await asyncio.Event().wait()
        finally:
            await self._flush()

    async def _flush(self) -> None:
        loop, flushed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # The event loop is closed.
                loop.call_soon_threadsafe(flushed.set)

        # A daemon thread does not keep the process alive.
        threading.Thread(target=shut_down, name="spans flush", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            # Until Python 3.11.2, `asyncio.timeout` does not expire in a cancelled task.
            await asyncio.wait_for(flushed.wait(), FLUSH_SECONDS)
        self._losses.close(unexported=self._processor.queued - self._exporter.exported)


class _RecordedSpan(Span):
    """A span that the SDK records; `tracestate` is passed on, and never exported.

    A publisher may write anything into a tracestate, so the SDK does not get it.
    """

    __slots__ = ("_span", "_tracer")

    def __init__(self, span: trace.Span, tracer: trace.Tracer, tracestate: TraceHeaders) -> None:
        context = span.get_span_context()
        trace_id = trace.format_trace_id(context.trace_id)
        span_id = trace.format_span_id(context.span_id)
        traceparent = f"00-{trace_id}-{span_id}-{context.trace_flags:02x}"
        super().__init__(((TRACEPARENT, traceparent), *tracestate), trace_id)
        self._span = span
        self._tracer = tracer

    def begin(self, name: str, kind: SpanKind, attributes: Attributes) -> Span:
        """Begin a child span, which is recorded, too."""
        context = trace.set_span_in_context(self._span, Context())
        span = self._tracer.start_span(name, context, _KINDS[kind], attributes)
        return _RecordedSpan(span, self._tracer, self.headers[1:])

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End the span and queue it for export; an `error` becomes its status and `error.type`."""
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class _SpanLosses:
    """Counts dropped spans, and logs them at most once in `WARN_SECONDS`."""

    def __init__(self, dropped: Counter) -> None:
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._failed = self._unlogged = 0
        self._reason: SpanLoss = "export_failed"
        self._logged_at = -math.inf
        self._is_closed = False

    def add(self, reason: SpanLoss, count: int) -> None:
        if self._is_closed:
            return
        self._dropped.labels(reason).inc(count)
        self._reason = reason
        self._unlogged += count
        if reason == "export_failed":
            self._failed += count
        if self._loop.time() - self._logged_at >= WARN_SECONDS:
            self._log()

    def add_from_thread(self, count: int) -> None:
        """Count spans whose export failed; called from another thread than the event loop's."""
        with contextlib.suppress(RuntimeError):  # The event loop is closed.
            self._loop.call_soon_threadsafe(self.add, "export_failed", count)

    def close(self, *, unexported: int) -> None:
        """Count and log the failed exports that were not counted yet; count nothing later."""
        if unexported > self._failed:
            self.add("export_failed", unexported - self._failed)
        if self._unlogged:
            self._log()
        self._is_closed = True

    def _log(self) -> None:
        log.warning(
            "spans_dropped",
            why=self._reason,
            count=self._unlogged,
            remedy="check that a collector accepts OTLP over HTTP at tracing.otlp_endpoint",
        )
        self._unlogged, self._logged_at = 0, self._loop.time()


class _BoundedProcessor(BatchSpanProcessor):
    """Drops and counts new spans when the queue is full; the SDK drops old ones uncounted."""

    def __init__(self, exporter: "_Exporter", losses: _SpanLosses) -> None:
        super().__init__(
            exporter,
            max_queue_size=MAX_WAITING_SPANS,
            schedule_delay_millis=BATCH_SECONDS * 1000,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
        self._exporter = exporter
        self._losses = losses
        self.queued = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self.queued - self._exporter.finished >= MAX_WAITING_SPANS:
            self._losses.add("queue_full", 1)
        else:
            self.queued += 1
            super().on_end(span)


class _Exporter(OTLPSpanExporter):
    """Counts the spans of each batch; only the SDK's thread calls `export`."""

    def __init__(self, endpoint: str, losses: _SpanLosses) -> None:
        base = endpoint.rstrip("/").removesuffix(TRACES_PATH)
        super().__init__(base + TRACES_PATH, timeout=EXPORT_SECONDS, session=_BoundedSession())
        self._losses = losses
        self.exported = self.finished = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch, with retries for `EXPORT_SECONDS`."""
        result = SpanExportResult.FAILURE
        try:
            result = super().export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self._losses.add_from_thread(len(spans))
            self.finished += len(spans)
        return result


class _BoundedSession(requests.Session):
    """Reads a limited part of an answer's body, and treats a redirect as a failure."""

    def request(self, *arguments: Any, **options: Any) -> requests.Response:  # noqa: ANN401
        """Send a request, and read at most `MAX_ANSWER_BYTES` of the answer's body."""
        answer = super().request(*arguments, **(options | {"stream": True}))
        with answer:
            answer.raw.read(MAX_ANSWER_BYTES)
        if answer.status_code in REDIRECTS:
            # The exporter does not follow a redirect, and would count these spans as exported.
            raise requests.TooManyRedirects
        return answer


def _read_context(headers: TraceHeaders) -> trace.SpanContext:
    """Parse a traceparent that `read_trace` has checked."""
    _, trace_id, span_id, flags = headers[0][1].split("-")
    flag_bits = trace.TraceFlags(int(flags, 16))
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, flag_bits)


def _make_unsampled() -> TraceHeaders:
    """Begin a trace with the unsampled flag, so that later services do not decide again."""
    ids = random.randbytes(24).hex()  # noqa: S311  no secret
    return ((TRACEPARENT, f"00-{ids[:32]}-{ids[32:]}-{_UNSAMPLED_FLAGS}"),)


def _describe_process(service: str, version: str) -> Resource:
    """Describe this process; the environment variables of OpenTelemetry take precedence."""
    ours = {
        "service.name": service,
        "service.version": version,
        "service.instance.id": uuid4().hex,
    }
    return Resource.create().merge(Resource(ours)).merge(OTELResourceDetector().detect())
