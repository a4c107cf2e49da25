"""What the wire relies on in aio-pika, aiormq and pamqp.

Each test fails when an upgrade changes what it is named after.
"""

import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
import pytest
from pamqp.frame import unmarshal
from pamqp.heartbeat import Heartbeat

from bridge.amqp.client import Connection
from bridge.amqp.wire import Wire
from tests.amqp_client import Amqp
from tests.integration.conftest import connected, eventually, unique


@pytest.fixture
async def queue(amqp: Amqp) -> AsyncIterator[str]:
    name = unique("leaned-on")
    await amqp.channel.declare_queue(name, durable=True)
    yield name
    await amqp.delete([name])


def tap(connection: Connection) -> list[bytes]:
    pieces: list[bytes] = []
    wire = connection.wire
    assert isinstance(wire, Wire)
    transport: Any = wire._transport

    class Tap:
        """Writes down, and passes on."""

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

        def write(self, data: bytes) -> None:
            pieces.append(bytes(data))
            transport.write(data)

    assert connection.transport is not None
    aiormqs: Any = connection.transport.connection
    # Its writer lives in the frame of the task that writes, and nowhere else.
    writer = aiormqs._writer_task.get_coro().cr_frame.f_locals["writer"]
    writer._transport = Tap()
    return pieces


def frames_in(piece: bytes) -> list[Any]:
    """Read the frames of a piece; one that is cut is an error."""
    frames = []
    while piece:
        used, _, frame = unmarshal(piece)
        frames.append(frame)
        piece = piece[used:]
    return frames


async def test_the_client_writes_whole_frames(connection: Connection, queue: str) -> None:
    pieces = tap(connection)
    channel = await connection.channel()
    message = aio_pika.Message(bytes(300_000))
    await channel.default_exchange.publish(message, queue)
    await channel.close()

    names = {type(frame).__name__ for piece in pieces for frame in frames_in(piece)}
    assert {"Open", "Publish", "ContentHeader", "ContentBody", "Close"} <= names


async def test_the_client_sends_heartbeats(amqp_url: str) -> None:
    """A connection on which only we write is kept alive by aiormq: it sends the heartbeats."""
    async with connected(amqp_url, heartbeat_seconds=1) as connection:
        pieces = tap(connection)

        async def beats() -> bool:
            frames = [frame for piece in pieces for frame in frames_in(piece)]
            return sum(isinstance(frame, Heartbeat) for frame in frames) >= 2

        await eventually(beats, what="two heartbeats")


def test_the_clients_log_under_their_names() -> None:
    for package in ("aio_pika", "aiormq"):
        modules = [module for name, module in sys.modules.items() if name.startswith(package)]
        values = [value for module in modules for value in vars(module).values()]
        loggers = (logging.Logger, logging.LoggerAdapter)
        names = {value.name for value in values if isinstance(value, loggers)}

        assert names
        assert {name.partition(".")[0] for name in names} == {package}
