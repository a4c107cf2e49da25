"""How many messages wait in each of the worker's queues, for the metrics."""

import time
from collections.abc import Mapping
from typing import NoReturn

from bridge.amqp.client import Connection
from bridge.config import WorkerSettings
from bridge.topology.declarations import dead_queue, request_queues, retry_queues
from bridge.topology.queue_sizes import QueueSizes, QueueWatch
from bridge.worker.metrics import WorkerMetrics


class OwnQueues:
    """Reads the sizes of the main queue, the urgent queue, their retry queues, the dead letters."""

    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics) -> None:
        self._queues = request_queues(settings)
        self._metrics = metrics
        self._watch = QueueWatch(self._note)
        self._roles = {
            **dict(zip(self._queues, ("main", "urgent"), strict=False)),
            dead_queue(settings.queue): "dead_letter",
            **dict.fromkeys(retry_queues(settings), "retry"),
        }

    async def watch(self, connection: Connection) -> NoReturn:
        """Read the sizes every few seconds, as long as the connection is served."""
        await self._watch.watch(connection, self._roles)

    def _note(self, found: Mapping[str, QueueSizes]) -> None:
        for name, seen in found.items():
            self._metrics.queue_ready.labels(name, self._roles[name]).set(seen.ready)
        for name in self._queues:
            if (sizes := found.get(name)) is not None:
                self._metrics.queue_consumers.labels(name).set(sizes.consumers)
        if found.keys() == self._roles.keys():
            self._metrics.queue_stats_timestamp.set(time.time())
