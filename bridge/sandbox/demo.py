"""The demo: both directions for real, with faults, and an account of every single message."""

import asyncio
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

import aiormq
import httpx
from rich.console import Console, RenderableType
from rich.live import Live

from bridge.config import mask_url
from bridge.errors import BridgeError
from bridge.sandbox.actors import Actors, bring_on
from bridge.sandbox.scoreboard import (
    Metrics,
    Summary,
    check_webhook_metrics,
    check_worker_metrics,
    live_table,
    progress_line,
)
from bridge.sandbox.stage import Stage, open_stage
from bridge.sandbox.traffic import (
    Request,
    Seen,
    Webhook,
    check_requests,
    check_webhooks,
    count_open_requests,
    count_open_webhooks,
    plan_faults,
    plan_requests,
    plan_webhooks,
)

DEMO_SECONDS: Final = 110
# What is kept of them for the summary and the end of all processes.
END_SECONDS: Final = 10
LOOK_SECONDS: Final = 0.5
LINE_SECONDS: Final = 3

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


def run_demo(*, keep: bool, messages: int = 1000, events: int = 200) -> int:
    """Run the demo and return its exit code: 0 when every message came to its expected end.

    With `keep` everything goes on running afterwards, until Ctrl-C.
    """
    console = Console(highlight=False)
    run = secrets.token_hex(3)
    plan = plan_requests(messages, run=run), plan_webhooks(events, run=run)
    with _terminated_by_signals():
        try:
            _run(console, *plan, keep=keep)
        except BridgeError as error:
            console.print(f"FAILED: {error}", style="red", markup=False)
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return 0


def _run(
    console: Console, requests: list[Request], webhooks: list[Webhook], *, keep: bool
) -> None:
    begun = time.monotonic()
    console.print("Starting RabbitMQ, the sandbox, the worker and the webhook receiver ...")
    with open_stage() as stage:
        stage.start()
        console.print(f"Ready after {time.monotonic() - begun:.0f} s: {_describe(stage)}.")
        show = Show(stage, console, requests, webhooks)
        lines = asyncio.run(show.play(until=begun + DEMO_SECONDS - END_SECONDS))
        if keep:
            _report(console, lines, stage)
            _keep(console, stage)
        lines += stage.stop()
        if lines:
            raise BridgeError("\n".join([*lines, f"the logs: {stage.folder}"]))
    took = time.monotonic() - begun
    console.print(f"Every message is accounted for, none was sent twice. It took {took:.0f} s.")


class Show:
    """One run of the traffic, watched."""

    def __init__(
        self, stage: Stage, console: Console, requests: list[Request], webhooks: list[Webhook]
    ) -> None:
        self._stage = stage
        self._console = console
        self._requests = requests
        self._webhooks = webhooks
        self._seen = Seen()
        self._worker = self._webhook = self._before = Metrics()

    async def play(self, *, until: float) -> list[str]:
        """Send everything, wait for every end, and return a line for each thing that is wrong."""
        async with bring_on(self._stage, self._seen) as actors:
            with suppress(TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    await self._perform(actors)
            lines = await self._account(actors)
            await actors.forget_faults()
        for part in Summary(
            self._worker,
            self._webhook,
            self._seen,
            requests=self._requests,
            webhooks=self._webhooks,
        ).tables():
            self._console.print(part)
        return lines

    async def _perform(self, actors: Actors) -> None:
        await actors.prepare(plan_faults(self._requests))
        self._before = await actors.scrape("webhook")
        watching = asyncio.create_task(self._watch(actors))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(actors.publish(self._requests))
                group.create_task(actors.send_webhooks(self._webhooks))
                await watching
            await actors.wait_until_idle()
        finally:
            watching.cancel()

    async def _watch(self, actors: Actors) -> None:
        """Look again and again, and show it, until nothing is open."""
        with self._screen() as live:
            said = time.monotonic()
            while self._open_count:
                await asyncio.sleep(LOOK_SECONDS)
                await self._look(actors)
                live.update(self._draw())
                if not self._console.is_terminal and time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    self._console.print(progress_line(self._seen, **self._open))
