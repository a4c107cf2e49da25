"""Sort the main queue: when its requests are taken, to be moved to their class or their lane.

A queue gives its messages out in their order, so that nothing in it can pass what is before it. The
sorter is always ahead of the sending: it keeps the main queue near empty, and the requests wait
behind it.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from bridge.amqp.client import Connection
from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.consumer import Consumer, Gauges
from bridge.worker.drain import finish, finish_at_once, hand_over, until_come_again
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.ordering.sorter_lock import SorterLock
from bridge.worker.sorting.mover import PREFETCH, Mover

# How often to look whether this worker may sort, before it takes the lock.
MAY_SORT_POLL_SECONDS: Final = 0.2


class Sorter:
    """Has what comes to the main queue moved, in its order, on a connection of its own.

    It sorts while `may_sort` says so; set `changed` when that may be otherwise. With a `lock` it
    keeps the order of each key: it sorts while it has the lock, one message of a key at a time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        lock: SorterLock | None,
        publisher: Publisher,
        peers: Peers,
        repeated_copies: RepeatedCopies,
        may_sort: Callable[[], bool],
        metrics: WorkerMetrics,
    ) -> None:
        self._queue = settings.worker.queue
        self._lock = lock
        self._may_sort = may_sort
        self._peers = peers
        self._publisher = publisher
        self.changed = asyncio.Event()
        self.mover = Mover(
            settings,
            keeps_order=lock is not None,
            publisher=publisher,
            repeated_copies=repeated_copies,
            wake=self.changed.set,
            # The consumer is made next, and wants this one.
            let_go=lambda delivery: self.consumer.let_go(delivery),  # noqa: PLW0108
            renew=lambda: self.consumer.renew(),  # noqa: PLW0108
            metrics=metrics,
        )
        self.consumer = Consumer(
            self._queue,
            prefetch=self._prefetch,
            changed=self.changed,
            on_delivery=self.mover.take,
            on_registered=self.mover.ledger.consuming_again,
            on_session_over=self.mover.on_session_over,
            gauges=Gauges(metrics.sorter_up.set, metrics.poison_suspected.set),
        )

    @property
    def is_sorting(self) -> bool:
        """Whether the broker gives it what comes to the queue."""
        return self.consumer.is_registered

    @property
    def is_ready(self) -> bool:
        """Whether the queue is sorted, here or by another worker, as far as that can be."""
        is_elsewhere = self._lock is not None and self._lock.is_held_elsewhere
        return self.is_sorting or is_elsewhere or self._publisher.is_blocked

    async def serve(self, connection: Connection) -> None:
        """Sort, on a channel of this connection; `Link.run` calls it."""
        if self.mover.is_stopping and self._lock is not None:
            await asyncio.Event().wait()  # Others may have the lock.
        # Before anything is taken: it may have to be asked for.
        await self._peers.until_acquainted()
        if self._lock is None:
            await self.consumer.serve(connection)
        else:
            # Who has the lock and cannot sort would keep the others from it.
            while not self._may_sort():  # noqa: ASYNC110  `changed` is the consumer's
                await asyncio.sleep(MAY_SORT_POLL_SECONDS)
            await self._lock.hold(connection, self.consumer.serve)

    async def drain(self) -> bool:
        """Take nothing more, move what is taken, and see that the broker has read the acks.

        Returns False when it may not have read some. Has no deadline; cancelled, it gives back
        what is not moved.
        """
        try:
            if self._lock is not None:
                await until_come_again(self.mover.ledger)
            self.mover.stop()
            end = finish if self._lock is None else finish_at_once
            return await end(self.mover, self.consumer, self.mover.ledger)
        finally:
            self.mover.give_back_all()

    async def hand_over(self) -> None:
        """Have other workers move what `drain` gave back, while this one can be asked for it."""
        await self.mover.all_given_back()
        await hand_over(self.consumer, self.mover.ledger, self._peers)

    def _prefetch(self) -> dict[str, int]:
        if self._lock is not None and (self.is_sorting or self._may_sort()):
            # Always the same: what comes back after this worker's end comes in the order of its
            # consumers, so there must be one only.
            return {self._queue: PREFETCH}
        if self.mover.is_stopping:
            # What comes again is acked, if it is moved; any other is left to the next worker.
            return {self._queue: 1}
        wants_none = self._publisher.is_blocked or not self._may_sort()
        return {} if wants_none else {self._queue: PREFETCH}
