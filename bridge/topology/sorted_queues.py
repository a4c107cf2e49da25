"""The queues behind the main one that exist, whatever the configuration says."""

from bridge.amqp.client import Connection
from bridge.config.settings import MAX_LANES
from bridge.topology.declarations import lane_queue, normal_queue, urgent_queue
from bridge.topology.queue_sizes import QueueSizes, try_to_read_queue


async def find_sorted_queues(connection: Connection, queue: str) -> dict[str, QueueSizes]:
    """Return those of priorities and of lanes, by their name; what cannot be read is left out."""
    found = {}
    for name in (urgent_queue(queue), normal_queue(queue)):
        sizes = await try_to_read_queue(connection, name)
        if sizes is not None and sizes.exists:
            found[name] = sizes
    for number in range(MAX_LANES):
        name = lane_queue(queue, number)
        sizes = await try_to_read_queue(connection, name)
        # RabbitMQ logs an error for each that does not exist: the first of them is the end.
        if sizes is None or not sizes.exists:
            break
        found[name] = sizes
    return found
