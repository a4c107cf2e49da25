"""`check --changed` prints what a configuration adds to the defaults and its presets."""

from typing import Any

import pytest

from bridge.cli.check import changed_settings
from bridge.config import Settings

MASK = "**********"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, {}),
        (
            {"worker": {"rate_limit": {"per_second": 5}}},
            {"worker": {"rate_limit": {"per_second": 5}}},
        ),
        ({"rabbitmq": {"password": "guess"}}, {"rabbitmq": {"password": MASK}}),
        (
            # Masked it looks like the default.
            {"rabbitmq": {"url": "amqp://a:b@localhost:5672/"}},
            {"rabbitmq": {"url": ["amqp://***:***@localhost:5672/"]}},
        ),
        (
            {"sms_api": {"preset": "twilio", "account": "AC1", "timeout_seconds": 5}},
            {"sms_api": {"preset": "twilio", "account": "AC1", "timeout_seconds": 5}},
        ),
        (
            {"sms_api": {"preset": "vonage", "response": {"errors": {"1": "retry"}}}},
            {"sms_api": {"preset": "vonage", "response": {"errors": {"1": "retry"}}}},
        ),
        (
            {
                "webhook": {
                    "endpoints": [{"path": "/in", "preset": "telnyx", "event_id_pointers": []}]
                }
            },
            {
                "webhook": {
                    "endpoints": [{"path": "/in", "preset": "telnyx", "event_id_pointers": []}]
                }
            },
        ),
    ],
    ids=["none", "deep", "secret", "masked", "preset", "code", "endpoint"],
)
def test_what_differs(settings: dict[str, Any], shown: dict[str, Any]) -> None:
    assert changed_settings(Settings.model_validate(settings)) == shown
