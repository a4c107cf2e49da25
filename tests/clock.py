"""Time for tests: a clock that is set by hand, and a loop whose time leaps to the next timer."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any, TypeVarTuple

from bridge.telemetry.metrics import Registry, new_registry
from bridge.worker.metrics import WorkerMetrics

_Arguments = TypeVarTuple("_Arguments")


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class LeapingSelector(selectors.SelectSelector):
    """Does not wait, but moves its clock on."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Leap over the time in which nothing would happen."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everything waits, and nothing will ever happen")
        if not ready and timeout:
            self.now += timeout
        return ready


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock that leaps; `late_seconds` says how late each timer goes off."""

    def __init__(self) -> None:
        self.selector = LeapingSelector()
        self.late_seconds: Callable[[], float] | None = None
        super().__init__(self.selector)

    def time(self) -> float:
        """Return the time of the leaping clock."""
        return self.selector.now

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Arguments], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        late = 0.0 if self.late_seconds is None else self.late_seconds()
        return super().call_at(when + late, callback, *args, context=context)


class LeapingWorld:
    """A loop on a clock that leaps, and the metrics of a worker that lives by it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=LeapingLoop)
        loop = self._runner.get_loop()
        assert isinstance(loop, LeapingLoop)
        self.loop = loop
        self.registry: Registry = new_registry()
        self.metrics = WorkerMetrics(
            self.registry, queue="q", retry_queues=["q.retry.5s"], dead="q.dead"
        )

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.selector.now += seconds

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end."""
        return self._runner.run(coroutine)

    def seconds(self, coroutine: Coroutine[Any, Any, Any]) -> float:
        """Run to the end and return how long it took by this world's clock."""
        before = self.loop.time()
        self.run(coroutine)
        return self.loop.time() - before

    def moments(self, coroutines: Iterable[Coroutine[Any, Any, object]]) -> list[float]:
        """Run all together, and return after how many seconds each one ended."""
        started = self.loop.time()

        async def one(coroutine: Coroutine[Any, Any, object]) -> float:
            await coroutine
            return self.loop.time() - started

        async def everyone() -> list[float]:
            return sorted(await asyncio.gather(*(one(each) for each in coroutines)))

        ended: list[float] = self.run(everyone())
        return ended

    def value(self, name: str, **labels: str) -> float | None:
        """Read a metric."""
        return self.registry.get_sample_value(f"sms_bridge_worker_{name}", labels)

    def close(self) -> None:
        """Close the loop."""
        self._runner.close()
