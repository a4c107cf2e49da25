"""The worker's queues: from which it takes, and how many messages wait in each."""

import asyncio
import time
from collections.abc import Mapping
from typing import Final, NoReturn

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, heed_cancellation, open_channel
from bridge.amqp.client import ChannelAccessRefused, ChannelClosed, Connection
from bridge.config import WorkerSettings
from bridge.logs import Log
from bridge.outbound.metrics import WorkerMetrics
from bridge.topology.declarations import (
    dead_queue,
    normal_queue,
    queues_behind,
    retry_queue,
    urgent_queue,
)
from bridge.topology.queue_sizes import QueueSizes, try_to_read_queue, watch_queues

log = Log(__name__)

LEFT_BEHIND: Final = (
    "worker.priorities is off, and what was sorted before is taken from there; delete them when "
    "they are empty, or set worker.priorities to on"
)
NOT_READABLE: Final = (
    "worker.priorities is off, and this worker may not take what was sorted before; let its user "
    "read them, or set worker.priorities to on until they are empty"
)


class OwnQueues:
    """The queue of requests, those behind it, that of its dead letters, and the retry ladder.

    `taken` are those from which the worker takes what it sends.
    """

    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics) -> None:
        self._queue = settings.queue
        self._metrics = metrics
        self._behind = queues_behind(settings)
        self._left_behind: list[str] = []
        self.taken = self._behind or (settings.queue,)
        self._roles = {
            settings.queue: "main",
            **dict.fromkeys(self._behind, "sorted"),
            dead_queue(settings.queue): "dead_letter",
            **{retry_queue(settings.queue, d): "retry" for d in settings.retry_delays},
        }

    async def look_behind(self, connection: Connection) -> None:
        """Find out whether to take from queues that were sorted into before: nothing strands.

        They stay until somebody deletes them: other workers may sort into them yet.
        """
        if self._behind:
            return
        found = []
        for name in (urgent_queue(self._queue), normal_queue(self._queue)):
            sizes = await try_to_read_queue(connection, name)
            if sizes is not None and sizes.exists:
                found.append(name)
        readable = [name for name in found if await _may_read(connection, name)]
        heed_cancellation()
        self.taken = (self._queue, *readable)
        if found != self._left_behind:
            self._left_behind = found
            remedy = LEFT_BEHIND if readable == found else NOT_READABLE
            if found:
                log.warning("queues_left_behind", queues=found, remedy=remedy)

    async def watch(self, connection: Connection) -> NoReturn:
        """Read the sizes every few seconds, as long as the connection is served."""
        await watch_queues(connection, {**self._roles, **dict.fromkeys(self.taken)}, self._note)

    def _note(self, found: Mapping[str, QueueSizes]) -> None:
        for name, role in self._roles.items():
            # The main queue counts with what was sorted from it: all of that is yet to be sent.
            parts = {name, *self.taken, *self._behind} if role == "main" else {name}
            if name in found:
                ready = sum(found[part].ready for part in parts & found.keys())
                self._metrics.queue_ready.labels(name, role).set(ready)
        if (main := found.get(self._queue)) is not None:
            self._metrics.queue_consumers.labels(self._queue).set(main.consumers)
        if found.keys() >= self._roles.keys():
            self._metrics.queue_stats_timestamp.set(time.time())


async def _may_read(connection: Connection, queue: str) -> bool:
    """Ask whether the user may consume a queue, without doing so; False also if not known."""
    try:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            # RabbitMQ looks at the permission before the argument, which is wrong.
            await channel.basic_consume(queue, _ignore, arguments={"x-priority": "no number"})
    except ChannelAccessRefused:
        return False
    except ChannelClosed:
        return True
    except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
        log.debug("queue_not_tried", queue=queue, error=type(error).__name__)
    return False


async def _ignore(_message: object) -> None: ...
