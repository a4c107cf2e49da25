"""Spans that wait, and the thread that exports them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from bridge.telemetry.tracing import batches as module
from bridge.telemetry.tracing.batches import MAX_BATCH_SPANS, MAX_WAITING_SPANS, Batches
from bridge.telemetry.tracing.recorded import RecordedSpan, TraceContext
from tests.ears import Ears

GUARD_SECONDS = 20.0
SPAN = RecordedSpan("one", "client", {}, context=TraceContext("1" * 32, "01"), on_end=id)


class Exports:
    """Takes batches, and remembers their sizes; `let_go` lets it take them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.let_go = threading.Event()
        self.let_go.set()
        self.faults = 0
        self.stopped = threading.Event()
        self._news = threading.Condition()

    def take(self, spans: Sequence[RecordedSpan]) -> None:
        """Take a batch, or raise as often as told."""
        self.let_go.wait(GUARD_SECONDS)
        with self._news:
            self.sizes.append(len(spans))
            self._news.notify_all()
        if self.faults:
            self.faults -= 1
            raise ZeroDivisionError

    def wait_for(self, check: Callable[[], bool]) -> bool:
        """Wait until something is so."""
        with self._news:
            return self._news.wait_for(check, GUARD_SECONDS)


@pytest.fixture
def exports() -> Exports:
    """Look at what is exported."""
    return Exports()


@contextmanager
def running(exports: Exports) -> Iterator[Batches]:
    """Run the thread, and see it end."""
    made = Batches(exports.take, stopped=exports.stopped.set)
    yield made
    exports.let_go.set()
    made.stop()
    assert exports.stopped.wait(GUARD_SECONDS)


@pytest.fixture
def batches(exports: Exports) -> Iterator[Batches]:
    """Run the thread, as it is."""
    with running(exports) as made:
        yield made


def test_a_full_batch_is_exported_at_once(
    monkeypatch: pytest.MonkeyPatch, exports: Exports
) -> None:
    """The thread is woken for it, and goes on while there is another one."""
    monkeypatch.setattr(module, "BATCH_SECONDS", 10 * GUARD_SECONDS)
    exports.let_go.clear()
    with running(exports) as batches:
        for _ in range(3 * MAX_BATCH_SPANS):
            batches.put(SPAN)
        exports.let_go.set()

        assert exports.wait_for(lambda: exports.sizes == [MAX_BATCH_SPANS] * 3)


def test_an_export_that_fails_is_not_the_last(
    ears: Ears, exports: Exports, batches: Batches
) -> None:
    """A fault of ours costs its batch alone, and is told."""
    exports.faults = 1
    batches.put(SPAN)
    assert exports.wait_for(lambda: len(exports.sizes) == 1)
    batches.put(SPAN)

    assert exports.wait_for(lambda: len(exports.sizes) == 2)
    assert [line["error"] for line in ears.heard("internal_error")] == ["ZeroDivisionError"]


def test_no_more_wait_than_there_is_room(exports: Exports, batches: Batches) -> None:
    """Those that are being exported take room, too, and give it back."""
    exports.let_go.clear()
    taken = [batches.put(SPAN) for _ in range(MAX_WAITING_SPANS + 3)]
    waiting = batches.waiting
    exports.let_go.set()
    exported = exports.wait_for(lambda: sum(exports.sizes) == MAX_WAITING_SPANS)

    assert taken == [True] * MAX_WAITING_SPANS + [False] * 3
    assert waiting == MAX_WAITING_SPANS
    assert exported


def test_the_end_exports_what_waits(exports: Exports, batches: Batches) -> None:
    """All that was taken is exported before the thread says that it ends."""
    for _ in range(MAX_BATCH_SPANS + 5):
        batches.put(SPAN)
    batches.stop()

    assert exports.stopped.wait(GUARD_SECONDS)
    assert sum(exports.sizes) == MAX_BATCH_SPANS + 5
    assert batches.waiting == 0
