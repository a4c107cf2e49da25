"""Dead letters: look at them, send them again, take them away; safe to kill at any point.

A look takes the messages with a consumer, unacked, and gives them back by closing the channel.
RabbitMQ has nothing more harmless: a quorum queue counts each time that a message comes back,
whether by a closed channel, a nack (until 4.3), `basic.get` or the management API's "get
messages", and drops what is over its delivery limit (20 by default since RabbitMQ 4.0). So a
message that has come back `MAX_LOOKS` times is not given back but renewed: published to the end
of the same queue, confirmed, then acked, which starts its count anew. No number of looks can drop
a dead letter, unless the queue has a delivery limit of 4 or less.

Only what is looked at is counted, so `list` takes no more than it shows. Nothing is kept in memory
but the messages in hand: at most `PREFETCH` and a half.
"""

import asyncio
import base64
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

import aio_pika
import aiormq
from aiormq.abc import DeliveredMessage

from bridge import __version__, envelope
from bridge.broker import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    close_quietly,
    open_channel,
    open_first_connection,
)
from bridge.config import Settings
from bridge.envelope import moved_properties, read_moment, replayed_properties
from bridge.errors import BridgeError, BrokerError, PublishError
from bridge.metrics import BridgeMetrics, new_registry
from bridge.properties import Properties, tolerate_broken_properties
from bridge.publisher import Publisher
from bridge.topology import dead_queue, read_queue

PREFETCH: Final = 1000
ACK_SECONDS: Final = 5.0
IN_FLIGHT: Final = 50
MAX_LOOKS: Final = 4
# Without a delivery for so long, look whether another one took what is missing.
IDLE_SECONDS: Final = 2.0
IDLE_TRIES: Final = 5
PUBLISH_SECONDS: Final = 10.0
BATCH: Final = 200
BATCH_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One message of the dead-letter queue. Moments are unix seconds."""

    tag: int
    body: bytes
    properties: Properties
    message_id: str | None
    reason: str | None
    detail: str | None
    attempts: int | None
    uncertain_attempts: int
    status: int | None
    dead_at: float | None
    expires_at: float | None
    looks: int

    @property
    def may_be_sent(self) -> bool:
        """Whether an attempt may have reached the phone, so that a replay may be a second SMS."""
        return self.reason == "uncertain" or self.uncertain_attempts > 0

    @property
    def to(self) -> str | None:
        """The number, when the body has one."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        number = document.get("to") if isinstance(document, dict) else None
        return number if isinstance(number, str) else None


def read_dead_letter(message: DeliveredMessage) -> DeadLetter:
    """Read what a dead letter's headers say; what is not as we write it counts as not there."""
    properties = message.header.properties
    headers = properties.headers or {}
    return DeadLetter(
        tag=message.delivery_tag or 0,
        body=message.body,
        properties=properties,
        message_id=properties.message_id or None,
        reason=_text(headers.get(envelope.REASON)),
        detail=_text(headers.get(envelope.DETAIL)),
        attempts=_count(headers.get(envelope.ATTEMPTS)),
        uncertain_attempts=_count(headers.get(envelope.UNCERTAIN_ATTEMPTS)) or 0,
        status=_count(headers.get(envelope.STATUS)),
        dead_at=read_moment(headers, envelope.DEAD_AT),
        expires_at=read_moment(headers, envelope.EXPIRES_AT),
        looks=_count(headers.get(envelope.DELIVERY_COUNT)) or 0,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which dead letters are meant; an age is counted from `sms-bridge-dead-at`, in seconds."""

    reasons: Collection[str] = ()
    ids: Collection[str] = ()
    older_than: float | None = None
    newer_than: float | None = None

    @property
    def takes_all(self) -> bool:
        """Whether every letter is meant."""
        return not (self.reasons or self.ids) and self.older_than is self.newer_than is None

    def takes(self, letter: DeadLetter, *, now: float) -> bool:
        """Say whether a letter is meant; one without a moment of death has no age to go by."""
        if self.reasons and letter.reason not in self.reasons:
            return False
        if self.ids and letter.message_id not in self.ids:
            return False
        return self._has_age(letter, now)

    def _has_age(self, letter: DeadLetter, now: float) -> bool:
        if self.older_than is None and self.newer_than is None:
            return True
        if letter.dead_at is None:
            return False
        age = now - letter.dead_at
        return (self.older_than is None or age > self.older_than) and (
            self.newer_than is None or age < self.newer_than
        )


class DeadLetterQueue:
    """The dead letters that are there when it is opened, each taken once.

    Whatever is not moved or removed goes back when it is closed.
    """

    def __init__(
        self, name: str, channel: aiormq.Channel, publisher: Publisher, *, total: int
    ) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._channel = channel
        self._publisher = publisher
        self._arrived: asyncio.Queue[DeliveredMessage | None] = asyncio.Queue()
        self._delivered = self._unacked = self._credit = 0
        self._places = asyncio.Semaphore(IN_FLIGHT)
        self._moves: set[asyncio.Task[None]] = set()
        self._fault: BridgeError | None = None
        self._stopping = asyncio.Event()
        channel.closing.add_done_callback(lambda _: self._arrived.put_nowait(None))
        channel.on_consumer_cancel_callbacks.add(lambda _: self._arrived.put_nowait(None))

    def stop(self) -> None:
        """Take no more; what is being moved is finished."""
        self._stopping.set()
        self._arrived.put_nowait(None)

    @property
    def is_stopped(self) -> bool:
        """Whether somebody asked to stop."""
        return self._stopping.is_set()

    async def wait(self, seconds: float) -> None:
        """Wait so long, or until somebody asks to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopping.wait()

    async def letters(self, at_most: int | None = None) -> AsyncGenerator[DeadLetter, None]:
        """Yield the letters, oldest first; give each to `keep`, `move` or `remove`, then `finish`.

        Raises BrokerError when the broker ends it.
        """
        total = self.total if at_most is None else min(self.total, at_most)
        for _ in range(total):
            await self._ask_for_more(total)
            message = await self._next()
            if message is None:
                return
            yield read_dead_letter(message)

    async def _ask_for_more(self, total: int) -> None:
        # A letter that is kept uses up a place for good, so another consumer brings new ones.
        if not self._arrived.empty() or self._delivered >= total:
            return
        if self._credit - self._unacked > PREFETCH // 2:
            return
        places = min(PREFETCH, total - self._delivered)
        try:
            async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
                await self._channel.basic_qos(prefetch_count=places)
                await self._channel.basic_consume(self.name, self._on_delivery)
        except aiormq.exceptions.ChannelAccessRefused:
            raise BrokerError(
                f"queue {self.name}: no permission to read; use a user that may"
            ) from None
        self._credit += places

    async def _on_delivery(self, message: DeliveredMessage) -> None:
        self._delivered += 1
        self._unacked += 1
        self._arrived.put_nowait(message)

    async def _next(self) -> DeliveredMessage | None:
        """Return the next delivery, or None when there are no more or they are not wanted."""
        for _ in range(IDLE_TRIES):
            if self.is_stopped or self._fault is not None:
                return None
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await self._arrived.get()
            except TimeoutError:
                if await self._is_empty():
                    return None
                continue
            if message is not None or self.is_stopped or self._fault is not None:
                return message
            raise BrokerError(f"queue {self.name}: the broker ended the consumer; run it again")
        raise BrokerError(f"queue {self.name}: the broker delivers nothing; look at its log")

    async def _is_empty(self) -> bool:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            answer = await self._channel.queue_declare(self.name, passive=True)
        return not answer.message_count

    async def keep(self, letter: DeadLetter) -> None:
        """Leave a letter in the queue; one that was looked at often is renewed."""
        if letter.looks >= MAX_LOOKS:
            await self._start(letter, self.name, moved_properties(letter.properties), done=0)

    async def move(self, letter: DeadLetter, queue: str, properties: Properties) -> None:
        """Publish a letter to a queue, have that confirmed, then ack it; at most 50 at once.

        Returns when it has begun; `finish` tells what became of it.
        """
        await self._start(letter, queue, properties, done=1)

    async def remove(self, letter: DeadLetter) -> None:
        """Ack a letter: it is gone."""
        if not await self._ack(letter):
            raise BrokerError(f"queue {self.name}: the broker is gone; run it again")
        self.done += 1

    async def _ack(self, letter: DeadLetter) -> bool:
        try:
            async with asyncio.timeout(ACK_SECONDS):
                # Until it is written: a kill would undo an ack that is only queued.
                await self._channel.basic_ack(letter.tag, wait=True)
        except (
            aiormq.exceptions.AMQPError,
            aiormq.exceptions.ChannelInvalidStateError,
            TimeoutError,
        ):
            return False
        self._unacked -= 1
        return True

    async def finish(self) -> None:
        """Wait for what is being moved; raise BridgeError when something could not be."""
        while self._moves:
            await asyncio.wait(set(self._moves))
        if self._fault is not None:
            raise self._fault

    async def _start(
        self, letter: DeadLetter, queue: str, properties: Properties, *, done: int
    ) -> None:
        await self._places.acquire()
        if self._fault is not None:
            self._places.release()
            return
        task = asyncio.create_task(self._move(letter, queue, properties, done))
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        task.add_done_callback(lambda _: self._places.release())

    async def _move(
        self, letter: DeadLetter, queue: str, properties: Properties, done: int
    ) -> None:
        try:
            await self._publisher.publish(
                letter.body, exchange="", routing_key=queue, properties=properties
            )
            if await self._ack(letter):
                self.done += done
            else:
                self._fault = BrokerError(
                    f"queue {self.name}: the broker is gone; some letters may be in both queues, "
                    "with one key"
                )
        except PublishError as error:
            self._fault = BrokerError(
                f"queue {queue}: not stored: {error}; nothing is lost, mend it and run this again"
            )
        if self._fault is not None:
            self._arrived.put_nowait(None)


@contextlib.asynccontextmanager
async def open_dead_letters(settings: Settings) -> AsyncIterator[DeadLetterQueue]:
    """Open the dead-letter queue of `worker.queue`; what is still in hand goes back at the end.

    Raises BrokerError when there is no broker or no such queue.
    """
    tolerate_broken_properties()
    name = dead_queue(settings.worker.queue)
    async with contextlib.AsyncExitStack() as stack:
        consuming = await _open_connection(settings, "dead letters", stack)
        sizes = await read_queue(consuming, name)
        if sizes is None or not sizes.exists:
            raise BrokerError(
                f"queue {name}: there is none, or it answers nothing; is worker.queue right?"
            )
        publisher = Publisher(_metrics(settings), timeout_seconds=PUBLISH_SECONDS)
        # An alarm blocks the connection that publishes, and must not block acks.
        publishing = await _open_connection(settings, "dead letters publish", stack)
        serving = asyncio.create_task(publisher.serve(publishing))
        stack.callback(serving.cancel)
        channel = await open_channel(consuming)
        queue = DeadLetterQueue(name, channel, publisher, total=sizes.ready)
        try:
            yield queue
        finally:
            with contextlib.suppress(BridgeError):
                await queue.finish()
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            await close_channel(channel)


async def _open_connection(
    settings: Settings, name: str, stack: contextlib.AsyncExitStack
) -> aio_pika.Connection:
    connection = await open_first_connection(settings.rabbitmq, name=name)
    stack.push_async_callback(close_quietly, connection)
    return connection


def _metrics(settings: Settings) -> BridgeMetrics:
    # Nobody reads them, but publishing is counted wherever it is done.
    exchanges = ("default", settings.webhook.exchange)
    return BridgeMetrics(
        new_registry(), component="cli", version=__version__, revision="", exchanges=exchanges
    )


@dataclass(slots=True)
class Tally:
    """What a replay or a discard did, or would do."""

    taken: Counter[str] = field(default_factory=Counter)
    maybe_sent: Counter[str] = field(default_factory=Counter)
    expired: int = 0

    @property
    def total(self) -> int:
        """How many letters were meant."""
        return self.taken.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to replay or discard: `at_most` so many, and only when `apply` is set.

    `per_second` limits how fast a replay publishes; `step` is called after each letter looked at.
    """

    wanted: Filter
    apply: bool
    at_most: int | None = None
    per_second: float | None = None
    include_uncertain: bool = False
    step: Callable[[], None] = lambda: None


async def replay(queue: DeadLetterQueue, target: str, order: Order) -> Tally:
    """Publish the letters that are meant to the queue `target`, as new, with their old keys.

    Left out are those that may have been sent already, unless they are included, and those whose
    own expiry is over, which would only die again. Killed at any point, nothing is lost; at most
    `IN_FLIGHT` letters are then in both queues, each with the same message id.
    """
    tally = Tally()
    started = time.monotonic()
    async with contextlib.aclosing(queue.letters()) as letters:
        async for letter in letters:
            order.step()
            if not _is_replayed(letter, order, tally):
                await queue.keep(letter)
                continue
            if order.apply and order.per_second is not None:
                await queue.wait(started + tally.total / order.per_second - time.monotonic())
            if queue.is_stopped:
                break
            tally.taken[letter.reason or "-"] += 1
            if order.apply:
                await queue.move(letter, target, replayed_properties(letter.properties))
            else:
                await queue.keep(letter)
            if tally.total == order.at_most:
                break
    await queue.finish()
    return tally


def _is_replayed(letter: DeadLetter, order: Order, tally: Tally) -> bool:
    now = time.time()
    if not order.wanted.takes(letter, now=now):
        return False
    if letter.expires_at is not None and letter.expires_at <= now:
        tally.expired += 1
        return False
    if letter.may_be_sent and not order.include_uncertain:
        tally.maybe_sent[letter.reason or "-"] += 1
        return False
    return True


async def discard(queue: DeadLetterQueue, file: Path, order: Order) -> Tally:
    """Write the letters that are meant to a new file, a line of JSON each, then remove them.

    The file is the user's alone (0600) and on the disk before a letter is acked. Killed at any
    point, a letter is in the file, in the queue, or in both.
    """
    tally = Tally()
    batch: list[DeadLetter] = []
    with contextlib.ExitStack() as stack:
        backup = stack.enter_context(Backup(file))
        async with contextlib.aclosing(queue.letters()) as letters:
            async for letter in letters:
                order.step()
                is_meant = order.wanted.takes(letter, now=time.time())
                tally.taken[letter.reason or "-"] += is_meant
                if is_meant and order.apply:
                    batch.append(letter)
                else:
                    await queue.keep(letter)
                if len(batch) >= BATCH or sum(len(one.body) for one in batch) > BATCH_BYTES:
                    await _remove(queue, backup, batch)
                if tally.total == order.at_most:
                    break
        await _remove(queue, backup, batch)
    await queue.finish()
    return tally


async def _remove(queue: DeadLetterQueue, backup: "Backup", batch: list[DeadLetter]) -> None:
    if batch:
        backup.write(batch)
    for letter in batch:
        await queue.remove(letter)
    batch.clear()


class Backup:
    """A file of JSON lines that nobody else can read; made new with the first line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def write(self, letters: Collection[DeadLetter]) -> None:
        """Write letters and return when they are on the disk.

        Raises BridgeError when they cannot be, or when there is a file of that name already.
        """
        lines = (json.dumps(as_record(letter)) + "\n" for letter in letters)
        content = "".join(lines).encode("ascii")
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._descriptor = os.open(self._path, flags, 0o600)
                _sync_folder(self._path.parent)
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise BridgeError(
                f"{self._path}: {error.strerror}; what is not in it is still in the queue; "
                "name another file with --to"
            ) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_record(letter: DeadLetter) -> dict[str, Any]:
    """Make plain data of a letter, body and all: `body` is text, else there is `body_base64`."""
    properties = {
        name: value
        for name in letter.properties.attributes()
        if name not in {"headers", "cluster_id"}
        and (value := getattr(letter.properties, name)) not in {None, ""}
    }
    return {
        **as_summary(letter),
        "properties": _plain(properties),
        "headers": _plain(letter.properties.headers or {}),
        **_body(letter.body),
    }


def as_summary(letter: DeadLetter) -> dict[str, Any]:
    """Make plain data of what is known of a letter without its body."""
    return {
        "message_id": letter.message_id,
        "reason": letter.reason,
        "detail": letter.detail,
        "attempts": letter.attempts,
        "status": letter.status,
        "dead_at": None
        if letter.dead_at is None
        else datetime.fromtimestamp(letter.dead_at, UTC).isoformat(timespec="milliseconds"),
        "age_seconds": None if letter.dead_at is None else round(time.time() - letter.dead_at),
    }


def _body(body: bytes) -> dict[str, str]:
    try:
        return {"body": body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _plain(value: Any) -> Any:  # noqa: ANN401  a header may be anything
    match value:
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes() | bytearray():
            return {"base64": base64.b64encode(value).decode()}
        case datetime():
            return value.isoformat()
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def mask_number(number: str) -> str:
    """Write a number so that it is recognised by who knows it: `+491*****78`."""
    shown = 9
    return f"{number[:4]}*****{number[-2:]}" if len(number) >= shown else "***"


_SHOWN_PROPERTIES: Final = frozenset(
    (
        *("content_type", "content_encoding", "delivery_mode", "priority"),
        *("message_id", "timestamp", "message_type", "app_id"),
    )
)
_SHOWN_HEADERS: Final = frozenset(
    (
        *(envelope.EXPIRES_AT, envelope.NOT_BEFORE, envelope.ON_UNCERTAIN, envelope.REASON),
        *(envelope.DETAIL, envelope.ATTEMPTS, envelope.UNCERTAIN_ATTEMPTS, envelope.STATUS),
        *(envelope.FIRST_DELIVERED_AT, envelope.COPIES, envelope.DEAD_AT, envelope.DELIVERY_COUNT),
        *("traceparent", "tracestate"),
    )
)
_HIDDEN: Final = "***"


def mask_record(record: dict[str, Any]) -> dict[str, Any]:
    """Hide in a record of `as_record` whatever could be personal; names of members stay."""
    masked = dict(record)
    for part, shown in (("properties", _SHOWN_PROPERTIES), ("headers", _SHOWN_HEADERS)):
        masked[part] = {
            name: value if name in shown else _HIDDEN for name, value in record[part].items()
        }
    masked.pop("body_base64", None)
    masked["body"] = _mask_body(record.get("body", ""))
    return masked


def _mask_body(body: str) -> str:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return f"<{len(body)} characters, no JSON>"
    if not isinstance(document, dict):
        return "<no JSON object>"
    return json.dumps({name: _mask_member(name, value) for name, value in document.items()})


def _mask_member(name: str, value: object) -> str:
    if not isinstance(value, str):
        return _HIDDEN
    return {"to": mask_number(value), "text": f"<{len(value)} characters>"}.get(name, _HIDDEN)
