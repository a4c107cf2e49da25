"""Spans on their way to a collector: which are recorded, what they say, and which are dropped."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from bridge.telemetry.tracing import pipeline as module
from bridge.telemetry.tracing.batches import MAX_WAITING_SPANS
from bridge.telemetry.tracing.exporter import TRACES_PATH
from bridge.telemetry.tracing.pipeline import FLUSH_SECONDS, Pipeline
from bridge.telemetry.tracing.trace_headers import TraceHeaders
from tests.ears import Ears
from tests.otlp import Received, Receiver, otlp_receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1"))
UNSAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"), ("tracestate", "vendor=1"))
GUARD_SECONDS = 20.0


class Traced:
    """A pipeline, where its spans go, and which of them were dropped."""

    def __init__(self, receiver: Receiver, *, ratio: float, path: str) -> None:
        self.receiver = receiver
        self.lost: list[tuple[str, int]] = []
        self.pipeline = Pipeline(
            receiver.url + path,
            sample_ratio=ratio,
            service="sms-bridge-worker",
            version="1.2.3",
            lost=lambda why, count: self.lost.append((why, count)),
        )
        self._running = asyncio.create_task(self.pipeline.run())

    async def end(self) -> float:
        """End it, and return after how many seconds that was done."""
        began = time.monotonic()
        await asyncio.sleep(0)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        return time.monotonic() - began

    async def spans(self) -> list[Received]:
        """End it and return what has come, in the order of the names."""
        await self.end()
        return sorted(self.receiver.spans, key=lambda span: span.name)

    def make(self, count: int = 1, parent: TraceHeaders = ()) -> None:
        """Begin and end spans."""
        for _ in range(count):
            self.pipeline.begin("one", "consumer", {}, parent=parent).end({})


@asynccontextmanager
async def traced(
    receiver: Receiver, *, ratio: float = 1.0, path: str = ""
) -> AsyncIterator[Traced]:
    """Run a pipeline, with a limit for the whole."""
    ours = Traced(receiver, ratio=ratio, path=path)
    async with asyncio.timeout(GUARD_SECONDS):
        yield ours
        # Its thread may go on for longer, and would tell the next tests that nobody listens.
        receiver.status = 200
        receiver.let_go.set()
        await ours.end()
        await until(lambda: not exporting_threads())


def exporting_threads() -> list[threading.Thread]:
    """Return the threads in which spans are exported."""
    return [thread for thread in threading.enumerate() if thread.name == "spans"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Run a collector."""
    with otlp_receiver() as ours:
        yield ours


async def until(check: Callable[[], bool]) -> None:
    """Return when something is so; the limit is the test's."""
    while not check():  # noqa: ASYNC110  a thread of the library's changes it
        await asyncio.sleep(0.01)


async def test_a_span_says_what_it_was_told(receiver: Receiver) -> None:
    """Name, kind, times, attributes of its begin and its end, its parent and its process arrive."""
    async with traced(receiver) as ours:
        began = time.time()
        outer = ours.pipeline.begin("outer", "consumer", {"queue": "q"}, parent=SAMPLED)
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


async def test_an_error_is_one(receiver: Receiver) -> None:
    """What has failed says so with a word."""
    async with traced(receiver) as ours:
        ours.pipeline.begin("one", "server", {}, parent=()).end({}, error="timeout")
        (got,) = await ours.spans()

    assert (got.is_error, got.attributes) == (True, {"error.type": "timeout"})


async def test_a_link_names_another_span(receiver: Receiver) -> None:
    """A span refers to one of another trace, or of its own."""
    other = (("traceparent", f"00-{'c' * 32}-{'d' * 16}-01"),)
    async with traced(receiver) as ours:
        ours.pipeline.begin("one", "consumer", {}, parent=SAMPLED, link=other).end({})
        (got,) = await ours.spans()

    assert got.links == [("c" * 32, "d" * 16)]


async def test_headers_name_the_span(receiver: Receiver) -> None:
    """What is passed on names the span, and has the tracestate that came."""
    async with traced(receiver) as ours:
        outer = ours.pipeline.begin("outer", "server", {}, parent=SAMPLED)
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
    """What a publisher has written beside its trace goes on with it, and to no collector."""
    canary = "+491713920001"
    parent = (SAMPLED[0], ("tracestate", f"vendor={canary}"))
    async with traced(receiver) as ours:
        span = ours.pipeline.begin("one", "consumer", {}, parent=parent)
        span.begin("within", "client", {}).end({})
        span.end({})
        got = await ours.spans()

    assert span.headers[1] == parent[1]
    assert len(got) == 2
    assert canary.encode() not in b"".join(receiver.bodies)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_the_parent_decides(receiver: Receiver, ratio: float) -> None:
    """Whatever the ratio: what was sampled is recorded, what was sampled out is passed on as is."""
    async with traced(receiver, ratio=ratio) as ours:
        ours.make(parent=SAMPLED)
        out = ours.pipeline.begin("out", "consumer", {}, parent=UNSAMPLED)
        out.begin("within", "client", {}).end({})
        out.end({})
        got = await ours.spans()

    assert [span.name for span in got] == ["one"]
    assert (out.headers, out.trace_id) == (UNSAMPLED, None)


async def test_chance_decides_where_a_trace_begins(receiver: Receiver) -> None:
    """Of traces that begin here the share of the ratio is recorded, and everybody is told."""
    async with traced(receiver, ratio=0.3) as ours:
        begun = [ours.pipeline.begin("one", "consumer", {}, parent=()) for _ in range(2000)]
        recorded = [span for span in begun if span.trace_id is not None]
        flags = {
            (span.trace_id is not None, int(span.headers[0][1][-2:], 16) & 1) for span in begun
        }
        ids = {span.headers[0][1] for span in begun}

    # Ten times the standard deviation.
    assert 400 <= len(recorded) <= 800
    assert flags == {(True, 1), (False, 0)}
    assert len(ids) == len(begun)


@pytest.mark.parametrize("path", ["", "/", TRACES_PATH])
async def test_the_address_may_hold_the_path(receiver: Receiver, path: str) -> None:
    """A collector's address is taken with and without the path for traces."""
    async with traced(receiver, path=path) as ours:
        ours.make()
        await ours.spans()

    assert receiver.paths == {TRACES_PATH}


async def test_the_environment_names_the_process(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's own variables come before our names."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "sms")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    async with traced(receiver) as ours:
        ours.make()
        (got,) = await ours.spans()

    assert got.resource["service.name"] == "sms"
    assert got.resource["deployment.environment.name"] == "staging"


# A collector that does not take them


def drop_by_status(status: int) -> Callable[[Traced], Awaitable[None]]:
    """Have a batch answered so."""

    async def drop(ours: Traced) -> None:
        ours.receiver.status = status
        ours.make(3)
        await until(lambda: bool(ours.lost))

    return drop


async def drop_for_want_of_room(ours: Traced) -> None:
    """Have the collector hang until no more spans fit."""
    ours.receiver.status = None
    ours.make(MAX_WAITING_SPANS + 5)


@pytest.mark.parametrize(
    ("drop", "lost"),
    [
        (drop_by_status(400), [("export_failed", 3)]),
        (drop_by_status(307), [("export_failed", 3)]),
        (drop_for_want_of_room, [("queue_full", 1)] * 5),
    ],
    ids=["refused", "redirected", "full"],
)
async def test_what_is_dropped_is_counted(
    receiver: Receiver,
    ears: Ears,
    drop: Callable[[Traced], Awaitable[None]],
    lost: list[tuple[str, int]],
) -> None:
    """Spans that a collector refuses, or does not take in time, are dropped; the log tells once."""
    async with traced(receiver) as ours:
        await drop(ours)
        dropped = list(ours.lost)
        told = ears.heard("spans_dropped")

    assert dropped == lost
    assert [line["why"] for line in told] == [lost[0][0]]
    assert "tracing.otlp_endpoint" in told[0]["remedy"]


async def test_the_log_is_told_again_after_a_while(
    receiver: Receiver, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that stays away is a line in a while, with all that were dropped since."""
    receiver.status = 400
    async with traced(receiver) as ours:
        ours.make(2)
        await until(lambda: len(ours.lost) == 1)
        ours.make(3)
        await until(lambda: len(ours.lost) == 2)
        quiet = len(ears.heard("spans_dropped"))
        monkeypatch.setattr(module, "WARN_SECONDS", 0.0)
        ours.make(4)
        await until(lambda: len(ours.lost) == 3)
        told = [line["count"] for line in ears.heard("spans_dropped")]

    assert (quiet, told) == (1, [2, 7])


async def test_a_collector_that_hangs_holds_nothing_up(receiver: Receiver, ears: Ears) -> None:
    """The event loop goes on, and the end of the process waits for a bounded time."""
    receiver.status = None
    async with traced(receiver) as ours:
        ours.make()
        await until(lambda: receiver.requests > 0)
        began = time.monotonic()
        ours.make(100)
        took = time.monotonic() - began
        ended_after = await ours.end()
        told = ears.heard("spans_dropped")

    assert took < 1
    # Its own thread would be waited for half a minute.
    assert FLUSH_SECONDS - 0.5 <= ended_after < FLUSH_SECONDS + 8
    assert ours.lost == [("export_failed", 101)]
    assert [line["count"] for line in told] == [101]


async def test_the_end_exports_what_waits(receiver: Receiver) -> None:
    """What has just ended is exported before the process is over."""
    async with traced(receiver) as ours:
        ours.make(10)
        got = await ours.spans()

    assert (len(got), ours.lost) == (10, [])


async def test_nobody_waits_for_the_exporting_thread(receiver: Receiver) -> None:
    """A process may end while its collector hangs: no thread keeps it."""
    async with traced(receiver) as ours:
        ours.make()
        await until(lambda: receiver.requests > 0)
        threads = exporting_threads()

    assert threads
    assert all(thread.daemon for thread in threads)
