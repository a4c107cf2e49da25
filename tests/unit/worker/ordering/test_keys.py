"""By what messages are kept in order."""

from typing import Any

import pytest

from bridge.amqp.properties import Properties
from bridge.worker.ordering.keys import ordering_key

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
    """It is found invalid when its turn comes."""
    assert ordering_key(Properties(), body) == ""
