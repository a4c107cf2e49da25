"""Connections for the time of one command."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bridge.amqp.client import AbstractChannel, AMQPError, ChannelInvalidStateError, Connection
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.config import RabbitMQSettings, Settings
from bridge.errors import BrokerError


@asynccontextmanager
async def connected(settings: RabbitMQSettings, *, name: str) -> AsyncIterator[Connection]:
    """Connect to the first broker that answers; raise BrokerError if none does."""
    connection = await open_first_connection(settings, name=name)
    try:
        yield connection
    finally:
        await close_quietly(connection)


@asynccontextmanager
async def open_session(settings: Settings) -> AsyncIterator[tuple[Connection, AbstractChannel]]:
    """Connect, and open a channel; raise BrokerError if that fails or ends early."""
    async with connected(settings.rabbitmq, name="cli") as connection:
        try:
            yield connection, await connection.channel(on_return_raises=True)
        # ChannelInvalidStateError is from a channel that had already ended.
        except (AMQPError, ChannelInvalidStateError) as error:
            why = type(error).__name__
            raise BrokerError(f"the broker ended the connection: {why}") from None
