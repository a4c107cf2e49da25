"""Divide the rate limits with `scope: cluster` by the number of workers.

That is the number of peers heard just now, plus every other consumer that the broker counts: of a
worker that is late with its heartbeat, or that is no member. A worker that starts is heard before
it sends, so its peers have given up its share by then. A worker that stops publishes that. If a
worker is killed, the broker removes its consumer at once; when consumers have been missing for a
second, their workers no longer count.

Each worker publishes how many of the consumers are its own. It may have several: a quorum queue
counts a cancelled consumer until its deliveries are acked, and each worker registers anew when
another is killed.

A worker without peers relies on the number of consumers alone (`RateLimits.share_with`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.topology.queue_sizes import try_to_read_queue
from bridge.worker.cluster.membership import ACTIVE, HEARD, REMEMBERED, Membership, Part
from bridge.worker.cluster.messages import Consumers, Flag, WorkerState
from bridge.worker.service.account import Account

# How often to update the number of workers, and to count the consumers.
LOOK_SECONDS: Final = 0.1
COUNT_SECONDS: Final = 0.5
# Without peers, two counts in a row are compared; workers that start together must be in one.
ALONE_COUNT_SECONDS: Final = 1.0
# A worker that registers anew is no consumer for a moment; after a longer time it is gone.
MISSING_SECONDS: Final = 1.0


class ClusterRateLimit(Part):
    """Divides one worker's limits.

    `own_consumers` returns whether this worker is registered as a consumer, and how many of its
    cancelled consumers the broker still counts.
    """

    def __init__(
        self,
        queue: str,
        account: Account,
        membership: Membership,
        *,
        own_consumers: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._account = account
        self._membership = membership
        self._own_consumers = own_consumers
        self._clock = clock
        # The last count, each worker's consumers at that time, and since when some are missing.
        self._consumers: int | None = None
        self._owners: dict[str, int] = {}
        self._missing_since: float | None = None
        self._published = 0
        self._is_leaving = False

    def facts(self) -> dict[str, Any]:
        return {
            "consumers": Consumers(count=sum(self._own_consumers())),
            "leaving": Flag() if self._is_leaving else None,
        }

    def leave(self) -> None:
        """Give up this worker's share, because it sends nothing new."""
        self._is_leaving = True
        self._membership.publish(WorkerState(leaving=Flag()))

    def publish(self) -> None:
        """Publish this worker's number of consumers if it has changed."""
        count = sum(self._own_consumers())
        if count != self._published:
            self._published = count
            self._membership.publish(WorkerState(consumers=Consumers(count=count)))

    async def watch(self, connection: Connection) -> NoReturn:
        """Keep the number of workers up to date while this connection is served."""

        async def count() -> int | None:
            sizes = await try_to_read_queue(connection, self._queue)
            heed_cancellation()
            return None if sizes is None else sizes.consumers

        await self.follow(count)

    async def follow(self, count: Callable[[], Awaitable[int | None]]) -> NoReturn:
        """Keep the number of workers up to date; `count` returns the number of consumers."""
        next_count_at = self._clock()
        while True:
            self.publish()
            if self._clock() >= next_count_at:
                uncounted = self._uncounted
                self._note(await count())
                # The count may or may not include changes that were published meanwhile.
                is_up = self._membership.is_up
                seconds = COUNT_SECONDS if is_up else ALONE_COUNT_SECONDS
                is_clear = self._uncounted == uncounted or not is_up
                next_count_at = self._clock() + (seconds if is_clear else LOOK_SECONDS)
            if self._membership.is_up:
                self._account.rates.divide_by(self.workers)
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def workers(self) -> int:
        """Number of workers that share the limits, including this one."""
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
        if is_alone and consumers is not None and self._account.pause_reason is None:
            self._account.rates.share_with(consumers - cancelled)

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
        """Number of consumers that belong to no peer heard; if negative, of missing consumers."""
        if self._consumers is None:
            return 0
        known = (self._membership.worker_id, *self._heard, *self._leaving)
        return self._consumers - sum(self._owners.get(one, 0) for one in known)

    def _gone(self, missing: int) -> int:
        """Return the smallest number of workers that explains the missing consumers."""
        since = self._missing_since
        if since is None or self._clock() - since < MISSING_SECONDS:
            return 0
        gone = 0
        for consumers in sorted((self._owners.get(one, 0) for one in self._heard), reverse=True):
            if missing > 0:
                missing -= consumers
                gone += 1
        return gone
