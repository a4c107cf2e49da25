"""The queues from which a worker takes, also those sorted into before, and what it counts."""

from types import SimpleNamespace
from typing import Any, cast

import aiormq.exceptions
import pytest

from bridge.amqp.client import Connection
from bridge.config import WorkerSettings
from bridge.telemetry.metrics import new_registry
from bridge.topology.declarations import queues_behind
from bridge.topology.queue_sizes import QueueSizes
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.own_queues import LEFT_BEHIND, NOT_READABLE, OwnQueues
from tests.ears import Ears

BEHIND = ["q.urgent", "q.normal"]


class Broker:
    """What stands in for a connection: which queues exist, and which the user may read."""

    def __init__(
        self, *existing: str, readable: tuple[str, ...] = ("q.urgent", "q.normal")
    ) -> None:
        self.existing = set(existing)
        self.readable = readable
        self.asked: list[str] = []

    @property
    def transport(self) -> Any:
        """Return what opens channels."""
        return SimpleNamespace(connection=SimpleNamespace(channel=self.open))

    async def open(self, **_: object) -> "Broker":
        """Open a channel."""
        return self

    async def close(self) -> None:
        """Close it."""

    async def queue_declare(self, name: str, *, passive: bool) -> object:
        """Look for a queue."""
        assert passive
        self.asked.append(name)
        if name not in self.existing:
            raise aiormq.exceptions.ChannelNotFoundEntity
        return SimpleNamespace(message_count=3, consumer_count=1)

    async def basic_consume(self, name: str, _: object, *, arguments: dict[str, object]) -> None:
        """Refuse: for want of a permission, or because of the argument that is wrong."""
        assert arguments == {"x-priority": "no number"}
        if name not in self.readable:
            raise aiormq.exceptions.ChannelAccessRefused
        raise aiormq.exceptions.ChannelPreconditionFailed


def make_queues(priorities: str = "off") -> tuple[OwnQueues, Any]:
    """Make a worker's queues, and what reads its metrics."""
    settings = WorkerSettings.model_validate({"queue": "q", "priorities": priorities})
    registry = new_registry()
    metrics = WorkerMetrics(
        registry,
        queue="q",
        retry_queues=[f"q.retry.{name}" for name in ("5s", "30s", "2m", "10m", "1h")],
        dead="q.dead",
        queues_behind=queues_behind(settings),
    )
    return OwnQueues(settings, metrics), registry.get_sample_value


async def look(queues: OwnQueues, broker: Broker) -> None:
    """Look what was left behind."""
    await queues.look_behind(cast("Connection", broker))


async def test_without_priorities_the_queue_is_taken_from(ears: Ears) -> None:
    """And nothing is said of queues that nobody has made."""
    queues, _ = make_queues()
    await look(queues, Broker("q"))

    assert queues.taken == ("q",)
    assert ears.heard("queues_left_behind") == []


async def test_with_priorities_only_what_is_sorted_is_taken() -> None:
    """The urgent queue first; what lanes have left is looked for."""
    queues, _ = make_queues("on")
    broker = Broker()
    await look(queues, broker)

    assert queues.taken == ("q.urgent", "q.normal")
    assert broker.asked == [*BEHIND, "q.lane.0"]


async def test_what_was_left_behind_is_taken(ears: Ears) -> None:
    """As long as the queues are there, and it is said once."""
    queues, _ = make_queues()
    for _ in range(2):
        await look(queues, Broker("q", *BEHIND))
    assert queues.taken == ("q", *BEHIND)
    (told,) = ears.heard("queues_left_behind")
    assert told == {"queues": BEHIND, "remedy": LEFT_BEHIND}

    await look(queues, Broker("q"))
    assert queues.taken == ("q",)


async def test_what_may_not_be_read_is_not_taken(ears: Ears) -> None:
    """A worker that tried would end its channel again and again; it says what to do."""
    queues, _ = make_queues()
    await look(queues, Broker("q", *BEHIND, readable=("q.urgent",)))

    assert queues.taken == ("q", "q.urgent")
    (told,) = ears.heard("queues_left_behind")
    assert told == {"queues": BEHIND, "remedy": NOT_READABLE}


@pytest.mark.parametrize(("priorities", "ready"), [("on", 111), ("off", 100)])
async def test_what_is_sorted_counts_as_waiting(priorities: str, ready: int) -> None:
    """In the main queue, for alerts and scalers; retries and dead letters are none of it."""
    queues, value = make_queues(priorities)
    found = {"q": 100, "q.urgent": 1, "q.normal": 10, "q.dead": 1000, "q.retry.5s": 5000}
    queues._note({name: QueueSizes(count, 2) for name, count in found.items()})

    name = "sms_bridge_worker_queue_messages_ready"
    assert value(name, {"queue": "q", "role": "main"}) == ready
    assert value(name, {"queue": "q.dead", "role": "dead_letter"}) == 1000
    sorted_ones = [value(name, {"queue": one, "role": "sorted"}) for one in BEHIND]
    assert sorted_ones == ([1, 10] if priorities == "on" else [None, None])
    assert value("sms_bridge_worker_queue_consumers", {"queue": "q"}) == 2


async def test_what_was_left_behind_counts_as_waiting() -> None:
    """Whoever looks whether the queue is empty must not overlook it."""
    queues, value = make_queues()
    await look(queues, Broker("q", *BEHIND))
    queues._note({"q": QueueSizes(1, 1), "q.normal": QueueSizes(10, 1)})

    labels = {"queue": "q", "role": "main"}
    assert value("sms_bridge_worker_queue_messages_ready", labels) == 11
