"""A connection and a channel for the time of one command."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bridge.amqp.client import AbstractChannel, AMQPError, ChannelInvalidStateError, Connection
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.config import Settings
from bridge.errors import BrokerError


@asynccontextmanager
async def open_session(settings: Settings) -> AsyncIterator[tuple[Connection, AbstractChannel]]:
    """Connect to the first broker that answers; raise BrokerError if that fails or ends early."""
    connection = await open_first_connection(settings.rabbitmq, name="cli")
    try:
        yield connection, await connection.channel(on_return_raises=True)
    except (
        AMQPError,
        ChannelInvalidStateError,
    ) as error:  # the latter from a channel that had already ended
        raise BrokerError(f"the broker ended the connection: {type(error).__name__}") from None
    finally:
        await close_quietly(connection)
