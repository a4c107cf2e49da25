"""Which class a request is of."""

from typing import Any

import pytest

from bridge.amqp.properties import Properties
from bridge.worker.sorting.classes import URGENT_FROM_PRIORITY, is_urgent


@pytest.mark.parametrize(
    ("properties", "urgent"),
    [
        ({}, False),
        ({"headers": {}}, False),
        ({"headers": {"sms-bridge-priority": "urgent"}}, True),
        ({"headers": {"sms-bridge-priority": b"urgent"}}, True),
        ({"headers": {"sms-bridge-priority": bytearray(b"urgent")}}, True),
        ({"headers": {"sms-bridge-priority": "normal"}}, False),
        ({"headers": {"sms-bridge-priority": "high"}}, False),
        ({"headers": {"sms-bridge-priority": ["urgent"]}}, False),
        ({"priority": URGENT_FROM_PRIORITY}, True),
        ({"priority": URGENT_FROM_PRIORITY - 1}, False),
        ({"priority": 255}, True),
        ({"priority": 9, "headers": {"sms-bridge-priority": "normal"}}, False),
        ({"priority": 0, "headers": {"sms-bridge-priority": "urgent"}}, True),
        ({"priority": 9, "headers": {"sms-bridge-priority": None}}, True),
    ],
    ids=str,
)
def test_class_of_a_request(properties: dict[str, Any], *, urgent: bool) -> None:
    """The header decides, and without it the property; what cannot be read is not urgent."""
    assert is_urgent(Properties(**properties)) is urgent
