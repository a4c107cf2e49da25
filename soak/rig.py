"""Runs the processes of a soak: RabbitMQ, the sandbox as SMS service, workers and a receiver.

The roles connect to the others through proxies.
"""

import asyncio
import json
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx
from aio_pika.abc import AbstractIncomingMessage

from bridge.admin.checks.run import examine
from bridge.sandbox.broker import Broker, private_broker
from bridge.sandbox.processes import Child, Guard, accepts, free_ports, guarded
from bridge.topology.declarations import dead_queue, retry_queue
from soak.checker import DeadLetter, Post
from soak.growth import Sample
from soak.traffic import MountedSecrets, Request
from tests.amqp_client import Amqp, open_amqp
from tests.faults.amqp_proxy import AmqpProxy, open_amqp_proxy
from tests.faults.bench import PROGRAM, make_environ, make_settings
from tests.faults.http_proxy import HttpProxy, open_http_proxy
from tests.rabbitmq_cluster import Cluster, private_cluster

QUEUE: Final = "sms.outbound"
EVENTS: Final = "sms.inbound"
RETRY_SECONDS: Final = (1, 2, 5)
RETRY_DELAYS: Final = [f"{seconds}s" for seconds in RETRY_SECONDS]
LADDER: Final = tuple(retry_queue(QUEUE, seconds) for seconds in RETRY_SECONDS)
DEAD: Final = dead_queue(QUEUE)
CONCURRENCY: Final = 50
API_SECONDS: Final = 2
HEARTBEAT_SECONDS: Final = 3
# Latency of the service. Without it, a fault would hit few messages in flight.
LATENCY_SECONDS: Final = 0.2

READY_SECONDS: Final = 60
# A little more than the worker's own limit for a drain.
GRACE_SECONDS: Final = 30
READ_OUT_SECONDS: Final = 300.0
IDLE_SECONDS: Final = 30.0
ACKED_TOGETHER: Final = 500
# RabbitMQ writes the directory of quorum queues late. See `Broker.flush`.
SETTLE_SECONDS: Final = 3
# Number of POSTs that the sandbox keeps.
LOG_LIMIT: Final = 100_000
PAGE_BYTES: Final = 4096
POLL_SECONDS: Final = 0.1
SPREAD_TRIES: Final = 6
SPREAD_SECONDS: Final = 5.0
# Prefix of the `app_id` of malformed messages, which their dead letters keep.
MALFORMED: Final = "malformed-"


class SoakError(Exception):
    """The soak cannot continue."""


def read_sample(pid: int) -> Sample:
    """Return the size of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return Sample(int(pages) * PAGE_BYTES, len([*Path(f"/proc/{pid}/fd").iterdir()]))


class Role:
    """A worker or receiver: its current process, and the log of all its processes."""

    def __init__(
        self, name: str, role: str, values: Mapping[str, Any], folder: Path, guard: Guard
    ) -> None:
        self.name = name
        self.exit_codes: Counter[int] = Counter()
        self.log = RoleLog(folder / f"{name}.log")
        self._role = role
        self._environ = make_environ({**values}) | {"PYTHONFAULTHANDLER": "1"}
        self._guard = guard
        self._child: Child | None = None

    def start(self) -> None:
        """Start a process without waiting until it is ready."""
        self._child = Child(
            [*PROGRAM, self._role], guard=self._guard, log=self.log.path, environ=self._environ
        )

    @property
    def pid(self) -> int:
        """Id of the current process."""
        return self._running.pid

    @property
    def _running(self) -> Child:
        if self._child is None:
            raise SoakError(f"{self.name} is not running")
        return self._child

    def look(self) -> None:
        """Read the log. Raise SoakError if the process ended by itself."""
        self.log.read()
        if self._child is not None and self._child.exit_code is not None:
            raise SoakError(
                f"{self.name} ended by itself ({self._child.exit_code}):\n{self._child.tail()}"
            )

    def freeze(self) -> None:
        """Freeze the process."""
        self._running.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process."""
        self._running.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    async def end(self) -> None:
        """Stop the process, and count its exit status."""
        if (child := self._child) is not None:
            self._child = None
            await asyncio.to_thread(child.end, grace_seconds=GRACE_SECONDS)
            self.exit_codes[int(child.exit_code or 0)] += 1


class RoleLog:
    """Reads the log of a role incrementally."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: Counter[str] = Counter()
        # Times of timeouts and of lost connections, by idempotency key.
        self.slow: defaultdict[str, list[float]] = defaultdict(list)
        self.cut: defaultdict[str, list[float]] = defaultdict(list)
        # Time of the POST of the last accepted message.
        self.sent_at = 0.0
        # Whether this is the active worker (`worker.ordering`).
        self.is_active = False
        self.sent = 0
        # Number of deliveries settled after SIGTERM.
        self.late = 0
        # The broker of the consumer's last connection.
        self.host = ""
        self._offset = 0

    def read(self) -> None:
        """Read new lines, up to the last complete one."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                self._note(json.loads(line))
            except ValueError:  # an incomplete line of a killed process
                self.events["unreadable"] += 1

    def _note(self, facts: Mapping[str, Any]) -> None:
        event = str(facts.get("event"))
        self.events[event] += 1
        if event == "broker_connected" and facts["link"] == "worker consume":
            self.host = facts["host"]
        elif event in {"active", "no_longer_active", "standing_by"}:
            self.is_active = event == "active"
        elif event == "delivery":
            at = datetime.fromisoformat(facts["time"]).timestamp()
            self.late += self.events["signal"] > 0
            if facts["outcome"] == "sent":
                self.sent += 1
                # Messages in flight at the end of a fault do not prove a recovery.
                self.sent_at = max(self.sent_at, at - facts["seconds"])
            elif "answer_timeout" in (facts.get("detail") or ""):
                self.slow[facts["message_id"]].append(at)
            elif "connection_lost" in (facts.get("detail") or ""):
                self.cut[facts["message_id"]].append(at)


class Api:
    """The sandbox as SMS service, and its proxy."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.child = Child(
            [*PROGRAM, "sandbox", "--port", str(self.port)],
            guard=guard,
            log=folder / "sandbox.log",
            environ=make_environ({}),
        )
        self._client = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60)

    async def set_faults(self, *faults: Mapping[str, object]) -> None:
        """Replace the faults. Other answers are a little late."""
        late = {"latency_seconds": LATENCY_SECONDS}
        (await self._client.put("/sandbox/faults", json=[*faults, late])).raise_for_status()

    async def read_posts(self, requests: Iterable[Request]) -> list[Post]:
        """Read every POST in the log: its message, and whether it was accepted."""
        attempts = (await self._client.get("/sandbox/requests")).json()["requests"]
        messages = (await self._client.get("/sandbox/messages")).json()["messages"]
        if len(attempts) >= LOG_LIMIT:
            raise SoakError(f"the sandbox keeps only the last {LOG_LIMIT} POSTs")
        return join_log(attempts, messages, {request.number: request for request in requests})

    async def forget(self) -> None:
        """Clear the log."""
        for log in ("requests", "messages"):
            (await self._client.delete(f"/sandbox/{log}")).raise_for_status()

    async def aclose(self) -> None:
        """Kill the process."""
        self.child.kill()
        await self._client.aclose()


def join_log(
    attempts: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    by_number: Mapping[str, Request],
) -> list[Post]:
    """Return the message of each POST in the service's log, and whether it was accepted.

    An accepted message belongs to the last POST to its number before it. Raises SoakError if a
    message has a wrong text or no POST.
    """
    posts: list[Post] = []
    places: defaultdict[str | None, list[int]] = defaultdict(list)
    for attempt in attempts:
        number = attempt["to"]
        known = by_number.get(number or "")
        # An unknown number becomes an unknown message.
        owner = known.message_id if known else number
        at = _moment(attempt)
        places[number].append(len(posts))
        posts.append(Post(owner, attempt["idempotency_key"], at, attempt["status"], accepted=False))
    for message in messages:
        request, at = by_number.get(message["to"]), _moment(message)
        if request is not None and message["text"] != request.text:
            raise SoakError(f"{request.message_id} was sent with another text")
        brought = [n for n in places[message["to"]] if posts[n].at <= at and not posts[n].accepted]
        if not brought:
            raise SoakError(f"the sandbox logged no POST for a message accepted at {at:.3f}")
        posts[brought[-1]] = posts[brought[-1]]._replace(accepted=True)
    return posts


def _moment(entry: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(entry["received_at"]).timestamp()


class Rig:
    """All processes of a soak. `broker` is a single node, or the first node of `cluster`."""

    def __init__(
        self,
        brokers: Broker | Cluster,
        amqp: AmqpProxy,
        api: Api,
        http: HttpProxy,
        folder: Path,
        guard: Guard,
    ) -> None:
        self.cluster = brokers if isinstance(brokers, Cluster) else None
        self.broker = brokers.nodes[0] if isinstance(brokers, Cluster) else brokers
        self.amqp = amqp
        self.api = api
        self.http = http
        self.workers: list[Role] = []
        self.key_file = folder / "key"
        self.key_file.write_text("key-0\n", encoding="ascii")
        self.secrets = MountedSecrets(folder / "secrets")
        files = self.secrets.put(current="secret-0", previous="secret-before")
        self.port, admin_port = free_ports(2)
        # The roles connect to the nodes of a cluster directly, so that they choose between them.
        self.urls = self.cluster.urls if self.cluster else [amqp.url]
        self._folder = folder
        self._guard = guard
        self._values: dict[str, Any] = {
            "rabbitmq.url": self.urls,
            "rabbitmq.heartbeat_seconds": HEARTBEAT_SECONDS,
            "admin.host": "127.0.0.1",
            "admin.port": 0,
            "log.format": "json",
        }
        webhook = {
            "webhook.host": "127.0.0.1",
            "webhook.port": self.port,
            "webhook.secret_files": [str(file) for file in files],
            "admin.port": admin_port,
        }
        self.receiver = Role("webhook", "webhook", self._values | webhook, folder, guard)

    @property
    def roles(self) -> list[Role]:
        """The workers and the receiver."""
        return [*self.workers, self.receiver]

    def add_worker(self, **changed: Any) -> Role:
        """Add a worker without starting it. `worker__ordering` overrides `worker.ordering`."""
        values = self._values | {
            "sms_api.base_url": self.http.url,
            "sms_api.key_file": str(self.key_file),
            "sms_api.timeout_seconds": API_SECONDS,
            "worker.concurrency": CONCURRENCY,
            "worker.retry_delays": RETRY_DELAYS,
        }
        values |= {name.replace("__", "."): value for name, value in changed.items()}
        name = f"worker-{len(self.workers) + 1}"
        self.workers.append(Role(name, "worker", values, self._folder, self._guard))
        return self.workers[-1]

    async def start(self) -> None:
        """Start all roles, and wait until they are ready and their queues survive a kill."""
        for role in self.roles:
            role.start()
        await self.until(self._is_ready, what="all are ready")
        if self.cluster:
            await asyncio.to_thread(self.cluster.join)
            await spread(self.cluster, self.urls)
        await asyncio.sleep(SETTLE_SECONDS)
        await asyncio.to_thread((self.cluster or self.broker).flush)

    def _is_ready(self) -> bool:
        consuming = [
            one.log.events["consuming"] + one.log.events["standing_by"] for one in self.workers
        ]
        is_one_active = not consuming or any(one.log.events["consuming"] for one in self.workers)
        return all(consuming) and is_one_active and accepts(self.port)

    def look(self) -> None:
        """Read the logs. Raise SoakError if a process ended by itself."""
        if (code := self.api.child.exit_code) is not None:
            raise SoakError(f"the sandbox ended by itself ({code}):\n{self.api.child.tail()}")
        for role in self.roles:
            role.look()

    async def wait(self, seconds: float) -> None:
        """Wait, and check the processes."""
        await asyncio.sleep(seconds)
        self.look()

    async def until(
        self, check: Callable[[], object], *, what: str, seconds: float = READY_SECONDS
    ) -> None:
        """Poll until `check` is true. Raise SoakError at the deadline."""
        try:
            async with asyncio.timeout(seconds):
                while not check():
                    await self.wait(POLL_SECONDS)
        except TimeoutError:
            raise SoakError(f"not within {seconds:g} s: {what}") from None

    async def end(self) -> None:
        """Stop all roles, one after the other."""
        for role in self.roles:
            await role.end()
            role.log.read()

    async def ctl(self, *args: str) -> str:
        """Run `rabbitmqctl`."""
        return await asyncio.to_thread((self.cluster or self.broker).ctl, *args)

    async def count_waiting(self) -> int:
        """Count the messages in the main and retry queues, including unacked ones."""
        text = await self.ctl("list_queues", "--formatter", "json", "name", "messages")
        sizes = {row["name"]: row["messages"] for row in json.loads(text)}
        return sum(int(sizes.get(name) or 0) for name in (QUEUE, *LADDER))

    async def take_messages(self, queues: Iterable[str]) -> list[dict[str, Any]]:
        """Take all messages out of queues. Return number, reason and `app_id` of each."""
        async with asyncio.timeout(READ_OUT_SECONDS), open_amqp(self.broker.url) as amqp:
            return [
                {
                    "number": _number_of(message.body),
                    "reason": str(message.headers.get("sms-bridge-reason")),
                    "app_id": message.app_id or "",
                }
                for queue in queues
                for message in await _take_all(amqp, queue)
            ]

    async def take_events(self) -> Counter[str]:
        """Take all stored webhooks, and count the copies by event id."""
        async with asyncio.timeout(READ_OUT_SECONDS), open_amqp(self.broker.url) as amqp:
            messages = await _take_all(amqp, EVENTS)
        return Counter(str(message.headers.get("sms-bridge-event-id")) for message in messages)

    async def aclose(self) -> None:
        """Kill all processes."""
        for role in self.roles:
            role.kill()
        await self.api.aclose()


async def _take_all(amqp: Amqp, queue: str) -> list[AbstractIncomingMessage]:
    """Consume the current messages of a queue. More may arrive meanwhile."""
    source = await amqp.channel.declare_queue(queue, passive=True)
    left = source.declaration_result.message_count or 0
    found: list[AbstractIncomingMessage] = []
    if left:
        # Later messages return to the queue. Thousands of acks may still be pending.
        async with source.iterator(timeout=IDLE_SECONDS) as messages:
            async for message in messages:
                found.append(message)
                if len(found) % ACKED_TOGETHER == 0 or len(found) >= left:
                    await message.ack(multiple=True)
                if len(found) >= left:
                    break
    return found


async def spread(cluster: Cluster, urls: Sequence[str]) -> None:
    """Replicate queues that are older than the cluster, with the remedy of `check --online`.

    Raises SoakError if the check does not find them, or if the remedy fails.
    """
    values = {
        "rabbitmq.url": [*urls],
        "sms_api.base_url": "http://127.0.0.1:9",
        "sms_api.key": "soak",
        "worker.retry_delays": RETRY_DELAYS,
        "webhook.secrets": ["secret-0"],
    }
    settings, url = make_settings(values), cluster.nodes[0].management_url
    for tries in range(SPREAD_TRIES):
        found = await examine(settings, ("worker", "webhook"), management=url)
        poor = [one for one in found if one.subject == "replicas"]
        if not poor and not tries:
            raise SoakError("check --online does not report that the queues have only one member")
        if not poor:
            return
        for one in poor:
            for command in (one.fix or "").split("; "):
                tool, *arguments = shlex.split(command)
                await asyncio.to_thread(cluster.nodes[0].ctl, *arguments, tool=tool)
        # The management API is some seconds late.
        await asyncio.sleep(SPREAD_SECONDS)
    raise SoakError("the queues still do not have three members")


def _number_of(body: bytes) -> str:
    found = re.search(rb'"to": ?"(\+\d+)"', body)
    return found[1].decode() if found else ""


def dead_letters(
    messages: Iterable[Mapping[str, Any]], requests: Iterable[Request]
) -> list[DeadLetter]:
    """Return the dead letters among the taken messages, without malformed messages."""
    owners = {request.number: request.message_id for request in requests}
    return [
        DeadLetter(owners.get(one["number"], one["number"]), one["reason"])
        for one in messages
        if not one["app_id"].startswith(MALFORMED)
    ]


@asynccontextmanager
async def open_rig(*, nodes: int = 1, management: bool = False) -> AsyncIterator[Rig]:
    """Provide a rig without workers. Its logs are kept if the block raises."""
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-soak-"))
    sys.stdout.write(f"logs: {folder}\n")
    run_brokers = private_cluster if nodes > 1 else private_broker
    with run_brokers(management=management) as broker, guarded() as guard:
        async with rig_on(broker, folder, guard) as rig:
            yield rig
    shutil.rmtree(folder)


@asynccontextmanager
async def rig_on(broker: Broker | Cluster, folder: Path, guard: Guard) -> AsyncIterator[Rig]:
    """Provide a rig on a running broker."""
    api = Api(folder, guard)
    first = broker.nodes[0] if isinstance(broker, Cluster) else broker
    async with open_amqp_proxy(first.url) as amqp, open_http_proxy(api.url) as http:
        rig = Rig(broker, amqp, api, http, folder, guard)
        try:
            await rig.until(lambda: accepts(api.port), what="the sandbox answers")
            await api.set_faults()
            yield rig
        finally:
            await rig.aclose()
