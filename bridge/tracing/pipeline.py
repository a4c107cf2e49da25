"""Records spans, and exports them with OpenTelemetry's SDK: OTLP, protobuf over HTTP.

The SDK's batch processor exports in a thread of its own. Nothing waits for it: what finds no room,
and what the collector does not take, is dropped and counted. Import this module only where spans
are exported: OpenTelemetry takes half a second to load.

Why spans are begun and ended by ourselves: the SDK's tracer takes the event loop three times as
long for a span that is recorded, and five times for one that is sampled out. What is exported is
its `ReadableSpan` all the same. To swap the tracer in, have `begin` return its spans, and sample
with `ParentBased`.
"""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn
from uuid import uuid4

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanKind as SdkSpanKind

from bridge.logs import Log
from bridge.tracing.exporter import Exporter
from bridge.tracing.spans import Attributes, Span, SpanKind, SpanLoss
from bridge.tracing.trace_headers import TRACEPARENT, TraceHeaders

log = Log(__name__)

# How many spans may wait, those that are being exported included.
MAX_WAITING_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 512
BATCH_SECONDS: Final = 1.0
# How long the process waits at its end until the last spans are exported.
FLUSH_SECONDS: Final = 3.0
# Between two lines of the log about spans that are dropped.
WARN_SECONDS: Final = 60.0

# The second flag says that trace ids are random.
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
_OK: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)
_KINDS: Final[dict[SpanKind, SdkSpanKind]] = {
    "client": SdkSpanKind.CLIENT,
    "consumer": SdkSpanKind.CONSUMER,
    "producer": SdkSpanKind.PRODUCER,
    "server": SdkSpanKind.SERVER,
}


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
        self._exporter = Exporter(endpoint, failed=self._on_failed)
        self._queue = _Queue(self._exporter, full=lambda: self._lose("queue_full", 1))
        self._resource = _resource(service, version)
        self._scope = InstrumentationScope("sms-bridge", version)

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
            return _Recorded(self, name, kind, attributes, context=_new_context(None, _SAMPLED))
        remote = _read_context(parent)
        if not remote.trace_flags.sampled:
            return Span(parent)
        context = _new_context(remote, remote.trace_flags)
        span = _Recorded(self, name, kind, attributes, context=context, parent=remote)
        span.headers += parent[1:]
        if link:
            span.links = (Link(_read_context(link)),)
        return span

    def export(self, span: "_Recorded", attributes: Attributes, status: Status) -> None:
        """Put a span that has ended on its way to the collector, with all its attributes."""
        self._queue.put(
            ReadableSpan(
                name=span.name,
                context=span.context,
                parent=span.parent,
                resource=self._resource,
                attributes=attributes,
                links=span.links,
                kind=_KINDS[span.kind],
                status=status,
                start_time=span.begun_at,
                end_time=time.time_ns(),
                instrumentation_scope=self._scope,
            )
        )

    async def run(self) -> NoReturn:
        """Do nothing until cancelled; then export what waits, for `FLUSH_SECONDS` at most."""
        try:
            while True:
                await asyncio.Event().wait()
        finally:
            await self._flush()

    async def _flush(self) -> None:
        stopped = asyncio.Event()

        def stop() -> None:
            self._queue.shutdown()
            self._call(stopped.set)

        # In a thread that no end of the process waits for.
        threading.Thread(target=stop, name="last spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await stopped.wait()
        if self._queue.waiting:
            self._told_at = -WARN_SECONDS
            self._lose("export_failed", self._queue.waiting)
        # What fails yet is counted already.
        self._is_over = True

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


class _Recorded(Span):
    """A span that is exported when it ends. `begun_at` is in nanoseconds since 1970."""

    __slots__ = (
        "_attributes",
        "_pipeline",
        "begun_at",
        "context",
        "kind",
        "links",
        "name",
        "parent",
    )

    def __init__(
        self,
        pipeline: Pipeline,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        context: SpanContext,
        parent: SpanContext | None = None,
    ) -> None:
        super().__init__((_header_of(context),), f"{context.trace_id:032x}")
        self._pipeline = pipeline
        self._attributes = attributes
        self.name = name
        self.kind: SpanKind = kind
        self.context = context
        self.parent = parent
        self.links: tuple[Link, ...] = ()
        self.begun_at = time.time_ns()

    def begin(self, name: str, kind: SpanKind, attributes: Attributes) -> Span:
        """Begin a span within this one, which is recorded, too."""
        context = _new_context(self.context, self.context.trace_flags)
        span = _Recorded(
            self._pipeline, name, kind, attributes, context=context, parent=self.context
        )
        span.headers += self.headers[1:]
        return span

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End it and have it exported; its status is an error's if there is one."""
        facts = {**self._attributes, **attributes}
        if error is not None:
            facts["error.type"] = error
        self._pipeline.export(self, facts, _OK if error is None else _ERROR)


class _Queue:
    """Puts spans into the SDK's batch processor while there is room; `full` is called otherwise.

    The event loop alone calls it. The SDK's own would drop the oldest span, and count it nowhere
    that we could read.
    """

    def __init__(self, exporter: Exporter, *, full: Callable[[], None]) -> None:
        self._exporter = exporter
        self._full = full
        self._taken = 0
        self._batches = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_WAITING_SPANS,
            schedule_delay_millis=BATCH_SECONDS * 1000,
            max_export_batch_size=MAX_BATCH_SPANS,
        )

    @property
    def waiting(self) -> int:
        """How many spans are neither exported nor dropped."""
        return self._taken - self._exporter.done

    def put(self, span: ReadableSpan) -> None:
        """Take a span that has ended."""
        if self.waiting >= MAX_WAITING_SPANS:
            self._full()
            return
        self._taken += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Export what waits; may take half a minute with a collector that hangs."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]


def _read_context(headers: TraceHeaders) -> SpanContext:
    """Read the span that headers name, in the form that `read_trace` has checked.

    The tracestate is passed on, and not exported: a publisher may write anything into it.
    """
    _, trace_id, span_id, flags = headers[0][1].split("-")
    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
    )


def _unsampled() -> TraceHeaders:
    """Begin a trace that is not recorded: whoever is told of it must not decide anew."""
    ids = f"{random.getrandbits(128):032x}-{random.getrandbits(64):016x}"
    return ((TRACEPARENT, f"00-{ids}-02"),)


def _new_context(parent: SpanContext | None, flags: TraceFlags) -> SpanContext:
    """Make up the ids of a span, of its trace too if it has no parent."""
    return SpanContext(
        random.getrandbits(128) if parent is None else parent.trace_id,
        random.getrandbits(64),
        is_remote=False,
        trace_flags=flags,
    )


def _header_of(context: SpanContext) -> tuple[str, str]:
    ids = f"{context.trace_id:032x}-{context.span_id:016x}"
    return TRACEPARENT, f"00-{ids}-{context.trace_flags:02x}"


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
