"""What a soak runs on: a private broker, the stand-in SMS service and its workers, all real."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import aio_pika
import httpx

from bridge.config import ENV_PREFIX
from bridge.sandbox.broker import URL_VARIABLE, Broker
from bridge.sandbox.processes import Child, Guard, free_ports, wait_until
from bridge.topology.declarations import dead_queue, retry_queue
from soak.checker import DeadLetter, Post
from soak.publisher import Request

CONCURRENCY: Final = 50
API_SECONDS: Final = 2
QUEUE: Final = "sms.outbound"
RETRY_DELAYS: Final = ("1s", "2s", "5s")
LADDER: Final = tuple(retry_queue(QUEUE, int(delay[0])) for delay in RETRY_DELAYS)
DEAD: Final = dead_queue(QUEUE)

READY_SECONDS: Final = 30
# A little over what the worker allows itself for a drain.
GRACE_SECONDS: Final = 30
# RabbitMQ writes the directory of its quorum queues late: see `Broker.flush`.
SETTLE_SECONDS: Final = 3
# Without it hardly anything is in flight when a fault strikes.
LATENCY_SECONDS: Final = 0.2
# The sandbox forgets its oldest POSTs beyond this.
LOG_LIMIT: Final = 100_000
PAGE_BYTES: Final = 4096

_WORKER: Final[Mapping[str, str]] = {
    "SMS_API__KEY": "soak",
    "SMS_API__TIMEOUT_SECONDS": str(API_SECONDS),
    "WORKER__CONCURRENCY": str(CONCURRENCY),
    "WORKER__RETRY_DELAYS": json.dumps(RETRY_DELAYS),
    "ADMIN__HOST": "127.0.0.1",
    "ADMIN__PORT": "0",
    "LOG__FORMAT": "json",
}


class SoakError(Exception):
    """The soak itself cannot go on."""


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Let the signals that end a program, and the end of the time, end all processes, too."""

    def interrupt(number: int, _frame: object) -> None:
        if number == signal.SIGALRM:
            raise SoakError(f"not over after {seconds} s")
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def read_peak_kib(pid: int) -> int:
    """Return the most memory that a process has used; 0 when it runs no more."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="ascii"))
    return int(found[1]) if found else 0


def read_rss_bytes(pid: int) -> int:
    """Return how much memory a process that runs occupies now."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * PAGE_BYTES


class Bench:
    """The processes, what can be done to them, and what they tell.

    The workers are given `urls`, of which the broker's is one; by default that alone. They find the
    service at `api_url`, unless something is put before it until they start.
    """

    def __init__(
        self,
        broker: Broker,
        folder: Path,
        guard: Guard,
        *,
        workers: int = 1,
        urls: Sequence[str] = (),
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.broker = broker
        self.urls = [*urls] or [broker.url]
        self.worker_peak_kib = 0
        self.worker_exits: Counter[int] = Counter()
        self._settings = {**_WORKER, **settings}
        self._folder = folder
        self._guard = guard
        self._port = free_ports(1)[0]
        self._url = self.api_url = f"http://127.0.0.1:{self._port}"
        self._client = httpx.Client(trust_env=False, timeout=60)
        self._sandbox: Child | None = None
        self._workers: list[Child] = []
        self._names = [f"worker-{number}" for number in range(1, workers + 1)]
        self.log = WorkerLog([folder / f"{name}.log" for name in self._names])

    def start(self) -> None:
        """Start everything; return when the workers consume and their queues survive a kill."""
        self._sandbox = self._start("sandbox", "sandbox", "--port", str(self._port))
        if not wait_until(self._sandbox_answers, seconds=READY_SECONDS):
            raise SoakError(f"the sandbox does not answer:\n{self._sandbox.tail()}")
        self.set_faults()
        self._workers = [self._start(name, "worker") for name in self._names]
        if not wait_until(
            lambda: self.log.has_seen("consuming", times=len(self._workers)),
            seconds=READY_SECONDS,
            running=lambda: all(worker.exit_code is None for worker in self._workers),
        ):
            tails = "\n".join(worker.tail() for worker in self._workers)
            raise SoakError(f"not every worker consumes:\n{tails}")
        time.sleep(SETTLE_SECONDS)
        self.broker.flush()

    @property
    def workers(self) -> int:
        """How many workers take from the queue."""
        return len(self._names)

    @property
    def worker_pids(self) -> list[int]:
        """The ids of the workers' processes."""
        return [worker.pid for worker in self._workers]

    def start_worker(self, index: int) -> None:
        """Start a worker in the place of one that has ended; it may not be ready yet."""
        self._workers[index] = self._start(self._names[index], "worker")

    def freeze_worker(self, index: int) -> None:
        """Stop a worker in the middle of everything, until `thaw_worker`."""
        self.look()
        self._workers[index].signal(signal.SIGSTOP)

    def thaw_worker(self, index: int) -> None:
        """Let a worker go on that was frozen."""
        self._workers[index].signal(signal.SIGCONT)

    def kill_worker(self, index: int) -> None:
        """End a worker at once."""
        self.look()
        self._workers[index].kill()

    def end_worker(self, index: int) -> None:
        """End a worker in good order, and note its exit code."""
        self.look()
        worker = self._workers[index]
        worker.end(grace_seconds=GRACE_SECONDS)
        self.worker_exits[int(worker.exit_code or 0)] += 1

    def end_workers(self) -> None:
        """End all workers in good order, one after the other."""
        while self._workers:
            self.end_worker(0)
            self._workers.pop(0)

    def look(self) -> None:
        """Read the workers' memory and logs; raise when a process has ended by itself."""
        for child in (self._sandbox, *self._workers):
            if child is not None and child.exit_code is not None:
                raise SoakError(f"{child.name} ended by itself ({child.exit_code}): {child.tail()}")
        for worker in self._workers:
            self.worker_peak_kib = max(self.worker_peak_kib, read_peak_kib(worker.pid))
        self.log.read()

    def set_faults(self, *faults: dict[str, object]) -> None:
        """Have the service misbehave so, and otherwise answer a little late."""
        late = {"latency_seconds": LATENCY_SECONDS}
        answer = self._client.put(f"{self._url}/sandbox/faults", json=[*faults, late])
        answer.raise_for_status()

    def forget_posts(self) -> None:
        """Have the service forget its log, which has room for so many POSTs only."""
        for log in ("requests", "messages"):
            self._client.delete(f"{self._url}/sandbox/{log}").raise_for_status()

    def connections(self) -> dict[str, str]:
        """List the connections to the broker: name to what its owner calls it."""
        rows = self._manage("GET", "/api/connections").json()
        return {row["name"]: row.get("user_provided_name", "") for row in rows}

    def close_connection(self, name: str) -> None:
        """Have the broker close one connection."""
        self._manage("DELETE", f"/api/connections/{name}")

    def broker_version(self) -> str:
        """Return RabbitMQ's version."""
        return self.broker.ctl("version").strip()

    def count_waiting(self) -> int:
        """Count what is in the main and retry queues, unacknowledged messages too."""
        text = self.broker.ctl("list_queues", "--formatter", "json", "name", "messages")
        sizes = {row["name"]: row["messages"] for row in json.loads(text)}
        return sum(int(sizes.get(name) or 0) for name in (QUEUE, *LADDER))

    def read_posts(self, requests: Iterable[Request]) -> list[Post]:
        """Read the service's log: every POST, whose it was, and whether it was accepted."""
        attempts = self._client.get(f"{self._url}/sandbox/requests").json()["requests"]
        messages = self._client.get(f"{self._url}/sandbox/messages").json()["messages"]
        if len(attempts) >= LOG_LIMIT:
            raise SoakError(f"the sandbox keeps only the last {LOG_LIMIT} POSTs")
        return join_log(attempts, messages, {request.number: request for request in requests})

    def read_dead_letters(self, requests: Iterable[Request]) -> list[DeadLetter]:
        """Read the dead-letter queue out; the letters stay there."""
        found = asyncio.run(self._read_out([DEAD], requests))
        return [DeadLetter(i, str(headers.get("sms-bridge-reason"))) for i, headers in found]

    def read_waiting(self, requests: Iterable[Request]) -> list[str]:
        """Read out whose messages wait; the worker must have ended."""
        found = asyncio.run(self._read_out([*LADDER, QUEUE], requests))
        return [message_id for message_id, _ in found]

    def close(self) -> None:
        """End the workers and the service at once."""
        for child in (*self._workers, self._sandbox):
            if child is not None:
                child.kill()
        self._client.close()

    def _start(self, name: str, command: str, *options: str) -> Child:
        others = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        ours = {ENV_PREFIX + name: value for name, value in self._settings.items()}
        ours[f"{ENV_PREFIX}SMS_API__BASE_URL"] = self.api_url
        ours[URL_VARIABLE] = json.dumps(self.urls)
        return Child(
            [sys.executable, "-m", "bridge", command, *options],
            guard=self._guard,
            log=self._folder / f"{name}.log",
            environ=others | ours if command == "worker" else others,
        )

    def _sandbox_answers(self) -> bool:
        try:
            return self._client.get(f"{self._url}/sandbox/faults").is_success
        except httpx.HTTPError:
            return False

    def _manage(self, method: str, path: str) -> httpx.Response:
        url = f"{self.broker.management_url}{path.replace(' ', '%20').replace('>', '%3E')}"
        return self._client.request(method, url, auth=("guest", "guest")).raise_for_status()

    async def _read_out(
        self, queues: Iterable[str], requests: Iterable[Request]
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """Take everything and acknowledge nothing: it is all back when the connection closes.

        A number is used for one message, which may have been published without an id.
        """
        owners = {request.number: request.message_id for request in requests}
        found: list[tuple[str, Mapping[str, Any]]] = []
        async with await aio_pika.connect(self.urls[0], timeout=READY_SECONDS) as connection:
            for name in queues:
                channel = await connection.channel()
                queue = await channel.get_queue(name)
                while (message := await queue.get(fail=False)) is not None:
                    number = str(json.loads(message.body)["to"])
                    found.append((owners.get(number, number), message.headers))
        return found


def join_log(
    attempts: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    by_number: Mapping[str, Request],
) -> list[Post]:
    """Find out for each POST in the service's log whose it was and whether it was accepted.

    A message and the POST that brought it have the same number and the same moment. Raises
    SoakError when a message has another text than was published, or there was no POST for it.
    """
    accepted = Counter((message["to"], message["received_at"]) for message in messages)
    for message in messages:
        request = by_number.get(message["to"])
        if request is not None and message["text"] != request.text:
            raise SoakError(f"{request.message_id} was sent with another text")
    posts = []
    for attempt in attempts:
        number, moment = attempt["to"], attempt["received_at"]
        took = accepted[number, moment] > 0
        accepted[number, moment] -= took
        known = by_number.get(number or "")
        # A number that nobody published shows as a message that nobody published.
        owner = known.message_id if known else number
        at = datetime.fromisoformat(moment).timestamp()
        posts.append(Post(owner, attempt["idempotency_key"], at, attempt["status"], took))
    if any(accepted.values()):
        raise SoakError("the sandbox has messages of which it logged no POST")
    return posts


class WorkerLog:
    """What the workers write, read a piece at a time; `hosts` has where each link went last."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.events: Counter[str] = Counter()
        self.deliveries: Counter[str] = Counter()
        self.hosts: dict[str, str] = {}
        self._last_sent_began = 0.0
        self.slow: dict[str, list[float]] = defaultdict(list)
        self._offsets = dict.fromkeys(paths, 0)

    def has_seen(self, event: str, *, times: int) -> bool:
        """Say whether an event has been logged so often."""
        self.read()
        return self.events[event] >= times

    def has_sent_since(self, moment: float) -> bool:
        """Say whether a message was delivered and sent after a moment."""
        return self._last_sent_began > moment

    def read(self) -> None:
        """Read what is new, up to the last whole line."""
        for path in self._offsets:
            if path.exists():
                self._read(path)

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] += len(whole)
        for line in whole.splitlines():
            # A worker that is killed may leave half a line, to which the next one adds its first.
            facts = _parse(line)
            self._note(facts)

    def _note(self, facts: Mapping[str, Any]) -> None:
        self.events[str(facts.get("event", "unreadable"))] += 1
        if facts.get("event") == "broker_connected":
            self.hosts[facts["link"]] = facts["host"]
        if facts.get("event") != "delivery":
            return
        at = datetime.fromisoformat(facts["time"]).timestamp()
        self.deliveries[f"{facts['outcome']} {facts.get('reason', '')}".rstrip()] += 1
        if facts["outcome"] == "sent":
            # What was in flight when a fault ended does not show that the worker has recovered.
            self._last_sent_began = max(self._last_sent_began, at - facts["seconds"])
        elif "answer_timeout" in (facts.get("detail") or ""):
            # In an outage it is the pause that is the reason, not the answer.
            self.slow[facts["message_id"]].append(at)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return facts
