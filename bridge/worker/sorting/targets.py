"""To which queue a request is moved."""

from collections.abc import Callable
from typing import NamedTuple

from bridge.config import WorkerSettings
from bridge.topology.declarations import queues_behind
from bridge.worker.delivery import Delivery
from bridge.worker.metrics import MessageClass
from bridge.worker.ordering.keys import lane_of, ordering_key
from bridge.worker.sorting.classes import is_urgent


class Target(NamedTuple):
    """The queue of a request, as what it is counted, and by what it is kept in order, if it is."""

    queue: str
    counted_as: MessageClass
    key: str | None = None


FindTarget = Callable[[Delivery], Target]


def find_target_in(settings: WorkerSettings) -> FindTarget:
    """Make what `worker.lanes` or `worker.priorities` asks for."""
    queues = queues_behind(settings)
    if settings.lanes is not None:

        def lane(delivery: Delivery) -> Target:
            key = ordering_key(delivery.properties, delivery.body)
            return Target(queues[lane_of(key, len(queues))], "lane", key)

        return lane
    urgent, normal = Target(queues[0], "urgent"), Target(queues[1], "normal")

    def class_of(delivery: Delivery) -> Target:
        return urgent if is_urgent(delivery.properties) else normal

    return class_of
