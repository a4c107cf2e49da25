"""The interface of a wire, which carries deliveries, acks, publishes and confirms.

`StreamWire` reads and writes their frames past aiormq, at a tenth of the cost. `PlainWire` uses
aiormq's documented methods alone. `python -m bench.wires` measures both.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final, Literal, NamedTuple, Protocol

from aiormq import Channel
from aiormq.abc import ConsumerCallback

from bridge.amqp.properties import Properties
from bridge.errors import Confirm

Body = bytes | bytearray
# Called with the delivery tag, whether it was delivered before, the properties and the body.
DeliveryHandler = Callable[[int, bool, Properties, Body], None]
# By consumer tag.
NO_HANDLERS: Final[Mapping[bytes, DeliveryHandler]] = {}
# Larger than any send request. Larger bodies are copied as little as possible, and published one at
# a time.
LARGE_BODY_BYTES: Final = 1024 * 1024


class Progress(NamedTuple):
    """Progress of the broker with the publishes of a channel.

    `oldest` is the delivery tag of the oldest unanswered publish, or None.
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
        """First bytes of an answer that was not AMQP; empty if it was, or if unknown."""

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and text with which the broker closed the connection, if known."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes on this connection (a memory or disk alarm)."""

    def on_blocked(self, notify: Callable[[str | None], object]) -> None:
        """Call `notify` with the reason when the broker blocks the connection, None at the end."""

    def deliveries(
        self,
        channel: Channel,
        take: DeliveryHandler,
        by_tag: Mapping[bytes, DeliveryHandler] = NO_HANDLERS,
    ) -> AbstractContextManager[ConsumerCallback]:
        """Pass the deliveries of a channel to `take` while the block lasts.

        Deliveries to a consumer whose tag is in `by_tag` go to the handler given there.

        Yields the callback for `basic_consume`. `take` must not raise, or the connection or its
        channel ends.
        """

    def ack(self, channel: Channel, delivery_tag: int) -> None:
        """Send the ack of a delivery without waiting.

        The prefetch bounds unsent acks, because the broker delivers no more until it reads acks.
        """

    async def acks_read(self, channel: Channel) -> None:
        """Return when the broker has read every ack that was sent on a channel.

        The broker answers the methods of a channel in order, so the answer to a later method proves
        it. Has no deadline, and may change the prefetch. Raises aiormq's error if the channel ends.
        """

    def publishing(self, channel: Channel) -> AbstractContextManager["PublishingChannel"]:
        """Publish on a channel with confirms, as long as the block lasts."""

    @property
    def silent_seconds(self) -> float:
        """Seconds of silence of the broker while reading was on; 0 if unknown."""

    def abort(self) -> None:
        """Abort a silent connection without a regular close."""

    @property
    def is_reading(self) -> bool:
        """Whether reading from the connection is on."""

    def set_reading(self, *, enabled: bool) -> None:
        """Stop or resume reading from the connection, where the wire can."""

    def keep_alive(self) -> None:
        """Keep the connection alive while reading is off; call every few seconds."""


class PublishingChannel(Protocol):
    """A channel with publisher confirms."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes now (a memory or disk alarm)."""

    @property
    def unconfirmed(self) -> int:
        """Number of unconfirmed publishes, abandoned ones included."""

    @property
    def progress(self) -> Progress | None:
        """Progress of the broker with the publishes, or None if unknown."""

    @property
    def unwritten_bytes(self) -> int:
        """Upper bound of the bytes that the broker has not read."""

    @property
    def max_properties_bytes(self) -> int:
        """Bytes of properties that fit a frame, because a content header cannot be split."""

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return the confirm of a message in flight with this id, or None."""

    def publish(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> "asyncio.Future[Confirm]":
        """Send a mandatory message, and return its confirm as a future.

        A returned message is recognised by its message id, so ids in flight must be unique. Raises
        ValueError if exchange, routing key or properties do not fit AMQP.
        """
