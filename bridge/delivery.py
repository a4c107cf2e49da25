"""One AMQP delivery of a send request, bound to the channel that it came on."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import aiormq

from bridge.envelope import Envelope, Properties

ACK_SECONDS: Final = 5.0


class Session:
    """One stretch of consuming on one channel; over when nothing can be acked on it any more."""

    def __init__(self, channel: aiormq.Channel) -> None:
        self.channel = channel
        self.has_failed = False
        self.over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be acked on it any more."""
        return self.over.is_set()

    async def ack(self, tag: int) -> bool:
        """Write an ack, or return False: the broker delivers the message again.

        A channel whose broker hangs takes no more frames. Then the session is given up, for an
        ack that is not written would keep its message unsettled for ever.
        """
        if self.is_over or self.channel.is_closed:
            return False
        try:
            async with asyncio.timeout(ACK_SECONDS):
                await self.channel.basic_ack(tag, wait=False)
        except (aiormq.exceptions.AMQPError, aiormq.exceptions.ChannelInvalidStateError):
            return False
        except TimeoutError:
            self.has_failed = True
            return False
        return not self.is_over


@dataclass(slots=True, eq=False)
class Delivery:
    """A message that the broker has given us and that we have not settled."""

    body: bytes
    properties: Properties
    redelivered: bool
    tag: int
    session: Session
    envelope: Envelope
    received: float = field(default_factory=time.monotonic)
    is_waiting: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether its session is over, so that the broker delivers the message again."""
        return self.session.is_over or self.session.channel.is_closed

    @property
    def held_seconds(self) -> float:
        """How long it has been held here."""
        return time.monotonic() - self.received

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Mark a wait in which it may be given back to the queue: nothing has been sent."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False
