"""The fanout exchange `<queue>.workers`, on which the workers of a queue publish to each other.

Each worker receives through its own queue, which ends with its connection; nothing is stored or
confirmed. The publishing connection carries these messages: an alarm of the broker must not block
the consuming connection, and they still arrive if that one is cut or not read.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    close_soon,
    closed_channel,
    describe_end,
    heed_cancellation,
    open_channel,
)
from bridge.amqp.client import (
    Channel,
    ChannelClosed,
    ChannelNotFoundEntity,
    Connection,
    ConsumerCallback,
)
from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.deadline import Deadline
from bridge.telemetry.logs import Log
from bridge.worker.cluster.membership import MESSAGE_SECONDS, TICK_SECONDS, Coordination

log = Log(__name__)

# How long to wait before joining again if the broker has refused it, and otherwise.
REFUSED_SECONDS: Final = 5.0
JOIN_AGAIN_SECONDS: Final = 0.5
# How long a worker that starts waits for the states of its peers. If there was no exchange, just
# long enough to hear workers that start at the same time.
ACQUAINTING_SECONDS: Final = 0.5
ALONE_SECONDS: Final = 0.05
# How long writing a message may take.
WRITE_SECONDS: Final = 1.0
# Limits the messages for a worker that does not read. Without `x-expires`, a queue whose consumer
# the broker refuses would remain as long as the connection.
QUEUE_ARGUMENTS: Final[dict[str, Any]] = {
    "x-queue-type": "classic",
    "x-expires": 15_000,
    "x-message-ttl": 1000 * MESSAGE_SECONDS,
    "x-max-length": 4096,
    "x-max-length-bytes": 16 * 1024 * 1024,
    "x-overflow": "drop-head",
}
REMEDY: Final = (
    "each worker decides alone until you repair this; let the user configure, write and read names "
    "that begin with the exchange's name; delete an exchange of this name that is durable or has "
    "another type; or set worker.coordination to off"
)


class ClusterExchange:
    """Connects a worker to its peers."""

    def __init__(self, cluster: Coordination) -> None:
        self._cluster = cluster
        self._membership = cluster.membership
        self._name = cluster.membership.exchange
        self._last_fault = ""

    async def beside(
        self, serve: Callable[[Connection], Awaitable[None]], connection: Connection
    ) -> None:
        """Serve a publishing connection, and be a member on it while it lasts."""
        if not self._membership.is_enabled:
            await serve(connection)
            return
        joining = asyncio.create_task(self._keep_joining(connection))
        try:
            await serve(connection)
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _keep_joining(self, connection: Connection) -> NoReturn:
        while True:
            is_refused = False
            try:
                await self._be_member(connection)
            except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                heed_cancellation()
                # An exchange that is not found has just been deleted with its last queue.
                is_passing = isinstance(error, ChannelNotFoundEntity)
                is_refused = isinstance(error, ChannelClosed) and not is_passing
                self._membership.is_refused = is_refused
                self._log_fault(describe_end(error), is_passing=is_passing)
            await asyncio.sleep(REFUSED_SECONDS if is_refused else JOIN_AGAIN_SECONDS)

    async def _be_member(self, connection: Connection) -> None:
        """Join, and publish until the channel ends."""
        cluster, membership = self._cluster, self._membership
        async with _own_channel(connection) as channel:
            channel.closing.add_done_callback(lambda _: membership.wake())
            with connection.wire.deliveries(channel, self._on_delivery) as callback:
                async with Deadline(RPC_TIMEOUT_SECONDS):
                    is_alone = not (membership.joins or await _is_there(connection, self._name))
                    # A new name at each join, because the queue of a dead connection may remain.
                    membership.joins += 1
                    queue = membership.queue_name(membership.worker_id, membership.joins)
                    await _consume(channel, self._name, queue, callback)
                cluster.join(connection.wire)
                seconds = ALONE_SECONDS if is_alone else ACQUAINTING_SECONDS
                asyncio.get_running_loop().call_later(seconds, membership.note_acquainted)
                try:
                    await self._publish_until_closed(channel)
                finally:
                    if not membership.awaits_echo:
                        self._last_fault = ""
                    membership.lose()
            ended = channel.closing
            error = None if not ended.done() or ended.cancelled() else ended.exception()
            raise error or closed_channel(channel, "peers'")

    async def _publish_until_closed(self, channel: Channel) -> None:
        next_tick_at = time.monotonic() + TICK_SECONDS
        while not channel.is_closed:
            if time.monotonic() >= next_tick_at:
                next_tick_at = time.monotonic() + TICK_SECONDS
                self._cluster.tick()
            while (unpublished := self._membership.next_unpublished()) is not None:
                body, queue = unpublished
                async with Deadline(WRITE_SECONDS):
                    if queue is None:
                        await channel.basic_publish(body, exchange=self._name)
                    else:
                        await channel.basic_publish(body, routing_key=queue)
            await self._membership.until_unpublished(next_tick_at - time.monotonic())

    def _on_delivery(
        self,
        _tag: int,
        _redelivered: bool,  # noqa: FBT001  as the wire calls it
        _properties: Properties,
        body: Body,
    ) -> None:
        try:
            self._cluster.receive(body)
        except Exception:
            log.exception("internal_error", component="cluster")

    def _log_fault(self, why: str, *, is_passing: bool) -> None:
        """Log a warning for each new fault, unless it passes by itself."""
        membership = self._membership
        # The broker's error names the queue, which differs at each join.
        fault = why.replace(membership.queue_name(membership.worker_id, membership.joins), "")
        if fault == self._last_fault or is_passing:
            log.debug("peers_not_joined", why=why)
        else:
            remedy = REMEDY if membership.is_refused else None
            log.warning("peers_not_joined", exchange=self._name, why=why, remedy=remedy)
            self._last_fault = fault
        if membership.is_refused:
            membership.note_acquainted()


async def _is_there(connection: Connection, exchange: str) -> bool:
    """Whether an exchange exists. Ask seldom, because RabbitMQ logs an error if it does not."""
    # On its own channel, which ends if there is none.
    channel = await open_channel(connection)
    try:
        await channel.exchange_declare(exchange, passive=True)
    except ChannelNotFoundEntity:
        return False
    await close_channel(channel)
    return True


@asynccontextmanager
async def _own_channel(connection: Connection) -> AsyncIterator[Channel]:
    """Open a channel; close it, and with it its queue, if the block fails."""
    channel = await open_channel(connection)
    try:
        yield channel
    except Exception:
        close_soon(channel)
        raise


async def _consume(channel: Channel, exchange: str, queue: str, callback: ConsumerCallback) -> None:
    """Consume an exchange through a queue that ends with the connection."""
    await channel.exchange_declare(
        exchange, exchange_type="fanout", durable=False, auto_delete=True
    )
    await channel.queue_declare(queue, exclusive=True, auto_delete=True, arguments=QUEUE_ARGUMENTS)
    await channel.queue_bind(queue, exchange)
    await channel.basic_consume(queue, callback, no_ack=True)
