"""What is known of services: a file for each, with settings of `sms_api` and what it answers.

Under `webhook` it has those of an endpoint that the service calls, under `webhooks` what it calls.
A preset's settings are the same keys as a user's, which are laid over them: a key that the user
gives counts, and null leaves it to the preset. `request.fields` is taken as a whole; the codes of
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
# Taken as a whole: a field of the preset's that is left would be sent beside the user's.
_WHOLE: Final = ("fields",)
# In C, where PyYAML has it: a tenth of the time.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_preset(value: object) -> object:
    if value in PRESETS:
        return value
    names = ", ".join(PRESETS)
    meant = did_you_mean(value, PRESETS) if isinstance(value, str) else ""
    raise ValueError(f"is unknown{meant or f'; there are {names}'}")


KnownPreset = Annotated[Preset, BeforeValidator(_check_preset)]


def preset_settings(name: Preset) -> dict[str, Any]:
    """Return the settings of `sms_api` that a preset brings along, each of its shape's keys."""
    generic: dict[str, Any] = _read("generic")["sms_api"]
    return generic if name == "generic" else lay_over(generic, _read(name)["sms_api"])


def preset_endpoint(name: Preset) -> dict[str, Any]:
    """Return the settings of a webhook endpoint that a preset brings along.

    Where the service sends nothing that binds the body, `signature` is not among them.
    """
    own: dict[str, Any] = _read(name)["webhook"]
    below = dict(_read("generic")["webhook"])
    if "signature" not in own:
        del below["signature"]
    return lay_over(below, own)


def documented_answers(name: Preset) -> Sequence[Mapping[str, Any]]:
    """Return examples of what the service answers: `means`, `status`, `body`, `fate` of each.

    `missing` names what a request lacks that is answered so, where the service tells.
    """
    answers: list[Mapping[str, Any]] = _read(name)["answers"]
    return answers


def code_meanings(name: Preset) -> Mapping[str, str]:
    """Return what each code of the service says, in our words; a status may stand for a code."""
    meanings: Mapping[str, str] = _read(name)["meanings"]
    return meanings


def needed_settings(name: Preset) -> Mapping[str, str]:
    """Return settings of `sms_api` that the service needs, with what it calls each of them."""
    needs: Mapping[str, str] = _read(name)["needs"]
    return needs


def webhook_secret(name: Preset) -> str:
    """Return what the service calls the secret of its webhooks."""
    words: str = _read(name)["webhook_secret"]
    return words


def webhook_repeats(name: Preset) -> str:
    """Return when the service calls again, in words."""
    words: str = _read(name)["webhook_repeats"]
    return words


def documented_webhooks(name: Preset) -> Sequence[Mapping[str, Any]]:
    """Return examples of what the service calls.

    Each has `means`, `body` (a flat map for a form), `content_type` unless it is JSON, its `type`
    and `event_id`, and as a receipt `delivery`, `code`, `provider_id`, `message_id`, as far as it
    has them.
    `number` is the person's in the body, `text` that of the message.
    """
    webhooks: list[Mapping[str, Any]] = _read(name)["webhooks"]
    return webhooks


@functools.cache
def _read(name: Preset) -> dict[str, Any]:
    text = (files("bridge.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.load(text, Loader=_Loader)  # noqa: S506  a safe one
    return document


def lay_over(below: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lay what is given over what is below; what is given as null stays as it is there."""
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
    """Read a map that the environment gives as JSON; what is none is left to be told as a fault."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
