"""What waits for the workers of a queue: counted, without taking anything."""

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.admin.moving import open_connection, read_existing_queue, read_readable_queue
from bridge.amqp.client import Connection
from bridge.config import Settings, WorkerSettings
from bridge.topology.declarations import dead_queue, retry_queue


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many messages are ready in each queue, and how many consumers the main queue has.

    `ready` has the retry queues first, the longest delay before the others, and the main queue
    last: a message that comes back from a retry queue during the drain is met there.
    """

    ready: Mapping[str, int]
    workers: int

    @property
    def total(self) -> int:
        """How many wait in all."""
        return sum(self.ready.values())


async def find_waiting(settings: Settings) -> Waiting:
    """Count what waits; raise BrokerError when there is no broker or a queue is missing."""
    async with open_connection(settings, "drain") as connection:
        return await count_waiting(connection, settings.worker)


async def count_waiting(connection: Connection, worker: WorkerSettings) -> Waiting:
    """Count what waits, on this connection; a retry queue that is not there is empty.

    Raises BrokerError when the main queue is missing, or that of the dead letters, where it is to
    go.
    """
    await read_existing_queue(connection, dead_queue(worker.queue))
    ready = {}
    for delay in sorted(worker.retry_delays, reverse=True):
        name = retry_queue(worker.queue, delay)
        ready[name] = (await read_readable_queue(connection, name)).ready
    main = await read_existing_queue(connection, worker.queue)
    ready[worker.queue] = main.ready
    return Waiting(ready, main.consumers)
