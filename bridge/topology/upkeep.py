"""Declares a role's queues and exchanges when it connects, and again if they go missing."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, NoReturn

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.amqp.client import Channel, ChannelClosed, ChannelPreconditionFailed, Connection
from bridge.config import TopologyMode
from bridge.deadline import Deadline
from bridge.telemetry.logs import Log
from bridge.telemetry.metrics import BridgeMetrics
from bridge.topology.comparison import compare, compare_one, refusal
from bridge.topology.declarations import Binding, Entity, Exchange, Queue, Topology, name_of
from bridge.topology.differences import (
    HIDDEN,
    NOT_COMPARED,
    USED_AS_IT_IS,
    Difference,
    is_unusable,
)

log = Log(__name__)

# Minimum interval between two repairs of a missing queue.
MEND_SECONDS: Final = 5.0
# Intervals at which an unusable topology is checked again, and logged again.
LOOK_SECONDS: Final = 5.0
LOG_AGAIN_SECONDS: Final = 60.0
_REMEDIES: Final = {
    "topology_differs": USED_AS_IT_IS,
    "topology_not_compared": NOT_COMPARED,
    "topology_hidden": HIDDEN,
}
_EVENTS: Final[Mapping[str, str]] = {
    "not_compared": "topology_not_compared",
    "hidden": "topology_hidden",
}


async def provide(
    connection: Connection, topology: Topology, mode: TopologyMode
) -> list[Difference]:
    """Declare missing entities, only compare, or do neither, by `mode`; return the differences.

    Existing entities are not changed. Raises BrokerError or TimeoutError if the broker does not
    answer.
    """
    if mode == "off":
        return []
    if mode == "verify":
        return [difference async for difference in compare(connection, topology)]
    found: list[Difference] = []
    channel: Channel | None = None
    for entity in (*topology.declarable, *topology.bindings):
        channel = channel or await open_channel(connection)
        try:
            await _create(channel, entity)
        except ChannelClosed as error:
            channel = None  # a refusal closes it
            found += await _explain(connection, entity, error)
    if channel is not None:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            await close_channel(channel)
    return found


async def _create(channel: Channel, entity: Entity) -> None:
    """Declare an entity, which creates it unless it exists."""
    async with Deadline(RPC_TIMEOUT_SECONDS):
        match entity:
            case Queue():
                await channel.queue_declare(entity.name, durable=True, arguments=entity.arguments)
            case Exchange():
                await channel.exchange_declare(entity.name, exchange_type="topic", durable=True)
            case Binding():
                await channel.queue_bind(entity.queue, entity.exchange, entity.routing_key)


async def _explain(
    connection: Connection, entity: Entity, error: ChannelClosed
) -> list[Difference]:
    if isinstance(error, ChannelPreconditionFailed) and not isinstance(entity, Binding):
        return await compare_one(connection, entity)
    return [refusal(entity, error)]


class Upkeep:
    """Maintains one role's part of the topology, as `rabbitmq.topology` demands.

    `is_usable` is true while the role can work with the topology; `changed` is set when that
    changes.
    """

    def __init__(
        self,
        needed: Topology,
        mode: TopologyMode,
        *,
        metrics: BridgeMetrics,
        changed: asyncio.Event | None = None,
    ) -> None:
        self._needed = needed
        self._mode: TopologyMode = mode
        self._metrics = metrics
        self._logged_used: dict[str, str] = {}
        self._logged_unusable = ""
        self._logged_at = 0.0
        self.is_usable = False
        self._changed = asyncio.Event() if changed is None else changed

    async def ensure(self, connection: Connection) -> None:
        """Declare or verify the topology, and return once the role can work with it.

        Until then it checks again every 5 s, and logs the differences and remedies once a minute.
        """
        while True:
            differences = await provide(connection, self._needed, self._mode)
            self._count(differences)
            unusable = [one for one in differences if is_unusable(one, self._mode)]
            if (is_usable := not unusable) != self.is_usable:
                self.is_usable = is_usable
                self._changed.set()
            self._log_unusable(unusable)
            if self.is_usable:
                self._log_used(differences)
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def mend(self, connection: Connection, missing: asyncio.Event) -> NoReturn:
        """Call `ensure` when `missing` is set, at most every 5 s."""
        while True:
            await missing.wait()
            missing.clear()
            with contextlib.suppress(TimeoutError):  # a hung broker is noticed elsewhere
                await self.ensure(connection)
            await asyncio.sleep(MEND_SECONDS)

    async def mend_beside(
        self,
        serve: Callable[[Connection], Awaitable[None]],
        connection: Connection,
        missing: asyncio.Event,
    ) -> None:
        """Serve a connection, and call `ensure` when `missing` is set meanwhile."""
        mending = asyncio.create_task(self.mend(connection, missing))
        try:
            await serve(connection)
        finally:
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)

    def _count(self, differences: Collection[Difference]) -> None:
        counted = [name_of(one.entity) for one in differences if one.kind not in _EVENTS]
        for entity in (*self._needed.declarable, *self._needed.bindings):
            name = name_of(entity)
            self._metrics.topology_differences.labels(name).set(counted.count(name))

    def _log_unusable(self, differences: Collection[Difference]) -> None:
        why = " | ".join(one.why for one in differences)
        now = asyncio.get_running_loop().time()
        if why and (why != self._logged_unusable or now - self._logged_at >= LOG_AGAIN_SECONDS):
            log.warning("topology_unusable", why=why)
            self._logged_at = now
        elif self._logged_unusable and not why:
            log.info("topology_usable")
        self._logged_unusable = why

    def _log_used(self, differences: Collection[Difference]) -> None:
        texts: defaultdict[str, list[str]] = defaultdict(list)
        for one in differences:
            event = _EVENTS.get(one.kind, "topology_differs")
            texts[event].append(f"{name_of(one.entity)}: {one.text}")
        logged = {event: " | ".join(found) for event, found in texts.items()}
        for event, why in logged.items():
            if why != self._logged_used.get(event):
                log.warning(event, why=why, remedy=_REMEDIES[event])
        self._logged_used = logged
