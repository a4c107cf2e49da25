"""Keep this process registered as a consumer of its queues, and know when it is not.

A loop compares what should be with what is, at every change and every few seconds, so that no
lost event can stop consumption. Deliveries come from the wire, not from the client library.
"""

import asyncio
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

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
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Body, DeliveryHandler
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log
from bridge.worker.delivery import Delivery
from bridge.worker.intake import MAX_HELD_BYTES, Intake
from bridge.worker.session import Session

log = Log(__name__)

# How often to compare what is with what should be when nothing has changed.
WATCH_SECONDS: Final = 5.0
# Smaller bodies never make the prefetch shrink. It does so in large steps: each change interrupts
# consuming for a moment.
USUAL_BODY_BYTES: Final = 64 * 1024
PREFETCH_FACTOR: Final = 4
# The remembered size of large bodies shrinks by this factor with each body that follows.
FADING: Final = 0.95
# While bodies are large: the broker's answer to a method comes after the bodies that it has sent.
LARGE_RPC_TIMEOUT_SECONDS: Final = 60.0
URGENT_REMEDY: Final = (
    "create the queue and let the user read it, or set worker.urgent_queue to null to do without"
)


class Gauges(NamedTuple):
    """What a consumer shows, each set to 1 or 0.

    Whether it is registered, by queue, and whether a message is suspected of ending each session.
    """

    up: Mapping[str, Callable[[float], None]]
    poison_suspected: Callable[[float], None]


class Consumer:
    """Consumes the main queue and the urgent one, each with a prefetch of its own.

    `prefetch()` says how much for each; 0 is not at all. Both are consumed on one channel, and end
    with it. `urgent_queue` is None where there is none. Set `changed` when `prefetch()` may return
    something else. `on_delivery` is called with each delivery, `on_registered` each time that the
    broker has registered this process as a consumer, `on_session_over` when the deliveries of a
    session can no longer be acked and come again, with the most that may have been unacked. Call
    `let_go` for each delivery at its end: the bytes that are held have a bound.
    """

    def __init__(  # noqa: PLR0913  what it consumes, and what it calls
        self,
        queue: str,
        *,
        urgent_queue: str | None,
        prefetch: Callable[[], Mapping[str, int]],
        changed: asyncio.Event,
        on_delivery: Callable[[Delivery], None],
        on_registered: Callable[[], None],
        on_session_over: Callable[[int], None],
        gauges: Gauges,
    ) -> None:
        self._queue = queue
        self._urgent_queue = urgent_queue
        self._prefetch = prefetch
        self._changed = changed
        self._hand_on = on_delivery
        self._on_registered = on_registered
        self._on_session_over = on_session_over
        self._gauges = gauges
        # Called with the queue when its consumer has been cancelled, before there is another one.
        self.on_cancelled: Callable[[str], None] = lambda _: None
        self._consuming_with: dict[str, int] = {}
        self._intake = Intake(queue, poison_suspected=gauges.poison_suspected, changed=changed)
        self._stopped = False
        self._is_to_renew = False
        self._has_ended = False
        self._session: Session | None = None
        self._large_bytes = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_registered(self) -> bool:
        """Whether the broker knows this process as a consumer."""
        return bool(self._consuming_with)

    @property
    def is_served(self) -> bool:
        """Whether the broker delivers to this worker."""
        return self.is_registered

    @property
    def has_session(self) -> bool:
        """Whether it has a channel on which it could consume."""
        return self._session is not None

    @property
    def prefetch(self) -> int:
        """The smallest prefetch with which it is registered; 0 while it is not."""
        return min(self._consuming_with.values(), default=0)

    async def stop(self) -> None:
        """Take nothing more; return when the broker has been told, or is gone."""
        self._stopped = True
        self._changed.set()
        await self._idle.wait()

    def resume(self) -> None:
        """Take deliveries again after `stop`."""
        self._stopped = False
        self._changed.set()

    async def end(self) -> None:
        """End the session, and let the broker deliver to others what it holds; for good."""
        self._has_ended = True
        self._changed.set()
        if self._session is not None:
            await self._session.over.wait()

    def renew(self) -> None:
        """Consume anew: what is held and stays unacked is no part of the new prefetch."""
        self._is_to_renew = True
        self._changed.set()

    def let_go(self, delivery: Delivery) -> None:
        """Note that a delivery is held no more."""
        self._intake.let_go(delivery)

    async def flush(self) -> None:
        """Return when the broker has processed every ack that was written, or the session is over.

        What has been read may yet be held back for a moment.
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
        """Consume on a channel of this connection; raise when it is no use any more.

        That is a BrokerError, or whatever the client library raises. Returns only after `end`.
        """
        channel = await open_channel(connection)
        channel.closing.add_done_callback(lambda _: self._changed.set())
        channel.on_consumer_cancel_callbacks.add(self._on_cancelled_by_broker)
        wire = connection.wire
        self._session = session = Session(channel, wire)
        tags: dict[str, str] = {}
        take = functools.partial(self._on_delivery, session, self._queue)
        of_urgent: dict[bytes, DeliveryHandler] = {}
        try:
            with wire.deliveries(channel, take, of_urgent) as callback:
                self._intake.begin(wire)
                while not self._has_ended:
                    self._check(session, tags)
                    if wire.is_reading:
                        await self._follow(session, tags, callback, of_urgent)
                    wire.keep_alive()
                    await self._wait_for_change()
            await close_channel(channel)
        except (ChannelAccessRefused, ChannelNotFoundEntity):
            self._intake.refuse()
            raise
        finally:
            session.over.set()
            self._intake.end()
            self._session = None
            self._mark({})
            self._on_session_over(session.most_unacked)
            self._idle.set()

    async def _follow(
        self,
        session: Session,
        tags: dict[str, str],
        callback: ConsumerCallback,
        of_urgent: dict[bytes, DeliveryHandler],
    ) -> None:
        """Start, stop or restart consuming so that it is as it should be."""
        wanted, is_to_renew = self._wanted(), self._is_to_renew
        if wanted == self._consuming_with and not is_to_renew:
            return
        self._is_to_renew = False
        kept = {} if is_to_renew else dict(wanted.items() & self._consuming_with.items())
        channel = session.channel
        timeout = LARGE_RPC_TIMEOUT_SECONDS if self._large_bytes else RPC_TIMEOUT_SECONDS
        async with Deadline(timeout):
            for queue in self._consuming_with.keys() - kept.keys():
                await channel.basic_cancel(tags.pop(queue))
                self.on_cancelled(queue)
            self._mark(kept)
            if not wanted:
                self._idle.set()
                return
            self._idle.clear()
            for queue, prefetch in wanted.items():
                if queue in kept:
                    continue
                session.note_consumer(queue, prefetch)
                await channel.basic_qos(prefetch_count=prefetch)
                if queue == self._urgent_queue:
                    tags[queue] = await self._consume_urgent(session, queue, callback, of_urgent)
                else:
                    result = await channel.basic_consume(queue, callback)
                    tags[queue] = result.consumer_tag or ""
        self._mark(wanted)
        self._on_registered()

    async def _consume_urgent(
        self,
        session: Session,
        queue: str,
        callback: ConsumerCallback,
        of_urgent: dict[bytes, DeliveryHandler],
    ) -> str:
        """Consume the urgent queue under a tag by which the wire tells its deliveries apart.

        The handler of a former tag stays: what it was given may still be on its way.
        """
        tag = f"urgent.{len(of_urgent)}"
        of_urgent[tag.encode()] = functools.partial(self._on_delivery, session, queue)
        try:
            await session.channel.basic_consume(queue, callback, consumer_tag=tag)
        except (ChannelAccessRefused, ChannelNotFoundEntity):
            log.warning("urgent_queue_unusable", queue=queue, remedy=URGENT_REMEDY)
            raise
        return tag

    def _wanted(self) -> dict[str, int]:
        if self._stopped:
            return {}
        prefetch = self._prefetch()
        most = max(1, self._most_that_fit() // len(prefetch))
        return {queue: min(wanted, most) for queue, wanted in prefetch.items() if wanted}

    def _most_that_fit(self) -> int:
        """Return how many bodies as large as the last ones may be held."""
        if not self._large_bytes:
            return sys.maxsize
        most, fitting = MAX_HELD_BYTES / self._large_bytes, 1
        while fitting * PREFETCH_FACTOR <= most:
            fitting *= PREFETCH_FACTOR
        return fitting

    def _note_size(self, size: int) -> None:
        if size <= USUAL_BODY_BYTES and not self._large_bytes:
            return
        self._large_bytes = max(size, self._large_bytes * FADING)
        if self._large_bytes <= USUAL_BODY_BYTES:
            self._large_bytes = 0.0
        self._changed.set()

    def _check(self, session: Session, tags: Mapping[str, str]) -> None:
        if session.has_failed:
            raise BrokerError("the broker takes no acks")
        if session.channel.is_closed:
            raise closed_channel(session.channel, "consuming")
        for queue, tag in tags.items():
            if tag not in session.channel.consumers:
                raise BrokerError(f"the broker cancelled the consumer of {queue}")

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(WATCH_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _mark(self, consuming_with: dict[str, int]) -> None:
        if bool(consuming_with) != bool(self._consuming_with):
            event = "consuming" if consuming_with else "not_consuming"
            prefetch = max(consuming_with.values(), default=None)
            log.info(event, queue=self._queue, prefetch=prefetch)
        self._consuming_with = consuming_with
        for queue, up in self._gauges.up.items():
            up(1 if queue in consuming_with else 0)

    def _on_delivery(
        self,
        session: Session,
        queue: str,
        tag: int,
        redelivered: bool,  # noqa: FBT001  as the wire calls it
        properties: Properties,
        body: Body,
    ) -> None:
        delivery = self._intake.make(
            session,
            tag,
            properties,
            body,
            redelivered=redelivered,
            queue=queue,
            is_urgent=queue == self._urgent_queue,
        )
        self._note_size(len(body))
        self._hand_on(delivery)

    def _on_cancelled_by_broker(self, _frame: object) -> None:
        log.warning("consumer_cancelled", queue=self._queue)
        self._changed.set()
