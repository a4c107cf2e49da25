"""What is written for a host is what the program starts with, for every service."""

from pathlib import Path

import pytest

from bridge.admin.wizard.documents import write_document
from bridge.admin.wizard.interview import Interview
from bridge.admin.wizard.questions import (
    QUESTIONS,
    Answers,
    Name,
    is_signed,
    signs_address,
)
from bridge.config import Settings, load_settings
from bridge.config.presets import PRESETS, Preset, webhook_secret
from bridge.start_checks import check_roles

# Of RFC 8032, 7.1, test 1: what any other service takes as a secret, too.
PUBLIC_KEY = "11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="


def answers(preset: Preset, folder: Path, **other: str) -> Answers:
    """Answer all that is asked for a preset on a host."""
    files = {"key": "Canary7Key", "webhook": PUBLIC_KEY, "password": "Canary7Password"}
    for name, text in files.items():
        (folder / name).write_text(text)
    all_answers: dict[Name, str] = {
        "broker": "amqp://rabbitmq.example.com/sms",
        "broker-user": "yes",
        "broker-password-file": str(folder / "password"),
        "preset": preset,
        "base-url": "https://api.example.com",
        "account": "0123",
        "username": "me #1 {you}",
        "key-file": str(folder / "key"),
        "webhook-secret-file": str(folder / "webhook"),
        "public-url": "https://sms.example.com/webhooks",
    }
    given: dict[Name, str] = {"where": "host"}
    for question in QUESTIONS:
        if question.name in all_answers and question.applies(given | {"preset": preset}):
            given[question.name] = other.get(question.name, all_answers[question.name])
    interview = Interview(given, None, lambda _answers: None)
    interview.answer_all()
    return interview.answers


def written(given: Answers, folder: Path) -> tuple[str, Settings]:
    """Write the document of these answers, and load it."""
    path = folder / "config.yaml"
    path.write_text(write_document(given))
    return path.read_text(), load_settings(path, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_both_roles_could_start_with_it(tmp_path: Path, preset: Preset) -> None:
    """It is loaded as written, it says all that was answered, and neither role lacks anything."""
    text, settings = written(answers(preset, tmp_path), tmp_path)
    (endpoint,) = settings.webhook.all_endpoints

    assert check_roles(settings, ["worker", "webhook"]) == {"worker": None, "webhook": None}
    assert settings.sms_api.preset == endpoint.preset == preset
    assert settings.sms_api.missing == []
    assert settings.rabbitmq.username == "yes"
    assert endpoint.path == ("/webhooks" if preset == "generic" else f"/webhooks/{preset}")
    assert endpoint.secret_files == (tmp_path / "webhook",)
    assert (endpoint.public_url is not None) == signs_address(preset)
    assert settings.sms_api.account in {"0123", None}
    assert settings.sms_api.auth.username in {"me #1 {you}", None}
    assert f"# Holds {webhook_secret(preset)}." in text
    assert "Canary7" not in text
    assert PUBLIC_KEY not in text


@pytest.mark.parametrize("preset", PRESETS)
def test_the_worker_could_start_alone(tmp_path: Path, preset: Preset) -> None:
    """Without webhooks the webhook role is not configured at all, and the worker is."""
    alone = answers(preset, tmp_path, **{"webhook-secret-file": "none"})
    text, settings = written(alone, tmp_path)
    missing = check_roles(settings, ["worker", "webhook"])

    assert missing["worker"] is None
    assert missing["webhook"] is not None
    assert "webhook:" not in text


def test_what_a_proxy_signs_is_said(tmp_path: Path) -> None:
    """Where the preset knows no signature, it is written out and explained."""
    unsigned = [preset for preset in PRESETS if not is_signed(preset)]

    for preset in unsigned:
        text, settings = written(answers(preset, tmp_path), tmp_path)
        assert settings.webhook.endpoints[0].signature.preset == "plain"
        assert "# How a proxy in front signs what it has checked.\n" in text
    assert len(unsigned) == 3


def test_paths_and_names_of_any_kind_stay_what_they_are(tmp_path: Path) -> None:
    """What YAML would take for something else is quoted."""
    odd = tmp_path / "a b: #c, [d] 'e' ü"
    odd.mkdir()
    _, settings = written(answers("plivo", odd, account="1e3", **{"broker-user": "null"}), odd)

    assert settings.sms_api.key_file == odd / "key"
    assert settings.sms_api.account == "1e3"
    assert settings.rabbitmq.username == "null"
