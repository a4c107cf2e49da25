"""What answers come to, as data."""

import pytest

from bridge.admin.wizard.drafts import (
    draft_settings,
    draft_values,
    secrets_to_make,
    split_image,
)
from bridge.admin.wizard.questions import Answers

TWILIO: Answers = {
    "where": "kubernetes",
    "image": "registry.example.com/sms-bridge:0.1.0",
    "broker": "amqps://rabbitmq.example.com:5670/sms",
    "broker-secret-name": "rabbitmq",
    "preset": "twilio",
    "account": "AC1",
    "key-secret-name": "twilio/auth-token",
    "webhook-secret-name": "twilio/auth-token",
    "public-url": "https://sms.example.com/webhooks/twilio",
}


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("sms-bridge", {"registry": "", "repository": "sms-bridge"}),
        ("team/sms-bridge:1", {"registry": "", "repository": "team/sms-bridge", "tag": "1"}),
        ("localhost/a:1", {"registry": "localhost", "repository": "a", "tag": "1"}),
        ("r:5000/a/b", {"registry": "r:5000", "repository": "a/b"}),
        (
            "r.example/a:1@sha256:ab",
            {"registry": "r.example", "repository": "a", "tag": "1", "digest": "sha256:ab"},
        ),
    ],
)
def test_an_image_is_taken_apart(image: str, parts: dict[str, str]) -> None:
    """The chart has a value for each part of an image's name."""
    assert split_image(image) == parts


def test_the_chart_has_its_own_names() -> None:
    """An address becomes host, port, virtual host and TLS; Secrets are named with their keys."""
    assert draft_values(TWILIO) == {
        "image": {
            "registry": "registry.example.com",
            "repository": "sms-bridge",
            "tag": "0.1.0",
        },
        "rabbitmq": {
            "host": "rabbitmq.example.com",
            "port": 5670,
            "vhost": "sms",
            "tls": {"enabled": True},
            "existingSecret": "rabbitmq",
        },
        "smsApi": {
            "preset": "twilio",
            "account": "AC1",
            "existingSecret": "twilio",
            "secretKeys": {"key": "auth-token"},
        },
        "webhook": {
            "endpoints": [
                {
                    "path": "/webhooks/twilio",
                    "preset": "twilio",
                    "existingSecret": "twilio",
                    "secretKeys": ["auth-token"],
                    "config": {"public_url": "https://sms.example.com/webhooks/twilio"},
                }
            ]
        },
    }


@pytest.mark.parametrize("path", ["", "/", "/%2F", "/%2f"])
def test_the_first_virtual_host_is_the_charts_default(path: str) -> None:
    """However "/" is written in an address, the chart is not told it."""
    assert "vhost" not in draft_values(TWILIO | {"broker": f"amqp://h{path}"})["rabbitmq"]


def test_a_secret_is_made_once_with_all_its_keys() -> None:
    """Two values in one Secret make one command, and none makes nothing."""
    both = TWILIO | {"webhook-secret-name": "twilio/other"}

    assert secrets_to_make(TWILIO) == {
        "rabbitmq": ["username", "password"],
        "twilio": ["auth-token"],
    }
    assert secrets_to_make(both)["twilio"] == ["auth-token", "other"]
    assert secrets_to_make(TWILIO | {"webhook-secret-name": "none"}) == secrets_to_make(TWILIO)


def test_half_of_the_answers_make_half_a_draft() -> None:
    """What has not been answered is left out, so that the rest can be checked."""
    assert draft_settings({"where": "host"}) == {}
    assert draft_settings({"where": "host", "broker": "amqp://h/", "broker-user": ""}) == {
        "rabbitmq": {"url": "amqp://h/"}
    }
