"""What a queue's arguments and policies would do to messages."""

from typing import Any

import pytest

from bridge.config import WorkerSettings
from bridge.operators.checks.queue_rules import judge_queue, judge_retry_queue
from bridge.topology.declarations import Queue, worker_topology
from bridge.topology.facts import QueueFacts

OLD = (3, 10, 8)
NEW = (4, 2, 0)
# What keeps RabbitMQ 4 from its default of 20.
UNLIMITED = {"delivery-limit": -1}


def _results(version: tuple[int, ...], **given: Any) -> list[str]:
    facts = QueueFacts(name="q", **given)
    return [finding.result for finding in judge_queue(facts, version=version)]


@pytest.mark.parametrize(
    ("policy", "results"),
    [
        ({}, []),
        ({"message-ttl": 1000}, ["fail"]),
        ({"message-ttl": 1000, "dead-letter-exchange": "dlx"}, ["warn"]),
        ({"expires": 1000}, ["fail"]),
        ({"max-length": 5}, ["fail"]),
        ({"max-length-bytes": 5, "overflow": "drop-head"}, ["fail"]),
        ({"max-length": 5, "overflow": "reject-publish"}, []),
        ({"max-length": 5, "dead-letter-exchange": ""}, ["warn"]),
        ({"delivery-limit": 5}, ["fail"]),
        ({"delivery-limit": 5, "dead-letter-exchange": ""}, ["warn"]),
        ({"delivery-limit": -1}, ["fail"]),
        ({"consumer-timeout": 60_000}, ["warn"]),
        ({"consumer-timeout": 1_800_000}, []),
    ],
    ids=str,
)
def test_limits_that_drop_messages_are_found(policy: dict[str, Any], results: list[str]) -> None:
    """A limit that drops messages is a failure, one that dead-letters them a warning."""
    arguments = {f"x-{key}": value for key, value in policy.items()}

    assert _results(OLD, policy=policy) == results
    assert _results(OLD, arguments=arguments) == results


def test_the_default_delivery_limit_of_rabbitmq_4_is_found() -> None:
    """Since RabbitMQ 4 a quorum queue drops what came back 21 times, unless it is told not to."""
    (finding,) = judge_queue(QueueFacts(name="sms.outbound"), version=NEW)

    assert finding.result == "fail"
    assert "21 times" in finding.text
    assert "'{\"delivery-limit\":-1}'" in (finding.fix or "")
    assert _results(NEW, policy=UNLIMITED) == []
    assert _results(NEW, type="classic") == []
    assert _results(OLD) == []


@pytest.mark.parametrize(
    "given", [{"durable": False}, {"auto_delete": True}, {"exclusive": True}], ids=str
)
def test_queues_that_do_not_last_are_found(given: dict[str, Any]) -> None:
    """A queue that goes away with the broker or its consumer is a failure."""
    assert _results(NEW, policy=UNLIMITED, **given) == ["fail"]


def _retry_queue() -> Queue:
    return worker_topology(WorkerSettings(retry_delays=(5,))).queues[1]


@pytest.mark.parametrize(
    ("changed", "fails"),
    [
        ({}, 0),
        ({"x-dead-letter-strategy": "at-most-once"}, 1),
        ({"x-overflow": "drop-head"}, 1),
        ({"x-message-ttl": None}, 1),
        ({"x-dead-letter-routing-key": "elsewhere"}, 1),
        ({"x-dead-letter-exchange": None}, 1),
        ({"x-expires": 60_000}, 1),
        ({"x-max-length": 10}, 0),
    ],
    ids=str,
)
def test_a_retry_queue_that_would_lose_messages_is_found(
    changed: dict[str, Any], fails: int
) -> None:
    """A retry queue has its TTL, its way back, at-least-once and reject-publish, or it fails."""
    needed = _retry_queue()
    arguments = {k: v for k, v in (needed.arguments | changed).items() if v is not None}
    facts = QueueFacts(name=needed.name, arguments=arguments)

    assert [one.result for one in judge_retry_queue(facts, needed)] == ["fail"] * fails


def test_policies_can_stand_in_for_a_retry_queues_arguments() -> None:
    """What a retry queue needs may come from a policy as well."""
    needed = _retry_queue()
    policy = {key.removeprefix("x-"): value for key, value in needed.arguments.items()}

    assert list(judge_retry_queue(QueueFacts(name=needed.name, policy=policy), needed)) == []


def test_a_classic_retry_queue_is_found() -> None:
    """A classic retry queue loses what waits in it at a restart of the broker."""
    needed = _retry_queue()
    facts = QueueFacts(name=needed.name, type="classic", arguments=needed.arguments)

    assert [one.result for one in judge_retry_queue(facts, needed)] == ["fail"]


def test_a_mirrored_queue_is_found() -> None:
    """A policy that mirrors a classic queue is a warning; on a quorum queue it does nothing."""
    assert _results(OLD, type="classic", policy={"ha-mode": "all"}) == ["warn"]
    assert _results(OLD, policy={"ha-mode": "all"}) == []
