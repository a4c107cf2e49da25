"""What a queue's arguments and policies would do to messages: lose them, or leave them alone.

Pure. Since RabbitMQ 4.0 a quorum queue without a delivery limit has one of 20, and a negative limit
means none; older versions read a negative limit as: drop whatever comes back once.
"""

from collections.abc import Iterator
from typing import Final

from bridge.operators.finding import CheckResult, Finding
from bridge.topology import message_loss
from bridge.topology.declarations import Queue
from bridge.topology.facts import QueueFacts

DEFAULT_DELIVERY_LIMIT: Final = 20
_DEFAULT_LIMIT_SINCE: Final = (4, 0)
SHORT_CONSUMER_TIMEOUT_MS: Final = 15 * 60 * 1000
_MAKE_ANEW: Final = "delete it once it is empty, and let the bridge declare it"


def judge_retry_queue(facts: QueueFacts, needed: Queue) -> Iterator[Finding]:
    """Find what would lose messages that wait for their next attempt."""
    subject = f"queue {facts.name}"
    yield from _judge_existence(facts)
    wanted = {
        key.removeprefix("x-"): value
        for key, value in needed.arguments.items()
        if key != "x-queue-type"
    }
    for key, value in wanted.items():
        if facts.value(key) != value:
            text = (
                f"{key} is {facts.value(key)!r} and has to be {value!r}, "
                "or messages that wait are lost when the broker restarts, or never come back"
            )
            yield Finding(subject, "fail", text, _MAKE_ANEW)
    if facts.type != "quorum":
        text = f"it is a {facts.type} queue: what waits in it is lost when the broker restarts"
        yield Finding(subject, "fail", text, _MAKE_ANEW)


def judge_queue(
    facts: QueueFacts, *, version: tuple[int, ...], drops: CheckResult = "fail"
) -> Iterator[Finding]:
    """Find what would drop messages of a queue that is consumed from.

    `drops` is the result to report when a message can be dropped there.
    """
    yield from _judge_existence(facts)
    yield from _judge_drops(facts, version, drops)
    subject = f"queue {facts.name}"
    if facts.type == "classic" and facts.value("ha-mode") is not None:
        yield Finding(
            subject,
            "warn",
            "it is mirrored (ha-mode): a mirror that is not in step loses messages when it takes "
            "over, and RabbitMQ 4 has no mirrors",
            "make it a quorum queue",
        )
    timeout_ms = facts.value("consumer-timeout")
    if timeout_ms is not None and timeout_ms < SHORT_CONSUMER_TIMEOUT_MS:
        yield Finding(
            subject,
            "warn",
            f"consumer-timeout is {timeout_ms / 1000:g} s: a paused worker holds a message longer",
            "raise it to 30 minutes",
        )


def _judge_existence(facts: QueueFacts) -> Iterator[Finding]:
    subject = f"queue {facts.name}"
    if not facts.durable or facts.exclusive:
        yield Finding(subject, "fail", message_loss.NOT_DURABLE, "make it durable")
    if facts.auto_delete:
        yield Finding(subject, "fail", message_loss.AUTO_DELETED, "make it without auto-delete")
    if facts.value("expires") is not None:
        text = message_loss.deleted_when_unused(facts)
        yield Finding(subject, "fail", text, "remove `expires` from its arguments or policy")


def _judge_drops(
    facts: QueueFacts, version: tuple[int, ...], drops: CheckResult
) -> Iterator[Finding]:
    limits = (
        (
            message_loss.dropped_by_age(facts),
            "remove `message-ttl` from its arguments or policy; for requests set worker.max_age",
        ),
        (
            message_loss.dropped_by_length(facts),
            "set `overflow: reject-publish` beside the limit",
        ),
        (_over_delivery_limit(facts, version), _lift_delivery_limit(facts.name, version)),
    )
    result: CheckResult = "warn" if facts.has_dead_letters else drops
    for text, fix in limits:
        if text is not None:
            told = message_loss.dropped_to(facts, text)
            yield Finding(f"queue {facts.name}", result, told, fix)


def _over_delivery_limit(facts: QueueFacts, version: tuple[int, ...]) -> str | None:
    if facts.type != "quorum":
        return None
    limit = facts.value("delivery-limit")
    has_default = version >= _DEFAULT_LIMIT_SINCE
    if limit is None and has_default:
        return message_loss.dropped_by_delivery_limit(DEFAULT_DELIVERY_LIMIT, "RabbitMQ's default")
    if limit is None or (limit < 0 and has_default):
        return None
    if limit < 0:
        return (
            "delivery-limit is below zero, which this RabbitMQ reads as: drop what comes back once"
        )
    return message_loss.dropped_by_delivery_limit(limit, "delivery-limit")


def _lift_delivery_limit(name: str, version: tuple[int, ...]) -> str:
    if version < _DEFAULT_LIMIT_SINCE:
        return "remove `delivery-limit` from its arguments or policy"
    return (
        f"rabbitmqctl set_policy --apply-to queues sms-bridge-{name} "
        f"'^{name.replace('.', '[.]')}$' '{{\"delivery-limit\":-1}}'"
    )
