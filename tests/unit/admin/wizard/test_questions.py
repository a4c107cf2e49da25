"""The questions of `sms-bridge init`: which are asked of whom, and in whose words."""

import pytest

from bridge.admin.wizard.questions import (
    GROUPS,
    QUESTIONS,
    Answers,
    Name,
    is_signed,
    signs_address,
)
from bridge.config.presets import PRESETS, Preset, needed_settings, webhook_secret


def question(name: Name) -> tuple[str, ...]:
    """Return what a question explains, for each preset on a host."""
    (found,) = (one for one in QUESTIONS if one.name == name)
    return tuple(found.explain({"where": "host", "preset": preset}) for preset in PRESETS)


def test_there_are_five_groups() -> None:
    """Where, broker, service, key, webhooks: each with a question that everybody is asked."""
    hosts = [
        [one.name for one in group.questions if one.applies({"where": "host"})] for group in GROUPS
    ]

    assert [names[0] for names in hosts] == [
        "where",
        "broker",
        "preset",
        "key-file",
        "webhook-secret-file",
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_service_needs_is_asked_in_its_words(preset: Preset) -> None:
    """Every setting that a preset needs has its question, which says what the service calls it."""
    answers: Answers = {"where": "host", "preset": preset}
    asked = " ".join(one.explain(answers) for one in QUESTIONS if one.applies(answers))

    for words in needed_settings(preset).values():
        assert f"Of {preset}: {words}." in asked


def test_the_secret_of_webhooks_is_told_for_every_service() -> None:
    """Each preset has its words for the secret, and its question has them."""
    assert all(map(webhook_secret, PRESETS))
    for preset, text in zip(PRESETS, question("webhook-secret-file"), strict=True):
        assert webhook_secret(preset) in text


def test_services_without_a_signature_default_to_no_webhooks() -> None:
    """Where nothing could be verified, Enter means none; else it names a file."""
    (asked,) = (one for one in QUESTIONS if one.name == "webhook-secret-file")
    defaults = {
        preset: asked.default({"where": "host", "preset": preset, "key-file": "/k"})
        for preset in PRESETS
    }

    assert {preset for preset in PRESETS if defaults[preset] == "none"} == {
        "vonage-sms",
        "infobip",
        "httpsms",
    }
    assert {preset for preset in PRESETS if not is_signed(preset)} == {
        "vonage-sms",
        "infobip",
        "httpsms",
    }
    assert {preset for preset in PRESETS if defaults[preset] == "/k"} == {"twilio", "plivo"}


def test_the_address_is_asked_where_it_is_signed() -> None:
    """Whoever signs the address has to be told it, and nobody else is asked."""
    assert {preset for preset in PRESETS if signs_address(preset)} == {
        "twilio",
        "messagebird",
        "plivo",
    }
