"""The sorter that the settings ask for."""

from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.topology.declarations import queues_behind
from bridge.topology.upkeep import Upkeep
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.ordering.share import LaneShare
from bridge.worker.ordering.sorter_lock import SorterLock
from bridge.worker.sorting.sorter import Sorter


def make_sorter(
    settings: Settings,
    *,
    publisher: Publisher,
    peers: Peers,
    repeated_copies: RepeatedCopies,
    share: LaneShare | None,
    upkeep: Upkeep,
    metrics: WorkerMetrics,
) -> Sorter | None:
    """Make what `worker.priorities` or `worker.lanes` asks for; `share` is that of the lanes."""
    if not queues_behind(settings.worker):
        return None
    return Sorter(
        settings,
        lock=None if share is None else SorterLock(settings.worker.queue, share),
        publisher=publisher,
        peers=peers,
        repeated_copies=repeated_copies,
        may_sort=lambda: upkeep.is_usable,
        metrics=metrics,
    )
