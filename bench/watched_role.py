"""Runs a role as `sms-bridge` does, and records each pause of its event loop with the cause.

    BENCH_PAUSES=pauses.json python bench/watched_role.py worker

A timer of one millisecond measures how late it runs. The cause is a garbage collection, a scrape, a
reload of the secrets, a lack of CPU, or otherwise the function in which a second thread finds the
event loop. After a signal, the longest pauses are written as JSON.
"""

import gc
import heapq
import json
import os
import sys
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import uvloop

from bridge import __main__, credentials
from bridge.http import admin_port

TICK_SECONDS: Final = 0.001
# Shorter pauses are timer inaccuracy, or a few messages handled together.
NOTED_SECONDS: Final = 0.003
# Interval at which the second thread samples during a pause.
LOOK_SECONDS: Final = 0.002
KEPT: Final = 200
_Ranked = tuple[float, float, dict[str, Any]]
BRIDGE: Final = f"{Path(admin_port.__file__).parents[1]}{os.sep}"


class Longest:
    """The longest pauses by clock and by CPU time.

    Each has its CPU time and its end in Unix seconds.
    """

    def __init__(self) -> None:
        self._by_clock: list[_Ranked] = []
        self._by_cpu: list[_Ranked] = []

    def add(self, seconds: float, cpu_seconds: float, **facts: str) -> None:
        """Keep a pause if it is among the longest."""
        at = time.time()
        one = {"ms": seconds * 1000, "cpu_ms": cpu_seconds * 1000, "at": at, **facts}
        for heap, rank in ((self._by_clock, seconds), (self._by_cpu, cpu_seconds)):
            keep = heapq.heappushpop if len(heap) >= KEPT else heapq.heappush
            keep(heap, (rank, at, one))

    def show(self) -> list[dict[str, float | str]]:
        """Return the pauses, the longest by the clock first."""
        kept = {at: one for _, at, one in (*self._by_clock, *self._by_cpu)}
        return sorted(kept.values(), key=lambda one: one["ms"], reverse=True)


class _Clocks(NamedTuple):
    seconds: float
    cpu_seconds: float


def _clocks() -> _Clocks:
    """Read the clock, and the CPU time of this thread."""
    return _Clocks(time.perf_counter(), time.thread_time())


class Watch:
    """Watches the event loop of the current thread."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.pauses = Longest()
        self.known = {name: Longest() for name in ("garbage", "scrape", "secrets")}
        # Since the last tick: known causes, and samples of the second thread.
        self._since: defaultdict[str, float] = defaultdict(float)
        self._seen: Counter[str] = Counter()
        self._loop = loop
        self._thread = threading.get_ident()
        # Run time of the thread, then its wait for a core: sched-stats.rst of Linux.
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._garbage_began = self._ticked = _clocks()
        self._waited = self._core_wait()
        loop.call_soon(self._tick)
        gc.callbacks.append(self._on_garbage)
        threading.Thread(target=self._look, daemon=True).start()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the event loop to record its duration."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = _clocks()
            try:
                return function(*args, **kwargs)
            finally:
                self._note(name, begun)

        return run

    def _note(self, name: str, begun: _Clocks, which: str = "") -> None:
        now = _clocks()
        seconds, cpu_seconds = now.seconds - begun.seconds, now.cpu_seconds - begun.cpu_seconds
        self.known[name].add(seconds, cpu_seconds, which=which)
        self._since[name] += now.seconds - begun.seconds

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._garbage_began = _clocks()
        else:
            self._note("garbage", self._garbage_began, f"generation {info['generation']}")

    def _core_wait(self) -> float:
        return int(os.pread(self._schedule, 100, 0).split()[1]) / 1e9

    def _tick(self) -> None:
        now, waited = _clocks(), self._core_wait()
        seconds = now.seconds - self._ticked.seconds - TICK_SECONDS
        if seconds >= NOTED_SECONDS:
            cpu_seconds = now.cpu_seconds - self._ticked.cpu_seconds
            self.pauses.add(seconds, cpu_seconds, why=self._why(seconds, waited - self._waited))
        self._since.clear()
        self._seen.clear()
        self._ticked, self._waited = now, waited
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _why(self, seconds: float, core_wait: float) -> str:
        """Return the cause of at least half of the pause, or else the sampled function."""
        places = ", ".join(place for place, _ in self._seen.most_common(2)) or "many short ones"
        cause, longest = max(self._since.items(), key=lambda one: one[1], default=("", 0.0))
        if longest > (seconds - core_wait) / 2:
            places = cause
        return f"others had the core, then {places}" if core_wait >= seconds / 2 else places

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            if time.perf_counter() - self._ticked.seconds > TICK_SECONDS + LOOK_SECONDS:
                frame = sys._current_frames().get(self._thread)
                if frame is not None:
                    self._seen[_place(frame)] += 1


def _place(innermost: FrameType) -> str:
    """Return the innermost function of the bridge, or else the innermost function."""
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(BRIDGE):
            return f"{code.co_filename.removeprefix(BRIDGE)}: {code.co_qualname}"
        frame = frame.f_back
    return f"{Path(innermost.f_code.co_filename).name}: {innermost.f_code.co_qualname}"


def main() -> None:
    """Run the role on the command line."""
    watches: list[Watch] = []
    new_event_loop = uvloop.new_event_loop

    def watched_event_loop() -> uvloop.Loop:
        loop = new_event_loop()
        watch = Watch(loop)
        watches.append(watch)
        admin_port._write_part = watch.timed("scrape", admin_port._write_part)
        reread = watch.timed("secrets", credentials.Secrets.reread)
        credentials.Secrets.reread = reread  # type: ignore[method-assign]
        return loop

    uvloop.new_event_loop = watched_event_loop
    try:
        __main__.main()
    finally:
        found = {
            "pauses": watches[0].pauses.show(),
            **{name: longest.show() for name, longest in watches[0].known.items()},
        }
        Path(os.environ["BENCH_PAUSES"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
