"""What a worker's metrics say of its queues."""

from typing import Any

import pytest

from bridge.config import WorkerSettings
from bridge.telemetry.metrics import new_registry
from bridge.topology.queue_sizes import QueueSizes
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.own_queues import OwnQueues

RETRY = [f"q.retry.{name}" for name in ("5s", "30s", "2m", "10m", "1h")]


def make_queues() -> tuple[OwnQueues, Any]:
    """Make a worker's queues, and what reads its metrics."""
    settings = WorkerSettings.model_validate({"queue": "q", "urgent_queue": None})
    registry = new_registry()
    metrics = WorkerMetrics(registry, queue="q", retry_queues=RETRY, dead="q.dead")
    return OwnQueues(settings, metrics), registry.get_sample_value


def test_each_queue_has_its_role() -> None:
    """Each queue is counted on its own; scalers look at the main queue."""
    queues, value = make_queues()
    found = {"q": 100, "q.dead": 1000, "q.retry.5s": 5000}
    queues._note({name: QueueSizes(count, 2) for name, count in found.items()})

    name = "sms_bridge_worker_queue_messages_ready"
    assert value(name, {"queue": "q", "role": "main"}) == 100
    assert value(name, {"queue": "q.dead", "role": "dead_letter"}) == 1000
    assert value(name, {"queue": "q.retry.5s", "role": "retry"}) == 5000
    assert value("sms_bridge_worker_queue_consumers", {"queue": "q"}) == 2


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_time_of_a_whole_look(*, is_complete: bool) -> None:
    """The sizes are as new as the last look that read all queues."""
    queues, value = make_queues()
    names = ["q", "q.dead", *RETRY]
    queues._note({name: QueueSizes(1, 1) for name in names[: None if is_complete else -1]})

    assert bool(value("sms_bridge_worker_queue_stats_timestamp_seconds")) is is_complete
