"""What `sms-bridge init` writes for Kubernetes is what the chart takes, for every service."""

from pathlib import Path

import pytest
import yaml

from bridge.admin.wizard import (
    Answers,
    check_answer,
    questions,
    secrets_to_make,
    write_document,
)
from bridge.config import load_settings
from bridge.config.presets import PRESETS, Preset
from bridge.start_checks import check_roles
from tests.chart.rendering import MOUNTED, ROLES, config, deployment, of_kind, render, secret_files

# Of RFC 8032, 7.1, test 1: what any other service takes as a secret, too.
PUBLIC_KEY = "11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="


def answers(preset: Preset, webhook_secret: str) -> Answers:
    known = {
        "where": "kubernetes",
        "image": "registry.example.com/sms-bridge:0.1.0",
        "broker": "amqps://rabbitmq.messaging.svc:5670/sms",
        "broker-secret-name": "sms-rabbitmq",
        "preset": preset,
        "base-url": "https://api.example.com",
        "account": "0123",
        "username": "me #1 {you}",
        "key-secret-name": "sms-api/api-key",
        "webhook-secret-name": webhook_secret,
        "public-url": "https://sms.example.com/webhooks",
    }
    given: Answers = {}
    for question in questions(given):
        given[question.name] = known[question.name]
        check_answer(question.name, given, {})
    return given


@pytest.mark.parametrize("preset", PRESETS)
def test_the_chart_takes_what_is_written(tmp_path: Path, preset: Preset) -> None:
    told = answers(preset, "sms-webhook/secret")
    values = yaml.safe_load(write_document(told))
    mounted = {
        path: secret
        for role in ROLES
        for path, secret in secret_files(deployment(values, role)["spec"]["template"]).items()
    }
    for path in mounted:
        file = tmp_path / Path(path).relative_to(MOUNTED)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PUBLIC_KEY if "webhook" in path else "word")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(values)).replace(MOUNTED, str(tmp_path)))
    settings = load_settings(file, {})
    (endpoint,) = settings.webhook.all_endpoints
    (url,) = settings.rabbitmq.url

    assert check_roles(settings, ROLES) == {"worker": None, "webhook": None}
    assert settings.sms_api.preset == endpoint.preset == preset
    assert settings.sms_api.auth.username in {"me #1 {you}", None}
    assert endpoint.path == ("/webhooks" if preset == "generic" else f"/webhooks/{preset}")
    assert url.get_secret_value() == "amqps://rabbitmq.messaging.svc:5670/sms"
    assert set(mounted.values()) == {
        f"{name}/{key}" for name, keys in secrets_to_make(told).items() for key in keys
    }


def test_the_worker_is_installed_alone() -> None:
    """Without webhooks there is no webhook role."""
    values = yaml.safe_load(write_document(answers("twilio", "none")))

    assert list(of_kind(render(values), "Deployment")) == ["rel-sms-bridge-worker"]


def test_what_a_proxy_signs_is_said() -> None:
    for preset in PRESETS:
        values = yaml.safe_load(write_document(answers(preset, "sms-webhook/secret")))
        for endpoint in config(values)["webhook"].get("endpoints", []):
            is_unsigned = preset in {"vonage-sms", "infobip", "httpsms"}
            assert endpoint.get("signature") == ({"preset": "plain"} if is_unsigned else None)
