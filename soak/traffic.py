"""The traffic of a soak: messages, signed webhooks, and malformed messages.

The publisher uses aio-pika, and no code of the bridge.
"""

import asyncio
import hashlib
import hmac
import itertools
import json
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import aio_pika
from aio_pika.abc import AbstractChannel
from yarl import URL

from soak.webhook_checker import PROBE, Event
from tests.amqp_client import NO_ID

MAX_OPEN: Final = 500
TICK_SECONDS: Final = 0.1
CONNECT_SECONDS: Final = 5.0
CONFIRM_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 0.3
HEARTBEAT_SECONDS: Final = 5

SENDERS: Final = 16
# One event in this many is repeated after its 200, and one has a forged twin.
AGAIN_EVERY, FORGED_EVERY = 100, 50
# Delay before a repeat. Real services wait longer, and the receiver asks for five seconds.
EVENT_AGAIN_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 15.0
GIVE_UP_SECONDS: Final = 180.0

Ids = Literal["on", "half", "off"]

# aio-pika also raises other exceptions than its own, and a closing channel cancels its waiters.
_FAULTS: Final = (Exception, asyncio.CancelledError)


# Messages


@dataclass(frozen=True, slots=True)
class Request:
    """A message to send, each to another number.

    Without `has_id`, it is published without a `message_id`. `key` is its ordering key.
    """

    message_id: str
    number: str
    text: str
    has_id: bool = True
    key: str | None = None

    def message(self) -> aio_pika.Message:
        """Return the AMQP message."""
        body = {"to": self.number, "from": "Soak", "text": self.text}
        return aio_pika.Message(
            json.dumps(body).encode(),
            message_id=self.message_id if self.has_id else NO_ID,
            content_type="application/json",
            timestamp=time.time(),
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            headers={} if self.key is None else {"sms-bridge-ordering-key": self.key},
        )


def plan_requests(
    count: int, *, seed: int, ids: Ids = "on", keys: int = 0, first: int = 0
) -> list[Request]:
    """Make requests with numbers from `first`, distributed over `keys` ordering keys.

    With `half`, every other request has no id.
    """
    return [
        Request(
            f"soak-{seed}-{index}",
            f"+9995{index:09d}",
            f"message {index}",
            has_id=ids == "on" or (ids == "half" and index % 2 == 0),
            key=f"key-{index % keys}" if keys else None,
        )
        for index in range(first, first + count)
    ]


class Publisher:
    """Publishes each request with the same message id until it is confirmed.

    After a fault, it uses the next URL. Requests with the same ordering key stay in order.
    """

    def __init__(
        self,
        urls: Sequence[str],
        queue: str,
        requests: Sequence[Request],
        *,
        per_second: float,
        burst: float = 0.0,
    ) -> None:
        self.published: Counter[str] = Counter()
        self.confirmed: set[str] = set()
        self._urls = itertools.cycle(
            URL(url).update_query(heartbeat=HEARTBEAT_SECONDS, name="soak-publisher")
            for url in urls
        )
        self._queue = queue
        self._requests = requests
        self._per_second = per_second
        self._burst = burst
        self._keys: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._channel: AbstractChannel | None = None
        self._connected = asyncio.Event()
        self._broken = asyncio.Event()

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Publish until the end of the block, and give up unconfirmed requests."""
        tasks = [asyncio.create_task(one) for one in (self._stay_connected(), self._publish_all())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish_all(self) -> None:
        allowed, last = self._burst, time.monotonic()
        async with asyncio.TaskGroup() as group:
            open_tasks: set[asyncio.Task[None]] = set()
            for request in self._requests:
                while allowed < 1 or len(open_tasks) >= MAX_OPEN:
                    await asyncio.sleep(TICK_SECONDS)
                    now = time.monotonic()
                    # Catch up after an outage, within bounds.
                    allowed = min(allowed + (now - last) * self._per_second, MAX_OPEN)
                    last = now
                allowed -= 1
                task = group.create_task(self._publish_in_turn(request))
                open_tasks.add(task)
                task.add_done_callback(open_tasks.discard)

    async def _publish_in_turn(self, request: Request) -> None:
        if request.key is None:
            await self._publish(request)
            return
        async with self._keys[request.key]:
            await self._publish(request)

    async def _publish(self, request: Request) -> None:
        message = request.message()
        while True:
            await self._connected.wait()
            channel = self._channel
            if channel is None:
                continue
            self.published[request.message_id] += 1
            if await self._is_confirmed(channel, message):
                self.confirmed.add(request.message_id)
                return
            # A repeated publish must not get the answer to the first, so close a connection after
            # any fault. Another task may already have replaced it.
            if channel is self._channel:
                self._broken.set()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _is_confirmed(self, channel: AbstractChannel, message: aio_pika.Message) -> bool:
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await channel.default_exchange.publish(message, self._queue, mandatory=True)
        except _FAULTS:
            _heed_cancellation()
            return False
        return True

    async def _stay_connected(self) -> None:
        while True:
            connection = aio_pika.Connection(next(self._urls))
            try:
                await connection.connect(timeout=CONNECT_SECONDS)
                async with asyncio.timeout(CONNECT_SECONDS):
                    self._channel = await connection.channel(on_return_raises=True)
                self._broken.clear()
                self._connected.set()
                ends = (connection.closed(), self._broken.wait())
                waits = [asyncio.ensure_future(end) for end in ends]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            except _FAULTS:
                _heed_cancellation()
            finally:
                self._connected.clear()
                self._channel = None
                with suppress(*_FAULTS):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await connection.close()
                _heed_cancellation()
            await asyncio.sleep(AGAIN_SECONDS)


def _heed_cancellation() -> None:
    """Re-raise only this task's own cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


# Webhooks


class MountedSecrets:
    """Secret files as Kubernetes mounts them: links into a folder that is replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._generation = 0
        folder.mkdir()

    def put(self, **secrets: str) -> list[Path]:
        """Replace all secrets, and return their files."""
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


class Client:
    """A kept-alive connection to the receiver, which reconnects after a failure."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes, secret: str) -> int | None:
        """Post a body signed with this secret. Return the status, or None without an answer."""
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


class EventSender:
    """Sends signed events, and repeats each with the same id until it is accepted or refused.

    `accepted_at` contains the time of each first 200.
    """

    def __init__(self, port: int, *, seed: int, secret: str) -> None:
        self.secret = secret
        self.events: dict[str, Event] = {}
        self.forged: Counter[int | None] = Counter()
        self.accepted_at: list[float] = []
        self._port = port
        self._seed = seed
        self._next = 0
        self._slot = 0.0

    def forget(self) -> None:
        """Reset the counts, but not the ids."""
        self.events, self.forged, self.accepted_at = {}, Counter(), []

    @asynccontextmanager
    async def sending(self, per_second: float) -> AsyncIterator[None]:
        """Send events at an even rate during the block, then wait for all answers."""
        enough = asyncio.Event()
        senders = [asyncio.create_task(self._send(per_second, enough)) for _ in range(SENDERS)]
        try:
            yield
            enough.set()
            await asyncio.gather(*senders)
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    async def probe(self, secret: str) -> int | None:
        """Post an uncounted event signed with this secret, and return the status."""
        client = Client(self._port)
        status = await client.post(_make_event(f"{PROBE}{secret}"), secret)
        client.close()
        return status

    async def _send(self, per_second: float, enough: asyncio.Event) -> None:
        client = Client(self._port)
        while not enough.is_set():
            number = self._next
            self._next += 1
            self._slot = max(self._slot + 1 / per_second, time.monotonic())
            await asyncio.sleep(self._slot - time.monotonic())
            if number % FORGED_EVERY == 0:
                body = _make_event(f"forged-{self._seed}-{number}")
                *_, answer = await self._post_until_answered(client, body, f"{self.secret}!")
                self.forged[answer] += 1
            await self._send_one(client, f"event-{self._seed}-{number}", number)
        client.close()

    async def _send_one(self, client: Client, event_id: str, number: int) -> None:
        event = self.events[event_id] = Event()
        body = _make_event(event_id)
        event.answers.update(await self._post_until_answered(client, body))
        if not event.is_accepted:
            return
        self.accepted_at.append(time.time())
        if number % AGAIN_EVERY == 0:
            event.again += 1
            event.answers[await client.post(body, self.secret)] += 1

    async def _post_until_answered(
        self, client: Client, body: bytes, secret: str | None = None
    ) -> list[int | None]:
        """Post until the event is accepted or refused, and return every answer.

        Each attempt is signed with the given secret, or with the current one.
        """
        deadline = time.monotonic() + GIVE_UP_SECONDS
        answers: list[int | None] = []
        while not answers or time.monotonic() < deadline:
            answer = await client.post(body, secret or self.secret)
            answers.append(answer)
            if answer is not None and answer < 500:
                break
            await asyncio.sleep(EVENT_AGAIN_SECONDS)
        return answers


def _make_event(event_id: str) -> bytes:
    number = int(hashlib.sha256(event_id.encode()).hexdigest()[:8], 16)
    data = {"from": f"+999{number}", "text": f"héllo {number}"}
    document = {"type": "message.received", "id": event_id, "data": data}
    return json.dumps(document, ensure_ascii=False).encode()


# Malformed messages

_REQUEST: Final = {"to": "+491713920000", "from": "Soak", "text": "never sent"}
_BODIES: Final = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\x00\xfe",
    b"[" * 100_000,
    b"\xef\xbb\xbf" + json.dumps(_REQUEST).encode(),
    json.dumps(_REQUEST).encode("utf-16"),
    json.dumps(_REQUEST).encode()[:-3],
    b'{"to": "+491713920000", "to": "+491713920000"}',
    json.dumps(_REQUEST | {"text": "\ud800"}).encode(),
    json.dumps(_REQUEST | {"text": "x" * 100_000}).encode(),
    json.dumps(_REQUEST | {"to": 491713920000}).encode(),
    json.dumps(_REQUEST | {"to": float("inf")}).encode(),
    json.dumps(_REQUEST | {"from": None, "text": [1]}).encode(),
    json.dumps(_REQUEST | {"mesage": "?"}).encode(),
)
_VALUES: Final = (
    True,
    bytearray(b"\xff\xfe"),
    [1, [2, [3]]],
    {"a": {"b": bytearray(b"c")}},
    *("yesterday", "", "9" * 200, "2026-02-30T00:00:00Z", "x" * 20_000),
    *(10**13, -(10**15), -1.5),
)
_HEADERS: Final = (
    *("sms-bridge-expires-at", "sms-bridge-not-before", "sms-bridge-on-uncertain"),
    "sms-bridge-expire-at",
)
# With a number appended, each is at most 255 bytes long.
_MESSAGE_IDS: Final = ("", "x" * 245, "é" * 122, "\x00\r\n", "%00", "a b")
_FIRST_SECOND: Final = 1_700_000_000


def make_malformed(rng: Random, number: int) -> tuple[bytes, dict[str, Any]]:
    """Make the body and properties of an invalid message.

    The worker must be able to distinguish these messages by their ids, or without an id by their
    timestamps.
    """
    begin = rng.choice(_MESSAGE_IDS)
    properties: dict[str, Any] = {
        "message_id": begin and f"{begin}{number}",
        "timestamp": datetime.fromtimestamp(_FIRST_SECOND + number, UTC),
    }
    if rng.random() < 0.5:
        return rng.choice(_BODIES), properties
    headers = {rng.choice(_HEADERS): rng.choice(_VALUES), "x-any": rng.choice(_VALUES)}
    return json.dumps(_REQUEST).encode(), properties | {"headers": headers}
