"""The plain wire where a broker would show nothing: what aiormq is asked for, and in which order.

What both wires do with a real broker is in tests/integration/test_wires.py.
"""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bridge.amqp.client import Channel, ChannelInvalidStateError, Connection
from bridge.amqp.plain_wire import PlainWire
from bridge.amqp.properties import Properties

GUARD_SECONDS = 10.0


class Methods:
    """A channel that writes down what it is asked for; each method takes some turns of the loop."""

    number = 1
    max_content_size = 4088

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.is_gone = False
        self.can_write = asyncio.Event()
        self.can_write.set()

    async def basic_ack(self, delivery_tag: int, *, wait: bool) -> None:
        """Write an ack."""
        assert not wait
        await self.can_write.wait()
        if self.is_gone:
            raise ChannelInvalidStateError
        self.asked.append(delivery_tag)

    async def basic_qos(self, *, prefetch_count: int) -> None:
        """Ask for something that is answered."""
        assert prefetch_count
        self.asked.append("qos")

    async def basic_publish(self, _body: bytes, **_: Any) -> None:
        """Write a message that is never confirmed."""
        await asyncio.get_running_loop().create_future()


@pytest.fixture
async def methods() -> Methods:
    """Make a channel."""
    return Methods()


@pytest.fixture
async def channel(methods: Methods) -> Channel:
    """Lend it as aiormq's."""
    return cast("Channel", methods)


@pytest.fixture
async def wire() -> PlainWire:
    """Make a wire."""
    return PlainWire(cast("Connection", SimpleNamespace(transport=None, is_closed=False)))


async def test_an_answer_shows_the_acks_before_it(
    wire: PlainWire, channel: Channel, methods: Methods
) -> None:
    """Acks leave one by one in their order, and the question behind all of them."""
    methods.can_write.clear()
    with wire.deliveries(channel, lambda *_: None):
        for tag in range(1, 4):
            wire.ack(channel, tag)
        answer = asyncio.create_task(wire.acks_read(channel))
        for _ in range(5):
            await asyncio.sleep(0)
        wire.ack(channel, 4)
        methods.can_write.set()
        async with asyncio.timeout(GUARD_SECONDS):
            await answer

    assert methods.asked == [1, 2, 3, 4, "qos"]


async def test_a_channel_that_is_gone_stops_no_ack_of_another(
    wire: PlainWire, channel: Channel, methods: Methods
) -> None:
    """An ack that cannot be sent any more is left out; the broker delivers the message again."""
    gone = Methods()
    gone.is_gone = True
    with wire.deliveries(channel, lambda *_: None):
        wire.ack(cast("Channel", gone), 1)
        wire.ack(channel, 2)
        async with asyncio.timeout(GUARD_SECONDS):
            await wire.acks_read(channel)

    assert (gone.asked, methods.asked) == ([], [2, "qos"])


async def test_nothing_is_acked_behind_the_block(
    wire: PlainWire, channel: Channel, methods: Methods
) -> None:
    """Acks that a connection has not taken when its session ends are not left waiting for it."""
    methods.can_write.clear()
    with wire.deliveries(channel, lambda *_: None):
        wire.ack(channel, 1)
        wire.ack(channel, 2)
        await asyncio.sleep(0)
    methods.can_write.set()
    for _ in range(5):
        await asyncio.sleep(0)

    assert methods.asked == []


@pytest.mark.parametrize("turns", [0, 3])
async def test_what_hangs_at_the_end_is_told(wire: PlainWire, channel: Channel, turns: int) -> None:
    """A publish that the library never ends is an error with its channel, begun or not."""
    with wire.publishing(channel) as publishing:
        properties = Properties(message_id="m")
        confirm = publishing.publish(b"", exchange="", routing_key="q", properties=properties)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert publishing.unconfirmed == 1
    async with asyncio.timeout(GUARD_SECONDS):
        told = await confirm
    await asyncio.sleep(0)

    assert told == "error"
    assert (publishing.unconfirmed, publishing.awaited("m")) == (0, None)
