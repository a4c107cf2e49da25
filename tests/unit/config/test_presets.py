"""What the presets' files say of the services."""

import json

import pytest

from bridge.config import SmsApiSettings
from bridge.config.presets import (
    PRESETS,
    Preset,
    code_meanings,
    documented_answers,
    receipt_meanings,
)
from bridge.worker.service.shape import shape_from
from bridge.worker.service.transport import Reply

MAX_CHARACTERS = 80


def settings_of(preset: Preset) -> SmsApiSettings:
    given = {"base_url": "http://localhost", "account": "an-account", "key": "a-key"}
    return SmsApiSettings.model_validate({"preset": preset, **given})


@pytest.mark.parametrize("preset", PRESETS)
def test_each_code_has_a_meaning(preset: Preset) -> None:
    """Each code that has a fate, and each in a documented answer, is explained under `meanings`."""
    settings = settings_of(preset)
    codes = {*settings.response.errors, settings.response.duplicate.code}
    if preset != "generic":
        shape = shape_from(settings)
        replies = [
            Reply(answer["status"], (), json.dumps(answer.get("body")).encode())
            for answer in documented_answers(preset)
            # The example of a code that no page explains yet.
            if "FOR_A_NEW_REASON" not in json.dumps(answer.get("body"))
        ]
        codes |= {shape.judge(reply).code for reply in replies}

    assert codes - {None} - code_meanings(preset).keys() == set()


@pytest.mark.parametrize("preset", PRESETS)
def test_meanings_are_short(preset: Preset) -> None:
    """A meaning is one sentence that fits into a line."""
    meanings = [*code_meanings(preset).items(), *receipt_meanings(preset).items()]

    assert all(isinstance(code, str) for code, _ in meanings)
    assert [
        said
        for _, said in meanings
        if not (len(said) <= MAX_CHARACTERS and said.isascii() and said[-1:] == ".")
    ] == []


def test_an_answer_is_explained() -> None:
    """A code, or a status in its place, has its meaning; an unknown one and a yes have none."""
    twilio, phone = (shape_from(settings_of(one)) for one in ("twilio", "android-sms-gateway"))
    stop, unknown, sent, full = (
        shape.judge(Reply(status, (), body)).meaning
        for shape, status, body in (
            (twilio, 400, b'{"code": 21610}'),
            (twilio, 400, b'{"code": 29999}'),
            (twilio, 201, b'{"sid": "SM1"}'),
            (phone, 503, b"{}"),
        )
    )

    assert stop == "The recipient replied STOP."
    assert (unknown, sent) == (None, None)
    assert full is not None
