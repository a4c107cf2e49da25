"""Which of an argument and a policy holds, and what two policies come to."""

from bridge.topology.facts import QueueFacts, merge_policies


def test_the_smaller_limit_holds() -> None:
    """Of a limit in an argument and one in a policy the smaller holds; of the rest the argument."""
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


def test_an_operators_policy_comes_before_an_ordinary_one() -> None:
    """Of an ordinary and an operator policy the smaller limit holds, else the operator's word."""
    merged = merge_policies(
        {"max-length": 10, "overflow": "drop-head", "expires": 5},
        {"max-length": 20, "overflow": "reject-publish"},
    )

    assert merged == {"max-length": 10, "overflow": "reject-publish", "expires": 5}
