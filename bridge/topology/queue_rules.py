"""What a queue's arguments and policies would do to messages: lose them, or leave them alone.

Pure. The rules are RabbitMQ's: of a limit that stands in an argument and in a policy the smaller
one holds, of everything else the argument. Since RabbitMQ 4.0 a quorum queue has a delivery limit
of 20 when none is set, and a message that is over it is dropped when there is no dead-letter
exchange; each look at a queue, and each client that dies with messages in hand, counts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bridge.topology.declarations import Difference, Exchange, Queue

Result = Literal["ok", "warn", "fail"]

DEFAULT_DELIVERY_LIMIT: Final = 20
_DEFAULT_LIMIT_SINCE: Final = (4, 0)
_SMALLER: Final = ("message-ttl", "expires", "max-length", "max-length-bytes", "delivery-limit")
SHORT_CONSUMER_TIMEOUT_MS: Final = 15 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check: `fail` would lose messages or cannot work; `fix` is what to do."""

    subject: str
    result: Result
    text: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What the broker knows of a queue. `policy` holds what policies set, operator's included."""

    name: str
    type: str = "quorum"
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)

    def value(self, key: str) -> Any:  # noqa: ANN401  numbers and texts
        """Return what holds for a key such as `message-ttl`, or None."""
        argument, policy = self.arguments.get(f"x-{key}"), self.policy.get(key)
        if argument is None or policy is None:
            return policy if argument is None else argument
        return _smaller(argument, policy) if key in _SMALLER else argument


def merge_policies(ordinary: Mapping[str, Any], operators: Mapping[str, Any]) -> dict[str, Any]:
    """Put a policy and an operator policy together: the smaller limit, else the operator's."""
    merged = {**ordinary, **operators}
    for key in _SMALLER:
        if key in ordinary and key in operators:
            merged[key] = _smaller(ordinary[key], operators[key])
    return merged


def _smaller(first: int, second: int) -> int:
    # Below zero is no limit.
    return min((value for value in (first, second) if value >= 0), default=first)


def judge_retry_queue(facts: QueueFacts, needed: Queue) -> Iterator[Finding]:
    """Find what would lose messages that wait for their next attempt."""
    yield from _judge_existence(facts)
    wanted = {
        key.removeprefix("x-"): value
        for key, value in needed.arguments.items()
        if key != "x-queue-type"
    }
    for key, value in wanted.items():
        if facts.value(key) != value:
            yield Finding(
                f"queue {facts.name}",
                "fail",
                f"{key} is {facts.value(key)!r} and has to be {value!r}, "
                "or messages that wait are lost when the broker restarts, or never come back",
                "delete it once it is empty, and let the bridge declare it",
            )
    if facts.type != "quorum":
        yield Finding(
            f"queue {facts.name}",
            "fail",
            f"it is a {facts.type} queue: what waits in it is lost when the broker restarts",
            "delete it once it is empty, and let the bridge declare it",
        )


def judge_queue(
    facts: QueueFacts, *, version: tuple[int, ...], drops: Result = "fail"
) -> Iterator[Finding]:
    """Find what would drop messages of a queue that is consumed from.

    `drops` is how bad it is when a message is dropped there.
    """
    yield from _judge_existence(facts)
    has_dead_letters = facts.value("dead-letter-exchange") is not None
    for rule in (_judge_ttl, _judge_length):
        if (found := rule(facts)) is not None:
            text, fix = found
            yield _weigh(facts, text, fix, drops, has_dead_letters=has_dead_letters)
    yield from _judge_delivery_limit(facts, version, drops, has_dead_letters=has_dead_letters)
    if facts.type == "classic" and facts.value("ha-mode") is not None:
        yield Finding(
            f"queue {facts.name}",
            "warn",
            "it is mirrored (ha-mode): a mirror that is not in step loses messages when it takes "
            "over, and RabbitMQ 4 has no mirrors",
            "make it a quorum queue",
        )
    timeout = facts.value("consumer-timeout")
    if timeout is not None and timeout < SHORT_CONSUMER_TIMEOUT_MS:
        yield Finding(
            f"queue {facts.name}",
            "warn",
            f"consumer-timeout is {timeout / 1000:g} s: a paused worker holds a message longer",
            "raise it to 30 minutes",
        )


_NOT_DURABLE: Final = "it is gone after a restart of the broker"
_AUTO_DELETED: Final = (
    "it is deleted with its last consumer, messages and all: a restart or a pause is enough"
)


def _judge_existence(facts: QueueFacts) -> Iterator[Finding]:
    subject = f"queue {facts.name}"
    if not facts.durable or facts.exclusive:
        yield Finding(subject, "fail", _NOT_DURABLE, "make it durable")
    if facts.auto_delete:
        yield Finding(subject, "fail", _AUTO_DELETED, "make it without auto-delete")
    if facts.value("expires") is not None:
        fix = "remove `expires` from its arguments or policy"
        yield Finding(subject, "fail", _expires(facts), fix)


def _expires(facts: QueueFacts) -> str:
    return f"it is deleted, messages and all, when unused for {facts.value('expires') / 1000:g} s"


def _judge_ttl(facts: QueueFacts) -> tuple[str, str] | None:
    ttl = facts.value("message-ttl")
    if ttl is None:
        return None
    return (
        f"messages are dropped after {ttl / 1000:g} s (message-ttl)",
        "remove `message-ttl` from its arguments or policy; for requests set worker.max_age",
    )


def _judge_length(facts: QueueFacts) -> tuple[str, str] | None:
    limits = [key for key in ("max-length", "max-length-bytes") if facts.value(key) is not None]
    if not limits or facts.value("overflow") in {"reject-publish", "reject-publish-dlx"}:
        return None
    return (
        f"the oldest message is dropped when it is full ({' and '.join(limits)}, drop-head)",
        "set `overflow: reject-publish` beside the limit",
    )


def _judge_delivery_limit(
    facts: QueueFacts, version: tuple[int, ...], drops: Result, *, has_dead_letters: bool
) -> Iterator[Finding]:
    if facts.type != "quorum":
        return
    limit = facts.value("delivery-limit")
    has_default = version >= _DEFAULT_LIMIT_SINCE
    fix = (
        f"rabbitmqctl set_policy --apply-to queues sms-bridge-{facts.name} "
        f"'^{facts.name.replace('.', '[.]')}$' '{{\"delivery-limit\":-1}}'"
        if has_default
        else "remove `delivery-limit` from its arguments or policy"
    )
    if limit is None and has_default:
        limit, said = DEFAULT_DELIVERY_LIMIT, "RabbitMQ's default"
    elif limit is None:
        return
    else:
        said = "delivery-limit"
    if limit < 0 and has_default:
        return
    text = (
        "delivery-limit is below zero, which this RabbitMQ reads as: drop what comes back once"
        if limit < 0
        else _over_delivery_limit(limit, said)
    )
    yield _weigh(facts, text, fix, drops, has_dead_letters=has_dead_letters)


def _over_delivery_limit(limit: int, said: str) -> str:
    return (
        f"a message that came back {limit + 1} times is dropped ({said}): "
        "each crash of a consumer and each look counts"
    )


def _weigh(
    facts: QueueFacts, text: str, fix: str, drops: Result, *, has_dead_letters: bool
) -> Finding:
    if has_dead_letters:
        return Finding(f"queue {facts.name}", "warn", _past_the_bridge(facts, text), fix)
    return Finding(f"queue {facts.name}", drops, text, fix)


def _past_the_bridge(facts: QueueFacts, text: str) -> str:
    """Say of what is dropped that it is dead-lettered, and to where."""
    where = facts.value("dead-letter-exchange") or "the default exchange"
    return f"{text.replace('dropped', 'dead-lettered')}, past the bridge, to {where}"


# What differs from what is needed, and what that can cost

RECREATE: Final = "delete and re-create it with the arguments named, once it is empty"
# Others may rely on what they have declared.
USED_AS_IT_IS: Final = (
    "with rabbitmq.topology: declare it is used as it is; if that costs too much, agree with "
    "whoever declares it, and delete it once it is empty"
)
_HARMLESS: Final = "no message is lost by it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """What the broker knows of an exchange."""

    type: str = "topic"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def compare_queue(needed: Queue, facts: QueueFacts) -> Iterator[Difference]:
    """Find each argument of a queue that is not as needed; policies are no arguments.

    Of a queue that others may have declared each is told with what it can cost.
    """
    found = {
        "durable": facts.durable,
        "auto_delete": facts.auto_delete,
        "exclusive": facts.exclusive,
        **facts.arguments,
    }
    wanted = {"durable": True, "auto_delete": False, "exclusive": False, **needed.arguments}
    for key in _differing(found, wanted):
        if needed.use == "own":
            text = f"{key} is {_value(found, key)} and has to be {_value(wanted, key)}"
            yield Difference(needed, "different", text, RECREATE)
        else:
            text = f"{_is_not(key, found, wanted)}: {_cost(key, facts)}"
            yield Difference(needed, "different", text, USED_AS_IT_IS)


def compare_exchange(needed: Exchange, facts: ExchangeFacts) -> Iterator[Difference]:
    """Find each argument of an exchange that is not as needed, with what it can cost."""
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


def _cost(key: str, facts: QueueFacts) -> str:
    rule = _COSTS.get(key)
    return _HARMLESS if rule is None else rule(facts)


def _cost_of_type(facts: QueueFacts) -> str:
    if facts.type == "stream":
        return "nothing is taken off a stream, and what came while nobody consumed is not delivered"
    return (
        f"a {facts.type} queue is on one node: it is away while that is, and lost with its disk; "
        "a mirror that is not in step loses messages when it takes over"
    )


def _cost_of_ttl(facts: QueueFacts) -> str:
    return _cost_of_dropping(facts, _judge_ttl(facts))


def _cost_of_length(facts: QueueFacts) -> str:
    return _cost_of_dropping(facts, _judge_length(facts))


def _cost_of_dropping(facts: QueueFacts, rule: tuple[str, str] | None) -> str:
    if rule is None:
        return "publishers are refused when it is full"
    text, _ = rule
    has_dead_letters = facts.value("dead-letter-exchange") is not None
    return _past_the_bridge(facts, text) if has_dead_letters else text


def _cost_of_delivery_limit(facts: QueueFacts) -> str:
    limit = facts.value("delivery-limit")
    if limit < 0:
        return "before RabbitMQ 4 this drops what comes back once"
    return _cost_of_dropping(facts, (_over_delivery_limit(limit, "delivery-limit"), ""))


def _cost_of_overflow(facts: QueueFacts) -> str:
    has_limit = any(facts.value(key) is not None for key in ("max-length", "max-length-bytes"))
    return _cost_of_length(facts) if has_limit else _HARMLESS


def _cost_of_dead_letters(facts: QueueFacts) -> str:
    where = facts.value("dead-letter-exchange") or "the default exchange"
    return f"what RabbitMQ itself drops goes to {where}, past the bridge"


_COSTS: Final[Mapping[str, Callable[[QueueFacts], str]]] = {
    "durable": lambda _: _NOT_DURABLE,
    "auto_delete": lambda _: _AUTO_DELETED,
    "exclusive": lambda _: "it is gone with the connection that declared it",
    "x-queue-type": _cost_of_type,
    "x-expires": _expires,
    "x-message-ttl": _cost_of_ttl,
    "x-max-length": _cost_of_length,
    "x-max-length-bytes": _cost_of_length,
    "x-overflow": _cost_of_overflow,
    "x-delivery-limit": _cost_of_delivery_limit,
    "x-dead-letter-exchange": _cost_of_dead_letters,
    "x-max-priority": lambda _: (
        "what has a higher priority overtakes, and may keep the rest waiting"
    ),
    "x-single-active-consumer": lambda _: "one worker at a time gets messages",
}
_EXCHANGE_COSTS: Final[Mapping[str, str]] = {
    "type": "it routes by its own rules: what no queue takes is answered 503",
    "durable": "it is gone, bindings and all, after a restart of the broker",
    "auto_delete": "it is deleted with its last binding",
    "internal": "no client may publish to it: every event is answered 503",
    "alternate-exchange": "what no queue takes goes there, and counts as stored",
}


def judge_bindings(exchange: str, bound: Mapping[str, QueueFacts]) -> Iterator[Finding]:
    """Find events that would be answered 200 and lost: no bound queue outlives the broker."""
    subject = f"exchange {exchange}"
    fragile = sorted(name for name, facts in bound.items() if not _lasts(facts))
    if not bound:
        yield Finding(
            subject,
            "fail",
            "no queue is bound to it: every webhook is answered 503",
            "set webhook.queue, or bind a durable queue",
        )
    elif len(fragile) == len(bound):
        yield Finding(
            subject,
            "fail",
            f"no bound queue outlives a restart of the broker: {', '.join(fragile)}",
            "set webhook.queue, or bind a durable queue",
        )
    elif fragile:
        yield Finding(
            subject,
            "warn",
            f"what these queues hold is gone after a restart of the broker: {', '.join(fragile)}",
            "make them durable, if their subscribers need every event",
        )
    else:
        yield Finding(subject, "ok", f"bound to durable queues: {', '.join(sorted(bound))}")


_FRAGILE: Final[tuple[Callable[[QueueFacts], bool], ...]] = (
    lambda facts: not facts.durable,
    lambda facts: facts.auto_delete,
    lambda facts: facts.exclusive,
    lambda facts: facts.value("expires") is not None,
)


def _lasts(facts: QueueFacts) -> bool:
    return not any(test(facts) for test in _FRAGILE)
