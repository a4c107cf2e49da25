"""A service's documented answers: found by name, and given with ids of the service's own form."""

import re

import pytest

from bridge.config import SmsApiSettings
from bridge.config.presets import PRESETS, Preset
from bridge.sandbox.answers import Answers, like


def answers(preset: Preset) -> Answers:
    """Make the answers of a preset."""
    return Answers(SmsApiSettings.model_validate({"preset": preset}))


@pytest.mark.parametrize("preset", PRESETS)
def test_an_accepted_message_has_an_id_of_its_own(preset: Preset) -> None:
    """Each message gets another id, which stands where the service puts it."""
    ours = answers(preset)
    one, other = ours.new_id(), ours.new_id()
    accepted = ours.accept(one)

    assert one != other
    assert one in str(accepted.body)
    assert ours.acceptance.body != accepted.body
    assert accepted.status == ours.acceptance.status


@pytest.mark.parametrize(
    ("example", "pattern"),
    [
        ("SM00000000000000000000000000000001", r"SM[0-9]{32}"),
        (
            "00000000-0000-4000-8000-000000000001",
            r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        ),
        ("0C000000217B7F02", r"[0-9A-F]{16}"),
        ("e8077d803532c0b5937c639b60216938", r"[0-9a-f]{32}"),
        ("01FC66621XXXXX119Z8PMV1QPQ", r"[0-9A-F]{9}XXXXX119Z8PMV1QPQ"),
        ("817790313235066447", r"[0-9]{18}"),
        ("a-message-id", r"sandbox-[0-9a-f]{32}"),
    ],
)
def test_an_id_has_the_form_of_its_example(example: str, pattern: str) -> None:
    """What differs from message to message is made up, and the form stays."""
    made = {like(example) for _ in range(20)}

    assert len(made) == 20
    assert all(re.fullmatch(pattern, one) for one in made)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("the person has answered STOP", "21610"),
        ("21610", "21610"),
        ("slow_down:sender", "21611"),
        ("setup:credentials_rejected", "20003"),
        ("uncertain", "20500"),
    ],
)
def test_an_answer_has_three_names(name: str, code: str) -> None:
    """What it means, its code, and its fate; of several with one fate it is the first."""
    assert answers("twilio").named(name).code == code


def test_an_unknown_name_lists_the_answers() -> None:
    """Who asks for an answer that there is not is told what there is, and the nearest name."""
    meant = r"^is unknown; did you mean the person has answered STOP\? there are: queued \(sent\); "
    with pytest.raises(ValueError, match=meant) as caught:
        answers("twilio").named("the persn has answerd STOP")

    assert "the person has answered STOP (21610, refused); " in str(caught.value)
    with pytest.raises(ValueError, match=r"^is unknown; there are: accepted"):
        answers("generic").named("xyz")


@pytest.mark.parametrize(
    ("preset", "missing", "code"),
    [
        ("twilio", "to", "21604"),
        ("twilio", "from", "21603"),
        ("twilio", "text", "21602"),
        ("twilio", None, "21211"),
        ("vonage-sms", "text", "2"),
        ("vonage-sms", None, "3"),
        ("telnyx", "to", "10004"),
        ("telnyx", None, "40310"),
        ("sinch", "from", "syntax_constraint_violation"),
        ("vonage", "from", "1020"),
    ],
)
def test_what_is_missing_has_its_own_code(preset: Preset, missing: str | None, code: str) -> None:
    """A service that tells what is missing from what is wrong does so here."""
    assert answers(preset).refusal(missing=missing).code == code


def test_a_repeat_is_answered_where_the_service_does_so() -> None:
    """Only two services answer the repeat of a key with something else than another yes."""
    repeated = {preset: answers(preset).duplicate for preset in PRESETS}

    assert {preset: one.status for preset, one in repeated.items() if one is not None} == {
        "android-sms-gateway": 409,
        "infobip": 200,
    }
