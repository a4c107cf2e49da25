"""Keep this process registered as a consumer of its queues.

A loop compares the wanted prefetch with the current one after every change and every few seconds,
so that a lost event cannot stop consumption. Deliveries come from `bridge.amqp.wire`, not from the
client library.

In ordered mode (with an `ActiveLock`) only the active worker consumes, and returned messages must
keep their order. The broker appends returned messages to those returned earlier, so all of them
have to be returned at once. Therefore no consumer is cancelled or restarted while messages are
unacked: the worker stops consuming by closing the channel once no request is in flight. The
prefetch is constant, so that all returned messages fit into it and are redelivered together.
"""

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, Protocol

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    closed_channel,
    open_channel,
    wait_for_held_back_acks,
)
from bridge.amqp.client import (
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    Connection,
    ConsumerCallback,
)
from bridge.amqp.frames import Body, DeliveryHandler
from bridge.amqp.properties import Properties
from bridge.config import WorkerSettings
from bridge.deadline import Deadline, wait_at_most
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log
from bridge.topology.declarations import request_queues
from bridge.worker.dispatcher import MAX_BYTES, Dispatcher
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.ordering import ActiveLock
from bridge.worker.session import Session

log = Log(__name__)

# How often to compare if nothing has changed; the last value applies while an ordered session waits
# for its deliveries in flight.
WATCH_SECONDS: Final = 5.0
ORDERED_WATCH_SECONDS: Final = 0.5
LEAVING_SECONDS: Final = 0.02
# Bodies up to this size never shrink the prefetch. The prefetch changes in large steps, because
# each change interrupts consuming briefly.
USUAL_BODY_BYTES: Final = 64 * 1024
PREFETCH_FACTOR: Final = 4
# The remembered size of large bodies decays by this factor with each body that follows.
FADING: Final = 0.95
# While bodies are large: the broker's answer to a method comes after the bodies already sent.
LARGE_RPC_TIMEOUT_SECONDS: Final = 60.0
URGENT_REMEDY: Final = (
    "create the queue and let the user read it, or set worker.urgent_queue to null to work without "
    "it"
)


class ConsumerOwner(Protocol):
    """Decides the prefetch of a consumer; is notified of registrations and lost sessions."""

    def prefetch_of_each(self) -> Mapping[str, int]:
        """Return the wanted prefetch of each queue, in the order to consume them; 0 means none."""

    def consumer_registered(self) -> None:
        """Note that the broker has registered this process as a consumer."""

    def session_over(self, most_unacked: int) -> None:
        """Note that the deliveries of a session can no longer be acked and will be redelivered.

        `most_unacked`: upper bound of the deliveries that were unacked.
        """


class Consumer:
    """Consumes the main queue and the urgent queue, each with its own prefetch.

    Both queues are consumed on one channel, and end with it. Set `changed` when `owner` may want
    another prefetch. With a `lock` this worker consumes only while it is the active worker.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        owner: ConsumerOwner,
        dispatcher: Dispatcher,
        lock: ActiveLock | None,
        changed: asyncio.Event,
        metrics: WorkerMetrics,
    ) -> None:
        self._queue = settings.queue
        self._urgent_queue = settings.urgent_queue
        self._owner = owner
        self._dispatcher = dispatcher
        self._lock = lock
        self._changed = changed
        queues = request_queues(settings)
        self._up = {queue: metrics.consumer_up.labels(queue) for queue in queues}
        self._consuming_with: dict[str, int] = {}
        self._is_stopped = False
        self._is_to_renew = False
        self._has_ended = False
        self._session: Session | None = None
        self._large_bytes = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_registered(self) -> bool:
        """Whether the broker has registered this process as a consumer."""
        return bool(self._consuming_with)

    @property
    def is_served(self) -> bool:
        """Whether the broker delivers to this worker, or to the active worker in its place."""
        return self.is_registered or (self._lock is not None and self._lock.is_standby)

    @property
    def can_consume(self) -> bool:
        """Whether this worker has a channel to consume on, or in ordered mode is active."""
        return self._session is not None if self._lock is None else self._lock.is_held

    @property
    def prefetch(self) -> int:
        """The smallest prefetch of its registered consumers; 0 if there is none."""
        return min(self._consuming_with.values(), default=0)

    async def stop(self) -> None:
        """Stop consuming; return when the broker has confirmed that or the session is over.

        In ordered mode, return when every delivery is settled or returned to the queue.
        """
        self._is_stopped = True
        self._changed.set()
        await self._idle.wait()

    def resume(self) -> None:
        """Start consuming again after `stop`."""
        self._is_stopped = False
        self._changed.set()

    async def end(self) -> None:
        """End the session for good, so that the broker delivers its messages to other workers."""
        self._has_ended = True
        self._changed.set()
        if self._session is not None:
            await self._session.over.wait()

    def renew(self) -> None:
        """Register a new consumer, so that unacked deliveries no longer count towards the prefetch.

        Has no effect in ordered mode, where unacked deliveries keep their place and later ones
        wait.
        """
        self._is_to_renew = True
        self._changed.set()

    async def flush(self) -> None:
        """Return when the broker has processed every ack that was written, or the session is over.

        The broker may delay an ack briefly after it has read it.
        """
        session = self._session
        if session is None:
            return
        await session.until_heard_from(changed=self._changed)
        if not session.is_over:
            await wait_for_held_back_acks(session.last_ack_at)

    async def prove(self) -> None:
        """Return when the broker has answered on the session, or the session is over."""
        if self._session is not None:
            await self._session.until_heard_from(changed=self._changed)

    async def serve(self, connection: Connection) -> None:
        """Consume on this connection until it fails, or until `end` is called.

        Raises BrokerError, or an error of the client library, if the connection fails.
        """
        if self._lock is None:
            await self._consume(connection)
            return
        async with self._lock.held_on(connection):
            while not self._has_ended:
                if self._wanted():
                    await self._consume_in_order(connection)
                else:
                    await self._wait_for_change(ORDERED_WATCH_SECONDS)

    async def _consume(self, connection: Connection) -> None:
        async with self._session_on(connection) as (session, callback, by_tag):
            while not self._has_ended:
                _check(session)
                if session.wire.is_reading:
                    await self._follow(session, callback, by_tag)
                session.wire.keep_alive()
                await self._wait_for_change(WATCH_SECONDS)

    async def _consume_in_order(self, connection: Connection) -> None:
        """Consume until that is no longer wanted and every delivery is settled or returned."""
        async with self._session_on(connection) as (session, callback, by_tag):
            await self._follow(session, callback, by_tag)
            while not session.is_leaving or session.in_progress:
                _check(session)
                session.wire.keep_alive()
                session.is_leaving = session.is_leaving or not self._wanted()
                if session.is_leaving:
                    # In each iteration: a delivery that was in flight before may be waiting now.
                    self._dispatcher.cancel(
                        lambda delivery: delivery.session is session and delivery.may_be_given_back
                    )
                seconds = LEAVING_SECONDS if session.is_leaving else ORDERED_WATCH_SECONDS
                await self._wait_for_change(seconds)
            async with Deadline(RPC_TIMEOUT_SECONDS):
                await session.wire.acks_read(session.channel)
                await wait_for_held_back_acks(session.last_ack_at)
            session.over.set()

    @asynccontextmanager
    async def _session_on(
        self, connection: Connection
    ) -> AsyncIterator[tuple[Session, ConsumerCallback, dict[bytes, DeliveryHandler]]]:
        """Open a session for the duration of the block.

        If the block has not set `over`, the last acks may be lost.
        """
        channel = await open_channel(connection)
        channel.closing.add_done_callback(lambda _: self._changed.set())
        channel.on_consumer_cancel_callbacks.add(self._on_cancelled_by_broker)
        self._session = session = Session(channel, connection.wire)
        take = functools.partial(self._on_delivery, session, self._queue)
        by_tag: dict[bytes, DeliveryHandler] = {}
        is_refused = False
        try:
            with connection.wire.deliveries(channel, take, by_tag) as callback:
                self._dispatcher.begin_session(connection.wire)
                yield session, callback, by_tag
            async with Deadline(RPC_TIMEOUT_SECONDS):
                await close_channel(channel)
        except (ChannelAccessRefused, ChannelNotFoundEntity):
            is_refused = True
            raise
        finally:
            are_acks_read = session.is_over
            session.over.set()
            self._dispatcher.end_session(is_refused=is_refused)
            self._session = None
            self._mark({})
            if not are_acks_read:
                self._owner.session_over(session.most_unacked)
            self._idle.set()

    async def _follow(
        self,
        session: Session,
        callback: ConsumerCallback,
        by_tag: dict[bytes, DeliveryHandler],
    ) -> None:
        """Start, stop or restart consumers until the prefetch is the wanted one."""
        wanted, is_to_renew = self._wanted(), self._is_to_renew
        if wanted == self._consuming_with and not is_to_renew:
            return
        self._is_to_renew = False
        kept = {} if is_to_renew else dict(wanted.items() & self._consuming_with.items())
        timeout = LARGE_RPC_TIMEOUT_SECONDS if self._large_bytes else RPC_TIMEOUT_SECONDS
        async with Deadline(timeout):
            for queue in self._consuming_with.keys() - kept.keys():
                await session.channel.basic_cancel(session.tags.pop(queue))
                self._dispatcher.note_cancel(queue)
            self._mark(kept)
            if not wanted:
                self._idle.set()
                return
            self._idle.clear()
            for queue, prefetch in wanted.items():
                if queue not in kept:
                    session.note_consumer(queue, prefetch)
                    await session.channel.basic_qos(prefetch_count=prefetch)
                    await self._register(session, queue, callback, by_tag)
        self._mark(wanted)
        self._owner.consumer_registered()

    async def _register(
        self,
        session: Session,
        queue: str,
        callback: ConsumerCallback,
        by_tag: dict[bytes, DeliveryHandler],
    ) -> None:
        """Consume a queue; the consumer tag identifies deliveries of the urgent queue.

        The handler of an earlier tag stays registered: its deliveries may still be under way.
        """
        if queue != self._urgent_queue:
            result = await session.channel.basic_consume(queue, callback)
            session.tags[queue] = result.consumer_tag or ""
            return
        tag = f"urgent.{len(by_tag)}"
        by_tag[tag.encode()] = functools.partial(self._on_delivery, session, queue)
        try:
            await session.channel.basic_consume(queue, callback, consumer_tag=tag)
        except (ChannelAccessRefused, ChannelNotFoundEntity):
            log.warning("urgent_queue_unusable", queue=queue, remedy=URGENT_REMEDY)
            raise
        session.tags[queue] = tag

    def _wanted(self) -> dict[str, int]:
        if self._is_stopped or self._has_ended:
            return {}
        prefetch = self._owner.prefetch_of_each()
        most = sys.maxsize if self._lock is not None else self._most_that_fit(len(prefetch))
        return {queue: min(wanted, most) for queue, wanted in prefetch.items() if wanted}

    def _most_that_fit(self, queues: int) -> int:
        """Return how many bodies of the recent size fit into memory for each queue."""
        if not self._large_bytes:
            return sys.maxsize
        most, fitting = MAX_BYTES / self._large_bytes, 1
        while fitting * PREFETCH_FACTOR <= most:
            fitting *= PREFETCH_FACTOR
        return max(1, fitting // queues)

    def _note_size(self, size: int) -> None:
        if size <= USUAL_BODY_BYTES and not self._large_bytes:
            return
        self._large_bytes = max(size, self._large_bytes * FADING)
        if self._large_bytes <= USUAL_BODY_BYTES:
            self._large_bytes = 0.0
        self._changed.set()

    async def _wait_for_change(self, most_seconds: float) -> None:
        await wait_at_most(most_seconds, self._changed)
        self._changed.clear()

    def _mark(self, consuming_with: dict[str, int]) -> None:
        if bool(consuming_with) != bool(self._consuming_with):
            event = "consuming" if consuming_with else "not_consuming"
            prefetch = max(consuming_with.values(), default=None)
            log.info(event, queue=self._queue, prefetch=prefetch)
        self._consuming_with = consuming_with
        for queue, up in self._up.items():
            up.set(1 if queue in consuming_with else 0)

    def _on_delivery(
        self,
        session: Session,
        queue: str,
        tag: int,
        redelivered: bool,  # noqa: FBT001  as the wire calls it
        properties: Properties,
        body: Body,
    ) -> None:
        if session.is_leaving:
            return  # Unacked: it returns to the queue with the others.
        self._note_size(len(body))
        dispatcher = self._dispatcher
        dispatcher.start(dispatcher.make(session, queue, tag, redelivered, properties, body))

    def _on_cancelled_by_broker(self, _frame: object) -> None:
        log.warning("consumer_cancelled", queue=self._queue)
        self._changed.set()


def _check(session: Session) -> None:
    if session.has_failed:
        raise BrokerError("the broker does not read acks")
    if session.channel.is_closed:
        raise closed_channel(session.channel, "consuming")
    for queue, tag in session.tags.items():
        if tag not in session.channel.consumers:
            raise BrokerError(f"the broker cancelled the consumer of {queue}")
