"""What RabbitMQ's refusals say of a queue, word for word as 3.10.8 writes them."""

from typing import Any

import pytest

from bridge.topology.comparison import _take_over

HEAD = "PRECONDITION_FAILED - inequivalent arg '{}' for queue 'q' in vhost '/': "


@pytest.mark.parametrize(
    ("key", "said", "value"),
    [
        ("x-queue-type", "received the value 'quorum' of type 'longstr' but current is none", None),
        ("x-queue-type", "received 'quorum' but current is 'stream'", "stream"),
        ("durable", "received 'true' but current is 'false'", False),
        ("auto_delete", "received 'false' but current is 'true'", True),
        (
            "x-message-ttl",
            "received none but current is the value '1000' of type 'short'",
            1000,
        ),
        (
            "x-single-active-consumer",
            "received none but current is the value 'true' of type 'bool'",
            True,
        ),
        ("x-known", "received '5' but current is '7'", 7),
        (
            "x-dead-letter-exchange",
            "received none but current is the value 'it's 'so'' of type 'longstr'",
            "it's 'so'",
        ),
    ],
)
def test_what_the_broker_names_is_taken_over(key: str, said: str, value: object) -> None:
    """The argument that a refusal names is known afterwards, and a second time says nothing new."""
    found: dict[str, Any] = {
        "durable": True,
        "auto_delete": False,
        "x-queue-type": "quorum",
        "x-known": 5,
    }
    text = HEAD.format(key) + said

    assert _take_over(text, found)
    assert found.get(key) == value
    assert type(found.get(key)) is type(value)
    assert not _take_over(text, found)


@pytest.mark.parametrize(
    "said",
    [
        "PRECONDITION_FAILED - queue 'q' in vhost '/' is something else",
        HEAD.format("x-dead-letter-exchange") + "received none but current is the value 'cut off",
        "",
    ],
)
def test_what_cannot_be_read_changes_nothing(said: str) -> None:
    """A refusal in other words, or one that is cut off, ends the asking."""
    found: dict[str, Any] = {"durable": True}

    assert not _take_over(said, found)
    assert found == {"durable": True}
