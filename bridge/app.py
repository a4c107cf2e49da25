"""Runs the roles in one process: start, signals, drain and end."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import Collection
from typing import Any, Final

import uvloop

from bridge import __version__, memory
from bridge.config import Role, Settings
from bridge.errors import EXIT_CLEAN, EXIT_DRAIN_TIMED_OUT, EXIT_FAILED
from bridge.start_checks import check_start
from bridge.telemetry.log_setup import log_loop_faults
from bridge.telemetry.logs import Log
from bridge.wiring import ADMIN_LISTENER, WEBHOOK_LISTENER, Wiring

log = Log(__name__)

# Timeout for closing connections and the admin port after the drain.
CLOSE_SECONDS: Final = 4.0


def run(settings: Settings, roles: Collection[Role]) -> int:
    """Run the roles until a signal and return the exit code.

    Raises ConfigError before anything is started if a role is not configured correctly.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, roles))


async def _run(settings: Settings, roles: Collection[Role]) -> int:
    bridge = Bridge(settings, roles)
    # Only now, because modules, settings and roles live until the process ends.
    memory.enable_gc()
    stop = asyncio.Event()
    _own_signals(stop)
    collecting = asyncio.create_task(memory.collect_when_quiet())
    try:
        return await bridge.run(stop)
    finally:
        collecting.cancel()


def _own_signals(stop: asyncio.Event) -> None:
    """Drain at the first SIGTERM or SIGINT, and exit at once at the second."""

    def on_signal(name: str) -> None:
        log.info("signal", signal=name)
        if stop.is_set():
            logging.shutdown()
            os._exit(EXIT_DRAIN_TIMED_OUT)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)


class Bridge:
    """One process of the bridge: runs and ends the objects in `wiring`."""

    def __init__(self, settings: Settings, roles: Collection[Role]) -> None:
        check_start(settings, roles)
        self._settings = settings
        self.wiring = Wiring(settings, roles)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, stop: asyncio.Event) -> int:
        """Run all parts until `stop` is set or a part fails; then drain."""
        log_loop_faults(asyncio.get_running_loop())
        self._tasks = {
            name: asyncio.create_task(part()) for name, part in self.wiring.parts.items()
        }
        self.wiring.health.live["tasks"] = lambda: not self._ended()
        self._log_start()
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({waiting, *self._tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
        failed = self._log_failures()
        clean = await self._drain()
        await self._close(waiting)
        log.info("stopped", clean=clean and not failed)
        if failed:
            return EXIT_FAILED
        return EXIT_CLEAN if clean else EXIT_DRAIN_TIMED_OUT

    def _log_start(self) -> None:
        webhook = self.wiring.webhook_listener
        log.info(
            "started",
            version=__version__,
            worker=self.wiring.worker is not None,
            webhook_port=None if webhook is None else webhook.port,
            admin_port=self.wiring.admin_listener.port,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def _ended(self) -> dict[str, asyncio.Task[None]]:
        """Return the tasks that have ended, which means that they failed."""
        return {name: task for name, task in self._tasks.items() if task.done()}

    def _log_failures(self) -> bool:
        failed = self._ended()
        for name, task in failed.items():
            error = None if task.cancelled() else task.exception()
            log.critical("component_failed", component=name, cause=error)
        return bool(failed)

    async def _drain(self) -> bool:
        """Drain both roles; return whether everything in flight was settled in time."""
        self.wiring.health.is_draining = True
        self.wiring.metrics.shutdown_timestamp.set(time.time())
        drained = await asyncio.gather(self._drain_worker(), self._drain_webhook())
        return all(drained)

    async def _drain_worker(self) -> bool:
        worker = self.wiring.worker
        if worker is None:
            return True
        return await worker.drain(self._settings.worker.shutdown_timeout_seconds)

    async def _drain_webhook(self) -> bool:
        listener = self.wiring.webhook_listener
        if listener is None:
            return True
        listener.stop()
        listening = self._tasks[WEBHOOK_LISTENER]
        timeout = self._settings.webhook.shutdown_timeout_seconds
        done, _ = await asyncio.wait({listening}, timeout=timeout)
        return bool(done) and not listener.has_cut_off

    async def _close(self, *others: asyncio.Task[Any]) -> None:
        """Cancel the remaining tasks; the admin port, which answers probes, stops by itself."""
        self.wiring.admin_listener.stop()
        tasks = [task for name, task in self._tasks.items() if name != ADMIN_LISTENER]
        for task in (*tasks, *others):
            task.cancel()
        await asyncio.wait({*self._tasks.values(), *others}, timeout=CLOSE_SECONDS)
        if self.wiring.worker is not None:
            with contextlib.suppress(Exception):
                await self.wiring.worker.aclose()
