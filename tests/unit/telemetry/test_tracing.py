"""Spans on their way to a collector: sampling, content, and losses."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing

import pytest
from prometheus_client import CollectorRegistry

from bridge.telemetry import tracing
from bridge.telemetry.counters import Counter
from bridge.telemetry.log_setup import configure_logging
from bridge.telemetry.trace_context import Attributes, TraceHeaders
from bridge.telemetry.tracing import (
    FLUSH_SECONDS,
    MAX_ANSWER_BYTES,
    MAX_WAITING_SPANS,
    TRACES_PATH,
    OtlpTracer,
)
from tests.ears import Ears
from tests.otlp import Received, Receiver, otlp_receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1"))
UNSAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"), ("tracestate", "vendor=1"))
GUARD_SECONDS = 20.0
CHUNK = b"10000\r\n" + b"x" * 65536 + b"\r\n"
# Fits into the socket buffers of both ends when one of them stops to read.
BUFFERED_BYTES = 16 * 1024 * 1024


class Traced:
    """A tracer, the receiver of its spans, and the count of dropped spans by reason."""

    def __init__(self, endpoint: str, receiver: Receiver, *, ratio: float) -> None:
        self.receiver = receiver
        self._dropped = Counter("dropped", "", ("reason",), registry=CollectorRegistry())
        self.tracer = OtlpTracer(
            endpoint,
            sample_ratio=ratio,
            service="sms-bridge-worker",
            version="1.2.3",
            dropped=self._dropped,
        )
        self._running = asyncio.create_task(self.tracer.run())

    @property
    def lost(self) -> dict[str, int]:
        reasons = ("queue_full", "export_failed")
        counts = {reason: int(self._dropped.labels(reason).value) for reason in reasons}
        return {reason: count for reason, count in counts.items() if count}

    async def end(self) -> float:
        """Cancel the tracer, wait for its end, and return how many seconds that took."""
        began = time.monotonic()
        await asyncio.sleep(0)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        return time.monotonic() - began

    async def spans(self) -> list[Received]:
        await self.end()
        return sorted(self.receiver.spans, key=lambda span: span.name)

    def make(self, count: int = 1, parent: TraceHeaders = ()) -> None:
        for _ in range(count):
            self.tracer.begin("one", "consumer", {}, parent=parent).end({})


@asynccontextmanager
async def traced(
    receiver: Receiver, *, ratio: float = 1.0, path: str = ""
) -> AsyncIterator[Traced]:
    ours = Traced(receiver.url + path, receiver, ratio=ratio)
    async with asyncio.timeout(GUARD_SECONDS):
        yield ours
        # A thread that still exports would report a dead collector into the next test.
        receiver.status = 200
        receiver.let_go.set()
        await ours.end()
        await until(lambda: not exporting_threads())


def exporting_threads() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name in {"OtelBatchSpanRecordProcessor", "spans flush"}
    ]


class Output:
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def isatty(self) -> bool:
        return False


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as ours:
        yield ours


async def until(check: Callable[[], bool]) -> None:
    while not check():  # noqa: ASYNC110  a thread of the SDK changes it
        await asyncio.sleep(0.01)


async def test_a_span_arrives_complete(receiver: Receiver) -> None:
    """Name, kind, times, attributes of begin and end, parent and resource arrive."""
    async with traced(receiver) as ours:
        began = time.time()
        outer = ours.tracer.begin("outer", "consumer", {"queue": "q"}, parent=SAMPLED)
        inner = outer.begin("inner", "client", {"port": 80})
        inner.end({"status": 202})
        outer.end({"queue": "other", "seconds": 0.5, "again": True})
        ended = time.time()
        got_inner, got_outer = await ours.spans()

    assert (got_outer.name, got_outer.kind) == ("outer", "consumer")
    assert (got_outer.trace_id, got_outer.parent_id) == (TRACE, PARENT)
    assert got_outer.attributes == {"queue": "other", "seconds": 0.5, "again": True}
    assert got_outer.attributes["again"] is True
    assert (got_inner.trace_id, got_inner.parent_id) == (TRACE, got_outer.span_id)
    assert (got_inner.kind, got_inner.attributes) == ("client", {"port": 80, "status": 202})
    assert began - 0.001 <= got_outer.started_at <= got_inner.started_at
    assert got_inner.ended_at <= got_outer.ended_at <= ended + 0.001
    assert not got_outer.is_error
    assert (
        got_outer.resource.items()
        >= {
            "service.name": "sms-bridge-worker",
            "service.version": "1.2.3",
        }.items()
    )


async def test_a_span_has_a_link_and_an_error(receiver: Receiver) -> None:
    """A span may link to another trace; a failure is one word as `error.type`."""
    other = (("traceparent", f"00-{'c' * 32}-{'d' * 16}-01"),)
    async with traced(receiver) as ours:
        span = ours.tracer.begin("one", "consumer", {}, parent=SAMPLED, link=other)
        span.end({}, error="timeout")
        (got,) = await ours.spans()

    assert got.links == [("c" * 32, "d" * 16)]
    assert (got.is_error, got.attributes) == (True, {"error.type": "timeout"})


async def test_headers_name_the_span(receiver: Receiver) -> None:
    """The traceparent that is passed on names the span; the tracestate is kept."""
    async with traced(receiver) as ours:
        outer = ours.tracer.begin("outer", "server", {}, parent=SAMPLED)
        inner = outer.begin("inner", "producer", {})
        outer.end({})
        inner.end({})
        got_inner, got_outer = await ours.spans()

    for span, got in ((outer, got_outer), (inner, got_inner)):
        (_, parent), state = span.headers
        assert got.is_named_by(parent)
        assert parent.endswith("-01")
        assert state == ("tracestate", "vendor=1")
        assert span.trace_id == TRACE


async def test_a_tracestate_is_not_exported(receiver: Receiver) -> None:
    """A publisher's tracestate is passed on with the trace, but no collector gets it."""
    canary = "+491713920001"
    parent = (SAMPLED[0], ("tracestate", f"vendor={canary}"))
    async with traced(receiver) as ours:
        span = ours.tracer.begin("one", "consumer", {}, parent=parent)
        span.begin("within", "client", {}).end({})
        span.end({})
        got = await ours.spans()

    assert span.headers[1] == parent[1]
    assert len(got) == 2
    assert canary.encode() not in b"".join(receiver.bodies)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_the_parent_decides(receiver: Receiver, ratio: float) -> None:
    """At any ratio, a sampled parent is recorded, and an unsampled one passed on unchanged."""
    async with traced(receiver, ratio=ratio) as ours:
        ours.make(parent=SAMPLED)
        out = ours.tracer.begin("out", "consumer", {}, parent=UNSAMPLED)
        out.begin("within", "client", {}).end({})
        out.end({})
        got = await ours.spans()

    assert [span.name for span in got] == ["one"]
    assert (out.headers, out.trace_id) == (UNSAMPLED, None)


async def test_chance_decides_where_a_trace_begins(receiver: Receiver) -> None:
    """Of new traces the configured share is recorded, and the headers carry the decision."""
    async with traced(receiver, ratio=0.3) as ours:
        begun = [ours.tracer.begin("one", "consumer", {}, parent=()) for _ in range(2000)]
        recorded = [span for span in begun if span.trace_id is not None]
        flags = {
            (span.trace_id is not None, int(span.headers[0][1][-2:], 16) & 1) for span in begun
        }
        ids = {span.headers[0][1] for span in begun}

    # Ten times the standard deviation.
    assert 400 <= len(recorded) <= 800
    assert flags == {(True, 1), (False, 0)}
    assert len(ids) == len(begun)


@pytest.mark.parametrize("path", ["/", TRACES_PATH])
async def test_the_address_may_hold_the_path(receiver: Receiver, path: str) -> None:
    """The collector's address may or may not end with the path for traces."""
    async with traced(receiver, path=path) as ours:
        ours.make()
        await ours.spans()

    assert receiver.paths == {TRACES_PATH}


# A collector that does not accept spans


def drop_by_status(status: int) -> Callable[[Traced], Awaitable[None]]:

    async def drop(ours: Traced) -> None:
        ours.receiver.status = status
        ours.make(3)
        await until(lambda: bool(ours.lost))

    return drop


async def drop_when_full(ours: Traced) -> None:
    ours.receiver.status = None
    ours.make(MAX_WAITING_SPANS + 5)


@pytest.mark.parametrize(
    ("drop", "lost"),
    [
        (drop_by_status(400), {"export_failed": 3}),
        (drop_by_status(307), {"export_failed": 3}),
        (drop_when_full, {"queue_full": 5}),
    ],
    ids=["refused", "redirected", "full"],
)
async def test_what_is_dropped_is_counted(
    receiver: Receiver,
    ears: Ears,
    drop: Callable[[Traced], Awaitable[None]],
    lost: dict[str, int],
) -> None:
    """Spans that a collector refuses, or does not accept in time, are dropped; one line says so."""
    async with traced(receiver) as ours:
        await drop(ours)
        dropped = ours.lost
        told = ears.heard("spans_dropped")

    assert dropped == lost
    assert [line["why"] for line in told] == [*lost]
    assert "tracing.otlp_endpoint" in told[0]["remedy"]


async def test_the_log_is_bounded(
    receiver: Receiver, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead collector is one line per interval, with the count since the last line."""
    receiver.status = 400
    async with traced(receiver) as ours:
        ours.make(2)
        await until(lambda: ours.lost == {"export_failed": 2})
        ours.make(3)
        await until(lambda: ours.lost == {"export_failed": 5})
        quiet = len(ears.heard("spans_dropped"))
        monkeypatch.setattr(tracing, "WARN_SECONDS", 0.0)
        ours.make(4)
        await until(lambda: ours.lost == {"export_failed": 9})
        told = [line["count"] for line in ears.heard("spans_dropped")]

    assert (quiet, told) == (1, [2, 7])


async def test_a_collector_that_hangs_holds_nothing_up(receiver: Receiver, ears: Ears) -> None:
    """The event loop goes on, and the end of the process waits no longer than the deadline."""
    receiver.status = None
    async with traced(receiver) as ours:
        ours.make()
        await until(lambda: receiver.requests > 0)
        # A process may end while its collector hangs.
        assert [thread.daemon for thread in exporting_threads()] == [True]
        began = time.monotonic()
        ours.make(100)
        took = time.monotonic() - began
        ended_after = await ours.end()
        told = ears.heard("spans_dropped")

    assert took < 1
    # The SDK would wait for half a minute.
    assert FLUSH_SECONDS - 0.5 <= ended_after < FLUSH_SECONDS + 8
    assert ours.lost == {"export_failed": 101}
    assert [line["count"] for line in told] == [101]


async def test_a_value_without_a_protobuf_type_costs_itself_only(receiver: Receiver) -> None:
    """An integer beyond 64 bits or half a surrogate pair is left out; the batch arrives."""
    async with traced(receiver) as ours:
        attributes: Attributes = {"big": 2**63, "half": "\ud800", "good": 2**63 - 1}
        ours.tracer.begin("odd", "consumer", attributes, parent=()).end({})
        ours.make()
        odd, one = await ours.spans()

    assert (one.name, odd.attributes) == ("one", {"good": 2**63 - 1})
    assert ours.lost == {}


async def test_a_disabled_sdk_records_nothing(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OTEL_SDK_DISABLED, headers are passed on as they came."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with traced(receiver) as ours:
        child = ours.tracer.begin("one", "consumer", {}, parent=SAMPLED)
        root = ours.tracer.begin("two", "consumer", {}, parent=())

    assert (child.headers, child.trace_id) == (SAMPLED, None)
    assert (root.headers, root.trace_id) == ((), None)


async def test_the_log_names_no_credential(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a proxy's password nor the collector's token is logged, even at level debug."""
    monkeypatch.setenv("HTTP_PROXY", "http://user:canary-password@127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=canary-token,canary-malformed")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    lines = Output()
    configure_logging("debug", "json", stream=lines)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            ours = Traced("http://collector.invalid:4318", receiver, ratio=1.0)
            ours.make()
            await until(lambda: bool(ours.lost))
            await ours.end()
    finally:
        logging.getLogger().handlers.clear()
        configure_logging("critical", "json", stream=Output())

    assert "spans_dropped" in lines.text
    assert "canary" not in lines.text


async def test_an_endless_answer_is_not_read(receiver: Receiver) -> None:
    """The body of an answer is read up to a bound, and the connection closed."""
    written = 0

    def answer(listener: socket.socket) -> None:
        nonlocal written
        connection, _ = listener.accept()
        with closing(connection):
            connection.settimeout(GUARD_SECONDS)
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                while written < 4 * BUFFERED_BYTES:
                    connection.sendall(CHUNK)
                    written += len(CHUNK)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        collector = threading.Thread(target=answer, args=(listener,))
        collector.start()
        ours = Traced(f"http://127.0.0.1:{listener.getsockname()[1]}", receiver, ratio=1.0)
        ours.make()
        await ours.end()
        await asyncio.to_thread(collector.join, GUARD_SECONDS)

    assert ours.lost == {}
    assert MAX_ANSWER_BYTES <= written < BUFFERED_BYTES
