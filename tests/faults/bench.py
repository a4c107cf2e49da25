"""What the fault tests stand on: a service, a proxied broker, names of their own, and bridges."""

import asyncio
import hashlib
import hmac
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, overload

import httpx
from aio_pika.abc import AbstractIncomingMessage

from bridge.amqp.client import Connection
from bridge.amqp.connecting import open_connection
from bridge.app import Bridge
from bridge.config import Role, Settings
from bridge.sandbox.api import create_app
from bridge.sandbox.broker import Broker
from bridge.sandbox.orders import Fault
from bridge.sandbox.processes import Child, guarded
from bridge.sandbox.records import AcceptedMessage, ReceivedRequest
from bridge.sandbox.server import serve
from bridge.sandbox.service import PlayedService
from bridge.sandbox.store import SandboxStore
from bridge.worker.worker import Worker
from tests.amqp_client import Amqp, open_amqp
from tests.ears import Ears, listening
from tests.faults.amqp_proxy import CONFIRM_SELECT_OK, AmqpProxy, open_amqp_proxy
from tests.forked import ForkedChild

T = TypeVar("T")

SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.01
# How often in a row, and how far apart, a bench is looked at before it counts as settled.
SETTLED_LOOKS: Final = 5
SETTLED_POLL_SECONDS: Final = 0.05
SECRET: Final = "a-webhook-secret"
SIGNATURE: Final = "X-Service-Signature"
CONSUME_LINK: Final = "worker consume"
PUBLISH_LINK: Final = "worker publish"
WEBHOOK_LINK: Final = "webhook publish"

_serials = itertools.count(1)


@overload
async def eventually(
    check: Callable[[], Coroutine[Any, Any, T]], *, what: str, seconds: float = ...
) -> T: ...
@overload
async def eventually(check: Callable[[], T], *, what: str, seconds: float = ...) -> T: ...
async def eventually(check: Callable[[], Any], *, what: str, seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(POLL_SECONDS)


def make_settings(values: dict[str, Any]) -> Settings:
    """Make settings of keys such as `worker.queue`."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return Settings.model_validate(nested)


def make_environ(values: dict[str, Any]) -> dict[str, str]:
    """Make the environment of a process of keys such as `worker.queue`."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SMS_BRIDGE_")}
    for key, value in values.items():
        name = "SMS_BRIDGE_" + key.replace(".", "__").upper()
        environ[name] = value if isinstance(value, str) else json.dumps(value)
    return environ


PROGRAM: Final = (sys.executable, "-m", "bridge")


class Service:
    """The stand-in SMS service, on our own event loop."""

    def __init__(self, url: str, memory: SandboxStore, played: PlayedService) -> None:
        self.url = url
        self.memory = memory
        self.played = played

    def misbehave(self, *faults: dict[str, Any]) -> None:
        """Order faults, in the place of all others."""
        self.memory.faults[:] = [Fault(**fault) for fault in faults]

    @property
    def faults(self) -> list[Fault]:
        """The faults still to come."""
        return self.memory.faults

    def behave(self) -> None:
        """End the faults."""
        self.memory.faults.clear()

    def posts(self, numbers: Iterable[str]) -> list[ReceivedRequest]:
        """Return the POSTs for these numbers, oldest first, whatever came of them."""
        wanted = set(numbers)
        return [attempt for attempt in self.memory.requests if attempt.to in wanted]

    def taken(self, numbers: Iterable[str]) -> list[AcceptedMessage]:
        """Return the messages accepted for these numbers, oldest first."""
        wanted = set(numbers)
        return [message for message in self.memory.messages if message.to in wanted]

    def forget(self) -> None:
        """Forget everything, and behave."""
        self.behave()
        self.memory.messages.clear()
        self.memory.requests.clear()


@asynccontextmanager
async def open_service() -> AsyncIterator[Service]:
    """Serve a stand-in SMS service on a free port."""
    app = create_app()
    # Behind the curtain: tests poll too often to go through HTTP.
    memory: SandboxStore = app.state.store
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    server = asyncio.create_task(serve(app, port=0, announce=url.set_result))
    try:
        service = Service(await asyncio.wait_for(url, SECONDS), memory, app.state.service)
        # The server takes signals for itself: it would end, and what runs here would go on without.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield service
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


class Live:
    """One bridge on our own event loop."""

    def __init__(self, bridge: Bridge, ears: Ears) -> None:
        self.bridge = bridge
        self.ears = ears
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(bridge.run(self._stop))

    @property
    def worker(self) -> Worker:
        assert self.bridge.wiring.worker is not None
        return self.bridge.wiring.worker

    @property
    def webhook_url(self) -> str:
        """Where webhooks go."""
        assert self.bridge.wiring.webhook_listener is not None
        return f"http://127.0.0.1:{self.bridge.wiring.webhook_listener.port}/webhooks"

    @property
    def admin_url(self) -> str:
        """Where probes go."""
        return f"http://127.0.0.1:{self.bridge.wiring.admin_listener.port}"

    @property
    def paused(self) -> set[str]:
        """Every reason for which it is paused now."""
        samples = self._samples("sms_bridge_worker_paused")
        return {labels["reason"] for labels, value in samples if value}

    def metric(self, name: str, **labels: str) -> float:
        samples = self._samples(name)
        return sum(value for given, value in samples if labels.items() <= given.items())

    def _samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [
            (sample.labels, sample.value)
            for family in self.bridge.wiring.registry.restricted_registry([name]).collect()
            for sample in family.samples
        ]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the facts of every line of an event."""
        return self.ears.heard(event)

    async def until_consuming(self, seconds: float = SECONDS) -> None:
        """Return when the broker knows it as a consumer."""
        await eventually(
            lambda: self.worker.consumer.is_registered, what="a consumer", seconds=seconds
        )

    async def until_linked(self, seconds: float = SECONDS) -> None:
        """Return when every connection to the broker is up."""
        await eventually(
            lambda: self.metric("sms_bridge_amqp_connection_up") == 1,
            what="connected",
            seconds=seconds,
        )

    async def stop(self) -> int:
        """Drain and return the exit code."""
        self._stop.set()
        async with asyncio.timeout(SECONDS):
            return await asyncio.shield(self._task)

    async def abandon(self) -> None:
        """End in whatever state it is."""
        if not self._task.done():
            self._stop.set()
            await asyncio.wait({self._task}, timeout=SECONDS)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def bugs(self) -> list[str]:
        """Return what it logged that may never be logged."""
        never = {"internal_error", "unhandled_error", "component_failed"}
        return [f"{line.event} {line.facts}" for line in self.ears.lines if line.event in never]


class FrozenError(BaseException):
    """Something keeps the event loop from turning."""


@asynccontextmanager
async def unfrozen(seconds: float = 5) -> AsyncIterator[None]:
    """Raise FrozenError out of whatever keeps the event loop busy for so long."""
    last = time.monotonic()

    async def beat() -> None:
        nonlocal last
        while True:
            last = time.monotonic()
            await asyncio.sleep(0.1)

    def look(*_: object) -> None:
        if time.monotonic() - last > seconds:
            raise FrozenError

    beating = asyncio.create_task(beat())
    former = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        beating.cancel()


@asynccontextmanager
async def running(settings: Settings, *roles: Role, bugs: bool = False) -> AsyncIterator[Live]:
    """Run a bridge; at the end it may not have logged a bug of its own, unless `bugs`."""
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    with listening() as ears:
        live = Live(Bridge(settings, roles), ears)
        try:
            async with unfrozen():
                yield live
        finally:
            await live.abandon()
            loop.set_exception_handler(handler)
    if not bugs:
        assert live.bugs() == []


def make_numbers(count: int) -> list[str]:
    """Make up numbers that no other message has."""
    return [f"+9997{next(_serials):08d}" for _ in range(count)]


class Bench:
    """One test's own world."""

    def __init__(self, broker: Broker, proxy: AmqpProxy, service: Service, amqp: Amqp) -> None:
        self.broker = broker
        self.proxy = proxy
        self.service = service
        self.amqp = amqp
        serial = next(_serials)
        self.queue = f"t{serial}.outbound"
        self.urgent_queue = f"{self.queue}.urgent"
        self.dead_queue = f"{self.queue}.dead"
        self.exchange = f"t{serial}.inbound"

    def values(self, **changed: Any) -> dict[str, Any]:
        """Return the settings of both roles; `worker__queue` changes `worker.queue`."""
        values: dict[str, Any] = {
            "rabbitmq.url": [self.proxy.url],
            "rabbitmq.connect_timeout_seconds": 3,
            "sms_api.base_url": self.service.url,
            "sms_api.key": "an-api-key",
            "worker.queue": self.queue,
            "worker.concurrency": 10,
            "worker.retry_delays": ["1s", "2s"],
            "webhook.host": "127.0.0.1",
            "webhook.port": 0,
            "webhook.exchange": self.exchange,
            "webhook.queue": self.exchange,
            "webhook.secrets": [SECRET],
            "admin.host": "127.0.0.1",
            "admin.port": 0,
            "log.format": "json",
        }
        return values | {key.replace("__", "."): value for key, value in changed.items()}

    @asynccontextmanager
    async def worker(self, **changed: Any) -> AsyncIterator[Live]:
        """Run a worker and wait until it consumes."""
        settings = make_settings(self.values(**changed))
        async with running(settings, "worker") as live:
            # It may have been a consumer for a moment only: what waits may pause it at once.
            await eventually(lambda: live.logged("consuming"), what="a consumer")
            await live.until_linked()
            yield live

    @contextmanager
    def worker_process(
        self, log: Path, *, is_forked: bool = True, **changed: Any
    ) -> Iterator[Child]:
        """Run a worker in a process of its own, which is killed at the end of the block."""
        environ = make_environ(self.values(**changed))
        with guarded() as guard:
            if is_forked:
                child: Child = ForkedChild(["worker"], guard=guard, log=log, environ=environ)
            else:
                child = Child([*PROGRAM, "worker"], guard=guard, log=log, environ=environ)
            try:
                yield child
            finally:
                child.kill()

    @asynccontextmanager
    async def webhook(self, **changed: Any) -> AsyncIterator[Live]:
        """Run a webhook receiver and wait until it can publish."""
        # It comes after the topology.
        ready = self.proxy.trap("broker", CONFIRM_SELECT_OK, "pass", link=WEBHOOK_LINK)
        async with running(make_settings(self.values(**changed)), "webhook") as live:
            await eventually(ready.sprung.is_set, what="a publishing channel")
            self.proxy.traps.remove(ready)
            yield live

    async def declare_main(self) -> None:
        """Declare the main queue as the bridge does, so that messages can wait in it."""
        await self.declare_queue(self.queue)

    async def declare_queue(self, queue: str, **arguments: Any) -> None:
        arguments = {"x-queue-type": "quorum", **arguments}
        await self.amqp.channel.declare_queue(queue, durable=True, arguments=arguments)

    async def declare_inbound(self) -> None:
        """Declare the exchange and the queue of webhooks as the bridge does."""
        channel = self.amqp.channel
        exchange = await channel.declare_exchange(self.exchange, "topic", durable=True)
        queue = await channel.declare_queue(
            self.exchange, durable=True, arguments={"x-queue-type": "quorum"}
        )
        await queue.bind(exchange, "#")

    async def publish(
        self,
        what: int | Sequence[str],
        *,
        sender: str = "Acme",
        ids: bool = True,
        urgent: bool = False,
        **properties: Any,
    ) -> list[str]:
        numbers = make_numbers(what) if isinstance(what, int) else [*what]
        queue = self.urgent_queue if urgent else self.queue
        await asyncio.gather(
            *(self._publish(queue, n, sender, ids=ids, **properties) for n in numbers)
        )
        return numbers

    async def _publish(
        self, queue: str, number: str, sender: str, *, ids: bool, **properties: Any
    ) -> None:
        body = json.dumps({"to": number, "from": sender, "text": "Hi"}).encode()
        if ids:
            properties["message_id"] = f"id-{number}"
        await self.amqp.publish(queue, body, **properties)

    async def until_taken(self, numbers: Sequence[str], seconds: float = SECONDS) -> None:
        def all_taken() -> bool:
            return {message.to for message in self.service.taken(numbers)} == set(numbers)

        deadline = time.monotonic() + seconds
        while not all_taken():
            missing = len(set(numbers)) - len({m.to for m in self.service.taken(numbers)})
            assert time.monotonic() < deadline, f"{missing} of {len(numbers)} not sent"
            await asyncio.sleep(POLL_SECONDS)

    async def until_settled(self, live: Live, seconds: float = SECONDS) -> None:
        """Return when the worker holds nothing and its queues are empty, dead letters aside.

        On its way from a retry queue, to the worker, or back from a connection that has ended a
        message is counted nowhere, so that this has to hold at several looks in a row, in which
        nothing is received. What a test asserts of the last message it awaits by itself.
        """
        taken = (self.queue, self.urgent_queue)
        queues = [*taken, *(f"{queue}.retry.{step}" for queue in taken for step in ("1s", "2s"))]
        deadline, looks, received = time.monotonic() + seconds, 0, -1.0
        while looks < SETTLED_LOOKS:
            assert time.monotonic() < deadline, f"not within {seconds:g} s: nothing left to do"
            before = received
            counts = [await self.amqp.count_if_there(queue) for queue in queues]
            received = live.metric("sms_bridge_worker_messages_received_total")
            held = live.metric("sms_bridge_worker_messages_in_progress")
            is_quiet = not any(counts) and not held and received == before
            looks = looks + 1 if is_quiet else 0
            await asyncio.sleep(SETTLED_POLL_SECONDS)

    async def until_dead(self, count: int) -> None:
        async def are_there() -> bool:
            return await self.amqp.count_if_there(self.dead_queue) >= count

        await eventually(are_there, what=f"{count} dead letters")

    async def dead_letters(self) -> list[AbstractIncomingMessage]:
        return await self.amqp.take_all(self.dead_queue)

    def extra_posts(self, numbers: Sequence[str]) -> dict[str, int]:
        """Return the numbers that were POSTed more than once, and how often."""
        counts = Counter(attempt.to for attempt in self.service.posts(numbers))
        return {str(to): count for to, count in counts.items() if count > 1}

    def sent_twice(self, numbers: Sequence[str]) -> dict[str, int]:
        """Return the numbers for which more than one message was accepted."""
        counts = Counter(message.to for message in self.service.taken(numbers))
        return {to: count for to, count in counts.items() if count > 1}


@asynccontextmanager
async def open_bench(broker: Broker, service: Service) -> AsyncIterator[Bench]:
    """Lend one test its world."""
    service.forget()
    async with open_amqp_proxy(broker.url) as proxy, open_amqp(broker.url) as amqp:
        yield Bench(broker, proxy, service, amqp)


@asynccontextmanager
async def open_link(bench: Bench, name: str, **changed: Any) -> AsyncIterator[Connection]:
    """Open one of our connections, as a `Link` does."""
    settings = make_settings(bench.values(**changed)).rabbitmq
    connection = await open_connection(settings, settings.url[0], name=name)
    try:
        yield connection
    finally:
        await connection.close()


def sign(body: bytes) -> dict[str, str]:
    """Sign a webhook as the preset `plain` does."""
    return {SIGNATURE: hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()}


def make_event(event_id: str | None) -> bytes:
    """Make the body of an event."""
    data = {"from": "+491713920000", "text": "Hi"}
    event: dict[str, object] = {"type": "message.received", "data": data}
    if event_id is not None:
        event["id"] = event_id
    return json.dumps(event).encode()


async def post_event(
    client: httpx.AsyncClient, url: str, event_id: str | None
) -> tuple[httpx.Response, float]:
    """Post one signed event; return the answer and how long it took."""
    body = make_event(event_id)
    started = time.monotonic()
    answer = await client.post(url, content=body, headers=sign(body))
    return answer, time.monotonic() - started
