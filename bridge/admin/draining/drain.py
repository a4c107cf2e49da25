"""Move what waits to the dead letters; killed at any point, nothing is lost.

Round for round the copies are published and confirmed and written down, the messages acked, and who
asked for their outcome is told.

Before anything is taken it is known that the dead-letter queue exists and that copies can be
published. That it is full the broker tells with the first copy only, so the first round is a single
message: it goes back, and when it has come back often it is renewed (see `rounds`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final

from bridge.admin.draining.move import Move, make_move
from bridge.admin.draining.waiting import Waiting, count_waiting
from bridge.admin.lines_file import NewLinesFile
from bridge.admin.moving import IN_FLIGHT, Copies, open_connection, open_copies
from bridge.admin.rounds import Rounds, Taken, open_rounds
from bridge.amqp.client import Connection
from bridge.amqp.properties import Properties
from bridge.config import Settings
from bridge.errors import BrokerError
from bridge.topology.declarations import dead_queue, retry_queue
from bridge.topology.queue_sizes import read_queue
from bridge.worker.announcer import Announcer
from bridge.worker.copies import renewed_properties

# A kill leaves at most one round of messages in both queues.
MAX_ROUND: Final = 256
# How often a message may have come back before it is renewed. Only the first one of a run that
# cannot work comes back: it may have been a worker's before, and to renew it costs it its place.
MAX_LOOKS: Final = 4
# A round moves about this many bytes; a round with more makes the next one smaller.
MAX_ROUND_BYTES: Final = 4 * 1024 * 1024


class Drain:
    """Empties the queues of a worker, the retry ladder first.

    `waiting` is what was there at the beginning, `moved` how many of which queue are dead letters,
    `maybe_sent` how many of them may have been sent.
    """

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        *,
        waiting: Waiting,
        rounds: Rounds,
        copies: Copies,
    ) -> None:
        worker = settings.worker
        self._worker = worker
        self._target = dead_queue(worker.queue)
        self._connection = connection
        self._rounds = rounds
        self._copies = copies
        self._announcer = Announcer(copies.publisher, outcome_exchange=worker.outcome_exchange)
        self.waiting = waiting
        self.moved: Counter[str] = Counter()
        self.maybe_sent = 0
        self.is_stopped = False

    @property
    def done(self) -> int:
        """How many messages are moved."""
        return self.moved.total()

    def stop(self) -> None:
        """Take no more; what is taken is moved."""
        self.is_stopped = True
        self._rounds.end()

    async def run(
        self,
        reason: str,
        file: NewLinesFile,
        *,
        at_most: int | None = None,
        step: Callable[[], None],
    ) -> None:
        """Move as many messages of each queue as it has when its turn comes, `at_most` in all.

        So a publisher that goes on keeps nobody here for ever. `step` is called for each
        that is moved. Raises BridgeError; what is not moved by then is where it was.
        """
        file.make()
        await self._rounds.check(self._worker.queue, self._target)
        for queue in self.waiting.ready:
            sizes = await read_queue(self._connection, queue)
            left = 0 if sizes is None else sizes.ready
            if at_most is not None:
                left = min(left, at_most - self.done)
            await self._empty(queue, left, reason, file, step)

    async def left(self) -> Waiting:
        """Count what waits by now."""
        return await count_waiting(self._connection, self._worker)

    async def _empty(
        self,
        queue: str,
        left: int,
        reason: str,
        file: NewLinesFile,
        step: Callable[[], None],
    ) -> None:
        size = 1
        while left > 0 and not self.is_stopped:
            wanted = min(size, left)
            moved: list[Move] = []
            try:
                sizes = await self._move_round(queue, wanted, reason, file, moved)
            finally:
                await self._settle(queue, moved)
            for _ in moved:
                step()
            if len(sizes) < wanted:
                return
            left -= wanted
            size = _next_size(size, sum(sizes))

    async def _move_round(
        self, queue: str, wanted: int, reason: str, file: NewLinesFile, moved: list[Move]
    ) -> list[int]:
        """Take a round and move what came, noted in `moved`; return the sizes of the bodies."""
        sizes: list[int] = []
        part: list[Taken] = []
        part_bytes = 0
        async with aclosing(self._rounds.take(queue, wanted)) as taken:
            async for message in taken:
                sizes.append(len(message.body))
                part.append(message)
                part_bytes += len(message.body)
                if part_bytes > MAX_ROUND_BYTES:
                    await self._move(queue, part, reason, file, moved)
                    part, part_bytes = [], 0
        await self._move(queue, part, reason, file, moved)
        return sizes

    async def _move(
        self,
        queue: str,
        part: Sequence[Taken],
        reason: str,
        file: NewLinesFile,
        moved: list[Move],
    ) -> None:
        max_bytes = self._copies.publisher.max_properties_bytes
        moves = [make_move(message, reason, max_bytes=max_bytes) for message in part]
        stored, fault = await self._store(moves)
        tags = set()
        try:
            file.write(move.as_record(queue) for move in stored)
            tags = {move.message.tag for move in stored}
        finally:
            for move in moves:
                if move.message.tag in tags:
                    self._rounds.settled(move.message)
                    # Its body is needed no more.
                    moved.append(replace(move, message=move.message._replace(body=b"")))
                else:
                    await self._rounds.let_go(queue, move.message)
        if fault is not None:
            raise fault

    async def _settle(self, queue: str, moved: Collection[Move]) -> None:
        """Have the broker forget what is moved, and tell who asked for the outcome."""
        await self._rounds.settle(queue)
        self.moved[queue] += len(moved)
        self.maybe_sent += sum(move.may_be_sent for move in moved)
        await self._announce(moved)

    async def _store(self, moves: Collection[Move]) -> tuple[list[Move], BrokerError | None]:
        """Publish the copies; return the moves whose copy is stored, and why others are not."""
        places = asyncio.Semaphore(IN_FLIGHT)
        stored: dict[int, Move] = {}
        faults: list[BrokerError] = []

        async def store(number: int, move: Move) -> None:
            async with places:
                if faults:
                    return
                try:
                    await self._copies.store(
                        move.message.body, queue=self._target, properties=move.properties
                    )
                except BrokerError as error:
                    faults.append(error)
                else:
                    stored[number] = move

        async with asyncio.TaskGroup() as group:
            for number, move in enumerate(moves):
                group.create_task(store(number, move))
        return [stored[number] for number in sorted(stored)], faults[0] if faults else None

    async def _announce(self, moves: Collection[Move]) -> None:
        places, at = asyncio.Semaphore(IN_FLIGHT), time.time()

        async def announce(move: Move) -> None:
            async with places:
                await self._announcer.announce(
                    move.message.properties,
                    move.envelope,
                    move.outcome,
                    at,
                    trace=move.envelope.trace,
                )

        async with asyncio.TaskGroup() as group:
            for move in moves:
                group.create_task(announce(move))


def _next_size(size: int, count_bytes: int) -> int:
    if count_bytes > MAX_ROUND_BYTES:
        return max(1, size // 2)
    return size if 2 * count_bytes > MAX_ROUND_BYTES else min(2 * size, MAX_ROUND)


@asynccontextmanager
async def open_drain(settings: Settings) -> AsyncIterator[Drain]:
    """Connect, and count what waits; nothing is taken before `run`.

    Raises BrokerError when there is no broker, no main queue or no dead-letter queue.
    """
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(open_connection(settings, "drain"))
        waiting = await count_waiting(connection, settings.worker)
        copies = await stack.enter_async_context(open_copies(settings, "drain publish"))
        retry_queues = {
            retry_queue(settings.worker.queue, delay) for delay in settings.worker.retry_delays
        }

        def renewal(queue: str, message: Taken) -> Properties | None:
            if queue in retry_queues:
                # It would wait once more. Over its limit it goes to the main queue, not away.
                return None
            return renewed_properties(
                message.properties,
                is_repeated=message.redelivered,
                max_bytes=copies.publisher.max_properties_bytes,
            )

        rounds = await stack.enter_async_context(
            open_rounds(
                settings,
                connection,
                queue=settings.worker.queue,
                copies=copies,
                renewal=renewal,
                max_looks=MAX_LOOKS,
            )
        )
        yield Drain(
            settings,
            connection,
            waiting=waiting,
            rounds=rounds,
            copies=copies,
        )
