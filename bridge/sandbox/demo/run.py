"""Run the demo: send the traffic, watch it from outside, and account for every message."""

import asyncio
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import httpx
from rich.console import Console

from bridge.amqp.client import (
    AbstractChannel,
    AbstractIncomingMessage,
    AMQPError,
    DeliveryMode,
    Message,
)
from bridge.amqp.connecting import close_quietly
from bridge.config import ENV_PREFIX
from bridge.config.urls import mask_url
from bridge.errors import EXIT_FAILED, BridgeError
from bridge.sandbox.broker import URL_VARIABLE
from bridge.sandbox.demo.environment import DemoEnvironment, open_environment, queues_of
from bridge.sandbox.demo.traffic import (
    MARKER,
    Observed,
    PlannedMessage,
    PlannedWebhook,
    check_traffic,
    plan_messages,
    plan_webhooks,
    tables,
)
from bridge.telemetry.scrape import Scrape
from bridge.topology.declarations import dead_queue

# The maximum duration of the demo, without the time in which its processes end.
DEMO_SECONDS: Final = 100
# The interval of readings, of which each line of progress is one.
LOOK_SECONDS: Final = 2
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

EXIT_INTERRUPTED: Final = 130

T = TypeVar("T")


def run_demo(*, keep: bool, messages: int = 1000, events: int = 200) -> int:
    """Run the demo and return its exit code: 0 if every message reached its expected end.

    With `keep` all processes keep running until Ctrl-C.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        _run(console, messages, events, keep=keep)
    except BridgeError as error:
        console.print(f"FAILED: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _run(console: Console, messages: int, events: int, *, keep: bool) -> None:
    begun = time.monotonic()
    console.print("Starting RabbitMQ, the sandbox, the worker and the webhook receiver ...")
    with open_environment() as environment:
        environment.start()
        took = time.monotonic() - begun
        console.print(f"Ready after {took:.0f} s, {_describe(environment)}.")
        run = secrets.token_hex(3)
        demo = DemoRun(
            environment, console, plan_messages(messages, run=run), plan_webhooks(events, run=run)
        )
        problems = asyncio.run(demo.perform(until=begun + DEMO_SECONDS))
        took = time.monotonic() - begun
        if keep:
            lines = ["", *problems, *addresses(environment), "Press Ctrl-C to stop."]
            console.print("\n".join(lines))
            _wait_for_interrupt(environment)
        problems += environment.stop()
        if problems:
            raise BridgeError("\n".join(["", *problems, f"The logs are in {environment.folder}"]))
    console.print(f"Every message is accounted for, none was sent twice. It took {took:.0f} s.")


class DemoRun:
    """One run: publisher, phones, subscriber and observer."""

    def __init__(
        self,
        environment: DemoEnvironment,
        console: Console,
        messages: Sequence[PlannedMessage],
        webhooks: Sequence[PlannedWebhook],
    ) -> None:
        self._environment = environment
        self._settings = environment.settings
        self._console = console
        self._messages = messages
        self._webhooks = webhooks
        self._seen = Observed()

    async def perform(self, *, until: float) -> list[str]:
        """Run until done, or until a monotonic time; return a line for each problem."""
        problems: list[str] = []
        try:
            await self._play(problems, until=until)
        except (ExceptionGroup, httpx.HTTPError, AMQPError, OSError) as error:
            # A connection breaks shortly before the end of its process, the actual error, is known.
            await asyncio.sleep(1)
            self._environment.check()
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            text = f"{type(cause).__name__}: {cause}"
            if isinstance(cause, httpx.RequestError):
                text = f"no answer from {cause.request.url} ({type(cause).__name__})"
            raise BridgeError(f"{text}\nThe logs are in {self._environment.folder}") from error
        for table in tables(self._messages, self._webhooks, self._seen):
            self._console.print(table)
        return problems

    async def _play(self, problems: list[str], *, until: float) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=_HTTP_TIMEOUT_SECONDS) as client:
            connection = await self._environment.connect("demo")
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    channel = await connection.channel(on_return_raises=True)
                    await self._prepare(client, channel)
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self._publish_all(channel))
                        tasks.create_task(self._send_webhooks(client))
                        tasks.create_task(self._watch(client, channel, problems))
            except TimeoutError:
                problems.insert(0, f"not everything was done within {DEMO_SECONDS} s")
            finally:
                await close_quietly(connection)
            await client.delete(f"{self._environment.sandbox_url}/sandbox/faults")

    async def _prepare(self, client: httpx.AsyncClient, channel: AbstractChannel) -> None:
        """Set the faults, wait until webhooks are accepted, and consume events and dead letters.

        The receiver answers 503 until it is connected to the broker.
        """
        faults = [message.fault for message in self._messages if message.fault is not None]
        url = f"{self._environment.sandbox_url}/sandbox/faults"
        (await client.put(url, json=faults)).raise_for_status()
        deadline = time.monotonic() + _PREPARE_SECONDS
        while (answers := await self._order(client, "/sandbox/events", _FIRST_EVENT)) != [200]:
            if time.monotonic() > deadline:
                raise BridgeError(f"webhooks are answered {answers} for {_PREPARE_SECONDS} s")
            await asyncio.sleep(_POLL_SECONDS)
        exchange = await channel.get_exchange(self._settings.webhook.exchange)
        events = await channel.declare_queue(exclusive=True)
        await events.bind(exchange, "#")
        await events.consume(self._on_event, no_ack=True)
        dead = await channel.get_queue(dead_queue(self._settings.worker.queue))
        # Never acked: the dead letters return to their queue when the channel closes.
        await dead.consume(self._on_dead_letter)

    async def _on_event(self, message: AbstractIncomingMessage) -> None:
        found = re.search(MARKER, message.body.decode(errors="replace"))
        self._seen.events.append((found[0] if found else "unknown", message.routing_key or ""))

    async def _on_dead_letter(self, message: AbstractIncomingMessage) -> None:
        reason = message.headers.get("sms-bridge-reason")
        self._seen.dead.append((message.message_id or "unknown", str(reason)))

    async def _publish_all(self, channel: AbstractChannel) -> None:
        async for some in _in_slices(self._messages):
            await asyncio.gather(*(self._publish(channel, message) for message in some))

    async def _publish(self, channel: AbstractChannel, planned: PlannedMessage) -> None:
        message = Message(
            planned.body,
            message_id=planned.message_id,
            timestamp=time.time(),
            content_type="application/json",
            headers=planned.headers,
            delivery_mode=DeliveryMode.PERSISTENT,
        )
        await channel.default_exchange.publish(message, self._settings.worker.queue)
        self._seen.published += 1

    async def _send_webhooks(self, client: httpx.AsyncClient) -> None:
        limit = asyncio.Semaphore(_MAX_WEBHOOKS_IN_FLIGHT)
        async for some in _in_slices(self._webhooks):
            await asyncio.gather(*(self._send_webhook(client, webhook, limit) for webhook in some))

    async def _send_webhook(
        self, client: httpx.AsyncClient, webhook: PlannedWebhook, limit: asyncio.Semaphore
    ) -> None:
        answers: list[int | None] = []
        async with limit:
            for _ in range(webhook.orders):
                answers += await self._order(client, webhook.path, webhook.body)
        self._seen.answers[webhook.marker] = answers

    async def _order(self, client: httpx.AsyncClient, path: str, body: bytes) -> list[int | None]:
        answer = await client.post(self._environment.sandbox_url + path, content=body)
        answers: list[int | None] = answer.raise_for_status().json()["answers"]
        return answers

    async def _watch(
        self, client: httpx.AsyncClient, channel: AbstractChannel, problems: list[str]
    ) -> None:
        """Print the progress until everything has its expected end; keep `problems` current."""
        seen = self._seen
        while True:
            self._environment.check()
            # First, so that what is seen afterwards is final if nothing is left.
            unfinished = await self._unfinished(client, channel)
            answer = await client.get(f"{self._environment.sandbox_url}/sandbox/messages")
            messages = answer.raise_for_status().json()["messages"]
            seen.accepted = [str(message["idempotency_key"]) for message in messages]
            problems[:] = [*check_traffic(self._messages, self._webhooks, seen), *unfinished]
            if not problems:
                return
            self._console.print(
                f"published {seen.published:,}, accepted {len(seen.accepted):,}, "
                f"dead-lettered {len(seen.dead):,} | webhooks answered {len(seen.answers):,}, "
                f"events received {len(seen.events):,}"
            )
            await asyncio.sleep(LOOK_SECONDS)

    async def _unfinished(self, client: httpx.AsyncClient, channel: AbstractChannel) -> list[str]:
        """Return lines about messages in progress, and about queues that are not empty."""
        answer = await client.get(f"{self._environment.admin_urls['worker']}/metrics")
        worker = Scrape(answer.raise_for_status().text)
        processed = "sms_bridge_worker_messages_processed_total"
        self._seen.retries = worker.by("reason", processed, outcome="retried")
        held = int(worker.total("sms_bridge_worker_messages_in_progress"))
        lines = [f"{held} messages are still in progress"] if held else []
        for name in queues_of(self._settings, "worker"):
            if name == dead_queue(self._settings.worker.queue):
                continue
            queue = await channel.declare_queue(name, passive=True)
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
    yield f"logs              {environment.folder}"
    yield f"SMS service       {environment.sandbox_url}/ shows all texts, and replies to them"


def _wait_for_interrupt(environment: DemoEnvironment) -> None:
    try:
        while True:
            environment.check()
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        return
