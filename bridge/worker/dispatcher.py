"""Start a task for each delivery, and limit the memory that deliveries in progress take."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.config import WorkerSettings
from bridge.telemetry.logs import Log
from bridge.topology.declarations import request_queues
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import (
    DELIVERY_COUNT,
    POSSIBLE_DUPLICATE,
    bare_envelope,
    is_from_retry_queue,
)
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.session import Session

log = Log(__name__)

# If more sessions in a row than this end without a delivery, a message may be ending them.
POISON_SESSIONS: Final = 3
# A message with this delivery count or a higher one is logged at each delivery.
WARN_FROM_COUNT: Final = 4
# While the unsettled bodies exceed this, nothing is read from the connection. The body that is
# being read comes on top.
MAX_BYTES: Final = 32 * 1024 * 1024


class ReadControl(Protocol):
    """What this module needs of a connection: whether it reads, and a switch for that."""

    @property
    def is_reading(self) -> bool:
        """Whether frames are read from the connection."""

    def set_reading(self, *, enabled: bool) -> None:
        """Read frames, or leave them to the broker."""


class _DeliveryCounters:
    """Metrics of one queue, resolved once instead of for each message."""

    def __init__(self, queue: str, metrics: WorkerMetrics) -> None:
        self.received = metrics.received.labels(queue, "false")
        self.received_again = metrics.received.labels(queue, "true")
        self.returned = metrics.retry_copies.labels(queue, "returned")
        self.without_timestamp = metrics.without_timestamp.labels(queue)
        self.queue_age = metrics.queue_age.labels(queue)


class Dispatcher:
    """Creates a `Delivery` for each message received, and runs `process` in a task for it.

    `process` must not raise. While too many bytes are unsettled, nothing is read from the
    connection. `changed` is set when reading stops or resumes, and when a session that is ending
    has no delivery left.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        process: Callable[[Delivery], Coroutine[Any, Any, object]],
        changed: asyncio.Event,
        metrics: WorkerMetrics,
    ) -> None:
        self._process = process
        self._changed = changed
        self._main_queue = queue = settings.queue
        self._urgent_queue = settings.urgent_queue
        self._counters = {one: _DeliveryCounters(one, metrics) for one in request_queues(settings)}
        self._tasks: dict[asyncio.Task[object], Delivery] = {}
        # For each cancelled consumer, its unsettled deliveries.
        self._of_cancelled: list[set[Delivery]] = []
        self._last_delivery_at = 0.0
        self._empty_sessions = 0
        self._bytes = 0
        self._wire: ReadControl | None = None
        # Number of redelivered messages received so far.
        self.redeliveries = 0
        self._poison_suspected = metrics.poison_suspected
        metrics.in_progress.labels(queue).set_function(lambda: self.count)
        metrics.oldest_held.labels(queue).set_function(self._oldest)
        metrics.last_delivery.labels(queue).set_function(lambda: self._last_delivery_at)

    @property
    def count(self) -> int:
        return len(self._tasks)

    # Sessions

    def begin_session(self, wire: ReadControl) -> None:
        """Note that deliveries come from this connection until `end_session`."""
        # A message that the client cannot decode ends each connection before it becomes a delivery.
        self._empty_sessions += 1
        if self._empty_sessions > POISON_SESSIONS:
            self._poison_suspected.set(1)
            log.warning("protocol_poison_suspected", queue=self._main_queue)
        self._wire = wire
        self._regulate(wire)

    def end_session(self, *, is_refused: bool) -> None:
        """Note that the session is over; `is_refused`: the broker refused to deliver."""
        self._wire = None
        if is_refused:
            self._clear_suspicion()

    def _clear_suspicion(self) -> None:
        self._empty_sessions = 0
        self._poison_suspected.set(0)

    # Deliveries

    def make(
        self,
        session: Session,
        queue: str,
        tag: int,
        redelivered: bool,  # noqa: FBT001  as the wire calls it
        properties: Properties,
        body: Body,
    ) -> Delivery:
        """Create a delivery of a message that was received; pass it to `start`."""
        if self._empty_sessions:
            self._clear_suspicion()
        session.note_delivery(queue)
        headers = properties.headers or {}
        delivery = Delivery(
            body=body,
            properties=properties,
            # If a copy was published twice, the second one is not marked as redelivered.
            redelivered=redelivered or POSSIBLE_DUPLICATE in headers,
            tag=tag,
            session=session,
            envelope=bare_envelope(properties, now=time.time()),
            queue=queue,
            is_urgent=queue == self._urgent_queue,
        )
        count = headers.get(DELIVERY_COUNT, 0)
        # A quorum queue drops a message whose delivery count exceeds its limit, by default 20 since
        # RabbitMQ 4.0.
        if isinstance(count, int) and count >= WARN_FROM_COUNT:
            log.warning("high_delivery_count", message_id=delivery.envelope.key, before=count)
        return delivery

    def start(self, delivery: Delivery) -> None:
        self._count(delivery)
        task = asyncio.get_running_loop().create_task(self._process(delivery), name="delivery")
        self._tasks[task] = delivery
        delivery.session.in_progress += 1
        self._bytes += len(delivery.body)
        if self._bytes > MAX_BYTES and self._wire is not None:
            self._regulate(self._wire)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[object]) -> None:
        delivery = self._tasks.pop(task)
        self._bytes -= len(delivery.body)
        if self._wire is not None:
            self._regulate(self._wire)
        session = delivery.session
        session.in_progress -= 1
        if session.is_leaving and not session.in_progress:
            self._changed.set()

    def _regulate(self, wire: ReadControl) -> None:
        has_room = self._bytes <= MAX_BYTES
        if has_room is not wire.is_reading:
            wire.set_reading(enabled=has_room)
            self._changed.set()

    def cancel(self, which: Callable[[Delivery], bool]) -> None:
        """Cancel the tasks of the deliveries that `which` selects; those return to the queue."""
        for task, delivery in list(self._tasks.items()):
            if which(delivery):
                task.cancel()

    async def all_done(self) -> None:
        """Wait until all current deliveries are done; the caller sets the deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def cut_off(self) -> None:
        """Cancel the tasks of all deliveries, and wait for them to end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Cancelled consumers

    def note_cancel(self, queue: str) -> None:
        """Note that a queue's consumer was cancelled, and which unsettled deliveries it had."""
        if queue == self._main_queue:
            unsettled = {one for one in self._tasks.values() if one.queue == queue}
            self._of_cancelled.append(unsettled.difference(*self._of_cancelled))

    @property
    def cancelled_consumers(self) -> int:
        """Number of cancelled consumers that the main queue, a quorum queue, still counts.

        It counts each until all its deliveries are acked.
        """
        if self._of_cancelled:
            unacked = {one for one in self._tasks.values() if not one.is_stale}
            left = (given & unacked for given in self._of_cancelled)
            self._of_cancelled = [given for given in left if given]
        return len(self._of_cancelled)

    # Metrics

    def _count(self, delivery: Delivery) -> None:
        now, counters = time.time(), self._counters[delivery.queue]
        (counters.received_again if delivery.redelivered else counters.received).inc()
        self._last_delivery_at = now
        self.redeliveries += delivery.redelivered
        if delivery.redelivered:
            return
        if delivery.envelope.copies:
            if is_from_retry_queue(delivery.properties.headers or {}):
                counters.returned.inc()
            return
        published = delivery.envelope.dated_at
        if published is None:
            counters.without_timestamp.inc()
        else:
            counters.queue_age.observe(max(0.0, now - published))

    def _oldest(self) -> float:
        """Return the unix time when the oldest delivery was published or due; 0 if none."""
        envelopes = [delivery.envelope for delivery in self._tasks.values()]
        due = (max(e.dated_at or e.first_delivered_at, e.not_before or 0) for e in envelopes)
        return min(due, default=0.0)
