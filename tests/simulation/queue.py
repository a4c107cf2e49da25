"""The queue that workers share, with a retry ladder of any delay."""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Message(NamedTuple):
    """One message, and what its copies say of it."""

    key: str
    sender: str
    attempts: int = 0
    scheduled_at: float | None = None
    redelivered: bool = False


class Consumer(Protocol):
    """What the queue sees of a worker."""

    @property
    def has_room(self) -> bool:
        """Whether the prefetch is not used up."""

    @property
    def cancelled_consumers(self) -> int:
        """How many consumers of it have been cancelled and have something to ack."""

    def take(self, message: Message) -> None:
        """Process a message."""


class Queue:
    """A quorum queue that gives each consumer as many messages as its prefetch, in turn.

    It goes on counting a consumer that is cancelled while what it was given is not acked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[Message] = deque()
        self._consumers: deque[Consumer] = deque()
        self._serials = itertools.count(1)
        # How many have been settled so.
        self.sent = 0
        self.dead = 0

    @property
    def ready(self) -> int:
        """How many messages wait."""
        return len(self._ready)

    @property
    def consumers(self) -> int:
        """How many consumers it counts."""
        return len(self._consumers) + sum(one.cancelled_consumers for one in self._consumers)

    def publish(self, number: int, sender: str = "A") -> None:
        """Put messages into the queue."""
        self._ready.extend(Message(f"m{next(self._serials)}", sender) for _ in range(number))
        self.hand_out()

    def put_back(self, message: Message, *, seconds: float = 0) -> None:
        """Have a message come again after some time."""
        if seconds:
            self._loop.call_later(seconds, self.put_back, message)
        else:
            self._ready.append(message)
            self.hand_out()

    def redeliver(self, messages: Iterable[Message]) -> None:
        """Give others what a worker held that is gone."""
        self._ready.extendleft(message._replace(redelivered=True) for message in messages)
        self.hand_out()

    def register(self, worker: Consumer, *, is_consumer: bool) -> None:
        if is_consumer and worker not in self._consumers:
            self._consumers.append(worker)
        elif not is_consumer and worker in self._consumers:
            self._consumers.remove(worker)

    def hand_out(self) -> None:
        """Give what waits to those who have room."""
        idle = 0
        while self._ready and idle < len(self._consumers):
            worker = self._consumers[0]
            self._consumers.rotate(-1)
            if worker.has_room:
                worker.take(self._ready.popleft())
                idle = 0
            else:
                idle += 1
