"""The types of settings: what is out of bounds is refused by its key."""

import json

import pytest

from tests.unit.config.conftest import Faults, Load, env_name, nested, value_at


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker.concurrency", 0),
        ("worker.concurrency", "many"),
        ("worker.concurrency", 1.5),
        ("worker.concurrency", 5001),
        ("worker.max_concurrency", 0),
        ("worker.max_concurrency", "auto"),
        ("worker.max_attempts", 0),
        ("worker.max_uncertain_attempts", 0),
        ("worker.on_uncertain", "repeat"),
        ("worker.retry_delays", "5s"),
        ("worker.outage_after", -1),
        ("worker.max_age", "5w"),
        ("worker.default_from", ""),
        ("worker.default_from", "x" * 33),
        ("worker.default_from", "a\nb"),
        ("worker.default_from", 5),
        ("worker.extra_fields", "ignore"),
        ("worker.ordering", "sender"),
        ("worker.rate_limit.per_second", 0),
        ("worker.rate_limit.per_second", float("nan")),
        ("worker.rate_limit.scope", "global"),
        ("rabbitmq.url", "http://localhost/"),
        ("rabbitmq.url", []),
        ("rabbitmq.url", "amqp://"),
        ("rabbitmq.topology", "create"),
        ("sms_api.base_url", "api.example.com"),
        ("sms_api.base_url", "ftp://api.example.com"),
        ("sms_api.base_url", "https://api example.com"),
        ("sms_api.base_url", "https://api.example.com?a=b"),
        ("sms_api.base_url", "https://api.example.com#a"),
        ("sms_api.idempotency_header", "a b"),
        ("sms_api.idempotency_header", "a\r\nb"),
        ("sms_api.timeout_seconds", 0),
        ("webhook.port", 65536),
        ("webhook.path", "/a?b"),
        ("webhook.secrets", []),
        ("webhook.secret_files", []),
        ("webhook.secret_files", ["a"] * 6),
        ("webhook.signature.preset", "unknown"),
        ("admin.port", 65536),
        ("log.format", "xml"),
        ("tracing.sample_ratio", 1.1),
    ],
)
def test_value_that_is_refused(faults: Faults, key: str, value: object) -> None:
    """A value of the wrong type, or out of bounds, is one fault that names its key."""
    (fault,) = faults(nested(key, value))

    assert fault.startswith(key)


@pytest.mark.parametrize(
    "key", ["worker.queue", "worker.outcome_exchange", "webhook.exchange", "webhook.queue"]
)
@pytest.mark.parametrize(
    ("name", "text"),
    [("amq.sms", "must not begin with amq."), ("é" * 101, "must have at most 200 bytes")],
    ids=["reserved", "bytes"],
)
def test_name_that_rabbitmq_does_not_take(faults: Faults, key: str, name: str, text: str) -> None:
    """A name that RabbitMQ keeps for itself, or that no frame holds, is refused at the start."""
    (fault,) = faults(nested(key, name))

    assert fault.startswith(f"{key}: {text}")


@pytest.mark.parametrize("name", ["q~", "q\u00e4", "q\t", "q%"])
@pytest.mark.parametrize("key", ["worker.queue", "webhook.queue", "webhook.exchange"])
def test_name_that_the_client_cannot_write_is_refused(faults: Faults, key: str, name: str) -> None:
    """A name that no frame of the client library takes is refused at the start."""
    section, _, setting = key.partition(".")
    said = faults(json.dumps({section: {setting: name}}))

    assert said == (f"{key}: must be of letters and digits of ASCII, spaces and - _ . : @ # , / +",)


@pytest.mark.parametrize("key", ["worker.outcome_exchange", "webhook.exchange"])
def test_the_topic_exchange_of_every_vhost_can_be_used(load: Load, key: str) -> None:
    """RabbitMQ's own topic exchange is there already, and can be named."""
    assert value_at(load(nested(key, "amq.topic")).masked(), key) == "amq.topic"


@pytest.mark.parametrize("delay", ["3651d", "315360000.001"])
def test_retry_delay_that_rabbitmq_does_not_take(faults: Faults, delay: str) -> None:
    """A delay over the longest time to live that RabbitMQ takes is refused at the start."""
    (fault,) = faults({"worker": {"retry_delays": ["5s", delay]}})

    assert fault.startswith("worker.retry_delays.1: must be at most 3650d")


@pytest.mark.parametrize("key", ["sms_api.key", "rabbitmq.password", "webhook.secrets"])
@pytest.mark.parametrize("blank", ["", "  ", "\n"], ids=["empty", "spaces", "newline"])
@pytest.mark.parametrize("source", ["file", "environment"])
def test_empty_secret_is_refused(faults: Faults, key: str, blank: str, source: str) -> None:
    """A secret that is there but empty is a fault: anyone could know it."""
    value: object = [blank] if key == "webhook.secrets" else blank
    text = json.dumps(value) if isinstance(value, list) else blank
    (fault,) = (
        faults(nested(key, value)) if source == "file" else faults("", **{env_name(key): text})
    )

    assert fault.startswith(key)
