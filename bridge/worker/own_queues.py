"""How many messages wait in each of the worker's queues, for the metrics."""

import time
from collections.abc import Mapping
from typing import NoReturn

from bridge.amqp.client import Connection
from bridge.config import WorkerSettings
from bridge.topology.declarations import dead_queue, retry_queue
from bridge.topology.queue_sizes import QueueSizes, QueueWatch
from bridge.worker.metrics import WorkerMetrics


class OwnQueues:
    """Reads the sizes of the main queue, the retry queues and the dead-letter queue."""

    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics) -> None:
        self._queue = settings.queue
        self._metrics = metrics
        self._watch = QueueWatch(self._note)
        self._roles = {
            settings.queue: "main",
            dead_queue(settings.queue): "dead_letter",
            **{retry_queue(settings.queue, d): "retry" for d in settings.retry_delays},
        }

    async def watch(self, connection: Connection) -> NoReturn:
        """Read the sizes every few seconds, as long as the connection is served."""
        await self._watch.watch(connection, self._roles)

    def _note(self, found: Mapping[str, QueueSizes]) -> None:
        for name, sizes in found.items():
            self._metrics.queue_ready.labels(name, self._roles[name]).set(sizes.ready)
        if (main := found.get(self._queue)) is not None:
            self._metrics.queue_consumers.labels(self._queue).set(main.consumers)
        if found.keys() == self._roles.keys():
            self._metrics.queue_stats_timestamp.set(time.time())
