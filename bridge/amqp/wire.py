"""What a wire is: how deliveries and acks, publishes and confirms pass between a connection and us.

There are two behind one interface. `StreamWire` reads and writes their frames past aiormq, which
costs a tenth; `PlainWire` has aiormq do it, and leans on nothing but what aiormq documents.
`python -m tests.bench.wires` measures both.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Literal, Protocol

from aiormq import Channel
from aiormq.abc import ConsumerCallback

from bridge.amqp.properties import Properties
from bridge.errors import Confirm

Body = bytes | bytearray
# Called with the delivery tag, whether it was delivered before, the properties and the body.
Take = Callable[[int, bool, Properties, Body], None]
# A body of more bytes than any request is never copied without need, and published one at a time.
LARGE_BODY_BYTES: Final = 1024 * 1024


class Wire(Protocol):
    """How the messages of one connection pass."""

    @property
    def name(self) -> Literal["stream", "plain"]:
        """Which of the two it is."""

    @property
    def is_open(self) -> bool:
        """Whether the messages of the connection pass here, asked when it has opened."""

    @property
    def foreign(self) -> bytes:
        """How an answer begins that was no AMQP, as far as that is known; empty otherwise."""

    @property
    def closed(self) -> tuple[int, str] | None:
        """The code and the text with which the broker ended the connection, as far as is known."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages on this connection (a memory or disk alarm)."""

    def on_blocked(self, tell: Callable[[str | None], object]) -> None:
        """Call `tell` with the reason when the broker blocks the connection, None at the end."""

    def deliveries(self, channel: Channel, take: Take) -> AbstractContextManager[ConsumerCallback]:
        """Hand what is delivered on a channel to `take`, as long as the block lasts.

        What it yields is the callback to consume with. `take` must not raise: that ends what it
        was called for, the connection or its channel.
        """

    def ack(self, channel: Channel, delivery_tag: int) -> None:
        """Send the ack of a delivery, without waiting.

        Acks wait for the broker without a limit of their own: it has given us no more deliveries
        than the prefetch, and gives more only for acks that it has read.
        """

    async def acks_read(self, channel: Channel) -> None:
        """Return when the broker has read each ack that was sent on a channel.

        It answers the methods of a channel in order, so the answer to a later one shows it. Has
        no deadline, and may change the prefetch. Raises what aiormq does when the channel ends.
        """

    def publishing(self, channel: Channel) -> AbstractContextManager["PublishingChannel"]:
        """Publish on a channel with confirms, as long as the block lasts."""

    @property
    def is_reading(self) -> bool:
        """Whether what the broker sends is read."""

    def read(self, *, go_on: bool) -> None:
        """Read no more of the connection, or go on, where the wire can."""

    def keep_alive(self) -> None:
        """Keep a connection that is not read: call it every few seconds."""


class PublishingChannel(Protocol):
    """A channel whose every publish is confirmed by the broker."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages now (a memory or disk alarm)."""

    @property
    def unconfirmed(self) -> int:
        """How many messages the broker has said nothing of, those that nobody waits for too."""

    @property
    def unwritten_bytes(self) -> int:
        """How much the broker has not read, or more."""

    @property
    def max_properties_bytes(self) -> int:
        """How many bytes of properties one frame holds: a content header cannot be split."""

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return what will become of the message in flight that must not have another beside it."""

    def publish(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> "asyncio.Future[Confirm]":
        """Send a mandatory message, and return what will become of it.

        A returned message is told by its id: no two in flight may have the same.
        Raises ValueError when the exchange, the routing key or the properties do not fit AMQP.
        """
