"""Who hears what peers say: each kind of facts has a model, and those that are to hear it."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from bridge.worker.cluster.messages import Facts
from bridge.worker.metrics import WorkerMetrics

AnyFacts = TypeVar("AnyFacts", bound=Facts)
Hear = Callable[[str, AnyFacts], None]


class Hearers:
    """The hearers of one worker; what does not fit its model is counted and goes no further."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._hearers: dict[str, tuple[type[Facts], list[Hear[Any]]]] = {}

    def add(self, facts: type[AnyFacts], hear: Hear[AnyFacts]) -> None:
        """Call `hear` with a peer's id and what it says, each time that it says facts of a kind."""
        _, hearers = self._hearers.setdefault(facts.kind, (facts, []))
        hearers.append(hear)

    def hand_on(self, worker_id: str, kind: str, facts: object) -> None:
        """Have all hear what a peer says; a kind that nobody hears is another version's."""
        model, hearers = self._hearers.get(kind, (None, ()))
        if model is None:
            return
        try:
            told = model.model_validate(facts)
        except ValidationError:
            self._metrics.peer_messages_malformed.inc()
        else:
            for hear in hearers:
                hear(worker_id, told)
