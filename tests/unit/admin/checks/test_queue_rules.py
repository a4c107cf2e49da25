"""What a queue's arguments and policies would do to messages."""

from dataclasses import replace
from typing import Any

import pytest

from bridge.admin.checks.management_api import (
    has_default_limit,
    judge_default_limit,
    judge_policy,
    judge_queue,
    judge_refusals,
    judge_retry_queue,
)
from bridge.config import WorkerSettings
from bridge.topology.declarations import Queue, worker_topology
from bridge.topology.queue_facts import QueueFacts

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
    arguments = {f"x-{key}": value for key, value in policy.items()}

    assert _results(OLD, policy=policy) == results
    assert _results(OLD, arguments=arguments) == results


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
    assert _results(NEW) == []


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
    (finding,) = judge_policy(QueueFacts(name="q", is_policy_known=False))

    assert finding.result == "warn"
    assert list(judge_policy(QueueFacts(name="q"))) == []


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        ({}, 0),
        ({"max-length": 5}, 0),
        ({"overflow": "reject-publish"}, 0),
        ({"max-length": 5, "overflow": "reject-publish"}, 1),
        ({"max-length-bytes": 5, "overflow": "reject-publish-dlx"}, 1),
    ],
    ids=str,
)
def test_a_limit_that_refuses_retries_is_found(policy: dict[str, Any], count: int) -> None:
    found = list(judge_refusals(QueueFacts(name="q", policy=policy)))

    assert [one.result for one in found] == ["warn"] * count


@pytest.mark.parametrize(
    "given", [{"durable": False}, {"auto_delete": True}, {"exclusive": True}], ids=str
)
def test_queues_that_do_not_last_are_found(given: dict[str, Any]) -> None:
    assert _results(NEW, policy=UNLIMITED, **given) == ["fail"]


def _retry_queue() -> Queue:
    return worker_topology(WorkerSettings(retry_delays=(5,), urgent_queue=None)).queues[1]


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
    needed = _retry_queue()
    arguments = {k: v for k, v in (needed.arguments | changed).items() if v is not None}
    facts = QueueFacts(name=needed.name, arguments=arguments)

    assert [one.result for one in judge_retry_queue(facts, needed)] == ["fail"] * fails


def test_policies_can_stand_in_for_a_retry_queues_arguments() -> None:
    needed = _retry_queue()
    policy = {key.removeprefix("x-"): value for key, value in needed.arguments.items()}

    assert list(judge_retry_queue(QueueFacts(name=needed.name, policy=policy), needed)) == []


def test_a_classic_retry_queue_is_found() -> None:
    needed = _retry_queue()
    facts = QueueFacts(name=needed.name, type="classic", arguments=needed.arguments)

    assert [one.result for one in judge_retry_queue(facts, needed)] == ["fail"]


def test_a_mirrored_queue_is_found() -> None:
    assert _results(OLD, type="classic", policy={"ha-mode": "all"}) == ["warn"]
    assert _results(OLD, policy={"ha-mode": "all"}) == []
