"""Consume as the active worker, and give back what is held in its order.

The broker appends returned messages to those that came back before. So what goes back has to go
all at once: nothing is cancelled or re-registered while messages are held. Consuming ends when
nothing of the channel is in flight, by closing it; and the prefetch is always the same, so that
what comes back fits into it and comes back at once.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Final

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    closed_channel,
    open_channel,
    wait_for_held_back_acks,
)
from bridge.amqp.client import (
    Channel,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    Connection,
    ConsumerCallback,
)
from bridge.amqp.frames import Body, DeliveryHandler
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Wire
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log
from bridge.worker.consumer import URGENT_REMEDY, Gauges
from bridge.worker.delivery import Delivery
from bridge.worker.held import HeldDeliveries
from bridge.worker.intake import Intake
from bridge.worker.ordering.active_lock import ActiveLock
from bridge.worker.session import Session

log = Log(__name__)

# How often to compare what is with what should be when nothing has changed, and while what is in
# flight is waited for.
WATCH_SECONDS: Final = 0.5
LEAVING_SECONDS: Final = 0.02
# How many messages are held of each queue: enough different keys for every slot, though some keys
# have many messages behind one that waits for its next try.
MOST_HELD: Final = 3200


class OrderedSession(Session):
    """A session of which `held` deliveries are not settled yet."""

    def __init__(self, channel: Channel, wire: Wire) -> None:
        super().__init__(channel, wire)
        self.held = 0
        self.tags: dict[str, str] = {}


class OrderedConsumer:
    """Consumes the queues of the `lock` while this worker has it and `may_take` says so.

    Set `changed` when that may be otherwise. Each delivery is handed to `held`. `on_registered` is
    called each time that the broker has registered this worker as a consumer, `on_session_over`
    when deliveries can no longer be acked and come again, with how many were unacked at most. Call
    `let_go` for each delivery at its end.
    """

    def __init__(  # noqa: PLR0913  what it consumes, and what it calls
        self,
        lock: ActiveLock,
        *,
        urgent_queue: str | None,
        held: HeldDeliveries,
        may_take: Callable[[], bool],
        changed: asyncio.Event,
        on_registered: Callable[[], None],
        on_session_over: Callable[[int], None],
        gauges: Gauges,
    ) -> None:
        self._queues = lock.queues
        self._urgent_queue = urgent_queue
        self.lock = lock
        self._held = held
        self._may_take = may_take
        self._changed = changed
        self._on_registered = on_registered
        self._on_session_over = on_session_over
        self._gauges = gauges
        self._intake = Intake(
            lock.queues[0], poison_suspected=gauges.poison_suspected, changed=changed
        )
        self._session: OrderedSession | None = None
        self._stopped = False
        self._has_ended = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_registered = False

    @property
    def is_served(self) -> bool:
        """Whether the broker delivers to this worker, or to the active one in its place."""
        return self.is_registered or self.lock.is_standby

    @property
    def has_session(self) -> bool:
        """Whether it is active, so that it could consume."""
        return self.lock.is_held

    @property
    def prefetch(self) -> int:
        """How many messages it may hold now, of all queues."""
        return MOST_HELD * len(self._queues) if self.is_registered else 0

    async def stop(self) -> None:
        """Take nothing more; return when all that was held is settled or given back."""
        self._stopped = True
        self._changed.set()
        await self._idle.wait()

    def resume(self) -> None:
        """Take deliveries again after `stop`."""
        self._stopped = False
        self._changed.set()

    async def end(self) -> None:
        """Let another worker be active, for good."""
        self._has_ended = True
        await self.stop()

    def renew(self) -> None:
        """Do nothing: what is held keeps its place, and what is behind it waits."""

    def let_go(self, delivery: Delivery) -> None:
        """Note that a delivery is held no more."""
        session = delivery.session
        if isinstance(session, OrderedSession):
            session.held -= 1
            if session.is_leaving and not session.held:
                self._changed.set()
        self._intake.let_go(delivery)

    async def flush(self) -> None:
        """Return when the broker has processed every ack: `stop` has waited for that."""

    async def prove(self) -> None:
        """Return when the broker has answered on the session, or the session is over."""
        if self._session is not None:
            await self._session.until_heard_from(changed=self._changed)

    async def serve(self, connection: Connection) -> None:
        """Wait for the lock, and consume on this connection; raise when it is no use any more.

        That is a BrokerError, or whatever the client library raises. Returns only after `end`.
        """
        async with self.lock.held_on(connection):
            while not self._has_ended:
                if self._is_wanted:
                    await self._consume(connection)
                else:
                    await self._wait_for_change(WATCH_SECONDS)

    @property
    def _is_wanted(self) -> bool:
        return not (self._stopped or self._has_ended) and self._may_take()

    async def _consume(self, connection: Connection) -> None:
        """Consume until that is not wanted any more, and all that was held is settled or back."""
        self._idle.clear()
        channel = await open_channel(connection)
        channel.closing.add_done_callback(lambda _: self._changed.set())
        channel.on_consumer_cancel_callbacks.add(lambda _: self._changed.set())
        self._session = session = OrderedSession(channel, connection.wire)
        take = functools.partial(self._on_delivery, session, self._queues[0])
        by_tag: dict[bytes, DeliveryHandler] = {}
        is_left = False
        try:
            with connection.wire.deliveries(channel, take, by_tag) as callback:
                self._intake.begin(connection.wire)
                await self._register(session, callback, by_tag)
                await self._until_left(session)
                async with Deadline(RPC_TIMEOUT_SECONDS):
                    await session.wire.acks_read(channel)
                    await wait_for_held_back_acks(session.last_ack_at)
                session.over.set()
            is_left = True
            async with Deadline(RPC_TIMEOUT_SECONDS):
                await close_channel(channel)
        except (ChannelAccessRefused, ChannelNotFoundEntity):
            self._intake.refuse()
            raise
        finally:
            session.over.set()
            self._intake.end()
            self._session = None
            self._mark(is_registered=False)
            if not is_left:
                self._on_session_over(session.most_unacked)
            self._idle.set()

    async def _register(
        self,
        session: OrderedSession,
        callback: ConsumerCallback,
        by_tag: dict[bytes, DeliveryHandler],
    ) -> None:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await session.channel.basic_qos(prefetch_count=MOST_HELD)
            # The urgent queue first. If it cannot be consumed, no message of the main queue may be
            # delivered and given back, because that counts towards a delivery limit.
            for queue in reversed(self._queues):
                session.note_consumer(queue, MOST_HELD)
                is_urgent = queue == self._urgent_queue
                tag = "urgent" if is_urgent else "main"
                by_tag[tag.encode()] = functools.partial(self._on_delivery, session, queue)
                try:
                    await session.channel.basic_consume(queue, callback, consumer_tag=tag)
                except (ChannelAccessRefused, ChannelNotFoundEntity):
                    if is_urgent:
                        log.warning("urgent_queue_unusable", queue=queue, remedy=URGENT_REMEDY)
                    raise
                session.tags[queue] = tag
        self._mark(is_registered=True)
        self._on_registered()

    async def _until_left(self, session: OrderedSession) -> None:
        while not session.is_leaving or session.held:
            _check(session)
            session.wire.keep_alive()
            session.is_leaving = session.is_leaving or not self._is_wanted
            if session.is_leaving:
                # Each time: what was in flight may wait meanwhile.
                self._held.cancel(
                    lambda delivery: delivery.session is session and delivery.may_be_given_back
                )
            await self._wait_for_change(LEAVING_SECONDS if session.is_leaving else WATCH_SECONDS)

    async def _wait_for_change(self, most_seconds: float) -> None:
        try:
            async with asyncio.timeout(most_seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _mark(self, *, is_registered: bool) -> None:
        if is_registered is not self.is_registered:
            event = "consuming" if is_registered else "not_consuming"
            log.info(event, queue=self._queues[0], prefetch=MOST_HELD if is_registered else None)
        self.is_registered = is_registered
        for up in self._gauges.up.values():
            up(is_registered)

    def _on_delivery(
        self,
        session: OrderedSession,
        queue: str,
        tag: int,
        redelivered: bool,  # noqa: FBT001  as the wire calls it
        properties: Properties,
        body: Body,
    ) -> None:
        if session.is_leaving:
            return  # Unacked: it goes back with the others.
        delivery = self._intake.make(
            session,
            tag,
            properties,
            body,
            redelivered=redelivered,
            queue=queue,
            is_urgent=queue == self._urgent_queue,
        )
        session.held += 1
        self._held.take(delivery)


def _check(session: OrderedSession) -> None:
    if session.has_failed:
        raise BrokerError("the broker takes no acks")
    if session.channel.is_closed:
        raise closed_channel(session.channel, "consuming")
    for queue, tag in session.tags.items():
        if tag not in session.channel.consumers:
            raise BrokerError(f"the broker cancelled the consumer of {queue}")
