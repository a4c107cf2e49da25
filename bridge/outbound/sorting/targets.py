"""To which queue a request is moved."""

from collections.abc import Callable

from bridge.config import WorkerSettings
from bridge.outbound.delivery import Delivery
from bridge.outbound.metrics import MessageClass
from bridge.outbound.ordering.keys import lane_of, ordering_key
from bridge.outbound.sorting.classes import is_urgent
from bridge.topology.declarations import queues_behind

# The queue of a request, and as what it is counted.
FindTarget = Callable[[Delivery], tuple[str, MessageClass]]


def find_target_in(settings: WorkerSettings) -> FindTarget:
    """Make what `worker.lanes` or `worker.priorities` asks for."""
    queues = queues_behind(settings)
    if settings.lanes is not None:

        def lane(delivery: Delivery) -> tuple[str, MessageClass]:
            key = ordering_key(delivery.properties, delivery.body)
            return queues[lane_of(key, len(queues))], "lane"

        return lane
    urgent, normal = queues

    def class_of(delivery: Delivery) -> tuple[str, MessageClass]:
        return (urgent, "urgent") if is_urgent(delivery.properties) else (normal, "normal")

    return class_of
