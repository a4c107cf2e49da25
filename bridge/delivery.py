"""One AMQP delivery of a send request, bound to the channel that it came on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiormq

from bridge.envelope import Envelope, Properties


@dataclass(slots=True, eq=False)
class Delivery:
    """A message that the broker has given us and that we have not settled."""

    body: bytes
    properties: Properties
    redelivered: bool
    tag: int
    channel: aiormq.Channel
    envelope: Envelope
    received: float = field(default_factory=time.monotonic)
    is_waiting: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether its channel is gone, so that the broker delivers the message again."""
        return self.channel.is_closed

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
