"""The simulated queue of the workers, with retries after any delay."""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Message(NamedTuple):
    """A message, and the headers of its copies."""

    key: str
    sender: str
    attempts: int = 0
    scheduled_at: float | None = None
    redelivered: bool = False


class Consumer(Protocol):
    """The queue's view of a worker."""

    @property
    def has_room(self) -> bool:
        """Whether the prefetch allows another message."""

    @property
    def cancelled_consumers(self) -> int:
        """Number of the worker's cancelled consumers with unacked messages."""

    def take(self, message: Message) -> None:
        """Process a message."""


class Queue:
    """A quorum queue that gives each consumer messages in turn, up to its prefetch.

    A cancelled consumer counts until its messages are acked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[Message] = deque()
        self._consumers: deque[Consumer] = deque()
        self._serials = itertools.count(1)
        # Number of settled messages, by outcome.
        self.sent = 0
        self.dead = 0

    @property
    def ready(self) -> int:
        """Number of ready messages."""
        return len(self._ready)

    @property
    def consumers(self) -> int:
        """Number of consumers that the queue counts."""
        return len(self._consumers) + sum(one.cancelled_consumers for one in self._consumers)

    def publish(self, number: int, sender: str = "A") -> None:
        """Publish messages."""
        self._ready.extend(Message(f"m{next(self._serials)}", sender) for _ in range(number))
        self.hand_out()

    def put_back(self, message: Message, *, seconds: float = 0) -> None:
        """Return a message to the queue after a delay."""
        if seconds:
            self._loop.call_later(seconds, self.put_back, message)
        else:
            self._ready.append(message)
            self.hand_out()

    def redeliver(self, messages: Iterable[Message]) -> None:
        """Redeliver the messages of a worker that has ended."""
        self._ready.extendleft(message._replace(redelivered=True) for message in messages)
        self.hand_out()

    def register(self, worker: Consumer, *, is_consumer: bool) -> None:
        if is_consumer and worker not in self._consumers:
            self._consumers.append(worker)
        elif not is_consumer and worker in self._consumers:
            self._consumers.remove(worker)

    def hand_out(self) -> None:
        """Deliver ready messages to consumers with room."""
        idle = 0
        while self._ready and idle < len(self._consumers):
            worker = self._consumers[0]
            self._consumers.rotate(-1)
            if worker.has_room:
                worker.take(self._ready.popleft())
                idle = 0
            else:
                idle += 1
