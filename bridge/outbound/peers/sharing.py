"""By how many workers the limits of `scope: cluster` are divided.

Two counts are known: the workers that were heard just now, and the consumers of the queue, which
are counted every half a second. The larger one is used. A worker that starts is heard before it
sends, so that the others have given up their part by then; one that stops says so; of one that is
killed the broker loses the consumer at once, and its peers hear nothing. Whom only one of the
counts lacks, a worker that consumes anew or that had no time for a beat, keeps its part.

Who hears no peers counts consumers alone, as `RateLimits.share_with` does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.outbound.pausing.pace import Pace
from bridge.outbound.peers.beats import HEARD, REMEMBERED, SPEAKING
from bridge.outbound.peers.exchange import Peers
from bridge.outbound.peers.messages import Facts
from bridge.topology.queue_sizes import try_to_read_queue

# How often the number of workers is looked at, and the consumers are counted.
LOOK_SECONDS: Final = 0.1
COUNT_SECONDS: Final = 0.5
# By those who hear no peers: two counts in a row are compared, and workers that start together must
# see each other in one of them.
ALONE_COUNT_SECONDS: Final = 1.0


class Leaving(Facts):
    """A worker sends nothing new from now on: its part of the limits is the others'."""

    kind = "leaving"


class Sharing:
    """Tells a worker's `pace` with how many it shares the limits, as long as a queue is served.

    `is_registered` says whether the broker counts this worker as a consumer.
    """

    def __init__(
        self,
        queue: str,
        pace: Pace,
        peers: Peers,
        *,
        is_registered: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._pace = pace
        self._peers = peers
        self._is_registered = is_registered
        self._clock = clock
        self._consumers: int | None = None
        self._leaving: set[str] = set()
        self._has_left = False
        peers.on(Leaving, self._hear_leaving)
        peers.in_each_beat(lambda: Leaving() if self._has_left else None)

    def leave(self) -> None:
        """Give up the part of this worker: it sends nothing new."""
        self._has_left = True
        self._peers.tell(Leaving())

    async def watch(self, connection: Connection) -> NoReturn:
        """Keep the number of workers up to date, as long as the connection is served."""

        async def count() -> int | None:
            sizes = await try_to_read_queue(connection, self._queue)
            heed_cancellation()
            return None if sizes is None else sizes.consumers

        await self.follow(count)

    async def follow(self, count: Callable[[], Awaitable[int | None]]) -> NoReturn:
        """Keep the number of workers up to date; `count` returns the queue's consumers."""
        next_count_at = self._clock()
        while True:
            if self._clock() >= next_count_at:
                self._note(await count())
                next_count_at = self._clock() + self._count_seconds
            self._look()
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def _count_seconds(self) -> float:
        return COUNT_SECONDS if self._peers.is_up else ALONE_COUNT_SECONDS

    def _note(self, consumers: int | None) -> None:
        self._consumers = consumers
        if not self._peers.is_up and consumers is not None and self._is_registered():
            self._pace.share_with(consumers)

    def _look(self) -> None:
        if self._peers.is_up:
            self._pace.rates.divide_by(self.workers)

    @property
    def workers(self) -> int:
        """How many share the limits, with this one."""
        silence = SPEAKING if self._consumers is None else HEARD
        heard = self._peers.roster.others(silence)
        return max(1 + len(heard - self._leaving), self._consumers or 0)

    def _hear_leaving(self, peer: str, _told: Leaving) -> None:
        self._leaving &= self._peers.roster.others(REMEMBERED)
        if peer not in self._leaving:
            self._leaving.add(peer)
            if self._consumers:
                # Until they are counted again.
                self._consumers -= 1
