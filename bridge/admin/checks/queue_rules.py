"""What a queue's arguments and policies would do to messages: lose them, or leave them alone.

Pure. Since RabbitMQ 4.0 a quorum queue without a delivery limit has one of 20, and a negative limit
means none; older versions read a negative limit as: drop whatever comes back once.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from bridge.admin.finding import CheckResult, Finding
from bridge.topology import queue_facts
from bridge.topology.declarations import Queue
from bridge.topology.queue_facts import QueueFacts

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
        yield Finding(subject, "fail", queue_facts.NOT_DURABLE, "make it durable")
    if facts.auto_delete:
        yield Finding(subject, "fail", queue_facts.AUTO_DELETED, "make it without auto-delete")
    if facts.value("expires") is not None:
        text = queue_facts.deleted_when_unused(facts)
        yield Finding(subject, "fail", text, "remove `expires` from its arguments or policy")


def _judge_drops(
    facts: QueueFacts, version: tuple[int, ...], drops: CheckResult
) -> Iterator[Finding]:
    limits = (
        (
            queue_facts.dropped_by_age(facts),
            "remove `message-ttl` from its arguments or policy; for requests set worker.max_age",
        ),
        (
            queue_facts.dropped_by_length(facts),
            "set `overflow: reject-publish` beside the limit",
        ),
        (_over_delivery_limit(facts, version), _lift_delivery_limit(version)),
    )
    result: CheckResult = "warn" if facts.has_dead_letters else drops
    for text, fix in limits:
        if text is not None:
            told = queue_facts.dropped_to(facts, text)
            yield Finding(f"queue {facts.name}", result, told, fix)


def has_default_limit(facts: QueueFacts, version: tuple[int, ...]) -> bool:
    """Whether RabbitMQ drops what came back often, since nothing says otherwise."""
    is_limited = facts.type == "quorum" and version >= _DEFAULT_LIMIT_SINCE
    return is_limited and facts.is_policy_known and facts.value("delivery-limit") is None


def judge_default_limit(queues: Sequence[QueueFacts], *, vhost: str) -> Finding:
    """Say of queues with RabbitMQ's default delivery limit what it costs, and how to lift it."""
    names = ", ".join(facts.name for facts in queues)
    text = (
        f"RabbitMQ drops a message that came back {DEFAULT_DELIVERY_LIMIT + 1} times, its default "
        f"since version 4, as from a worker that dies again and again: {names}"
    )
    free = [facts.name for facts in queues if facts.policy_name is None]
    fixes = []
    if free:
        pattern = "|".join(exactly(name) for name in free)
        where = "" if vhost == "/" else f"-p {shlex.quote(vhost)} "
        policy = shlex.quote(f"sms-bridge-{free[0]}")
        fixes.append(
            f"rabbitmqctl set_policy {where}--apply-to queues {policy} "
            f"'^({pattern})$' '{{\"delivery-limit\":-1}}'"
        )
    # One policy alone is in force on a queue.
    fixes += [
        f"add delivery-limit -1 to the policy {facts.policy_name}, in force on {facts.name}"
        for facts in queues
        if facts.policy_name is not None
    ]
    return Finding("delivery limit", "warn", text, "; ".join(fixes))


def judge_refusals(facts: QueueFacts) -> Iterator[Finding]:
    """Find a limit by which the queue of requests refuses retries that come back."""
    if queue_facts.refuses_when_full(facts):
        yield Finding(
            f"queue {facts.name}",
            "warn",
            queue_facts.RETRIES_REFUSED,
            "remove the limit from its arguments or policy, and bound publishers in another way; "
            "`sms-bridge status` counts retries that are late",
        )


def judge_policy(facts: QueueFacts) -> Iterator[Finding]:
    """Find a queue of which the broker does not tell what its policies set."""
    if not facts.is_policy_known:
        yield Finding(
            f"queue {facts.name}",
            "warn",
            "which policy is in force is not told yet",
            "run this again; when it stays so, look at the queue's leader: "
            f"rabbitmq-queues quorum_status {facts.name}",
        )


def _over_delivery_limit(facts: QueueFacts, version: tuple[int, ...]) -> str | None:
    if facts.type != "quorum":
        return None
    limit = facts.value("delivery-limit")
    unlimited = version >= _DEFAULT_LIMIT_SINCE
    if limit is None or (limit < 0 and unlimited):
        return None
    if limit < 0:
        return (
            "delivery-limit is below zero, which this RabbitMQ reads as: drop what comes back once"
        )
    return queue_facts.dropped_by_delivery_limit(limit, "delivery-limit")


def _lift_delivery_limit(version: tuple[int, ...]) -> str:
    if version < _DEFAULT_LIMIT_SINCE:
        return "remove `delivery-limit` from its arguments or policy"
    return "set `delivery-limit` to -1 in its policy, or remove it from its arguments"


def exactly(name: str) -> str:
    """Write a name as a pattern that matches it alone.

    In brackets rather than with backslashes, which a shell or a YAML file may take away.
    """
    return re.sub(r"[^\w/-]", r"[\g<0>]", name)
