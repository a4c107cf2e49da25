"""The demo: both directions for real, with faults, and an account of every single message."""

import asyncio
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from bridge.amqp.client import AMQPError
from bridge.config import ENV_PREFIX
from bridge.config.urls import mask_url
from bridge.errors import EXIT_FAILED, BridgeError
from bridge.sandbox.actors import Actors, bring_on
from bridge.sandbox.reachability import URL_VARIABLE
from bridge.sandbox.scoreboard import (
    Summary,
    check_webhook_metrics,
    check_worker_metrics,
    count_events,
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
from bridge.telemetry.scrape import Scrape

# The demo takes this long at most, from its start to its end.
DEMO_SECONDS: Final = 110
# How much of that is reserved for the summary and for ending all processes.
END_SECONDS: Final = 10
# How often everything is looked at, and, where there is no terminal, how often a line is printed.
LOOK_SECONDS: Final = 0.5
LINE_SECONDS: Final = 3
# Characters in a line where there is no terminal.
PLAIN_WIDTH: Final = 110

EXIT_INTERRUPTED: Final = 130

_FAULTS = (httpx.HTTPError, AMQPError, OSError)


def run_demo(*, keep: bool, messages: int = 1000, events: int = 200) -> int:
    """Run the demo and return its exit code: 0 when every message came to its expected end.

    With `keep` everything goes on running afterwards, until Ctrl-C.
    """
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    run = secrets.token_hex(3)
    requests, webhooks = plan_requests(messages, run=run), plan_webhooks(events, run=run)
    with _interrupted_by_signals():
        try:
            _run(console, requests, webhooks, keep=keep)
        except BridgeError as error:
            _say(console, f"FAILED: {error}")
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return 0


def _run(console: Console, requests: list[Request], webhooks: list[Webhook], *, keep: bool) -> None:
    begun = time.monotonic()
    _say(console, "Starting RabbitMQ, the sandbox, the worker and the webhook receiver ...")
    with open_stage() as stage:
        stage.start()
        _say(console, f"Ready after {time.monotonic() - begun:.0f} s, {_describe(stage)}.")
        show = Show(stage, console, requests, webhooks)
        problems = asyncio.run(show.play(until=begun + DEMO_SECONDS - END_SECONDS))
        took = time.monotonic() - begun
        if keep:
            _say(console, "\n".join(["", *problems, *addresses(stage), "Ctrl-C ends it all."]))
            _wait_for_interrupt(stage)
        problems += stage.stop()
        if problems:
            raise BridgeError("\n".join(["", *problems, f"The logs are in {stage.folder}"]))
    _say(console, f"Every message is accounted for, none was sent twice. It took {took:.0f} s.")


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
        self._worker = self._webhook = self._before = Scrape()

    async def play(self, *, until: float) -> list[str]:
        """Send everything, wait for every end, and return a line for each thing that is wrong."""
        try:
            async with bring_on(self._stage, self._seen) as actors:
                late = await self._perform_until(actors, until)
                problems = [*late, *await self._account(actors)]
                await actors.forget_faults()
        except _FAULTS as error:
            await self._explain(error)
        self._draw_summary()
        return problems

    async def _perform_until(self, actors: Actors, until: float) -> list[str]:
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._perform(actors)
        except TimeoutError:
            return [f"not all was over within {DEMO_SECONDS - END_SECONDS} s"]
        return []

    async def _perform(self, actors: Actors) -> None:
        await actors.prepare(plan_faults(self._requests))
        self._before = await actors.scrape("webhook")
        parts = (
            actors.publish(self._requests),
            actors.send_webhooks(self._webhooks),
            self._watch(actors),
        )
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        await actors.wait_until_idle()

    async def _watch(self, actors: Actors) -> None:
        """Look again and again, and show it, until nothing is open."""
        is_terminal = self._console.is_terminal
        screen = Live(console=self._console, transient=True) if is_terminal else nullcontext()
        said = time.monotonic()
        with screen as live:
            while any(self._count_open()):
                await asyncio.sleep(LOOK_SECONDS)
                await self._look(actors)
                if live is not None:
                    live.update(self._draw())
                elif time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    _say(self._console, progress_line(self._seen, *self._count_open()))

    async def _look(self, actors: Actors) -> None:
        self._stage.check()
        await actors.look()
        self._worker = await actors.scrape("worker")
        self._webhook = await actors.scrape("webhook")

    async def _account(self, actors: Actors) -> list[str]:
        await self._look(actors)
        return [
            *check_requests(self._requests, self._seen),
            *check_webhooks(self._webhooks, self._seen),
            *await actors.remains(),
            *check_worker_metrics(self._worker, self._seen),
            *check_webhook_metrics(self._webhook, self._seen, before=self._before),
        ]

    async def _explain(self, error: Exception) -> NoReturn:
        # A connection breaks a moment before its process is gone, which says more.
        await asyncio.sleep(1)
        self._stage.check()
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, httpx.RequestError):
            what = f"no answer from {error.request.url} ({type(error).__name__})"
        raise BridgeError(f"{what}\nThe logs are in {self._stage.folder}") from error

    def _count_open(self) -> tuple[int, int]:
        return (
            count_open_requests(self._requests, self._seen),
            count_open_webhooks(self._webhooks, self._seen),
        )

    def _draw(self) -> Table:
        events = count_events(self._webhook, before=self._before)
        return live_table(self._worker, events, self._seen, *self._count_open())

    def _draw_summary(self) -> None:
        summary = Summary(
            self._worker,
            self._webhook,
            self._seen,
            requests=self._requests,
            webhooks=self._webhooks,
        )
        for part in summary.parts():
            self._console.print(part)


def _describe(stage: Stage) -> str:
    if not stage.place.is_private:
        queue, url = stage.settings.worker.queue, stage.settings.rabbitmq.url[0]
        return f"on {mask_url(url)} with a queue of its own, {queue}"
    if os.environ.get(URL_VARIABLE):
        return f"on a private RabbitMQ, because {URL_VARIABLE} names none that answers"
    return "on a private RabbitMQ"


def addresses(stage: Stage) -> Iterator[str]:
    """List what can be tried while all is running, a line each."""
    settings, place = stage.settings, stage.place
    given = {ENV_PREFIX + name: value for name, value in place.names.items()}
    broker = mask_url(settings.rabbitmq.url[0])
    if place.is_private:
        broker = given[URL_VARIABLE] = place.environ[URL_VARIABLE]
    bridge = " ".join([*(f"{name}={value}" for name, value in given.items()), _own_command()])
    delays = json.dumps([f"{seconds:g}s" for seconds in settings.worker.retry_delays])
    order = '{"from": "+491713920000", "text": "Yes"}'
    yield f"RabbitMQ          {broker}"
    yield f"queue, exchange   {settings.worker.queue}, {settings.webhook.exchange}"
    yield f"webhook receiver  {stage.webhook_url}"
    for role, url in stage.admin_urls.items():
        yield f"{role + ' metrics':<16}  {url}/metrics"
    yield f"send a message    {bridge} send --to +491713920000 --from Demo --text Hello --wait"
    yield f"inbound events    {bridge} listen"
    kind = "-H 'Content-Type: application/json'"
    yield f"reply to it       curl {kind} -d '{order}' {stage.sandbox_url}/sandbox/replies"
    # The ladder of a minute is not the default's, so its queues are found by its delays only.
    ladder = shlex.quote(f"{ENV_PREFIX}WORKER__RETRY_DELAYS={delays}")
    yield f"check its queues  env {ladder} {bridge} topology verify"
    yield f"logs              {stage.folder}"
    yield f"SMS service       {stage.sandbox_url}/ shows all texts, and replies to them"


def _own_command() -> str:
    installed = Path(sys.executable).with_name("sms-bridge")
    return str(installed) if installed.is_file() else f"{sys.executable} -m bridge"


def _wait_for_interrupt(stage: Stage) -> None:
    try:
        while True:
            stage.check()
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        return


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let the signals that end a program end everything that the demo has started, too."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False)
