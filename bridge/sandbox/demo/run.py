"""Run the demo: send the traffic, watch it from outside, and account for every message."""

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, TypeVar

import httpx
from rich.console import Console, Group
from rich.live import Live

from bridge.amqp.client import (
    AbstractChannel,
    AbstractIncomingMessage,
    AMQPError,
    DeliveryMode,
    Message,
)
from bridge.amqp.connecting import close_quietly
from bridge.config import ENV_PREFIX, Role
from bridge.config.urls import mask_url
from bridge.errors import EXIT_FAILED, BridgeError
from bridge.sandbox.broker import URL_VARIABLE
from bridge.sandbox.demo.environment import DemoEnvironment, open_environment, queues_of
from bridge.sandbox.demo.report import IN_PROGRESS, DemoReport
from bridge.sandbox.demo.traffic import (
    MARKER,
    PlannedMessage,
    PlannedWebhook,
    check_traffic,
    count_open_messages,
    count_open_webhooks,
    plan_messages,
    plan_webhooks,
)
from bridge.telemetry.scrape import Scrape
from bridge.topology.declarations import dead_queue

# The maximum duration of the demo, and the part that is reserved for its end.
DEMO_SECONDS: Final = 110
END_SECONDS: Final = 10
# The intervals of readings, and of printed lines if there is no terminal.
LOOK_SECONDS: Final = 0.5
LINE_SECONDS: Final = 3
# The width of lines if there is no terminal.
PLAIN_WIDTH: Final = 110
# The traffic is sent in slices over this time, so that it can be watched, without a backlog.
SPREAD_SECONDS: Final = 10
_SLICES: Final = 100
_MAX_WEBHOOKS_IN_FLIGHT: Final = 20
# The deadlines of a request to the sandbox or an admin port, and of the first accepted webhook.
_HTTP_TIMEOUT_SECONDS: Final = 10
_PREPARE_SECONDS: Final = 20
_POLL_SECONDS: Final = 0.2
_FIRST_EVENT: Final = b'{"type": "demo.ready"}'
_ERRORS: Final = (httpx.HTTPError, AMQPError, OSError)

EXIT_INTERRUPTED: Final = 130

T = TypeVar("T")


def run_demo(*, keep: bool, messages: int = 1000, events: int = 200) -> int:
    """Run the demo and return its exit code: 0 if every message reached its expected end.

    With `keep` all processes keep running until Ctrl-C.
    """
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    run = secrets.token_hex(3)
    planned = plan_messages(messages, run=run), plan_webhooks(events, run=run)
    with _interrupted_by_signals():
        try:
            _run(console, *planned, keep=keep)
        except BridgeError as error:
            _say(console, f"FAILED: {error}")
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return 0


def _run(
    console: Console,
    messages: Sequence[PlannedMessage],
    webhooks: Sequence[PlannedWebhook],
    *,
    keep: bool,
) -> None:
    begun = time.monotonic()
    _say(console, "Starting RabbitMQ, the sandbox, the worker and the webhook receiver ...")
    with open_environment() as environment:
        environment.start()
        _say(console, f"Ready after {time.monotonic() - begun:.0f} s, {_describe(environment)}.")
        until = begun + DEMO_SECONDS - END_SECONDS
        problems = asyncio.run(_play(environment, console, messages, webhooks, until=until))
        took = time.monotonic() - begun
        if keep:
            _say(
                console,
                "\n".join(["", *problems, *addresses(environment), "Press Ctrl-C to stop."]),
            )
            _wait_for_interrupt(environment)
        problems += environment.stop()
        if problems:
            raise BridgeError("\n".join(["", *problems, f"The logs are in {environment.folder}"]))
    _say(console, f"Every message is accounted for, none was sent twice. It took {took:.0f} s.")


async def _play(
    environment: DemoEnvironment,
    console: Console,
    messages: Sequence[PlannedMessage],
    webhooks: Sequence[PlannedWebhook],
    *,
    until: float,
) -> list[str]:
    """Send all traffic, wait for its end, and return a line for each problem."""
    report = DemoReport(messages, webhooks)
    try:
        connection = await environment.connect("demo")
        try:
            async with (
                httpx.AsyncClient(trust_env=False, timeout=_HTTP_TIMEOUT_SECONDS) as client,
                connection.channel(on_return_raises=True) as channel,
            ):
                run = DemoRun(environment, channel, client, report, messages, webhooks)
                problems = await run.perform(console, until=until)
        finally:
            await close_quietly(connection)
    except _ERRORS as error:
        await _explain(environment, error)
    console.print(report.outbound())
    console.print(report.inbound())
    return problems


async def _explain(environment: DemoEnvironment, error: Exception) -> NoReturn:
    # A connection breaks shortly before the end of its process, the actual error, is known.
    await asyncio.sleep(1)
    environment.check()
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.RequestError):
        what = f"no answer from {error.request.url} ({type(error).__name__})"
    raise BridgeError(f"{what}\nThe logs are in {environment.folder}") from error


class DemoRun:
    """One run: publisher, phones, subscriber and observer."""

    def __init__(
        self,
        environment: DemoEnvironment,
        channel: AbstractChannel,
        client: httpx.AsyncClient,
        report: DemoReport,
        messages: Sequence[PlannedMessage],
        webhooks: Sequence[PlannedWebhook],
    ) -> None:
        self._environment = environment
        self._settings = environment.settings
        self._channel = channel
        self._client = client
        self._report = report
        self._seen = report.seen
        self._messages = messages
        self._webhooks = webhooks

    async def perform(self, console: Console, *, until: float) -> list[str]:
        """Run until done, or until a monotonic time; return a line for each problem."""
        late = []
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._prepare()
                parts = (self._publish_all(), self._send_webhooks(), self._watch(console))
                async with asyncio.TaskGroup() as tasks:
                    for part in parts:
                        tasks.create_task(part)
                while True:
                    if not await self._unfinished():
                        break
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            late = [f"not everything was done within {DEMO_SECONDS - END_SECONDS} s"]
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        await self._look()
        problems = [
            *late,
            *check_traffic(self._messages, self._webhooks, self._seen),
            *await self._unfinished(),
            *self._report.check_metrics(),
        ]
        await self._client.delete(f"{self._environment.sandbox_url}/sandbox/faults")
        return problems

    async def _prepare(self) -> None:
        """Set the faults, wait until webhooks are accepted, and consume events and dead letters.

        The receiver answers 503 until it is connected to the broker.
        """
        faults = [message.fault for message in self._messages if message.fault is not None]
        url = f"{self._environment.sandbox_url}/sandbox/faults"
        (await self._client.put(url, json=faults)).raise_for_status()
        deadline = time.monotonic() + _PREPARE_SECONDS
        while (answers := await self._order("/sandbox/events", _FIRST_EVENT)) != [200]:
            if time.monotonic() > deadline:
                raise BridgeError(f"webhooks are answered {answers} for {_PREPARE_SECONDS} s")
            await asyncio.sleep(_POLL_SECONDS)
        exchange = await self._channel.get_exchange(self._settings.webhook.exchange)
        events = await self._channel.declare_queue(exclusive=True)
        await events.bind(exchange, "#")
        await events.consume(self._on_event, no_ack=True)
        dead = await self._channel.get_queue(dead_queue(self._settings.worker.queue))
        # Never acked: the dead letters return to their queue when the channel closes.
        await dead.consume(self._on_dead_letter)
        self._report.webhook_before = await self._scrape("webhook")

    async def _on_event(self, message: AbstractIncomingMessage) -> None:
        found = re.search(MARKER, message.body.decode(errors="replace"))
        self._seen.events.append((found[0] if found else "unknown", message.routing_key or ""))

    async def _on_dead_letter(self, message: AbstractIncomingMessage) -> None:
        reason = message.headers.get("sms-bridge-reason")
        self._seen.dead.append((message.message_id or "unknown", str(reason)))

    async def _publish_all(self) -> None:
        async for some in _in_slices(self._messages):
            await asyncio.gather(*(self._publish(message) for message in some))

    async def _publish(self, planned: PlannedMessage) -> None:
        message = Message(
            planned.body,
            message_id=planned.message_id,
            timestamp=time.time(),
            content_type="application/json",
            headers=planned.headers,
            delivery_mode=DeliveryMode.PERSISTENT,
        )
        await self._channel.default_exchange.publish(message, self._settings.worker.queue)
        self._seen.published += 1

    async def _send_webhooks(self) -> None:
        limit = asyncio.Semaphore(_MAX_WEBHOOKS_IN_FLIGHT)
        async for some in _in_slices(self._webhooks):
            await asyncio.gather(*(self._send_webhook(webhook, limit) for webhook in some))

    async def _send_webhook(self, webhook: PlannedWebhook, limit: asyncio.Semaphore) -> None:
        answers: list[int | None] = []
        async with limit:
            for _ in range(webhook.orders):
                answers += await self._order(webhook.path, webhook.body)
        self._seen.answers[webhook.marker] = answers

    async def _order(self, path: str, body: bytes) -> list[int | None]:
        answer = await self._client.post(self._environment.sandbox_url + path, content=body)
        answers: list[int | None] = answer.raise_for_status().json()["answers"]
        return answers

    async def _watch(self, console: Console) -> None:
        """Show the progress until nothing is open."""
        report, seen = self._report, self._seen
        live = Live(console=console, transient=True) if console.is_terminal else nullcontext()
        said = time.monotonic()
        with live as screen:
            while any(still_open := self._count_open()):
                await asyncio.sleep(LOOK_SECONDS)
                await self._look()
                if screen is not None:
                    screen.update(Group(report.outbound(), report.inbound()))
                elif time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    _say(
                        console,
                        f"published {seen.published:,}, accepted {len(seen.accepted):,}, "
                        f"dead-lettered {len(seen.dead):,}, open {still_open[0]:,} | "
                        f"webhooks answered {len(seen.answers):,}, "
                        f"events received {len(seen.events):,}, open {still_open[1]:,}",
                    )

    def _count_open(self) -> tuple[int, int]:
        return (
            count_open_messages(self._messages, self._seen),
            count_open_webhooks(self._webhooks, self._seen),
        )

    async def _look(self) -> None:
        """Read the messages that the SMS service has accepted, and the metrics of both roles."""
        self._environment.check()
        answer = await self._client.get(f"{self._environment.sandbox_url}/sandbox/messages")
        messages = answer.raise_for_status().json()["messages"]
        self._seen.accepted = [str(message["idempotency_key"]) for message in messages]
        self._seen.accepted_at = [
            datetime.fromisoformat(message["received_at"]).timestamp() for message in messages
        ]
        self._report.worker = await self._scrape("worker")
        self._report.webhook = await self._scrape("webhook")

    async def _scrape(self, role: Role) -> Scrape:
        answer = await self._client.get(f"{self._environment.admin_urls[role]}/metrics")
        return Scrape(answer.raise_for_status().text)

    async def _unfinished(self) -> list[str]:
        """Return lines about messages in progress, and about queues that are not empty."""
        held = int((await self._scrape("worker")).total(IN_PROGRESS))
        lines = [f"{held} messages are still in progress"] if held else []
        dead = dead_queue(self._settings.worker.queue)
        for name in queues_of(self._settings, "worker"):
            if name == dead:
                continue
            queue = await self._channel.declare_queue(name, passive=True)
            if count := queue.declaration_result.message_count:
                lines.append(f"{count} messages are still in {name}")
        return lines


async def _in_slices(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yield the items in slices, spread over `SPREAD_SECONDS`."""
    start = time.monotonic()
    size = -(-len(items) // _SLICES)
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
        due = start + SPREAD_SECONDS * (begin + size) / len(items)
        await asyncio.sleep(max(0, due - time.monotonic()))


def _describe(environment: DemoEnvironment) -> str:
    if not environment.broker.is_private:
        settings = environment.settings
        url = mask_url(settings.rabbitmq.url[0])
        return f"on {url} with a queue of its own, {settings.worker.queue}"
    if os.environ.get(URL_VARIABLE):
        return f"on a private RabbitMQ, because {URL_VARIABLE} names no broker that answers"
    return "on a private RabbitMQ"


def addresses(environment: DemoEnvironment) -> Iterator[str]:
    """Yield lines with addresses and commands to try while everything is running."""
    settings, broker = environment.settings, environment.broker
    given = {ENV_PREFIX + name: value for name, value in broker.names.items()}
    url = mask_url(settings.rabbitmq.url[0])
    if broker.is_private:
        url = given[URL_VARIABLE] = broker.environ[URL_VARIABLE]
    installed = Path(sys.executable).with_name("sms-bridge")
    program = str(installed) if installed.is_file() else f"{sys.executable} -m bridge"
    bridge = " ".join([*(f"{name}={value}" for name, value in given.items()), program])
    delays = json.dumps([f"{seconds:g}s" for seconds in settings.worker.retry_delays])
    order = '{"from": "+491713920000", "text": "Yes"}'
    yield f"RabbitMQ          {url}"
    yield f"queue, exchange   {settings.worker.queue}, {settings.webhook.exchange}"
    yield f"webhook receiver  {environment.webhook_url}"
    for role, admin_url in environment.admin_urls.items():
        yield f"{role + ' metrics':<16}  {admin_url}/metrics"
    yield f"send a message    {bridge} send --to +491713920000 --from Demo --text Hello --wait"
    yield f"inbound events    {bridge} listen"
    kind = "-H 'Content-Type: application/json'"
    yield f"reply to it       curl {kind} -d '{order}' {environment.sandbox_url}/sandbox/replies"
    # The demo's retry delays, from which its retry queues are named, are not the default.
    retry = shlex.quote(f"{ENV_PREFIX}WORKER__RETRY_DELAYS={delays}")
    yield f"check its queues  env {retry} {bridge} topology verify"
    yield f"logs              {environment.folder}"
    yield f"SMS service       {environment.sandbox_url}/ shows all texts, and replies to them"


def _wait_for_interrupt(environment: DemoEnvironment) -> None:
    try:
        while True:
            environment.check()
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        return


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the demo like Ctrl-C."""

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
