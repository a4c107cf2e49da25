"""By how many workers the limits of `scope: cluster` are divided.

They are the peers that were heard just now, and every other consumer of the queue that the broker
counts: a worker that had no time for a heartbeat, or that is no member. A worker that starts is
heard before it sends, so that its peers have given up its share by then; one that stops publishes
that. The broker loses the consumer of a killed worker at once: when consumers are missing for a
second, so are the workers that had them.

Each worker publishes how many of the consumers are its own. A quorum queue counts a cancelled
consumer as long as it has something to ack: a worker that consumes anew, as each does when another
was killed, has several for a while.

A worker that hears no peers counts consumers alone, as `RateLimits.share_with` does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.topology.queue_sizes import try_to_read_queue
from bridge.worker.cluster.membership import ACTIVE, HEARD, REMEMBERED, Membership, Part
from bridge.worker.cluster.messages import Consumers, Flag, State
from bridge.worker.service.breaker import CircuitBreaker

# How often the number of workers is looked at, and the consumers are counted.
LOOK_SECONDS: Final = 0.1
COUNT_SECONDS: Final = 0.5
# Without peers two counts in a row are compared, and workers that start together must see each
# other in one of them.
ALONE_COUNT_SECONDS: Final = 1.0
# A worker that consumes anew is no consumer for a moment. After a longer time it is gone.
MISSING_SECONDS: Final = 1.0


class ClusterRateLimit(Part):
    """Divides a worker's limits, as long as a queue is served.

    `own_consumers` says whether the broker has this worker as a consumer, and how many more it
    counts that have been cancelled.
    """

    def __init__(
        self,
        queue: str,
        breaker: CircuitBreaker,
        membership: Membership,
        *,
        own_consumers: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._breaker = breaker
        self._membership = membership
        self._own_consumers = own_consumers
        self._clock = clock
        # The last count, the consumers of each worker that was known then, and since when some of
        # them are missing.
        self._consumers: int | None = None
        self._owners: dict[str, int] = {}
        self._missing_since: float | None = None
        self._published = 0
        self._is_leaving = False

    def facts(self) -> dict[str, Any]:
        """Return its fields of the state."""
        return {
            "consumers": Consumers(count=sum(self._own_consumers())),
            "leaving": Flag() if self._is_leaving else None,
        }

    def leave(self) -> None:
        """Give up this worker's share: it sends nothing new."""
        self._is_leaving = True
        self._membership.publish(State(leaving=Flag()))

    def publish(self) -> None:
        """Publish how many consumers are this worker's, if they are more or fewer."""
        count = sum(self._own_consumers())
        if count != self._published:
            self._published = count
            self._membership.publish(State(consumers=Consumers(count=count)))

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
            self.publish()
            if self._clock() >= next_count_at:
                uncounted = self._uncounted
                self._note(await count())
                # Changes that were published meanwhile may or may not be in the count.
                is_clear = self._uncounted == uncounted or not self._membership.is_up
                next_count_at = self._clock() + (self._count_seconds if is_clear else LOOK_SECONDS)
            if self._membership.is_up:
                self._breaker.rates.divide_by(self.workers)
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def workers(self) -> int:
        """How many share the limits, with this one."""
        uncounted = self._uncounted
        return 1 + len(self._heard) + (uncounted if uncounted >= 0 else -self._gone(-uncounted))

    def _note(self, consumers: int | None) -> None:
        membership = self._membership
        own = self._own_consumers()
        known = membership.others(REMEMBERED)
        self._owners = {peer: membership.peers[peer].consumers for peer in known}
        self._owners[membership.worker_id] = sum(own)
        self._consumers = consumers
        if self._uncounted >= 0:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._clock()
        is_registered, cancelled = own
        is_alone = not membership.is_up and consumers is not None and is_registered
        # A paused worker does not count itself.
        if is_alone and consumers is not None and not self._breaker.takes_nothing:
            self._breaker.rates.share_with(consumers - cancelled)

    @property
    def _count_seconds(self) -> float:
        return COUNT_SECONDS if self._membership.is_up else ALONE_COUNT_SECONDS

    @property
    def _leaving(self) -> frozenset[str]:
        peers = self._membership.peers.items()
        return frozenset(worker_id for worker_id, peer in peers if peer.is_leaving)

    @property
    def _heard(self) -> frozenset[str]:
        silence = ACTIVE if self._consumers is None else HEARD
        return self._membership.others(silence) - self._leaving

    @property
    def _uncounted(self) -> int:
        """How many consumers belong to no peer that was heard; below zero, how many are missing."""
        if self._consumers is None:
            return 0
        known = (self._membership.worker_id, *self._heard, *self._leaving)
        return self._consumers - sum(self._owners.get(one, 0) for one in known)

    def _gone(self, missing: int) -> int:
        """Return the fewest workers whose consumers are those that are missing for long enough."""
        since = self._missing_since
        if since is None or self._clock() - since < MISSING_SECONDS:
            return 0
        gone = 0
        for consumers in sorted((self._owners.get(one, 0) for one in self._heard), reverse=True):
            if missing > 0:
                missing -= consumers
                gone += 1
        return gone
