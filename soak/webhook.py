"""The soak of the webhook receiver: nothing signed is refused, nothing answered 200 is lost.

    python soak/webhook.py --events 100000 --kills 20 --seed 1 --json webhook.json

First the secret is rotated under load, then the broker is killed under load, again and again.
Exit code 0: so it was. 1: it was not. 2: bad usage.
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias

import aio_pika
import aiormq
import httpx
from rich.console import Console
from rich.table import Table

from bridge.config import ENV_PREFIX
from bridge.errors import BridgeError
from bridge.sandbox.broker import URL_VARIABLE, Broker, private_broker
from bridge.sandbox.processes import Child, Guard, free_ports, guarded
from soak.bench import (
    GRACE_SECONDS,
    READY_SECONDS,
    SETTLE_SECONDS,
    SoakError,
    bounded,
    read_peak_kib,
)
from soak.webhook_checker import SHOWN, Event, Evidence, Verdict, check

QUEUE: Final = "sms.inbound"
EVENT_ID: Final = "sms-bridge-event-id"
SENDERS: Final = 16
# Of so many events one is sent again although it was answered 200, and one has a forged twin.
AGAIN_EVERY, FORGED_EVERY = 100, 50
# What a service waits is longer; the receiver asks for five seconds.
AGAIN_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 15.0
GIVE_UP_SECONDS: Final = 180.0
# The rotation takes this long at least: the files are looked at every five seconds.
ROTATION_SECONDS: Final = 40.0
EVENTS_PER_SECOND_OF_KILLS: Final = 200.0
RECOVERY_SECONDS: Final = 90.0
RECOVERED_EVENTS: Final = 50
SLOWEST_PER_SECOND: Final = 100.0
READ_OUT_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.1
PROBES: Final = 16
PLAIN_WIDTH: Final = 120
EXIT_INTERRUPTED: Final = 130

Tell: TypeAlias = Callable[[str], None]


class MountedSecrets:
    """Secret files as Kubernetes mounts them: links into a folder that is exchanged as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._generation = 0
        folder.mkdir()

    def put(self, **secrets: str) -> list[Path]:
        """Put these in the place of all others, at once, and return the files."""
        self._generation += 1
        old = self._folder / f"..{self._generation - 1}"
        fresh = self._folder / f"..{self._generation}"
        fresh.mkdir()
        for name, secret in secrets.items():
            (fresh / name).write_text(f"{secret}\n", encoding="utf-8")
        link = self._folder / "..data_tmp"
        link.symlink_to(fresh.name)
        link.replace(self._folder / "..data")
        shutil.rmtree(old, ignore_errors=True)
        files = [self._folder / name for name in secrets]
        for file in files:
            if not file.is_symlink():
                file.symlink_to(Path("..data") / file.name)
        return files


class Receiver:
    """The webhook receiver: a real process, its port, its metrics, its log."""

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        guard: Guard,
        files: Sequence[Path],
        *,
        heartbeat_seconds: int = 10,
    ) -> None:
        self.port, self._admin_port = free_ports(2)
        ours = {
            "RABBITMQ__HEARTBEAT_SECONDS": str(heartbeat_seconds),
            "WEBHOOK__HOST": "127.0.0.1",
            "WEBHOOK__PORT": str(self.port),
            "WEBHOOK__SECRET_FILES": json.dumps([str(file) for file in files]),
            "ADMIN__HOST": "127.0.0.1",
            "ADMIN__PORT": str(self._admin_port),
            "LOG__FORMAT": "json",
        }
        others = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        ours = {ENV_PREFIX + name: value for name, value in ours.items()}
        self.log = folder / "webhook.log"
        self._child = Child(
            [sys.executable, "-m", "bridge", "webhook"],
            guard=guard,
            log=self.log,
            environ={**others, **ours, URL_VARIABLE: json.dumps([*urls])},
        )
        self._client = httpx.AsyncClient(trust_env=False, timeout=READY_SECONDS)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric, summed over the series that have these labels."""
        self.look()
        answer = await self._client.get(f"http://127.0.0.1:{self._admin_port}/metrics")
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", answer.text, re.MULTILINE)
        return sum(float(value) for given, value in lines if all(w in given for w in wanted))

    async def until_metric(self, name: str, value: float, **labels: str) -> None:
        """Return when a metric has reached a value."""

        async def is_reached() -> bool:
            with suppress(httpx.TransportError):
                return await self.metric(name, **labels) >= value
            return False

        await until(is_reached, seconds=READY_SECONDS, what=f"{name} {value}")

    def look(self) -> None:
        """Raise when the process has ended by itself."""
        if self._child.exit_code is not None:
            raise SoakError(f"the receiver ended by itself:\n{self._child.tail()}")

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._child.pid

    @property
    def peak_kib(self) -> int:
        """The most memory that it has used."""
        return read_peak_kib(self._child.pid)

    async def end(self) -> int | None:
        """End it in good order and return its exit code."""
        await self._client.aclose()
        await asyncio.to_thread(self._child.end, grace_seconds=GRACE_SECONDS)
        return self._child.exit_code

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()


async def until(check: Callable[[], Awaitable[bool]], *, seconds: float, what: str) -> None:
    """Poll until it is true; raise SoakError when the time is up."""
    deadline = time.monotonic() + seconds
    while not await check():
        if time.monotonic() > deadline:
            raise SoakError(f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(POLL_SECONDS)


class Connection:
    """One connection to the receiver, kept alive, opened again when it broke."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes, secret: str) -> int | None:
        """Post a body that is signed with this secret; return the status, None without answer."""
        signature = hmac.digest(secret.encode(), body, "sha256").hex()
        head = (
            "POST /webhooks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"X-Service-Signature: {signature}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._exchange(head.encode() + body)
        except (OSError, EOFError, TimeoutError):
            self.close()
            return None

    async def _exchange(self, request: bytes) -> int:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").lower()
        length = re.search(r"\r\ncontent-length: (\d+)", answer)
        await reader.readexactly(int(length[1]) if length else 0)
        if "\r\nconnection: close" in answer:
            self.close()
        return int(answer.split(maxsplit=2)[1])

    def close(self) -> None:
        """Close it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Service:
    """The service that sends signed events.

    Each is sent again under its id until it is answered 200, or refused, or too old.
    """

    def __init__(self, port: int, *, seed: int, secret: str) -> None:
        self.secret = secret
        self.events: dict[str, Event] = {}
        self.forged: Counter[int | None] = Counter()
        self.accepted = 0
        self._port = port
        self._seed = seed
        self._next = 0
        self._slot = 0.0

    def forget(self) -> None:
        """Begin new books; the ids go on."""
        self.events, self.forged, self.accepted = {}, Counter(), 0

    @asynccontextmanager
    async def sending(self, count: int | None, per_second: float) -> AsyncIterator[asyncio.Event]:
        """Send so many events at most, evenly; the block may set the event, to send no more."""
        enough = asyncio.Event()
        last = None if count is None else self._next + count
        senders = [
            asyncio.create_task(self._send(last, per_second, enough)) for _ in range(SENDERS)
        ]
        try:
            yield enough
            await asyncio.gather(*senders)
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    async def probe(self, secret: str) -> Counter[int | None]:
        """Post events that are signed with this secret and not in the books."""
        connection = Connection(self._port)
        answers = [await connection.post(self._make(f"probe-{n}"), secret) for n in range(PROBES)]
        connection.close()
        return Counter(answers)

    async def _send(self, last: int | None, per_second: float, enough: asyncio.Event) -> None:
        connection = Connection(self._port)
        while not enough.is_set() and (last is None or self._next < last):
            number = self._next
            self._next += 1
            self._slot = max(self._slot + 1 / per_second, time.monotonic())
            await asyncio.sleep(self._slot - time.monotonic())
            if number % FORGED_EVERY == 0:
                body = self._make(f"forged-{self._seed}-{number}")
                self.forged[await connection.post(body, f"{self.secret}!")] += 1
            await self._send_one(connection, f"event-{self._seed}-{number}")
            if number % AGAIN_EVERY == 0:
                await self._send_again(connection, f"event-{self._seed}-{number}")
        connection.close()

    async def _send_one(self, connection: Connection, event_id: str) -> None:
        event = self.events[event_id] = Event()
        body = self._make(event_id)
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < deadline:
            answer = await connection.post(body, self.secret)
            event.answers[answer] += 1
            if answer is not None and answer < 500:
                break
            await asyncio.sleep(AGAIN_SECONDS)
        self.accepted += event.is_accepted

    async def _send_again(self, connection: Connection, event_id: str) -> None:
        event = self.events[event_id]
        event.again += 1
        event.answers[await connection.post(self._make(event_id), self.secret)] += 1

    @staticmethod
    def _make(event_id: str) -> bytes:
        number = hashlib.sha256(event_id.encode()).hexdigest()[:8]
        data = {"from": f"+999{int(number, 16)}", "text": f"héllo {number}"}
        document = {"type": "message.received", "id": event_id, "data": data}
        return json.dumps(document, ensure_ascii=False).encode()


@dataclass(slots=True)
class Rotation:
    """What the receiver's metric said of the keys, and what became of the key that was removed."""

    valid_current: int = 0
    valid_previous: int = 0
    previous_after_change: int = 0
    removed_key_refused: int = 0


class Soak:
    """One run: the rotation, then the kills; after each the queue is read out."""

    def __init__(
        self,
        broker: Broker,
        receiver: Receiver,
        secrets: MountedSecrets,
        options: argparse.Namespace,
        tell: Tell,
    ) -> None:
        self._broker = broker
        self._receiver = receiver
        self._secrets = secrets
        self._options = options
        self._tell = tell
        self._random = random.Random(options.seed)
        self._service = Service(receiver.port, seed=options.seed, secret=OLD)
        self._counted = 0.0
        self.rotation = Rotation()
        self.problems: list[str] = []
        self.down_seconds: list[float] = []
        self.broker_version = ""

    async def start(self) -> None:
        """Wait until the receiver publishes and its queue survives a kill."""
        await self._receiver.until_metric("sms_bridge_amqp_connection_up", 1)
        await asyncio.sleep(SETTLE_SECONDS)
        await asyncio.to_thread(self._broker.flush)
        self.broker_version = await read_version(self._broker.url)

    # The secret is rotated

    async def rotate_under_load(self) -> tuple[Verdict, float]:
        """Send all the events, and rotate the secret in the meantime."""
        begun, count = time.monotonic(), self._options.events
        async with self._service.sending(count, count / ROTATION_SECONDS):
            await self._rotate(count)
            if self._service.accepted >= count:
                self.problems.append("the rotation was over only after the last event")
        return await self._settle(), time.monotonic() - begun

    async def _rotate(self, count: int) -> None:
        await self._until_accepted(count * 3 // 10)
        self._tell("both secrets are put in the files, the new one first")
        await self._put(changes=2, current=NEW, previous=OLD)
        await self._until_accepted(count // 2)
        self._tell("the service signs with the new secret")
        self._service.secret = NEW
        # What was signed before the change has been answered by then.
        await self._until_accepted(self._service.accepted + 2 * SENDERS)
        before = await self._count_valid("previous")
        await self._until_accepted(count * 7 // 10)
        after = await self._count_valid("previous")
        self._tell("the old secret is removed")
        await self._put(changes=1, current=NEW, previous=NEW)
        answers = await self._service.probe(OLD) + await self._service.probe(OLDER)
        self.rotation = Rotation(
            valid_current=await self._count_valid("current"),
            valid_previous=after,
            previous_after_change=after - before,
            removed_key_refused=answers[401],
        )
        if answers.keys() != {401}:
            self.problems.append(f"what a removed secret signed was answered {dict(answers)}")
        if after == 0 or after != before:
            self.problems.append("the metric does not tell when the previous secret is used")

    async def _put(self, *, changes: int, **secrets: str) -> None:
        labels = {"secret": "webhook", "outcome": "changed"}
        before = await self._receiver.metric("sms_bridge_secret_reloads_total", **labels)
        self._secrets.put(**secrets)
        await self._receiver.until_metric(
            "sms_bridge_secret_reloads_total", before + changes, **labels
        )

    async def _count_valid(self, key: str) -> int:
        name = "sms_bridge_webhook_signature_verifications_total"
        return int(await self._receiver.metric(name, result="valid", key=key))

    # The broker is killed

    async def kill_under_load(self) -> tuple[Verdict, float]:
        """Kill the broker again and again while events are sent."""
        begun = time.monotonic()
        self._service.forget()
        async with self._service.sending(None, EVENTS_PER_SECOND_OF_KILLS) as enough:
            for number in range(1, self._options.kills + 1):
                await self._until_accepted(self._service.accepted + RECOVERED_EVENTS)
                await asyncio.sleep(self._random.uniform(1, 4))
                await self._kill(number)
            await self._until_accepted(self._service.accepted + RECOVERED_EVENTS)
            enough.set()
        return await self._settle(), time.monotonic() - begun

    async def _kill(self, number: int) -> None:
        begun, accepted = time.monotonic(), self._service.accepted
        await asyncio.to_thread(self._broker.kill)
        await asyncio.sleep(self._random.uniform(0, 2))
        await asyncio.to_thread(self._broker.start)
        up = time.monotonic()
        await self._until_accepted(self._service.accepted + 1)
        self.down_seconds.append(time.monotonic() - begun)
        self._tell(
            f"kill {number}: broker up after {up - begun:.1f} s, "
            f"200 after {time.monotonic() - begun:.1f} s; {accepted} accepted before"
        )

    # Both

    async def _until_accepted(self, count: int) -> None:
        async def is_reached() -> bool:
            self._receiver.look()
            return self._service.accepted >= count

        seconds = RECOVERY_SECONDS + max(0, count - self._service.accepted) / SLOWEST_PER_SECOND
        await until(is_reached, seconds=seconds, what=f"{count} events accepted")

    async def _settle(self) -> Verdict:
        """Read the queue out and compare."""
        name = "sms_bridge_webhook_events_total"
        counted = await self._receiver.metric(name, outcome="published")
        evidence = Evidence(
            events=self._service.events,
            stored=await read_out(self._broker.url),
            forged=self._service.forged,
            counted=int(counted - self._counted),
        )
        self._counted = counted
        return check(evidence)


async def read_version(url: str) -> str:
    """Ask the broker for its version."""
    async with asyncio.timeout(READY_SECONDS), await aiormq.connect(url) as connection:
        return str(connection.server_properties["version"])


async def read_out(url: str) -> Counter[str]:
    """Take everything out of the queue, and count it by event id."""
    found: Counter[str] = Counter()
    async with asyncio.timeout(READ_OUT_SECONDS):
        async with await aio_pika.connect(url, timeout=READY_SECONDS) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(QUEUE)
            left = queue.declaration_result.message_count or 0
            done = asyncio.Event()

            async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
                nonlocal left
                found[str(message.headers.get(EVENT_ID))] += 1
                left -= 1
                if left <= 0:
                    done.set()

            if left:
                tag = await queue.consume(take, no_ack=True)
                await done.wait()
                await queue.cancel(tag)
            while (late := await queue.get(fail=False, no_ack=True)) is not None:
                await take(late)
    return found


OLDER, OLD, NEW = "an-older-secret", "the-old-secret", "the-new-secret"


async def run(
    broker: Broker,
    receiver: Receiver,
    secrets: MountedSecrets,
    options: argparse.Namespace,
    tell: Tell,
) -> dict[str, Any]:
    """Play it all and return the report."""
    begun = time.monotonic()
    soak = Soak(broker, receiver, secrets, options, tell)
    await soak.start()
    phases: dict[str, dict[str, Any]] = {}
    if options.events:
        verdict, seconds = await soak.rotate_under_load()
        phases["rotation"] = {**asdict(verdict), "seconds": round(seconds, 1)}
    if options.kills:
        verdict, seconds = await soak.kill_under_load()
        phases["kills"] = {**asdict(verdict), "seconds": round(seconds, 1)}
    peak = receiver.peak_kib
    if exit_code := await receiver.end():
        soak.problems.append(f"after SIGTERM the receiver ended with {exit_code}")
    found = [f"{name}: {line}" for name, phase in phases.items() for line in phase["problems"]]
    return {
        "settings": {"seed": options.seed, "events": options.events, "kills": options.kills},
        "phases": phases,
        "rotation": asdict(soak.rotation),
        "longest_down_seconds": round(max(soak.down_seconds, default=0.0), 1),
        "receiver_peak_mib": round(peak / 1024),
        "seconds": round(time.monotonic() - begun),
        "versions": {
            **{name: version(name) for name in ("sms-bridge", "aio-pika", "aiormq", "httptools")},
            "RabbitMQ": soak.broker_version,
            "Python": platform.python_version(),
        },
        "problems": [*found, *soak.problems],
    }


def draw(console: Console, report: dict[str, Any]) -> None:
    """Print the books of both phases, and the verdict."""
    table = Table(title=f"Webhooks, seed {report['settings']['seed']}", title_justify="left")
    table.add_column("")
    for name in report["phases"]:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[dict[str, Any]], object]] = {
        "signed events": lambda p: p["events"],
        "  tries": lambda p: p["tries"],
        "  answered 503, sent again": lambda p: p["answers"].get("503", 0),
        "  not answered, sent again": lambda p: p["answers"].get("None", 0),
        "  sent again although answered 200": lambda p: p["again"],
        "answered 200": lambda p: p["accepted"],
        "refused (4xx)": lambda p: p["refused"],
        "stored": lambda p: p["stored"],
        "  copies, of what was answered 503": lambda p: p["copies"],
        "  copies of anything else": lambda p: len(p["excess"]),
        "answered 200 and missing": lambda p: len(p["missing"]),
        "stored and never signed": lambda p: len(p["unexpected"]),
        "forged / not answered 401": lambda p: f"{p['forged']} / {p['forged_accepted']}",
        "seconds": lambda p: p["seconds"],
    }
    for name, value in rows.items():
        table.add_row(name, *(str(value(phase)) for phase in report["phases"].values()))
    console.print()
    console.print(table)
    rotation, versions = report["rotation"], report["versions"]
    if "rotation" in report["phases"]:
        console.print(
            f"verified with the previous secret: {rotation['valid_previous']}, after the service "
            f"had changed: {rotation['previous_after_change']}; with a removed secret refused: "
            f"{rotation['removed_key_refused']} of {2 * PROBES}"
        )
    if "kills" in report["phases"]:
        console.print(
            f"{report['settings']['kills']} kills, longest time without a 200: "
            f"{report['longest_down_seconds']} s"
        )
    console.print(
        f"receiver's peak memory {report['receiver_peak_mib']} MiB; {report['seconds']} s in all"
    )
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()))
    for problem in report["problems"]:
        console.print(f"FAILED: {problem}", markup=False)
    for phase in report["phases"].values():
        for event_id in [*phase["missing"], *phase["excess"], *phase["unexpected"]][:SHOWN]:
            console.print(f"  {event_id}", markup=False)
    if not report["problems"]:
        console.print("PASSED: nothing signed was refused, nothing answered 200 was lost.")


def main() -> int:
    """Run the soak that the command line asks for and return the exit code."""
    options = _parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        with bounded(options.max_seconds):
            return _run(options, console)
    except (SoakError, BridgeError, TimeoutError, aio_pika.exceptions.AMQPError) as error:
        console.print(f"FAILED: {str(error) or type(error).__name__}", markup=False)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(options: argparse.Namespace, console: Console) -> int:
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-soak-"))
    console.print(f"seed {options.seed}; the logs are in {folder}", markup=False)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')}  {text}", markup=False)

    with private_broker() as broker, guarded() as guard:
        secrets = MountedSecrets(folder / "secrets")
        files = secrets.put(current=OLD, previous=OLDER)
        receiver = Receiver([broker.url], folder, guard, files)
        try:
            report = asyncio.run(run(broker, receiver, secrets, options, tell))
        finally:
            receiver.kill()
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(console, report)
    if not report["problems"]:
        shutil.rmtree(folder)
    return 1 if report["problems"] else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Signed events, a rotation, kills of the broker.")
    parser.add_argument("--events", type=int, default=100_000, help="under the rotation; 0: none")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--max-seconds", type=int, default=1800)
    options = parser.parse_args()
    if options.kills < 0 or options.events < 0 or 0 < options.events < 1000:
        parser.error("--events must be 0 or at least 1000, --kills not negative")
    if not options.kills and not options.events:
        parser.error("there is nothing to do")
    return options


if __name__ == "__main__":
    sys.exit(main())
