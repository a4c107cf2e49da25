"""The types of settings: what is out of bounds is refused by its key."""

import json

import pytest

from tests.unit.config.conftest import Faults, Load, env_name, nested, value_at


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker.concurrency", 0),
        ("worker.concurrency", "many"),
        ("worker.concurrency", 5001),
        ("worker.max_concurrency", 0),
        ("worker.max_attempts", 0),
        ("worker.max_uncertain_attempts", 0),
        ("worker.on_uncertain", "repeat"),
        ("worker.retry_delays", "5s"),
        ("worker.outage_after", -1),
        ("worker.max_age", "5w"),
        ("worker.default_from", ""),
        ("worker.default_from", "x" * 33),
        ("worker.default_from", "a\nb"),
        ("worker.extra_fields", "ignore"),
        ("worker.ordering", "sender"),
        ("worker.rate_limit.per_second", 0),
        ("worker.rate_limit.per_second", float("nan")),
        ("worker.rate_limit.scope", "global"),
        ("rabbitmq.url", "http://localhost/"),
        ("rabbitmq.url", []),
        ("rabbitmq.url", "amqp://"),
        ("sms_api.base_url", "api.example.com"),
        ("sms_api.base_url", "ftp://api.example.com"),
        ("sms_api.base_url", "https://api.example.com?a=b"),
        ("sms_api.base_url", "https://api.example.com#a"),
        ("sms_api.idempotency_header", "a b"),
        ("sms_api.idempotency_header", "a\r\nb"),
        ("sms_api.timeout_seconds", 0),
        ("webhook.port", 65536),
        ("webhook.path", "/a?b"),
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


ASCII = "must be of letters and digits of ASCII, spaces and - _ . : @ # , / +"


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("worker.queue", "amq.sms", "worker.queue: must not begin with amq."),
        ("worker.outcome_exchange", "amq.sms", "worker.outcome_exchange: must not begin with amq."),
        ("webhook.exchange", "é" * 101, "webhook.exchange: must have at most 200 bytes"),
        ("webhook.queue", "é" * 101, "webhook.queue: must have at most 200 bytes"),
        ("worker.queue", "q~", f"worker.queue: {ASCII}"),
        ("webhook.queue", "q\t", f"webhook.queue: {ASCII}"),
        ("webhook.exchange", "qä", f"webhook.exchange: {ASCII}"),
        ("worker.retry_delays", ["5s", "3651d"], "worker.retry_delays.1: must be at most 3650d"),
        ("worker.retry_delays", ["315360000.001"], "worker.retry_delays.0: must be at most 3650d"),
    ],
)
def test_value_that_rabbitmq_does_not_take(
    faults: Faults, key: str, value: object, fault: str
) -> None:
    """A name or a delay that RabbitMQ or its client library refuses is refused at the start."""
    (told,) = faults(json.dumps(nested(key, value)))

    assert told.startswith(fault)


@pytest.mark.parametrize("key", ["worker.outcome_exchange", "webhook.exchange"])
def test_the_topic_exchange_of_every_vhost_can_be_used(load: Load, key: str) -> None:
    """RabbitMQ's own topic exchange is there already, and can be named."""
    assert value_at(load(nested(key, "amq.topic")).masked(), key) == "amq.topic"


@pytest.mark.parametrize("key", ["sms_api.key", "rabbitmq.password", "webhook.secrets"])
def test_empty_secret_is_refused(faults: Faults, key: str) -> None:
    """A secret that is there but empty is a fault: anyone could know it."""
    for blank in ("", " \n"):
        value: object = [blank] if key == "webhook.secrets" else blank
        text = json.dumps(value) if isinstance(value, list) else blank
        told = [faults(nested(key, value)), faults("", **{env_name(key): text})]

        assert [len(each) for each in told] == [1, 1]
        assert all(each[0].startswith(key) for each in told)
