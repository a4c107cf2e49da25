"""Differences between needed and existing queues and exchanges, their effects and remedies.

Pure functions. `comparison` reads the existing entities over AMQP, `bridge.admin.management` over
HTTP.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bridge.config import TopologyMode
from bridge.topology import queue_facts
from bridge.topology.declarations import Entity, Exchange, Queue, Use, name_of
from bridge.topology.queue_facts import ExchangeFacts, QueueFacts

DifferenceKind = Literal[
    "missing", "different", "locked", "refused", "not_compared", "hidden", "unfit"
]

RECREATE: Final = "delete and re-create it with the arguments named, once it is empty"
# The remedy for a queue or an exchange that other programs declared, and may rely on.
USED_AS_IT_IS: Final = (
    "with rabbitmq.topology: declare it is used unchanged; if that is not acceptable, agree on its "
    "arguments with its owner, and re-create it once it is empty"
)
NOT_COMPARED: Final = "grant the configure permission, so that its arguments can be compared"
HIDDEN: Final = "grant the read permission, so that it can be checked"
_HARMLESS: Final = "no message is lost"
_REFUSED: Final = "publishers are refused when it is full"
_STREAM: Final = "it is a stream, which a worker cannot consume: no message is sent"
_NO_STREAM: Final = (
    "name another queue in worker.queue, or delete the stream and have a quorum queue declared"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """An entity on the broker that is not as needed, and the remedy.

    `locked`: another connection uses the queue exclusively. `refused`: a permission is missing.
    `hidden`: the broker does not show whether the entity exists. `unfit`: it exists, but cannot
    serve its purpose.
    """

    entity: Entity
    kind: DifferenceKind
    text: str
    fix: str

    @property
    def why(self) -> str:
        """Text with the entity, the difference and the remedy."""
        return f"{name_of(self.entity)}: {self.text}; {self.fix}"


def is_unusable(difference: Difference, mode: TopologyMode) -> bool:
    """Whether a difference prevents a role from working.

    Publishers may have declared the queue that the worker consumes, and subscribers the entities
    that events are published to: in `declare` mode both are used as they are. One of the bridge's
    own queues would lose messages with other arguments.
    """
    match difference.kind:
        case "not_compared" | "hidden":
            return False
        case "missing" | "refused" | "unfit":
            return True
        case "locked":
            return mode == "verify" or _use(difference.entity) != "subscribed"
        case "different":
            return mode == "verify" or _use(difference.entity) == "own"


def _use(entity: Entity) -> Use:
    return entity.use if isinstance(entity, Queue) else "subscribed"


def compare_queue(needed: Queue, facts: QueueFacts) -> Iterator[Difference]:
    """Yield each argument of a queue that is not as needed; policies are not compared.

    For a queue that other programs may have declared, each difference states its possible effect.
    """
    found = {
        "durable": facts.durable,
        "auto_delete": facts.auto_delete,
        "exclusive": facts.exclusive,
        **facts.arguments,
    }
    wanted = {"durable": True, "auto_delete": False, "exclusive": False, **needed.arguments}
    if needed.use == "consumed" and facts.type == "stream":
        yield Difference(needed, "unfit", _STREAM, _NO_STREAM)
        return
    for key in _differing(found, wanted):
        if needed.use == "own":
            text = f"{key} is {_value(found, key)} and must be {_value(wanted, key)}"
            yield Difference(needed, "different", text, RECREATE)
        else:
            rule = _COSTS.get(key)
            cost = _HARMLESS if rule is None else rule(facts)
            if cost == _REFUSED and needed.use == "consumed":
                cost = queue_facts.RETRIES_REFUSED
            text = f"{_is_not(key, found, wanted)}: {cost}"
            yield Difference(needed, "different", text, USED_AS_IT_IS)


def compare_exchange(needed: Exchange, facts: ExchangeFacts) -> Iterator[Difference]:
    """Yield each argument of an exchange that is not as needed, with its possible effect."""
    found = {
        "type": facts.type,
        "durable": facts.durable,
        "auto_delete": facts.auto_delete,
        "internal": facts.internal,
        **facts.arguments,
    }
    wanted = {"type": "topic", "durable": True, "auto_delete": False, "internal": False}
    for key in _differing(found, wanted):
        cost = _EXCHANGE_COSTS.get(key, _HARMLESS)
        text = f"{_is_not(key, found, wanted)}: {cost}"
        yield Difference(needed, "different", text, USED_AS_IT_IS)


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys((*wanted, *sorted(found)))
    return [key for key in keys if found.get(key) != wanted.get(key)]


def _is_not(key: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    said = f"{key} is {_value(found, key)}"
    return f"{said} instead of {wanted[key]}" if key in wanted else said


def _value(values: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401  numbers and texts
    return values.get(key, "not set")


def _cost_of_type(facts: QueueFacts) -> str:
    if facts.type == "stream":
        return (
            "a stream keeps consumed messages, and messages published without a consumer "
            "are not delivered"
        )
    return (
        f"a {facts.type} queue is stored on one node: unavailable while the node is down, lost "
        "with its disk; an unsynchronised mirror loses messages on takeover"
    )


def _cost_of_length(facts: QueueFacts) -> str:
    return _cost_of_dropping(facts, queue_facts.dropped_by_length(facts))


def _cost_of_dropping(facts: QueueFacts, text: str | None) -> str:
    return _REFUSED if text is None else queue_facts.dropped_to(facts, text)


def _cost_of_delivery_limit(facts: QueueFacts) -> str:
    limit = facts.value("delivery-limit")
    if limit < 0:
        return "before RabbitMQ 4 a message that is returned once is dropped"
    text = queue_facts.dropped_by_delivery_limit(limit)
    return queue_facts.dropped_to(facts, text)


def _cost_of_overflow(facts: QueueFacts) -> str:
    has_limit = any(facts.value(key) is not None for key in ("max-length", "max-length-bytes"))
    return _cost_of_length(facts) if has_limit else _HARMLESS


_COSTS: Final[Mapping[str, Callable[[QueueFacts], str]]] = {
    "durable": lambda _: queue_facts.NOT_DURABLE,
    "auto_delete": lambda _: queue_facts.AUTO_DELETED,
    "exclusive": lambda _: "it is gone with the connection that declared it",
    "x-queue-type": _cost_of_type,
    "x-expires": queue_facts.deleted_when_unused,
    "x-message-ttl": lambda facts: _cost_of_dropping(facts, queue_facts.dropped_by_age(facts)),
    "x-max-length": _cost_of_length,
    "x-max-length-bytes": _cost_of_length,
    "x-overflow": _cost_of_overflow,
    "x-delivery-limit": _cost_of_delivery_limit,
    "x-dead-letter-exchange": lambda facts: (
        "messages that RabbitMQ drops go without the bridge to "
        f"{queue_facts.dead_letters_of(facts)}"
    ),
    "x-max-priority": lambda _: (
        "messages of higher priority are delivered first, and may starve the others"
    ),
    "x-single-active-consumer": lambda _: "one worker at a time gets messages",
}
_EXCHANGE_COSTS: Final[Mapping[str, str]] = {
    "type": "it routes by its own rules: unroutable events are answered 503",
    "durable": "a restart of the broker deletes it and its bindings",
    "auto_delete": "it is deleted with its last binding",
    "internal": "no client may publish to it: every event is answered 503",
    "alternate-exchange": "unroutable events go to the alternate exchange and count as stored",
}
