"""The replacements of a message that leaves its queue: a confirmed copy, or a line in a file."""

import asyncio
import base64
import json
import os
import uuid
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bridge import __version__
from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.errors import BridgeError, BrokerError, PublishError
from bridge.telemetry.metrics import BridgeMetrics, new_registry

PUBLISH_SECONDS: Final = 10.0
# How long to wait for the broker's reason, which follows the end of the channel.
REASON_SECONDS: Final = 1.0


class Replaced(NamedTuple):
    """The tags of the replaced messages, and why others are not replaced."""

    tags: Collection[int] = ()
    fault: BridgeError | None = None


class QueueFullError(BrokerError):
    """The broker has refused a copy, as for a full queue."""


class CopyPublisher:
    """Publishes copies of messages, each confirmed."""

    def __init__(self, publisher: Publisher, serving: asyncio.Task[None]) -> None:
        self.publisher = publisher
        self._serving = serving

    async def probe(self, queue: str) -> None:
        """Raise BrokerError if no copy can be published now, as in an alarm of the broker.

        Publishes an unroutable message, which is returned. A full queue is noticed only at the
        first copy, because a probe that it accepts would stay in it.
        """
        nobody = f"{queue}.{uuid.uuid4().hex}"
        try:
            await self.publisher.publish(
                b"", exchange="", routing_key=nobody, properties=Properties(message_id=nobody)
            )
        except PublishError as error:
            if error.fault == "returned":
                return
            why = await self._why_not_stored(error)
            raise BrokerError(
                f"queue {queue}: a copy is not stored: {why}; nothing was taken, nothing is lost; "
                "fix it and run this again"
            ) from None

    async def store(
        self, body: Body, queue: str, properties: Properties, *, alone: bool = False
    ) -> None:
        """Publish a copy, `alone` on a new channel; return when the broker has stored it.

        Raises BrokerError with the broker's reason, QueueFullError if the queue refuses the copy.
        """
        try:
            if alone:
                await self._publish_alone(body, queue, properties)
            else:
                await self.publisher.publish(
                    body, exchange="", routing_key=queue, properties=properties
                )
        except PublishError as error:
            remedy = "nothing is lost; fix it and run this again"
            if error.fault == "nacked":
                raise QueueFullError(
                    f"queue {queue}: not stored: {error}: it is full (max-length), or has no "
                    f"leader; {remedy}"
                ) from None
            why = await self._why_not_stored(error)
            raise BrokerError(f"queue {queue}: not stored: {why}; {remedy}") from None

    async def store_all(self, copies: Mapping[int, tuple[Body, str, Properties]]) -> Replaced:
        """Store the copy of each tag: body, queue and properties."""
        storing = (self.store(*copy) for copy in copies.values())
        results = await asyncio.gather(*storing, return_exceptions=True)
        stored, faults = set[int](), list[BrokerError]()
        for tag, result in zip(copies, results, strict=True):
            if isinstance(result, BrokerError):
                faults.append(result)
            elif result is not None:
                raise result
            else:
                stored.add(tag)
        return Replaced(stored, faults[0] if faults else None)

    async def _publish_alone(self, body: Body, queue: str, properties: Properties) -> None:
        async with self.publisher.deadline_for(body, alone=True) as deadline:
            publication = await self.publisher.write_alone(
                body, routing_key=queue, properties=properties, deadline=deadline
            )
            try:
                await publication.stored(deadline)
            finally:
                publication.abandon()

    async def _why_not_stored(self, error: PublishError) -> str:
        if self.publisher.is_blocked:
            return (
                f"{error}: the broker accepts no messages (memory or disk alarm); look at "
                "rabbitmq-diagnostics check_alarms; copies on their way may still be stored"
            )
        if error.fault != "error":
            return str(error)
        # The channel has ended, for a reason such as a missing permission, which follows.
        await asyncio.wait({self._serving}, timeout=REASON_SECONDS)
        ended = self._serving.exception() if self._serving.done() else None
        return str(ended) if isinstance(ended, BrokerError) else str(error)


def new_publisher(settings: Settings) -> Publisher:
    # The publisher requires metrics, which nothing reads here.
    exchanges = ("default", settings.webhook.exchange)
    metrics = BridgeMetrics(
        new_registry(), component="cli", version=__version__, revision="", exchanges=exchanges
    )
    return Publisher(metrics, timeout_seconds=PUBLISH_SECONDS)


def write_record(record: object, *, indent: int | None = None) -> str:
    """Write JSON; bytes in headers become `{"base64": ...}`, other AMQP values become text."""
    return json.dumps(record, indent=indent, default=_write_value)


def _write_value(value: object) -> object:
    match value:
        case bytes() | bytearray():
            return {"base64": base64.b64encode(value).decode()}
        case datetime():
            return value.isoformat()
        case _:
            return str(value)


def write_time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class NewLinesFile:
    """A new file of JSON lines that only its owner can read; removed at the end if it is empty.

    `option` is the command's option for another file, which errors name.
    """

    def __init__(self, path: Path, *, option: str) -> None:
        self.path = path
        self._remedy = (
            f"messages that are not in it are still in the queue; name another file with {option}"
        )
        self._is_empty = True

    def __enter__(self) -> Self:
        """Create the file; raise BridgeError if it exists or cannot be created."""
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise BridgeError(f"{self.path}: {error.strerror}; {self._remedy}") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        if self._is_empty:
            self.path.unlink(missing_ok=True)

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records, a line each; return when they are on the disk, or raise BridgeError."""
        try:
            # One at a time, because a record may have megabytes.
            for record in records:
                line = memoryview(f"{write_record(record)}\n".encode("ascii"))
                self._is_empty = False
                while line:
                    line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise BridgeError(f"{self.path}: {error.strerror}; {self._remedy}") from None
