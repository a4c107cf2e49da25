"""Shared by the integration tests: real processes around a real broker.

Environment variables configure every role. Roles and commands are forked from a process that has
imported their modules (tests/forked.py). Tests of Python's startup or shutdown start the program
instead. After a role ends, its exit code is checked, and its logs and metrics are searched for
canaries: the numbers, texts, keys and secrets that the tests generated.
"""

import asyncio
import hashlib
import hmac
import itertools
import json
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple, TypeVar

import anyio
import httpx
import pytest
from aio_pika.abc import AbstractIncomingMessage
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, open_connection
from bridge.config import Settings
from bridge.sandbox.broker import Broker, private_broker
from bridge.sandbox.processes import Child, Guard, guarded
from tests.amqp_client import Amqp, open_amqp
from tests.erlang import evaluate
from tests.forked import ForkedChild, prepare, run_forked

T = TypeVar("T")

PROGRAM = (sys.executable, "-m", "bridge")
SIGNATURE = "X-Service-Signature"
SECONDS = 30.0
POLL_SECONDS = 0.05


async def eventually(
    check: Callable[[], Awaitable[T | None]], *, what: str, seconds: float = SECONDS
) -> T:
    """Poll until `check` returns a true value, and return it. Fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not (result := await check()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(POLL_SECONDS)
    return result


class Canaries:
    """Generated personal data with recognisable stems."""

    key = "canary-key-7f3a"
    secret = "canary-secret-91bc"
    old_secret = "canary-secret-old-55d0"
    password = "canary-password-c04e"

    def __init__(self) -> None:
        self._counter = itertools.count(1000)
        self._signatures: set[str] = set()

    def number(self) -> str:
        """Generate a phone number."""
        return f"+99955501{next(self._counter)}"

    def text(self) -> str:
        return f"Zikadensommer {next(self._counter)}"

    def request(self, **members: str) -> dict[str, str]:
        """Generate a send request. Arguments replace generated values."""
        return {"to": self.number(), "from": "Acme", "text": self.text()} | members

    def sign(self, body: bytes, secret: str | None = None) -> str:
        """Sign a webhook as the preset `plain` does."""
        key = (secret or self.secret).encode()
        signature = hmac.new(key, body, hashlib.sha256).hexdigest()
        self._signatures.add(signature)
        return signature

    def found_in(self, text: str) -> set[str]:
        """Return the canaries in a text."""
        stems = "99955501|4917139200|Zikadensommer|canary-key|canary-secret|canary-password"
        return {*re.findall(stems, text), *(s for s in self._signatures if s in text)}


def make_environ(settings: Mapping[str, object]) -> dict[str, str]:
    """Convert settings such as `worker.queue` to environment variables."""
    ours = ("SMS_BRIDGE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    environ = {k: v for k, v in os.environ.items() if not k.upper().startswith(ours)}
    for key, value in settings.items():
        name = "SMS_BRIDGE_" + key.replace(".", "__").upper()
        environ[name] = value if isinstance(value, str) else json.dumps(value)
    return environ


async def run_program(
    *args: str, settings: Mapping[str, object] | None = None, given: bytes = b""
) -> CompletedProcess[bytes]:
    """Fork a command, and run it to its end."""
    environ = make_environ(settings or {})
    return await run_forked(args, given=given, environ=environ, seconds=SECONDS)


async def run_process(
    *args: str, settings: Mapping[str, object] | None = None
) -> CompletedProcess[bytes]:
    """Start a command as a user does, and run it to its end."""
    async with asyncio.timeout(SECONDS):
        environ = make_environ(settings or {})
        return await anyio.run_process([*PROGRAM, *args], check=False, env=environ)


async def run_programs(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, object]]],
) -> dict[str, CompletedProcess[bytes]]:
    """Run several commands with their settings, some of them concurrently.

    The keys are names chosen by the caller.
    """
    places = asyncio.Semaphore(3)

    async def run(args: Sequence[str], settings: Mapping[str, object]) -> CompletedProcess[bytes]:
        async with places:
            return await run_program(*args, settings=settings)

    results = await asyncio.gather(*(run(*command) for command in commands.values()))
    return dict(zip(commands, results, strict=True))


class Running:
    """A process of the bridge, with its log and its admin port."""

    def __init__(
        self, child: Child, canaries: Canaries, http: httpx.AsyncClient, entities: Sequence[str]
    ) -> None:
        self.child = child
        self.entities = entities
        self._canaries = canaries
        self._http = http
        self._shown = ""
        self.is_done = False

    @property
    def output(self) -> str:
        """Everything that the process has printed."""
        return self.child.log.read_text(encoding="utf-8", errors="replace")

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the facts of every log line with this event."""
        # The last line may be incomplete.
        whole, _, _ = self.output.rpartition("\n")
        lines = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == event]

    async def until_logged(self, event: str, **facts: object) -> dict[str, Any]:
        """Wait for the first log line with this event and these facts."""

        async def look() -> dict[str, Any] | None:
            found = [line for line in self.logged(event) if facts.items() <= line.items()]
            assert found or self.child.exit_code is None, self.child.tail()
            return found[0] if found else None

        return await eventually(look, what=f"{event} logged by {self.child.name}")

    @property
    def webhook_url(self) -> str:
        """URL for the service's webhooks."""
        return f"http://127.0.0.1:{self.logged('started')[0]['webhook_port']}/webhooks"

    async def ask(self, path: str) -> httpx.Response:
        port = self.logged("started")[0]["admin_port"]
        return await self._http.get(f"http://127.0.0.1:{port}{path}")

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.ask("/readyz")).status_code == 200

        await self.until_logged("started")
        await eventually(is_ready, what=f"{self.child.name} ready\n{self.child.tail()}")

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.ask("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until_metric(self, name: str, at_least: float, **labels: str) -> None:
        """Wait until a metric reaches a value."""

        async def has_grown() -> bool:
            return await self.metric(name, **labels) >= at_least

        await eventually(has_grown, what=f"{name}{labels} at least {at_least}")

    async def keep_what_it_shows(self) -> None:
        """Record the output of the admin port, which is searched for canaries."""
        for path in ("/metrics", "/livez", "/readyz", "/startupz"):
            self._shown += (await self.ask(path)).text

    async def ended(self, seconds: float = SECONDS) -> int:
        """Wait for the process to end, and return its exit code."""

        async def look() -> tuple[int] | None:
            code = self.child.exit_code
            return None if code is None else (code,)

        (code,) = await eventually(look, what=f"{self.child.name} ended", seconds=seconds)
        self.is_done = True
        return code

    async def stop(self) -> int:
        """Send SIGTERM, as Kubernetes does, and return the exit code."""
        if self.child.exit_code is None and self.logged("started"):
            await self.keep_what_it_shows()
        self.child.signal(signal.SIGTERM)
        return await self.ended()

    def leaks(self) -> set[str]:
        """Return the canaries in its output and on its admin port."""
        return self._canaries.found_in(self.output + self._shown)


@dataclass
class Launcher:
    """Starts processes of the bridge, and stops them."""

    base: Mapping[str, object]
    folder: Path
    guard: Guard
    canaries: Canaries
    http: httpx.AsyncClient
    started: list[Running] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def start(
        self, *command: str, settings: Mapping[str, object], is_forked: bool = True
    ) -> Running:
        """Start a command. These settings override the shared ones.

        Without `is_forked`, the program is started as a user starts it.
        """
        merged = {**self.base, **settings}
        log, environ = self.folder / f"{command[0]}-{next(self.numbers)}.log", make_environ(merged)
        if is_forked:
            child: Child = ForkedChild(command, guard=self.guard, log=log, environ=environ)
        else:
            child = Child([*PROGRAM, *command], guard=self.guard, log=log, environ=environ)
        running = Running(child, self.canaries, self.http, _entities(merged))
        self.started.append(running)
        return running

    async def role(
        self, *command: str, settings: Mapping[str, object], is_forked: bool = True
    ) -> Running:
        running = self.start(*command, settings=settings, is_forked=is_forked)
        await running.until_ready()
        return running

    async def end_all(self) -> dict[str, int]:
        """Stop running processes, and return exit codes other than 0."""
        left = [running for running in self.started if not running.is_done]
        codes = await asyncio.gather(*(running.stop() for running in left))
        pairs = zip(left, codes, strict=True)
        return {running.child.name: code for running, code in pairs if code != 0}


def _entities(settings: Mapping[str, object]) -> list[str]:
    queue, delays = settings.get("worker.queue"), settings.get("worker.retry_delays")
    steps = [f"{queue}.retry.{d}" for d in delays] if isinstance(delays, list) else []
    inbound = [settings.get("webhook.queue"), settings.get("webhook.exchange")]
    names = [queue, f"{queue}.dead", *steps, *inbound, settings.get("worker.outcome_exchange")]
    return [name for name in names if isinstance(name, str)]


@dataclass
class Line:
    """A worker, its queue and a publisher."""

    amqp: Amqp
    canaries: Canaries
    worker: Running
    queue: str

    def request(self, **members: str) -> dict[str, str]:
        """Generate a send request."""
        return self.canaries.request(**members)

    async def publish(self, request: object, **properties: Any) -> None:
        """Publish a send request, or raw bytes."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        await self.amqp.publish(self.queue, body, **properties)

    async def outcome(self, request: object, **properties: Any) -> dict[str, Any]:
        """Publish a send request, and return its outcome event."""
        async with self.replies() as replies:
            mark = uuid.uuid4().hex
            await self.publish(request, reply_to=replies, correlation_id=mark, **properties)
            message = await self.amqp.take(replies, correlation_id=mark)
        event: dict[str, Any] = json.loads(message.body)
        return event

    @asynccontextmanager
    async def replies(self) -> AsyncIterator[str]:
        """Provide a queue for outcome events."""
        queue = await self.amqp.channel.declare_queue(exclusive=True)
        try:
            yield queue.name
        finally:
            await queue.delete(if_unused=False, if_empty=False)

    async def dead_letter(self, request: object, **properties: Any) -> AbstractIncomingMessage:
        """Publish a send request, and return its dead letter."""
        properties.setdefault("message_id", uuid.uuid4().hex)
        await self.publish(request, **properties)
        return await self.amqp.take(f"{self.queue}.dead", message_id=properties["message_id"])

    async def settled(self) -> float:
        """Count the settled deliveries."""
        return await self.worker.metric("sms_bridge_worker_messages_processed_total")

    async def until_settled(self, count: float) -> None:
        """Wait until this many deliveries are settled."""
        await self.worker.until_metric("sms_bridge_worker_messages_processed_total", count)


class Post(NamedTuple):
    """A raw HTTP request, with header names in lower case."""

    first_line: str
    headers: dict[str, str]
    body: bytes


class HttpStub:
    """An HTTP server that records each request, sends the result of `answer`, and closes."""

    def __init__(self, answer: Callable[[Post], bytes]) -> None:
        self.url = ""
        self.posts: list[Post] = []
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first_line, *lines = head.split("\r\n")[:-2]
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.posts.append(Post(first_line, headers, body))
        writer.write(self._answer(self.posts[-1]))
        # A client may stop reading early.
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()


@asynccontextmanager
async def http_stub(answer: Callable[[Post], bytes]) -> AsyncIterator[HttpStub]:
    """Serve a stub on a free port."""
    stub = HttpStub(answer)
    async with await asyncio.start_server(stub.serve, "127.0.0.1", 0) as server:
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield stub


def http_answer(status: int, body: bytes = b"", kind: str = "application/json") -> bytes:
    """Format an HTTP answer."""
    head = f"HTTP/1.1 {status} Fine\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


class Service:
    """The sandbox as SMS service."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self._http = http

    async def forget(self) -> None:
        """Forget all messages and faults."""
        for kind in ("faults", "messages", "requests"):
            (await self._http.delete(f"{self.url}/sandbox/{kind}")).raise_for_status()

    async def misbehave(self, *faults: Mapping[str, object]) -> None:
        """Make the service inject faults."""
        answer = await self._http.put(f"{self.url}/sandbox/faults", json=list(faults))
        answer.raise_for_status()

    async def messages(self, to: str) -> list[dict[str, Any]]:
        """Return the accepted messages to a number."""
        return await self._list("messages", to)

    async def requests(self, to: str) -> list[dict[str, Any]]:
        """Return all POSTs to a number, accepted or not."""
        return await self._list("requests", to)

    async def until_sent(self, to: str) -> dict[str, Any]:
        """Wait for the first accepted message to a number."""

        async def look() -> dict[str, Any] | None:
            found = await self.messages(to)
            return found[0] if found else None

        return await eventually(look, what=f"a message for {to}")

    async def until_requested(self, to: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until there are this many POSTs to a number."""

        async def look() -> list[dict[str, Any]] | None:
            found = await self.requests(to)
            return found if len(found) >= count else None

        return await eventually(look, what=f"{count} requests for {to}")

    async def headers(self, to: str) -> list[dict[str, str]]:
        """Return the headers of all POSTs to a number, oldest first."""
        requests = await self.requests(to)
        urls = [f"{self.url}/sandbox/requests/{one['number']}" for one in requests]
        return [dict((await self._http.get(url)).json()["headers"]) for url in urls]

    async def _list(self, kind: str, to: str) -> list[dict[str, Any]]:
        answer = await self._http.get(f"{self.url}/sandbox/{kind}")
        answer.raise_for_status()
        return [entry for entry in answer.json()[kind] if entry["to"] == to]


@pytest.fixture(scope="session")
def canaries() -> Canaries:
    """Generate personal data."""
    return Canaries()


@pytest.fixture(scope="session", autouse=True)
def imports() -> None:
    """Import modules for forked processes while the broker starts."""
    prepare()


@pytest.fixture(scope="session")
def guard() -> Iterator[Guard]:
    """End all child processes after the tests."""
    with guarded() as ours:
        yield ours


@pytest.fixture(scope="session")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """Provide an HTTP client without keep-alive, because servers start and stop."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, timeout=SECONDS, limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
async def amqp(amqp_url: str) -> AsyncIterator[Amqp]:
    """Provide the shared AMQP client."""
    async with open_amqp(amqp_url) as client:
        yield client


StartService = Callable[[str], Awaitable[Service]]


@pytest.fixture(scope="session")
async def start_service(
    tmp_path_factory: pytest.TempPathFactory, guard: Guard, http: httpx.AsyncClient
) -> AsyncIterator[StartService]:
    """Start sandboxes with one API key each."""
    folder = tmp_path_factory.mktemp("services")
    children: list[Child] = []

    async def start(key: str) -> Service:
        command = ["sandbox", "--port", "0", "--key", key]
        log = folder / f"sandbox-{len(children)}.log"
        child = ForkedChild(command, guard=guard, log=log, environ=make_environ({}))
        children.append(child)

        async def look() -> str | None:
            assert child.exit_code is None, child.tail()
            found = re.search(r"sandbox: (http://\S+)", child.tail())
            return found[1] if found else None

        return Service(await eventually(look, what="the sandbox started"), http)

    yield start
    for child in children:
        child.end(grace_seconds=10)


@pytest.fixture(scope="session")
async def session_service(start_service: StartService, canaries: Canaries) -> Service:
    """Start the shared SMS service."""
    return await start_service(canaries.key)


@pytest.fixture
async def service(session_service: Service) -> Service:
    """Provide the shared SMS service, empty."""
    await session_service.forget()
    return session_service


@pytest.fixture(scope="module")
async def launcher(
    tmp_path_factory: pytest.TempPathFactory,
    guard: Guard,
    canaries: Canaries,
    http: httpx.AsyncClient,
    amqp: Amqp,
    amqp_url: str,
) -> AsyncIterator[Launcher]:
    """Start processes for a test file. At its end, check exit codes and search for canaries."""
    base: dict[str, object] = {
        "rabbitmq.url": amqp_url,
        "admin.host": "127.0.0.1",
        "admin.port": "0",
        "webhook.host": "127.0.0.1",
        "webhook.port": "0",
        "log.format": "json",
        "log.level": "debug",
    }
    launcher = Launcher(base, tmp_path_factory.mktemp("bridge"), guard, canaries, http)
    yield launcher
    unclean = await launcher.end_all()
    leaks = {running.child.name: running.leaks() for running in launcher.started}
    for running in launcher.started:
        await amqp.delete(running.entities)

    assert unclean == {}
    assert {name: found for name, found in leaks.items() if found} == {}


@pytest.fixture(scope="session")
def managed_broker() -> Iterator[Broker]:
    """Run a broker with the management API. Tests may change its policies and users.

    The API's data is at most two seconds old, instead of RabbitMQ's default of ten.
    """
    every_second = ["collect_statistics_interval = 1000"]
    with private_broker(management=True, configuration=every_second) as broker:
        # `rabbitmq.conf` has no such setting. Queues read it when they are declared.
        evaluate(broker, "application:set_env(rabbit, quorum_tick_interval, 1000)")
        yield broker


def unique(name: str) -> str:
    """Return a unique name for a queue or exchange."""
    return f"{name}.{uuid.uuid4().hex[:12]}"


@asynccontextmanager
async def connected(url: str, heartbeat_seconds: int = 10) -> AsyncIterator[Connection]:
    """Connect as the roles do."""
    values = {"rabbitmq": {"url": url, "heartbeat_seconds": heartbeat_seconds}}
    rabbitmq = Settings.model_validate(values).rabbitmq
    connection = await open_connection(rabbitmq, SecretStr(url), name="test")
    try:
        yield connection
    finally:
        await close_quietly(connection)


@pytest.fixture
async def connection(amqp_url: str) -> AsyncIterator[Connection]:
    """Provide a connection."""
    async with connected(amqp_url) as ours:
        yield ours
