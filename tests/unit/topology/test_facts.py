"""Which of an argument and a policy holds."""

from bridge.topology.queue_facts import QueueFacts


def test_the_smaller_limit_holds() -> None:
    facts = QueueFacts(
        name="q",
        arguments={"x-message-ttl": 7, "x-overflow": "reject-publish", "x-delivery-limit": -1},
        policy={"message-ttl": 5, "overflow": "drop-head", "delivery-limit": 3},
    )

    assert [facts.value(key) for key in ("message-ttl", "overflow", "delivery-limit")] == [
        5,
        "reject-publish",
        3,
    ]
