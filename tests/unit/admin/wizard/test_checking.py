"""What is asked for Kubernetes is checked in its own terms."""

import pytest

from bridge.admin.wizard.checking import check_answer
from bridge.admin.wizard.questions import Answers, Name
from bridge.errors import ConfigError

ON_KUBERNETES: Answers = {"where": "kubernetes"}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("image", "Sms Bridge", "must look like registry.example.com/sms-bridge"),
        ("image", "sms-bridge@sha256:12", "must look like"),
        ("broker", "amqp://localhost:5672/", "in a pod this is the pod itself"),
        ("broker", "amqp://[::1]:5672/", "in a pod this is the pod itself"),
        ("broker", "amqp://rabbitmq/?heartbeat=3", "the chart has no place"),
        ("broker-secret-name", "My_Secret", "must be the name of a Secret"),
        ("key-secret-name", "sk_live_1234", "the secret itself is never given here"),
        ("webhook-secret-name", "name/a key", "the secret itself is never given here"),
    ],
)
def test_what_cannot_be_is_refused(name: Name, value: str, why: str) -> None:
    """Each fault names the option and the remedy, and quotes no value."""
    with pytest.raises(ConfigError, match=why) as caught:
        check_answer(name, ON_KUBERNETES | {name: value}, {})

    assert str(caught.value).startswith(f"--{name}: ")
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", "registry.example.com:5000/team/sms-bridge:0.1.0"),
        ("image", "sms-bridge@sha256:" + "a" * 64),
        ("broker", "amqps://rabbitmq.messaging.svc/sms"),
        ("key-secret-name", "sms-api"),
        ("key-secret-name", "sms.api/API_KEY"),
        ("webhook-secret-name", "none"),
    ],
)
def test_what_can_be_is_taken(name: Name, value: str) -> None:
    """Names as Kubernetes and registries have them are right."""
    check_answer(name, ON_KUBERNETES | {name: value}, {})
