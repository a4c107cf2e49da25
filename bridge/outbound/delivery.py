"""One AMQP delivery of a send request, bound to the channel that it came on."""

import asyncio
import math
import time
from dataclasses import dataclass, field

from bridge.amqp.client import Channel
from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Wire
from bridge.outbound.envelope import Envelope


class Session:
    """One stretch of consuming on one channel; over when nothing can be acked on it any more.

    `most_unacked`: how many deliveries the broker may have made on it before it reads an ack.
    """

    def __init__(self, channel: Channel, wire: Wire) -> None:
        self.channel = channel
        self.wire = wire
        self.has_failed = False
        self.last_ack_at = -math.inf
        self.most_unacked = 0
        self.over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be acked on it any more."""
        return self.over.is_set()

    def ack(self, tag: int) -> bool:
        """Write an ack, or return False: the broker delivers the message again."""
        if self.is_over or self.channel.is_closed:
            return False
        self.last_ack_at = time.monotonic()
        self.wire.ack(self.channel.number, tag)
        return True


@dataclass(slots=True, eq=False)
class Delivery:
    """A message that the broker has given us and that we have not settled.

    `awaits_first`: the same message is being worked on, and this one is acked when that is done.
    """

    body: Body
    properties: Properties
    redelivered: bool
    tag: int
    session: Session
    envelope: Envelope
    received: float = field(default_factory=time.monotonic)
    is_waiting: bool = False
    awaits_first: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether its session is over, so that the broker delivers the message again."""
        return self.session.is_over or self.session.channel.is_closed

    @property
    def held_seconds(self) -> float:
        """How long it has been held here."""
        return time.monotonic() - self.received

    def waits(self) -> "_Wait":
        """Mark a wait in which it may be given back to the queue: nothing has been sent."""
        return _Wait(self)


class _Wait:
    """A `with` block; a generator would cost five times as much."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def __enter__(self) -> None:
        self._delivery.is_waiting = True

    def __exit__(self, *_: object) -> None:
        self._delivery.is_waiting = False
