"""What the wire relies on in aio-pika, aiormq and pamqp.

Each test fails when an upgrade changes what it is named after.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import aio_pika
import aiormq
import pytest
from aiormq.abc import DeliveredMessage
from pamqp.frame import unmarshal
from pamqp.heartbeat import Heartbeat
from yarl import URL

from bridge.amqp.channels import open_channel
from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly
from bridge.amqp.frames import Body
from bridge.amqp.properties import NAMES, ClientProperties, Properties
from bridge.amqp.wire import Wire
from bridge.errors import ConnectError
from tests.amqp_client import Amqp
from tests.integration.conftest import SECONDS, connected, eventually, unique


@pytest.fixture
async def queue(amqp: Amqp) -> AsyncIterator[str]:
    name = unique("leaned-on")
    await amqp.channel.declare_queue(name, durable=True)
    yield name
    await amqp.delete([name])


async def no_delivery(_message: object) -> None:
    raise AssertionError


def stream_of(connection: Connection) -> Wire:
    """Return the wire that reads and writes past aiormq."""
    wire = connection.wire
    assert isinstance(wire, Wire)
    return wire


def tap(connection: Connection) -> list[bytes]:
    pieces: list[bytes] = []
    transport: Any = stream_of(connection)._transport

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


async def ended(channel: aiormq.Channel) -> None:
    async with asyncio.timeout(SECONDS):
        await asyncio.wait({channel.closing})


# The stream


async def test_the_stream_is_ours(amqp_url: str, connection: Connection) -> None:
    """aio-pika hands our stream to aiormq, and the host of the certificate; aiormq uses it."""
    assert stream_of(connection).is_open
    given: list[dict[str, Any]] = []

    class Factory(aiormq.connection.TransportFactory):
        """Writes down what it is called with."""

        async def create(self, url: URL, **options: Any) -> Any:
            given.append({"url": url, **options})
            raise aiormq.exceptions.AMQPConnectionError

    other = Connection(URL(amqp_url))
    other.kwargs |= {"transport_factory": Factory(), "server_hostname": "broker.test"}
    with pytest.raises(aiormq.exceptions.AMQPConnectionError):
        await other.connect()
    await close_quietly(other)

    (options,) = given
    assert (options["url"].host, options["server_hostname"]) == ("127.0.0.1", "broker.test")
    assert callable(options["ssl_context_provider"].get_context)


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


async def test_deliveries_that_are_taken_never_reach_the_client(
    connection: Connection, queue: str, amqp: Amqp
) -> None:
    channel = await open_channel(connection)
    taken: asyncio.Queue[Body] = asyncio.Queue()

    def take(_tag: int, _redelivered: bool, _properties: Properties, body: Body) -> None:  # noqa: FBT001
        taken.put_nowait(body)

    with stream_of(connection).deliveries(channel, take):
        await channel.basic_qos(prefetch_count=5)
        answer = await channel.basic_consume(queue, no_delivery)
        await amqp.publish(queue, b"hello")
        async with asyncio.timeout(SECONDS):
            assert await taken.get() == b"hello"
        assert answer.consumer_tag in channel.consumers
        await channel.basic_cancel(answer.consumer_tag or "")
        assert answer.consumer_tag not in channel.consumers


# Channels


async def test_tags_of_publishes_begin_with_one(connection: Connection, queue: str) -> None:
    channel = await open_channel(connection, confirms=True)
    with stream_of(connection).publishing(channel) as publishing:
        told = []
        for number, key in enumerate((queue, f"{queue}.missing", queue)):
            confirm = publishing.publish(
                b"", exchange="", routing_key=key, properties=Properties(message_id=str(number))
            )
            # One by one: a confirm of several would hide that the tags are not the same.
            async with asyncio.timeout(SECONDS):
                told.append(await confirm)

    assert told == ["confirmed", "returned", "confirmed"]


async def test_the_size_of_a_frame_is_known(connection: Connection) -> None:
    channel = await open_channel(connection)
    assert connection.transport is not None
    tune = cast("aiormq.Connection", connection.transport.connection).connection_tune

    assert channel.max_content_size == (tune.frame_max or 0) - 8 == 131_064


async def test_an_ack_is_written_when_it_returns(
    connection: Connection, queue: str, amqp: Amqp
) -> None:
    channel = await open_channel(connection)
    taken: asyncio.Queue[DeliveredMessage] = asyncio.Queue()

    async def take(message: DeliveredMessage) -> None:
        taken.put_nowait(message)

    await channel.basic_consume(queue, take)
    await amqp.publish(queue, b"hello", message_id="m1")
    async with asyncio.timeout(SECONDS):
        message = await taken.get()
    pieces = tap(connection)
    tag = message.delivery_tag or 0
    await channel.basic_ack(tag, wait=True)

    acks = [frame.delivery_tag for piece in pieces for frame in frames_in(piece)]
    assert acks == [tag]
    assert (message.body, message.header.properties.message_id) == (b"hello", "m1")


async def test_a_cancelled_consumer_is_told(connection: Connection, queue: str, amqp: Amqp) -> None:
    channel = await open_channel(connection)
    told: asyncio.Queue[object] = asyncio.Queue()
    channel.on_consumer_cancel_callbacks.add(told.put_nowait)
    answer = await channel.basic_consume(queue, no_delivery)
    await amqp.channel.queue_delete(queue)
    async with asyncio.timeout(SECONDS):
        await told.get()

    assert answer.consumer_tag not in channel.consumers
    assert not channel.is_closed


async def _by_the_broker(channel: aiormq.Channel, connection: Connection) -> None:
    """Ack what was never delivered."""
    assert not connection.is_closed
    connection.wire.ack(channel, 4711)


async def _by_us(_channel: aiormq.Channel, connection: Connection) -> None:
    await close_quietly(connection)


async def _by_the_network(_channel: aiormq.Channel, connection: Connection) -> None:
    transport = stream_of(connection)._transport
    assert transport is not None
    transport.abort()


@pytest.mark.parametrize("end", [_by_the_broker, _by_us, _by_the_network])
async def test_the_end_of_a_channel_is_seen(
    connection: Connection, end: Callable[..., Any]
) -> None:
    channel = await open_channel(connection)
    await end(channel, connection)
    await ended(channel)

    assert channel.is_closed


async def test_the_end_of_a_connection_is_seen(connection: Connection) -> None:
    assert connection.connected.is_set()
    assert connection.transport is not None
    closing = connection.transport.connection.closing
    await _by_the_network(await open_channel(connection), connection)
    async with asyncio.timeout(SECONDS):
        await asyncio.wait({closing})

    async def is_seen() -> bool:
        return not connection.connected.is_set()

    await eventually(is_seen, what="not connected")
    for _ in range(2):
        await close_quietly(connection)

    assert isinstance(closing.exception(), aiormq.exceptions.AMQPError)
    assert connection.is_closed


# What the broker says


async def _declare_other(channel: aiormq.Channel, queue: str) -> object:
    return await channel.queue_declare(queue, durable=True, arguments={"x-max-length": 1})


async def _find_nothing(channel: aiormq.Channel, queue: str) -> object:
    return await channel.queue_declare(f"{queue}.missing", passive=True)


async def _take_what_is_not_ours(channel: aiormq.Channel, _queue: str) -> object:
    return await channel.queue_declare("amq.ours")


@pytest.mark.parametrize(
    ("attempt", "error", "said"),
    [
        (_declare_other, aiormq.exceptions.ChannelPreconditionFailed, "x-max-length"),
        (_find_nothing, aiormq.exceptions.ChannelNotFoundEntity, "no queue"),
        (_take_what_is_not_ours, aiormq.exceptions.ChannelAccessRefused, "reserved prefix"),
    ],
)
async def test_a_refusal_is_told_by_its_kind(
    connection: Connection, queue: str, attempt: Callable[..., Any], error: type, said: str
) -> None:
    """What the broker refuses is an exception of its code, whose last argument is its text."""
    channel = await open_channel(connection)
    with pytest.raises(aiormq.exceptions.ChannelClosed) as caught:
        await attempt(channel, queue)

    assert isinstance(caught.value, error)
    assert said in caught.value.args[-1]


async def test_a_refused_login_is_told_by_its_kind(amqp_url: str) -> None:
    """A wrong password and a wrong virtual host are told apart from a broker that is away."""
    for url in (URL(amqp_url).with_password("wrong"), URL(amqp_url).with_path("/missing")):
        with pytest.raises(ConnectError) as caught:
            async with connected(str(url)):
                pass
        assert caught.value.fault == "auth_failed"


async def test_the_brokers_version_is_known(connection: Connection) -> None:
    """What the broker says of itself is kept: `check --online` judges by its version."""
    assert connection.transport is not None
    properties: Any = connection.transport.connection.server_properties

    assert properties["product"] == "RabbitMQ"
    assert str(properties["version"]).split(".")[0].isdigit()


# pamqp


def test_the_fields_of_the_properties_are_as_the_protocol_has_them() -> None:
    fields = {
        name: (ClientProperties.flags[name], ClientProperties.amqp_type(name)) for name in NAMES
    }
    octets = dict.fromkeys(("delivery_mode", "priority"), "octet")
    others = {"headers": "table", "timestamp": "timestamp", **octets}
    types = dict.fromkeys(NAMES, "shortstr") | others

    assert list(fields) == [
        *("content_type", "content_encoding", "headers", "delivery_mode", "priority"),
        *("correlation_id", "reply_to", "expiration", "message_id", "timestamp", "message_type"),
        *("user_id", "app_id", "cluster_id"),
    ]
    expected = {name: (1 << (15 - at), types[name]) for at, name in enumerate(fields)}
    assert fields == expected


async def test_our_decoders_take_the_place_of_the_clients(connection: Connection) -> None:
    assert connection.connected.is_set()
    header = (
        b"\x00\x3c\x00\x00" + bytes(8) + b"\x80\x40" + b"\x01\xff" + (10**15).to_bytes(8, "big")
    )
    frame = b"\x02\x00\x01" + len(header).to_bytes(4, "big") + header + b"\xce"
    read: Any = unmarshal(frame)[2]

    assert read.properties.content_type == "\udcff"
    assert read.properties.timestamp.year == 2001


# Logging


def test_the_clients_log_under_their_names() -> None:
    for package in ("aio_pika", "aiormq"):
        modules = [module for name, module in sys.modules.items() if name.startswith(package)]
        values = [value for module in modules for value in vars(module).values()]
        loggers = (logging.Logger, logging.LoggerAdapter)
        names = {value.name for value in values if isinstance(value, loggers)}

        assert names
        assert {name.partition(".")[0] for name in names} == {package}
