"""What a wire is: the path of deliveries, acks, publishes and confirms over one connection.

There are two behind one interface. `StreamWire` reads and writes their frames past aiormq, which
costs a tenth; `PlainWire` has aiormq do it, and leans on nothing but what aiormq documents.
`python -m bench.wires` measures both.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Literal, NamedTuple, Protocol

from aiormq import Channel
from aiormq.abc import ConsumerCallback

from bridge.amqp.properties import Properties
from bridge.errors import Confirm

Body = bytes | bytearray
# Called with the delivery tag, whether it was delivered before, the properties and the body.
DeliveryHandler = Callable[[int, bool, Properties, Body], None]
# Larger than any send request. Bodies above this are not copied where that can be avoided, and are
# published one at a time.
LARGE_BODY_BYTES: Final = 1024 * 1024


class Progress(NamedTuple):
    """How far the broker has come with the publishes of a channel.

    `oldest` is the tag of the first that it has not answered, None without any.
    """

    oldest: int | None
    confirmed: int
    nacked: int


class Wire(Protocol):
    """Carries the messages of one connection."""

    @property
    def name(self) -> Literal["stream", "plain"]:
        """Which of the two it is."""

    @property
    def is_open(self) -> bool:
        """Whether the connection, once it is open, really runs over this wire."""

    @property
    def foreign(self) -> bytes:
        """How the answer began if it was not AMQP; empty if it was, or if that is not known."""

    @property
    def closed(self) -> tuple[int, str] | None:
        """The code and the text with which the broker closed the connection, as far as is known."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes on this connection (a memory or disk alarm)."""

    def on_blocked(self, notify: Callable[[str | None], object]) -> None:
        """Call `notify` with the reason when the broker blocks the connection, None at the end."""

    def deliveries(
        self, channel: Channel, take: DeliveryHandler
    ) -> AbstractContextManager[ConsumerCallback]:
        """Hand what is delivered on a channel to `take`, as long as the block lasts.

        It yields the callback to pass to `basic_consume`. `take` must not raise: the connection, or
        its channel, would end.
        """

    def ack(self, channel: Channel, delivery_tag: int) -> None:
        """Send the ack of a delivery, without waiting.

        Unsent acks have no bound of their own, and need none: the broker delivers no more than the
        prefetch until it has read acks.
        """

    async def acks_read(self, channel: Channel) -> None:
        """Return when the broker has read every ack that was sent on a channel.

        The broker answers the methods of a channel in order, so its answer to a later method proves
        it. Has no deadline, and may change the prefetch. Raises aiormq's error when the channel
        ends.
        """

    def publishing(self, channel: Channel) -> AbstractContextManager["PublishingChannel"]:
        """Publish on a channel with confirms, as long as the block lasts."""

    @property
    def silent_seconds(self) -> float:
        """For how long the broker has sent nothing, while it was read; 0 where that is unknown."""

    def abort(self) -> None:
        """End a connection that is silent, without a word to the broker."""

    @property
    def is_reading(self) -> bool:
        """Whether what the broker sends is read."""

    def set_reading(self, *, enabled: bool) -> None:
        """Stop or resume reading from the connection, where the wire can."""

    def keep_alive(self) -> None:
        """Keep a connection alive that is not read: call this every few seconds."""


class PublishingChannel(Protocol):
    """A channel whose every publish is confirmed by the broker."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes now (a memory or disk alarm)."""

    @property
    def unconfirmed(self) -> int:
        """How many publishes have no confirm yet, abandoned ones included."""

    @property
    def progress(self) -> Progress | None:
        """How far the broker has come with what was published; None where that is not known."""

    @property
    def unwritten_bytes(self) -> int:
        """How many bytes the broker has not read, at most."""

    @property
    def max_properties_bytes(self) -> int:
        """How many bytes of properties fit into a frame: a content header cannot be split."""

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return the confirm of the message in flight with which this id would collide, or None."""

    def publish(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> "asyncio.Future[Confirm]":
        """Send a mandatory message, and return its confirm as a future.

        A returned message is recognised by its message id: no two in flight may share one. Raises
        ValueError when the exchange, the routing key or the properties do not fit AMQP.
        """
