"""What commands that move messages share: a queue that is there, confirmed copies."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from bridge import __version__
from bridge.amqp.client import ChannelAccessRefused, Connection
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.amqp.wire import Body
from bridge.config import Settings
from bridge.errors import BrokerError, PublishError
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.topology.queue_sizes import QueueSizes, ask_queue

# How many messages are moved at the same time.
IN_FLIGHT: Final = 50
PUBLISH_SECONDS: Final = 10.0
# How long to wait for the broker's reason, which comes after the channel has ended.
REFUSAL_SECONDS: Final = 1.0


async def read_readable_queue(connection: Connection, name: str) -> QueueSizes:
    """Read the sizes of a queue, which may not exist; raise BrokerError when they are not told."""
    try:
        sizes = await ask_queue(connection, name)
    except ChannelAccessRefused:
        raise BrokerError(
            f"queue {name}: no permission to read; grant it with rabbitmqctl "
            "set_permissions, or name a user that may in rabbitmq.username"
        ) from None
    if sizes is None:
        raise BrokerError(f"queue {name}: it answers nothing; look at its leader and its nodes")
    return sizes


async def read_existing_queue(connection: Connection, name: str) -> QueueSizes:
    """Read the sizes of a queue; raise BrokerError, with what to do, when there is none."""
    sizes = await read_readable_queue(connection, name)
    if not sizes.exists:
        raise BrokerError(
            f"queue {name}: there is none; is worker.queue right? A worker makes it when it "
            "starts, or `sms-bridge topology declare` does"
        )
    return sizes


class CopyRefusedError(BrokerError):
    """The broker has refused to store a copy, as a full queue does."""


class Copies:
    """Publishes copies of messages to queues, each confirmed."""

    def __init__(self, publisher: Publisher, serving: asyncio.Task[None]) -> None:
        self.publisher = publisher
        self._serving = serving

    async def store(self, body: Body, *, queue: str, properties: Properties) -> None:
        """Return when a copy is stored; raise BrokerError, with the broker's words, when not.

        CopyRefusedError: the broker itself has refused it.
        """
        try:
            await self.publisher.publish(
                body, exchange="", routing_key=queue, properties=properties
            )
        except PublishError as error:
            what_to_do = "nothing is lost, mend it and run this again"
            if error.fault == "nacked":
                raise CopyRefusedError(
                    f"queue {queue}: not stored: {error}: it is full (max-length), or has no "
                    f"leader; {what_to_do}"
                ) from None
            why = await self._why_not_stored(error)
            raise BrokerError(f"queue {queue}: not stored: {why}; {what_to_do}") from None

    async def check(self, queue: str) -> None:
        """Raise BrokerError when this user, or the broker in an alarm, can publish no copy now.

        Asked with a message that no queue takes and that comes back. Whether a queue is full only
        the first copy for it can tell: a probe that it takes would stay in it, behind all others.
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
                f"queue {queue}: a copy is not stored: {why}; nothing was taken, nothing is lost, "
                "mend it and run this again"
            ) from None

    async def _why_not_stored(self, error: PublishError) -> str:
        if self.publisher.is_blocked:
            return (
                f"{error}: the broker takes no messages, as in a memory or disk alarm; look at "
                "rabbitmq-diagnostics check_local_alarms; what was under way may yet be stored"
            )
        if error.fault != "error":
            return str(error)
        # The channel has ended. The broker's words, such as a missing permission, come with that.
        await asyncio.wait({self._serving}, timeout=REFUSAL_SECONDS)
        ended = self._serving.exception() if self._serving.done() else None
        return str(ended) if isinstance(ended, BrokerError) else str(error)


@asynccontextmanager
async def open_copies(settings: Settings, name: str) -> AsyncIterator[Copies]:
    """Publish copies, on a connection of their own: an alarm blocks it, and must not block acks.

    Raises BrokerError when there is no broker.
    """
    # Nobody reads the metrics, but publishing is counted wherever it is done.
    exchanges = ("default", settings.webhook.exchange)
    metrics = BridgeMetrics(
        new_registry(), component="cli", version=__version__, revision="", exchanges=exchanges
    )
    publisher = Publisher(metrics, timeout_seconds=PUBLISH_SECONDS)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(open_connection(settings, name))
        serving = asyncio.create_task(publisher.serve(connection))
        stack.callback(serving.cancel)
        yield Copies(publisher, serving)


@asynccontextmanager
async def open_connection(settings: Settings, name: str) -> AsyncIterator[Connection]:
    """Connect for the time of one command; raise BrokerError when no broker answers."""
    connection = await open_first_connection(settings.rabbitmq, name=name)
    try:
        yield connection
    finally:
        await close_quietly(connection)
