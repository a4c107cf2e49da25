"""Take from the lanes that are this worker's, and leave each whole.

A lane has a channel of its own. It is left by closing that, when nothing that came on it is in
flight any more: the broker puts back what was held, in its order, and only then delivers to the
next worker. A consumer that is cancelled instead would let the next one pass what is in flight.
For the same reason a lane's prefetch is always the same: what comes back fits into it, and so comes
back at once.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    closed_channel,
    open_channel,
    wait_for_held_back_acks,
)
from bridge.amqp.client import Channel, ChannelAccessRefused, Connection
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Body, Wire
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log
from bridge.topology.declarations import lane_queue
from bridge.worker.consumer import Gauges
from bridge.worker.delivery import Delivery
from bridge.worker.intake import Intake
from bridge.worker.ordering.share import LaneShare
from bridge.worker.session import Session

log = Log(__name__)

# How often to compare what is with what should be when nothing has changed, and while a lane is
# being left.
WATCH_SECONDS: Final = 0.5
LEAVING_SECONDS: Final = 0.02
# How many are held of all lanes together, and of each at least: enough different keys for every
# slot, though one of them wait for its next try.
MOST_HELD: Final = 3200
LEAST_HELD_OF_EACH: Final = 25


class Lane(Session):
    """One lane that this worker takes from; `held` counts its deliveries that are not settled."""

    def __init__(self, channel: Channel, wire: Wire) -> None:
        super().__init__(channel, wire)
        self.held = 0
        self.tag = ""
        self.until_left = ExitStack()


class Calls(NamedTuple):
    """Whom a consumer of lanes calls: with each delivery, when it takes from its lanes, at the end.

    `session_over` is given how many deliveries were unacked at most. `give_back` is given a lane
    that is being left, to let go of what waits of it.
    """

    delivery: Callable[[Delivery], None]
    registered: Callable[[], None]
    session_over: Callable[[int], None]
    give_back: Callable[[Session], None]


class LaneConsumer:
    """Consumes each lane of the worker's `share`, as long as `may_take` says so.

    Set `changed` when that, or the share, may be otherwise. Call `let_go` for each delivery at its
    end.
    """

    def __init__(
        self,
        queue: str,
        share: LaneShare,
        *,
        may_take: Callable[[], bool],
        changed: asyncio.Event,
        calls: Calls,
        gauges: Gauges,
    ) -> None:
        self._queue = queue
        self._share = share
        self._may_take = may_take
        self._changed = changed
        self._calls = calls
        self._gauges = gauges
        self._intake = Intake(queue, poison_suspected=gauges.poison_suspected, changed=changed)
        self._prefetch = max(LEAST_HELD_OF_EACH, MOST_HELD // share.lanes)
        self._open: dict[int, Lane] = {}
        self._wire: Wire | None = None
        self._stopped = False
        self._has_ended = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_registered = False

    @property
    def is_registered(self) -> bool:
        """Whether it takes from its lanes, of which it may have none while workers are many."""
        return self._is_registered

    @property
    def has_session(self) -> bool:
        """Whether it has a connection on which it could consume."""
        return self._wire is not None

    @property
    def prefetch(self) -> int:
        """How many it may hold now, of all its lanes."""
        return self._prefetch * len(self._open)

    @property
    def lanes(self) -> int:
        """From how many lanes it takes, or waits to take."""
        return sum(not lane.is_leaving for lane in self._open.values())

    async def stop(self) -> None:
        """Take nothing more; return when all lanes are left, or the broker is gone."""
        self._stopped = True
        self._share.note_taking(takes=False)
        self._changed.set()
        await self._idle.wait()

    def resume(self) -> None:
        """Take from the lanes again after `stop`, behind whoever has them."""
        self._stopped = False
        self._changed.set()

    async def end(self) -> None:
        """Leave all lanes, for good."""
        self._has_ended = True
        if self._wire is not None:
            await self.stop()

    def renew(self) -> None:
        """Do nothing: what is held keeps its place, and what is behind it waits."""

    def let_go(self, delivery: Delivery) -> None:
        """Note that a delivery is held no more."""
        if isinstance(delivery.session, Lane):
            delivery.session.held -= 1
            if delivery.session.is_leaving and not delivery.session.held:
                self._changed.set()
        self._intake.let_go(delivery)

    async def flush(self) -> None:
        """Return when the broker has processed every ack: `stop` has waited for that."""

    async def prove(self) -> None:
        """Return when the broker has answered on each lane, or they are known to be lost."""
        lanes = list(self._open.values())
        await asyncio.gather(*(lane.until_heard_from(changed=self._changed) for lane in lanes))

    async def serve(self, connection: Connection) -> None:
        """Consume on channels of this connection; raise when it is no use any more.

        That is a BrokerError, or whatever the client library raises. Returns only after `end`.
        """
        self._wire = connection.wire
        self._intake.begin(self._wire)
        try:
            while not (self._has_ended and not self._open):
                self._check()
                if self._wire.is_reading:
                    await self._follow(connection)
                self._wire.keep_alive()
                await self._wait_for_change()
        except ChannelAccessRefused:
            self._intake.refuse()
            raise
        finally:
            most_unacked = self.prefetch
            for lane in self._open.values():
                lane.until_left.close()
                lane.over.set()
            self._open.clear()
            self._intake.end()
            self._wire = None
            self._mark(is_registered=False)
            self._calls.session_over(most_unacked)
            self._idle.set()

    async def _follow(self, connection: Connection) -> None:
        """Leave the lanes that are not this worker's any more, and take from those that are."""
        takes = not self._stopped and not self._has_ended and self._may_take()
        wanted = self._share.own if takes else frozenset()
        self._share.note_taking(takes=takes)
        for number, lane in self._open.items():
            lane.is_leaving = lane.is_leaving or number not in wanted
            if lane.is_leaving:
                # Each time: what was in flight may wait meanwhile.
                self._calls.give_back(lane)
        emptied = [
            number for number, lane in self._open.items() if lane.is_leaving and not lane.held
        ]
        await _all(self._leave(number) for number in emptied)
        await _all(self._take_from(connection, number) for number in wanted - self._open.keys())
        if not self._open and not takes:
            self._idle.set()
        if takes is not self._is_registered:
            self._mark(is_registered=takes)
            if takes:
                self._calls.registered()

    async def _take_from(self, connection: Connection, number: int) -> None:
        self._idle.clear()
        channel = await open_channel(connection)
        channel.closing.add_done_callback(lambda _: self._changed.set())
        channel.on_consumer_cancel_callbacks.add(lambda _: self._changed.set())
        self._open[number] = lane = Lane(channel, connection.wire)
        take = functools.partial(self._on_delivery, lane)
        callback = lane.until_left.enter_context(connection.wire.deliveries(channel, take))
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await channel.basic_qos(prefetch_count=self._prefetch)
            result = await channel.basic_consume(lane_queue(self._queue, number), callback)
        lane.tag = result.consumer_tag or ""

    async def _leave(self, number: int) -> None:
        lane = self._open[number]
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await lane.wire.acks_read(lane.channel)
            await wait_for_held_back_acks(lane.last_ack_at)
            del self._open[number]
            lane.over.set()
            lane.until_left.close()
            await close_channel(lane.channel)

    def _check(self) -> None:
        for lane in self._open.values():
            if lane.has_failed:
                raise BrokerError("the broker takes no acks")
            if lane.channel.is_closed:
                raise closed_channel(lane.channel, "consuming")
            if lane.tag not in lane.channel.consumers:
                raise BrokerError("the broker cancelled the consumer of a lane")

    async def _wait_for_change(self) -> None:
        is_leaving = any(lane.is_leaving for lane in self._open.values())
        try:
            async with asyncio.timeout(LEAVING_SECONDS if is_leaving else WATCH_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _mark(self, *, is_registered: bool) -> None:
        if is_registered is not self._is_registered:
            event = "consuming" if is_registered else "not_consuming"
            log.info(event, queue=self._queue, lanes=len(self._open) or None)
        self._is_registered = is_registered
        self._gauges.up(is_registered)

    def _on_delivery(
        self,
        lane: Lane,
        tag: int,
        redelivered: bool,  # noqa: FBT001  as the wire calls it
        properties: Properties,
        body: Body,
    ) -> None:
        if lane.is_leaving:
            return  # Unacked: it goes back with the others.
        delivery = self._intake.make(lane, tag, properties, body, redelivered=redelivered)
        lane.held += 1
        self._calls.delivery(delivery)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all at once; raise what the first raises that fails, when all have ended."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
