"""The exchange on which the workers of a queue speak, as it is on the broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from bridge.amqp.channels import close_channel, close_soon, open_channel
from bridge.amqp.client import Channel, ChannelNotFoundEntity, Connection, ConsumerCallback

# A queue that was made and not consumed, since the broker has refused what comes after, would stay
# as long as the connection, one for each try. Longer than a join may take.
UNUSED_MILLISECONDS: Final = 15_000
# A peer that does not read has no use for what is old. The rest bounds what it holds on the broker.
QUEUE_ARGUMENTS: Final[dict[str, Any]] = {
    "x-queue-type": "classic",
    "x-expires": UNUSED_MILLISECONDS,
    "x-message-ttl": 10_000,
    "x-max-length": 4096,
    "x-max-length-bytes": 16 * 1024 * 1024,
    "x-overflow": "drop-head",
}


async def is_there(connection: Connection, exchange: str) -> bool:
    """Find out whether there is such an exchange, which ends with the last worker.

    Has no deadline. RabbitMQ writes an error into its log when there is none: ask seldom.
    """
    # The refusal ends the channel.
    channel = await open_channel(connection)
    try:
        await channel.exchange_declare(exchange, passive=True)
    except ChannelNotFoundEntity:
        return False
    await close_channel(channel)
    return True


@asynccontextmanager
async def own_channel(connection: Connection) -> AsyncIterator[Channel]:
    """Open a channel to `join` on, which is closed when that, or anything after it, fails.

    As long as there is one, the broker hands out to its queue.
    """
    channel = await open_channel(connection)
    try:
        yield channel
    except Exception:
        close_soon(channel)
        raise


async def join(channel: Channel, exchange: str, queue: str, callback: ConsumerCallback) -> None:
    """Hear what is said on an exchange, through a queue that ends with the connection.

    Has no deadline. Raises aiormq's error when the broker refuses, or the channel ends.
    """
    await channel.exchange_declare(
        exchange, exchange_type="fanout", durable=False, auto_delete=True
    )
    await channel.queue_declare(queue, exclusive=True, auto_delete=True, arguments=QUEUE_ARGUMENTS)
    await channel.queue_bind(queue, exchange)
    await channel.basic_consume(queue, callback, no_ack=True)
