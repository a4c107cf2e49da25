"""The dead-letter queue, gone through from its oldest letter on; safe to kill at any point.

A look takes letters, unacked, and gives them back in their order. What that costs a letter on which
version of RabbitMQ, and how one that was looked at often is renewed so that no delivery limit ever
drops it, `rounds` says. While a command waits for whoever reads what it prints, no letter that it
holds has come back before. Behind the first letter that is renewed all others that are kept are
renewed too, so that a look at the whole queue leaves the letters in their order.

Nothing is taken before it is known that copies can be published. RabbitMQ counts only what it
delivers, so no more is taken than is shown. In memory are the letters of one round, up to
`MAX_HELD_BYTES`, and those whose copies wait for a confirm, as many bytes again.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Final, TypeVar

from bridge.admin.dead_letters.letter import DeadLetter, read_dead_letter
from bridge.admin.moving import (
    IN_FLIGHT,
    Copies,
    open_connection,
    open_copies,
    read_existing_queue,
)
from bridge.admin.rounds import MAX_HELD_BYTES, Rounds, Taken, open_rounds
from bridge.amqp.properties import Properties
from bridge.config import Settings
from bridge.errors import BridgeError, BrokerError
from bridge.topology.declarations import dead_queue
from bridge.worker.copies import moved_properties

T = TypeVar("T")

# A kill leaves at most one round of letters in both queues.
MAX_ROUND: Final = IN_FLIGHT
# A letter is renewed when it has come back once: no delivery limit is too low for that, but 0.
MAX_LOOKS: Final = 1


class DeadLetterQueue:
    """The dead letters that are there when it is opened, each taken once.

    `total` is how many there were then, `done` how many have been moved away or removed. Whatever
    is in hand goes back when it is closed.
    """

    def __init__(self, name: str, rounds: Rounds, copies: Copies, *, total: int) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._rounds = rounds
        self._copies = copies
        self._gone = 0
        self._moves: dict[asyncio.Task[None], int] = {}
        self._fault: BridgeError | None = None
        self._stopping = asyncio.Event()
        self._has_renewed = False

    def stop(self) -> None:
        """Take no more; what is being moved is finished."""
        self._stopping.set()
        self._rounds.end()

    @property
    def is_stopped(self) -> bool:
        """Whether somebody asked to stop."""
        return self._stopping.is_set()

    async def wait(self, seconds: float) -> None:
        """Wait so long, or until somebody asks to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopping.wait()

    async def letters(
        self, at_most: int | None = None, *, max_round: int = MAX_ROUND
    ) -> AsyncGenerator[DeadLetter, None]:
        """Yield the letters, oldest first; give each to `keep`, `move` or `remove`, then `finish`.

        At most `max_round` are in hand, apart from those that are kept. Raises BrokerError when the
        broker ends it, and before anything is taken when no copy could be published.
        """
        async with contextlib.aclosing(self._walk(at_most, max_round)) as walk:
            async for letter in walk:
                if letter is not None:
                    yield letter

    async def look(
        self, read: Callable[[DeadLetter], T], at_most: int | None = None
    ) -> AsyncGenerator[T, None]:
        """Yield what `read` makes of each letter, oldest first; all of them are kept."""
        found: list[T] = []
        async with contextlib.aclosing(self._walk(at_most, MAX_ROUND)) as walk:
            async for letter in walk:
                if letter is not None:
                    await self.keep(letter)
                    found.append(read(letter))
                    continue
                for one in found:
                    yield one
                found.clear()

    async def _walk(
        self, at_most: int | None, max_round: int
    ) -> AsyncGenerator[DeadLetter | None, None]:
        """Yield the letters, and None after each round, when all that it brought is settled."""
        left = self.total if at_most is None else min(self.total, at_most)
        size = 1
        if left:
            await self._rounds.check(self.name, self.name)
        while left > 0 and not self.is_stopped and self._fault is None:
            wanted = min(size, left)
            count = 0
            async with contextlib.aclosing(self._rounds.take(self.name, wanted)) as taken:
                async for message in taken:
                    count += 1
                    yield read_dead_letter(message)
            await self._settle()
            yield None
            if count < wanted:
                return
            left -= wanted
            size = min(2 * size, max_round)

    async def keep(self, letter: DeadLetter) -> None:
        """Leave a letter in the queue; one that was looked at before is renewed."""
        if self._has_renewed or self._rounds.is_due(letter.taken):
            self._has_renewed = True
            await self._start(letter, self._renew(letter))

    async def move(self, letter: DeadLetter, queue: str, properties: Properties) -> None:
        """Publish a letter to a queue, have that confirmed, then ack it; at most 50 at once.

        Returns when it has begun; `finish` tells what became of it.
        """
        await self._start(letter, self._move(letter, queue, properties))

    async def remove(self, letter: DeadLetter) -> None:
        """Take a letter away: it is gone when its round, or `finish`, has ended."""
        self._count_as_gone(letter)

    def _count_as_gone(self, letter: DeadLetter) -> None:
        self._rounds.settled(letter.taken)
        self._gone += 1

    async def finish(self) -> None:
        """Wait for what is being moved; raise BridgeError when something could not be."""
        await self._settle()
        if self._fault is not None:
            raise self._fault

    async def _settle(self) -> None:
        while self._moves:
            await asyncio.wait(set(self._moves))
        await self._rounds.settle(self.name)
        self.done += self._gone
        self._gone = 0

    async def _start(self, letter: DeadLetter, moving: Coroutine[None, None, None]) -> None:
        while self._moves and (
            len(self._moves) >= IN_FLIGHT
            or sum(self._moves.values()) + len(letter.body) > MAX_HELD_BYTES
        ):
            await asyncio.wait(set(self._moves), return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(moving)
        self._moves[task] = len(letter.body)
        task.add_done_callback(self._moves.pop)

    async def _renew(self, letter: DeadLetter) -> None:
        try:
            await self._rounds.renew(self.name, letter.taken, to_keep_order=True)
        except BrokerError as error:
            self._fault = self._fault or error

    async def _move(self, letter: DeadLetter, queue: str, properties: Properties) -> None:
        if self._fault is None:
            try:
                await self._copies.store(letter.body, queue=queue, properties=properties)
            except BrokerError as error:
                self._fault = error
            else:
                self._count_as_gone(letter)
                return
        await self._rounds.let_go(self.name, letter.taken)


def _renewal(_: str, message: Taken) -> Properties:
    return moved_properties(message.properties)


@contextlib.asynccontextmanager
async def open_dead_letters(settings: Settings) -> AsyncIterator[DeadLetterQueue]:
    """Open the dead-letter queue of `worker.queue`; what is still in hand goes back at the end.

    Raises BrokerError when there is no broker or no such queue.
    """
    name = dead_queue(settings.worker.queue)
    async with contextlib.AsyncExitStack() as stack:
        consuming = await stack.enter_async_context(open_connection(settings, "dead letters"))
        sizes = await read_existing_queue(consuming, name)
        copies = await stack.enter_async_context(open_copies(settings, "dead letters publish"))
        rounds = await stack.enter_async_context(
            open_rounds(
                settings,
                consuming,
                queue=name,
                copies=copies,
                renewal=_renewal,
                max_looks=MAX_LOOKS,
            )
        )
        queue = DeadLetterQueue(name, rounds, copies, total=sizes.ready)
        try:
            yield queue
        finally:
            with contextlib.suppress(BridgeError):
                await queue.finish()
