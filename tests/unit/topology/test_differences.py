"""Where the broker is not as it should be, what that can cost, and who can work with it."""

from typing import Any

import pytest

from bridge.config import WorkerSettings
from bridge.topology.declarations import Binding, Entity, Exchange, Queue, worker_topology
from bridge.topology.differences import (
    Difference,
    DifferenceKind,
    compare_exchange,
    compare_queue,
    is_unusable,
)
from bridge.topology.queue_facts import ExchangeFacts, QueueFacts

WITHOUT_URGENT = WorkerSettings(retry_delays=(5,), urgent_queue=None)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({}, []),
        ({"arguments": {}, "type": "classic"}, ["x-queue-type is not set instead of quorum: a cl"]),
        ({"durable": False}, ["durable is False instead of True: it is gone after a restart"]),
        ({"exclusive": True}, ["it is gone with the connection that declared it"]),
        ({"x-expires": 60_000}, ["x-expires is 60000: it is deleted with its messages"]),
        ({"x-message-ttl": 5000}, ["messages are dropped after 5 s"]),
        (
            {"x-message-ttl": 5000, "x-dead-letter-exchange": ""},
            ["x-dead-letter-exchange is : messages that RabbitMQ drops", "dead-lettered after 5 s"],
        ),
        ({"x-max-length": 9}, ["the oldest message is dropped"]),
        (
            {"x-max-length-bytes": 9, "x-overflow": "reject-publish"},
            ["and returning retries", "and returning retries"],
        ),
        ({"x-delivery-limit": 3}, ["returned 4 times is dropped"]),
        ({"x-delivery-limit": -1}, ["before RabbitMQ 4"]),
        ({"x-max-priority": 3}, ["are delivered first"]),
        ({"x-single-active-consumer": True}, ["one worker at a time"]),
    ],
    ids=str,
)
def test_what_others_have_declared_is_told_with_what_it_costs(
    given: dict[str, Any], texts: list[str]
) -> None:
    """Each argument that differs is told once, with what it can cost and what to do."""
    arguments = {key: value for key, value in given.items() if key.startswith("x-")}
    facts: dict[str, Any] = {"arguments": {"x-queue-type": "quorum", **arguments}}
    facts |= {key: value for key, value in given.items() if not key.startswith("x-")}
    needed = Queue("q", use="consumed")
    found = list(compare_queue(needed, QueueFacts(name="q", **facts)))

    assert len(found) == len(texts)
    assert [t for t, one in zip(texts, found, strict=True) if t not in one.text] == []
    assert {one.kind for one in found} <= {"different"}
    assert all("it is used unchanged" in one.fix for one in found)


def test_a_queue_of_our_own_has_to_be_as_it_is_needed() -> None:
    """Of a retry queue it is told what each argument has to be, and that it must be made anew."""
    needed = worker_topology(WITHOUT_URGENT).queues[1]
    facts = QueueFacts(name=needed.name, arguments=needed.arguments | {"x-message-ttl": 7000})
    (found,) = compare_queue(needed, facts)

    assert found.text == "x-message-ttl is 7000 and must be 5000"
    assert "re-create it" in found.why
    assert [queue.use for queue in worker_topology(WITHOUT_URGENT).queues] == [
        "consumed",
        "own",
        "own",
    ]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({}, []),
        ({"type": "fanout"}, ["type is fanout instead of topic: it routes by its own rules"]),
        ({"durable": False}, ["a restart of the broker deletes it and its bindings"]),
        ({"auto_delete": True}, ["with its last binding"]),
        ({"internal": True}, ["no client may publish to it"]),
        ({"arguments": {"alternate-exchange": "x"}}, ["count as stored"]),
    ],
    ids=str,
)
def test_an_exchange_of_others_is_told_with_what_it_costs(
    given: dict[str, Any], texts: list[str]
) -> None:
    found = list(compare_exchange(Exchange("e"), ExchangeFacts(**given)))

    assert len(found) == len(texts)
    assert [t for t, one in zip(texts, found, strict=True) if t not in one.text] == []


def test_a_stream_is_no_queue_of_requests() -> None:
    """A worker cannot consume a stream as a queue: that alone is told, and what to do."""
    stream = QueueFacts(name="q", type="stream", arguments={"x-queue-type": "stream"})
    (found,) = compare_queue(Queue("q", use="consumed"), stream)

    assert found.kind == "unfit"
    assert "it is a stream" in found.why
    assert "worker.queue" in found.why
    assert [one.kind for one in compare_queue(Queue("q", use="subscribed"), stream)] == [
        "different"
    ]


# Who can work with it


MAIN, RETRY, DEAD = worker_topology(WITHOUT_URGENT).queues
EVENTS = Queue("sms.inbound", use="subscribed")
EXCHANGE = Exchange("sms.inbound")
BINDING = Binding("sms.inbound", "sms.inbound")


@pytest.mark.parametrize(
    ("entity", "kind", "declare", "verify"),
    [
        (MAIN, "different", False, True),
        (EXCHANGE, "different", False, True),
        (BINDING, "different", False, True),
        (RETRY, "different", True, True),
        (DEAD, "different", True, True),
        (MAIN, "locked", True, True),
        (EVENTS, "locked", False, True),
        (MAIN, "missing", True, True),
        (EXCHANGE, "refused", True, True),
        (RETRY, "not_compared", False, False),
        (RETRY, "hidden", False, False),
        (MAIN, "unfit", True, True),
    ],
)
def test_what_a_role_can_use(
    entity: Entity, kind: DifferenceKind, *, declare: bool, verify: bool
) -> None:
    """Others' queues and exchanges are used where the bridge may declare; its own must be right."""
    difference = Difference(entity, kind, "it is another one", "make it anew")

    assert is_unusable(difference, "declare") is declare
    assert is_unusable(difference, "verify") is verify
