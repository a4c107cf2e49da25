"""Simulated time: a manual clock, and an event loop that jumps to its next timer."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any, TypeVarTuple

from bridge.telemetry.metrics import Registry, new_registry
from bridge.worker.metrics import WorkerMetrics

_Arguments = TypeVarTuple("_Arguments")


class Clock:
    """A manual clock."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class LeapingSelector(selectors.SelectSelector):
    """Advances its clock instead of waiting."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Jump to the next timer."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everything waits, and nothing will ever happen")
        if not ready and timeout:
            self.now += timeout
        return ready


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time. Each timer runs `late_seconds` late."""

    def __init__(self) -> None:
        self.selector = LeapingSelector()
        self.late_seconds: Callable[[], float] | None = None
        super().__init__(self.selector)

    def time(self) -> float:
        """Return the simulated time."""
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
    """A loop with simulated time, and the metrics of a worker that runs on it."""

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
        self.loop.selector.now += seconds

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    def play(self, story: Coroutine[Any, Any, Any]) -> Any:
        """Run a test's story; a world with more to start and end does so around it."""
        return self.run(story)

    def seconds(self, coroutine: Coroutine[Any, Any, Any]) -> float:
        """Run to the end, and return the simulated duration."""
        before = self.loop.time()
        self.run(coroutine)
        return self.loop.time() - before

    def moments(self, coroutines: Iterable[Coroutine[Any, Any, object]]) -> list[float]:
        """Run all concurrently, and return the simulated duration of each."""
        started = self.loop.time()

        async def one(coroutine: Coroutine[Any, Any, object]) -> float:
            await coroutine
            return self.loop.time() - started

        async def everyone() -> list[float]:
            return sorted(await asyncio.gather(*(one(each) for each in coroutines)))

        ended: list[float] = self.run(everyone())
        return ended

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"sms_bridge_worker_{name}", labels)

    def close(self) -> None:
        self._runner.close()


def in_world(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the loop of the world that is one of its fixtures."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        (world,) = (one for one in fixtures.values() if isinstance(one, LeapingWorld))
        world.play(test(**fixtures))

    return run
