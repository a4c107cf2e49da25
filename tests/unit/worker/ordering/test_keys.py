"""By what messages are kept in order."""

from collections import Counter
from typing import Any

import pytest

from bridge.amqp.properties import Properties
from bridge.worker.ordering.keys import lane_of, ordering_key

NUMBER = "+491713920001"
BODY = b'{"to":"%s","from":"Acme","text":"Hi"}' % NUMBER.encode()
KEY = "sms-bridge-ordering-key"


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        (None, NUMBER),
        ({}, NUMBER),
        ({KEY: "order 7"}, "order 7"),
        ({KEY: b"order 7"}, "order 7"),
        ({KEY: ""}, NUMBER),
        ({KEY: 7}, NUMBER),
    ],
)
def test_the_key_that_is_named_comes_before_the_number(
    headers: dict[str, Any] | None, key: str
) -> None:
    """A text that the publisher set, else the recipient."""
    assert ordering_key(Properties(headers=headers), BODY) == key


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[]", b"7", b"{}", b'{"to": 7}', b"[" * 100_000, b'"\xff"', b"9" * 5000],
)
def test_what_cannot_be_read_has_the_empty_key(body: bytes) -> None:
    """It has a lane as well, where it is found invalid."""
    assert ordering_key(Properties(), body) == ""


@pytest.mark.parametrize(
    ("key", "lanes", "lane"),
    [("", 32, 0), (NUMBER, 32, 28), (NUMBER, 1, 0), ("order 8", 32, 6), ("\udc80", 32, 27)],
)
def test_a_key_has_the_same_lane_in_every_version(key: str, lanes: int, lane: int) -> None:
    """What waits in the lanes outlives an upgrade."""
    assert lane_of(key, lanes) == lane


def test_numbers_are_spread_over_the_lanes() -> None:
    """Of numbers in a row no lane gets much more than its part."""
    counts = Counter(lane_of(f"+99970{number:07}", 32) for number in range(3200))

    assert len(counts) == 32
    assert max(counts.values()) < 200
