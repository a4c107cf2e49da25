"""The worker's queues: from which it takes, and how many messages wait in each."""

import time
from collections.abc import Mapping
from typing import Final, NoReturn

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, heed_cancellation, open_channel
from bridge.amqp.client import ChannelAccessRefused, ChannelClosed, Connection
from bridge.config import WorkerSettings
from bridge.deadline import Deadline
from bridge.telemetry.logs import Log
from bridge.topology.declarations import (
    dead_queue,
    lanes_together,
    queues_behind,
    retry_queue,
    sorted_as_counted,
)
from bridge.topology.queue_sizes import QueueSizes, QueueWatch
from bridge.topology.sorted_queues import find_sorted_queues
from bridge.worker.metrics import WorkerMetrics

log = Log(__name__)

LEFT_BEHIND: Final = (
    "from before worker.lanes or worker.priorities was changed; what was sorted into them is taken "
    "from there; delete them when they are empty, or undo the change"
)
NOT_READABLE: Final = (
    "from before worker.lanes or worker.priorities was changed; nothing is taken from them: with "
    "lanes it would be out of order, or this worker may not read them; undo the change until they "
    "are empty"
)


class OwnQueues:
    """The queue of requests, those behind it, that of its dead letters, and the retry ladder.

    `taken` are those from which the worker takes what it sends.
    """

    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics) -> None:
        self._queue = settings.queue
        self._metrics = metrics
        self._has_lanes = settings.lanes is not None
        self._behind = queues_behind(settings)
        self._left_behind: list[str] = []
        self._watch = QueueWatch(self._note)
        self.taken = self._behind or (settings.queue,)
        self._roles = {
            settings.queue: "main",
            **dict.fromkeys(sorted_as_counted(settings), "sorted"),
            dead_queue(settings.queue): "dead_letter",
            **{retry_queue(settings.queue, d): "retry" for d in settings.retry_delays},
        }

    async def look_behind(self, connection: Connection) -> None:
        """Find out whether to take from queues that were sorted into before: nothing strands.

        They stay until somebody deletes them: other workers may sort into them yet.
        """
        found = [
            name
            for name in await find_sorted_queues(connection, self._queue)
            if name not in self._behind
        ]
        readable = [name for name in found if await _may_read(connection, name)]
        heed_cancellation()
        if self._has_lanes:
            readable = []
        self.taken = (*(self._behind or (self._queue,)), *readable)
        if found != self._left_behind:
            self._left_behind = found
            remedy = LEFT_BEHIND if readable == found else NOT_READABLE
            if found:
                log.warning("queues_left_behind", queues=found, remedy=remedy)

    async def watch(self, connection: Connection) -> NoReturn:
        """Read the sizes every few seconds, as long as the connection is served."""
        names = {**dict.fromkeys(self._behind), **dict.fromkeys(self.taken), **self._roles}
        names.pop(lanes_together(self._queue), None)
        await self._watch.watch(connection, names)

    def _note(self, found: Mapping[str, QueueSizes]) -> None:
        for name, role in self._roles.items():
            # The main queue counts with what was sorted from it: all of that is yet to be sent.
            parts = {name, *self.taken, *self._behind} if role == "main" else {name}
            if name == lanes_together(self._queue):
                parts = set(self._behind)
            if parts & found.keys() and (name in found or role == "sorted"):
                ready = sum(found[part].ready for part in parts & found.keys())
                self._metrics.queue_ready.labels(name, role).set(ready)
        if (main := found.get(self._queue)) is not None:
            self._metrics.queue_consumers.labels(self._queue).set(main.consumers)
        if found.keys() >= self._roles.keys() - {lanes_together(self._queue)}:
            self._metrics.queue_stats_timestamp.set(time.time())


async def _may_read(connection: Connection, queue: str) -> bool:
    """Ask whether the user may consume a queue, without doing so; False also if not known."""
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
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
