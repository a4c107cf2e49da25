"""Reads the presets of SMS services: one file for each, with its settings and examples.

A file has settings of `sms_api` and of an endpoint (`webhook`), and examples of the service's
answers (`answers`) and webhooks (`webhooks`). The settings have the same keys as a user's, which
override them; null keeps the preset's value. `request.fields` is replaced as a whole; the codes of
`response.errors` are added to the preset's.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any, Final, Literal, get_args

import yaml
from pydantic import BeforeValidator

from bridge.config.fields import did_you_mean

Preset = Literal[
    "generic",
    "twilio",
    "vonage",
    "vonage-sms",
    "telnyx",
    "messagebird",
    "sinch",
    "plivo",
    "infobip",
    "android-sms-gateway",
    "httpsms",
]
PRESETS: Final[tuple[Preset, ...]] = get_args(Preset)
# Replaced as a whole: otherwise the preset's other fields would be sent with the user's.
_WHOLE: Final = ("fields",)
# The loader in C, if PyYAML has it, takes a tenth of the time.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_preset(value: object) -> object:
    if value in PRESETS:
        return value
    names = ", ".join(PRESETS)
    meant = did_you_mean(value, PRESETS) if isinstance(value, str) else ""
    raise ValueError(f"is unknown{meant or f'; there are {names}'}")


KnownPreset = Annotated[Preset, BeforeValidator(_check_preset)]


def preset_settings(name: Preset) -> dict[str, Any]:
    """Return a preset's settings of `sms_api`, with every key that describes the API."""
    generic: dict[str, Any] = _read("generic")["sms_api"]
    return generic if name == "generic" else lay_over(generic, _read(name)["sms_api"])


def preset_endpoint(name: Preset) -> dict[str, Any]:
    """Return a preset's settings of a webhook endpoint.

    They have no `signature` if the service sends nothing that authenticates the body.
    """
    own: dict[str, Any] = _read(name)["webhook"]
    below = dict(_read("generic")["webhook"])
    if "signature" not in own:
        del below["signature"]
    return lay_over(below, own)


def documented_answers(name: Preset) -> Sequence[Mapping[str, Any]]:
    """Return examples of the service's answers, each with `means`, `status`, `body` and `fate`.

    `missing`, if present, names the part of a request whose absence causes this answer.
    """
    answers: list[Mapping[str, Any]] = _read(name)["answers"]
    return answers


def code_meanings(name: Preset) -> Mapping[str, str]:
    """Return our explanation of each error code of the service; a status may stand for a code."""
    meanings: Mapping[str, str] = _read(name)["meanings"]
    return meanings


def receipt_meanings(name: Preset) -> Mapping[str, str]:
    """Return our explanation of each error code in the service's delivery receipts.

    A service that numbers these separately has `receipt_meanings`; the others use one set of codes.
    """
    preset = _read(name)
    meanings: Mapping[str, str] = preset.get("receipt_meanings", preset["meanings"])
    return meanings


def needed_settings(name: Preset) -> Mapping[str, str]:
    """Return the settings of `sms_api` that the service needs, with its own name for each."""
    needs: Mapping[str, str] = _read(name)["needs"]
    return needs


def webhook_secret(name: Preset) -> str:
    words: str = _read(name)["webhook_secret"]
    return words


def webhook_repeats(name: Preset) -> str:
    """Return a description of when the service sends a webhook again."""
    words: str = _read(name)["webhook_repeats"]
    return words


def documented_webhooks(name: Preset) -> Sequence[Mapping[str, Any]]:
    """Return examples of the service's webhooks.

    Each has `means`, `body` (a flat map for a form), `content_type` unless it is JSON, its `type`
    and `event_id`, and, if it is a receipt, `delivery`, `code`, `provider_id` and `message_id`, as
    far as it contains them. `callback` is the address that was given with the message, and was
    called; the reference in it is the `message_id`. `number` is the phone number of a person in the
    body, `text` the text of the message.
    """
    webhooks: list[Mapping[str, Any]] = _read(name)["webhooks"]
    return webhooks


@functools.cache
def _read(name: Preset) -> dict[str, Any]:
    text = (files("bridge.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.load(text, Loader=_Loader)  # noqa: S506  a safe loader
    return document


def lay_over(below: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `given` into `below`, map by map; a null keeps the value below."""
    laid = dict(below)
    for key, value in given.items():
        under = below.get(key)
        over = as_map(value) if isinstance(under, dict) else value
        if isinstance(under, dict) and isinstance(over, dict) and key not in _WHOLE:
            laid[key] = lay_over(under, over)
        elif over is not None or key not in below:
            laid[key] = over
    return laid


def as_map(value: object) -> object:
    """Parse a map that the environment contains as JSON; return invalid text for validation."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
