"""What a queue's policies would do to messages."""

from dataclasses import replace
from typing import Any

import pytest

from bridge.admin.checks.management_api import (
    has_default_limit,
    judge_default_limit,
    judge_policies,
)
from bridge.config import WorkerSettings
from bridge.topology.declarations import Queue, worker_topology
from bridge.topology.queue_facts import QueueFacts

OLD = (3, 10, 8)
NEW = (4, 2, 0)
# What keeps RabbitMQ 4 from its default of 20.
UNLIMITED = {"delivery-limit": -1}


CONSUMED = Queue("q", use="consumed")
(RETRY,) = (
    queue
    for queue in worker_topology(WorkerSettings(retry_delays=(5,), urgent_queue=None)).queues
    if queue.name.endswith(".5s")
)


def _results(
    version: tuple[int, ...], policy: dict[str, Any], needed: Queue = CONSUMED, **given: Any
) -> list[str]:
    facts = QueueFacts(name=needed.name, policy=policy, **given)
    return [finding.result for finding in judge_policies(facts, needed, version)]


@pytest.mark.parametrize(
    ("policy", "results"),
    [
        ({}, []),
        ({"message-ttl": 1000}, ["fail"]),
        ({"message-ttl": 1000, "dead-letter-exchange": "dlx"}, ["warn"]),
        ({"expires": 1000}, ["fail"]),
        ({"max-length": 5}, ["fail"]),
        ({"max-length-bytes": 5, "overflow": "drop-head"}, ["fail"]),
        # Retries that come back are refused, too.
        ({"max-length": 5, "overflow": "reject-publish"}, ["warn"]),
        ({"overflow": "reject-publish"}, []),
        ({"delivery-limit": 5}, ["fail"]),
        ({"delivery-limit": 5, "dead-letter-exchange": ""}, ["warn"]),
        ({"delivery-limit": -1}, ["fail"]),
        ({"consumer-timeout": 60_000}, ["warn"]),
        # Quorum queues have no mirrors.
        ({"ha-mode": "all"}, []),
    ],
    ids=str,
)
def test_policies_that_lose_messages_are_found(policy: dict[str, Any], results: list[str]) -> None:
    """A limit that drops messages is a failure, one that dead-letters them a warning."""
    assert _results(OLD, policy) == results


def test_subscribers_may_limit_their_queue() -> None:
    assert _results(OLD, {"max-length": 5}, Queue("q", use="subscribed")) == ["warn"]


def test_a_full_dead_letter_queue_may_refuse() -> None:
    assert _results(OLD, {"max-length": 5, "overflow": "reject-publish"}, Queue("q")) == []


def test_a_mirrored_queue_is_found() -> None:
    assert _results(OLD, {"ha-mode": "all"}, type="classic") == ["warn"]


@pytest.mark.parametrize(
    ("policy", "results"),
    [
        ({}, []),
        ({"message-ttl": 1000}, ["fail"]),
        ({"message-ttl": 60_000}, []),
        ({"expires": 60_000}, ["fail"]),
        ({"max-length": 10}, []),
    ],
    ids=str,
)
def test_policies_of_a_retry_queue(policy: dict[str, Any], results: list[str]) -> None:
    """The smaller of two TTLs applies, and nothing is delivered from a retry queue."""
    assert _results(OLD, policy, RETRY, arguments=RETRY.arguments) == results


def test_the_default_delivery_limit_of_rabbitmq_4_is_found() -> None:
    facts = QueueFacts(name="sms.outbound")
    finding = judge_default_limit([facts], vhost="/")

    assert has_default_limit(facts, NEW)
    assert finding.result == "warn"
    assert "21 times" in finding.text
    assert finding.fix == (
        "rabbitmqctl set_policy --apply-to queues sms-bridge-sms.outbound '^(sms[.]outbound)$' "
        "'{\"delivery-limit\":-1}'"
    )
    assert not has_default_limit(replace(facts, policy=UNLIMITED), NEW)
    assert not has_default_limit(replace(facts, type="classic"), NEW)
    assert not has_default_limit(replace(facts, is_policy_known=False), NEW)
    assert not has_default_limit(facts, OLD)
    assert _results(NEW, {}) == []


def test_the_remedy_of_the_default_limit_fits_the_vhost_and_the_policies() -> None:
    free = QueueFacts(name="a")
    under_a_policy = QueueFacts(name="b", policy_name="theirs")
    finding = judge_default_limit([free, under_a_policy], vhost="my host")

    assert (finding.fix or "").startswith("rabbitmqctl set_policy -p 'my host' ")
    assert "'^(a)$'" in (finding.fix or "")
    assert (finding.fix or "").endswith(
        "; add delivery-limit -1 to the policy theirs, in force on b"
    )


def test_a_policy_that_is_not_known_is_told() -> None:
    assert _results(NEW, {}, is_policy_known=False) == ["warn"]
