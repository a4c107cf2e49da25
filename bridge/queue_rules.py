"""What a queue's arguments and policies would do to messages: lose them, or leave them alone.

Pure. The rules are RabbitMQ's: of a limit that stands in an argument and in a policy the smaller
one holds, of everything else the argument. Since RabbitMQ 4.0 a quorum queue has a delivery limit
of 20 when none is set, and a message that is over it is dropped when there is no dead-letter
exchange; each look at a queue, and each client that dies with messages in hand, counts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bridge.topology import Queue

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
    timeout = facts.value("consumer-timeout")
    if timeout is not None and timeout < SHORT_CONSUMER_TIMEOUT_MS:
        yield Finding(
            f"queue {facts.name}",
            "warn",
            f"consumer-timeout is {timeout / 1000:g} s: a paused worker holds a message longer",
            "raise it to 30 minutes",
        )


def _judge_existence(facts: QueueFacts) -> Iterator[Finding]:
    subject = f"queue {facts.name}"
    if not facts.durable or facts.exclusive:
        yield Finding(
            subject, "fail", "it is gone after a restart of the broker", "make it durable"
        )
    if facts.auto_delete:
        yield Finding(
            subject, "fail", "it is deleted with its last consumer", "make it without auto-delete"
        )
    if (expires := facts.value("expires")) is not None:
        yield Finding(
            subject,
            "fail",
            f"it is deleted, messages and all, when unused for {expires / 1000:g} s",
            "remove `expires` from its arguments or policy",
        )


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
        else f"a message that came back {limit + 1} times is dropped ({said}): "
        "each crash of a consumer and each look counts"
    )
    yield _weigh(facts, text, fix, drops, has_dead_letters=has_dead_letters)


def _weigh(
    facts: QueueFacts, text: str, fix: str, drops: Result, *, has_dead_letters: bool
) -> Finding:
    if has_dead_letters:
        where = facts.value("dead-letter-exchange") or "the default exchange"
        text = f"{text.replace('dropped', 'dead-lettered')}, past the bridge, to {where}"
        return Finding(f"queue {facts.name}", "warn", text, fix)
    return Finding(f"queue {facts.name}", drops, text, fix)


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
