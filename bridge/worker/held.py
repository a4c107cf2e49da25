"""The deliveries that are taken and not settled, each with the task that works on it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bridge.config import WorkerSettings
from bridge.topology.declarations import request_queues
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import is_from_ladder
from bridge.worker.metrics import WorkerMetrics


class _Counters:
    """The counters of one queue, so that none is looked up by its labels for each message."""

    def __init__(self, queue: str, metrics: WorkerMetrics) -> None:
        self.received = metrics.received.labels(queue, "false")
        self.received_again = metrics.received.labels(queue, "true")
        self.returned = metrics.ladder.labels(queue, "returned")
        self.without_timestamp = metrics.without_timestamp.labels(queue)
        self.queue_age = metrics.queue_age.labels(queue)


class HeldDeliveries:
    """Runs `process` for each delivery in a task of its own, and counts what comes.

    `process` must raise nothing. `let_go` is called with each delivery at its end.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        process: Callable[[Delivery], Coroutine[Any, Any, None]],
        metrics: WorkerMetrics,
    ) -> None:
        self._process = process
        self._main_queue = queue = settings.queue
        self._counters = {one: _Counters(one, metrics) for one in request_queues(settings)}
        self._tasks: dict[asyncio.Task[None], Delivery] = {}
        # What each consumer was given that has been cancelled, as far as it is held.
        self._of_cancelled: list[set[Delivery]] = []
        self._last_delivery_at = 0.0
        self.let_go: Callable[[Delivery], None] = lambda _: None
        # How many redelivered messages have come so far.
        self.redeliveries = 0
        metrics.in_progress.labels(queue).set_function(lambda: self.count)
        metrics.oldest_held.labels(queue).set_function(self._oldest)
        metrics.last_delivery.labels(queue).set_function(lambda: self._last_delivery_at)

    @property
    def count(self) -> int:
        """How many are held."""
        return len(self._tasks)

    def take(self, delivery: Delivery) -> None:
        """Begin to work on a delivery."""
        self._count(delivery)
        task = asyncio.get_running_loop().create_task(self._process(delivery), name="delivery")
        self._tasks[task] = delivery
        task.add_done_callback(self._forget)

    def note_cancel(self, queue: str) -> None:
        """Note that the consumer of a queue is cancelled that was given what is held and new."""
        if queue == self._main_queue:
            held = {one for one in self._tasks.values() if one.queue == queue}
            self._of_cancelled.append(held.difference(*self._of_cancelled))

    @property
    def cancelled_consumers(self) -> int:
        """How many cancelled consumers the main queue, a quorum queue, still counts.

        It does so as long as something is not acked that they were given.
        """
        if self._of_cancelled:
            unacked = {one for one in self._tasks.values() if not one.is_stale}
            left = (given & unacked for given in self._of_cancelled)
            self._of_cancelled = [given for given in left if given]
        return len(self._of_cancelled)

    def cancel(self, which: Callable[[Delivery], bool]) -> None:
        """Cancel the work on some of them; they go back to the queue."""
        for task, delivery in list(self._tasks.items()):
            if which(delivery):
                task.cancel()

    async def all_done(self) -> None:
        """Wait until nothing that is held now is held any more; the caller sets the deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def cut_off(self) -> None:
        """Cancel the work on all of them, and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.let_go(self._tasks.pop(task))

    def _count(self, delivery: Delivery) -> None:
        now, counters = time.time(), self._counters[delivery.queue]
        (counters.received_again if delivery.redelivered else counters.received).inc()
        self._last_delivery_at = now
        self.redeliveries += delivery.redelivered
        if delivery.redelivered:
            return
        if delivery.envelope.copies:
            if is_from_ladder(delivery.properties.headers or {}):
                counters.returned.inc()
            return
        published = delivery.envelope.dated_at
        if published is None:
            counters.without_timestamp.inc()
        else:
            counters.queue_age.observe(max(0.0, now - published))

    def _oldest(self) -> float:
        """Return when the one that has been due for longest was due, in unix seconds."""
        envelopes = [delivery.envelope for delivery in self._tasks.values()]
        due = (max(e.dated_at or e.first_delivered_at, e.not_before or 0) for e in envelopes)
        return min(due, default=0.0)
