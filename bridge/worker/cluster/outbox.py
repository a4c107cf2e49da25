"""What a worker has still to say to its peers, as long as it can say anything.

What it says comes back to it, too: if nothing does, it hears nobody.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final

from bridge.amqp.client import Channel
from bridge.deadline import Deadline
from bridge.errors import BrokerError

# What waits to be said; of more, the newest is kept.
MAX_UNSAID: Final = 1024
# How long what has been said may wait to be written, and the last word at the end.
SAY_SECONDS: Final = 1.0
# After so many looks at which nothing had come back to this worker of what it had said itself, it
# hears nobody: its queue, or the exchange, was deleted by hand.
MAX_UNHEARD_LOOKS: Final = 5


class Outbox:
    """Messages for an exchange, in the order in which they are to be said.

    `has_lost` says whether any was lost, until its owner takes it back.
    """

    def __init__(self, exchange: str) -> None:
        self._exchange = exchange
        # Each for one queue, or for all.
        self._unsaid: deque[tuple[bytes, str | None]] = deque(maxlen=MAX_UNSAID)
        self._to_say = asyncio.Event()
        self._all_said = asyncio.Event()
        self.has_lost = False
        # What it has said itself has still to come back, and at how many looks it had not.
        self._awaits_echo = False
        self._unheard_looks = 0

    def begin(self) -> None:
        """Begin anew on another channel; what was not said is lost."""
        self._unsaid.clear()
        self._awaits_echo = False
        self._unheard_looks = 0

    def end(self) -> None:
        """Note that nothing can be said any more."""
        self._all_said.set()

    def put(self, body: bytes, *, queue: str | None = None) -> None:
        """Have a message said, to all or to one queue alone."""
        self._unsaid.append((body, queue))
        self._all_said.clear()
        self._to_say.set()

    def lose(self) -> None:
        """Note that a message is lost, for it may not be said now."""
        self.has_lost = True

    def wake(self) -> None:
        """End a wait for words."""
        self._to_say.set()

    async def wait(self, seconds: float) -> None:
        """Return when there is something to say, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._to_say.wait()

    async def say_all(self, channel: Channel, *, may_say: Callable[[], bool]) -> None:
        """Write what is there on a channel; what may not be said then is lost."""
        self._to_say.clear()
        while self._unsaid:
            body, queue = self._unsaid.popleft()
            if may_say():
                async with Deadline(SAY_SECONDS):
                    if queue is None:
                        await channel.basic_publish(body, exchange=self._exchange)
                        self._awaits_echo = True
                    else:
                        await channel.basic_publish(body, routing_key=queue)
            else:
                self.lose()
        self._all_said.set()

    async def until_all_said(self) -> None:
        """Return when all is written, or cannot be, or does not go."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAY_SECONDS):
                await self._all_said.wait()

    def note_echo(self) -> None:
        """Note that something came back of what this worker has said."""
        self._awaits_echo = False

    def look_for_echo(self, *, may_say: bool) -> None:
        """Count a look; raise BrokerError when nothing has come back at too many in a row."""
        self._unheard_looks = self._unheard_looks + 1 if may_say and self._awaits_echo else 0
        if self._unheard_looks > MAX_UNHEARD_LOOKS:
            raise BrokerError("what this worker says does not come back to it")
