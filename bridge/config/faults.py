"""Describes configuration faults in plain words: the key, what is valid, a similar name.

No fault quotes a value, or a key that may be a value: it may be a misplaced secret.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bridge.config.fields import HALF_CHARACTER, PATTERNS, did_you_mean
from bridge.config.settings import known_keys

MAX_FAULTS: Final = 20
MAX_SHOWN_KEY_CHARACTERS: Final = 32

# Our texts that replace pydantic's, by the type of its error.
_TEXTS: Final = {
    "string_type": "must be text; a number needs quotes",
    "string_unicode": HALF_CHARACTER,
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} in its list",
    "too_long": "must have at most {max_length} in its list",
    "tuple_type": "must be a list",
    "dict_type": "must be a map, like {{a: b}}",
    "recursion_loop": "is nested too deep",
    "missing": "is missing; write it",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt:.15g}",
    "greater_than_equal": "must be at least {ge:.15g}",
    "less_than_equal": "must be at most {le:.15g}",
    "literal_error": "must be {expected}",
    "path_type": "must be the path of a file",
    "model_type": "must hold keys, indented below it",
}

# Maps whose keys the user chooses, and the form of keys that cannot be a secret or a phone number.
_MADE_UP: Final = {
    ("sms_api", "request", "fields"): re.compile(r"(?:/[A-Za-z_-]{1,32}|/[0-9]{1,2}){1,8}"),
    ("sms_api", "request", "headers"): re.compile(r"[A-Za-z]{1,20}(?:-[A-Za-z]{1,20}){0,4}"),
    ("sms_api", "response", "errors"): re.compile(r"[0-9]{1,6}|[A-Z_]{1,32}|[a-z_-]{1,32}"),
}
# The line of each key in the file, by the path of the key.
Lines = Mapping[tuple[str, ...], int]


def describe(error: ValidationError, lines: Lines) -> list[str]:
    """Return a line for each fault that pydantic found: the first MAX_FAULTS, then a count."""
    errors = error.errors(include_url=False)
    faults = [_describe_one(one, lines) for one in errors[:MAX_FAULTS]]
    if len(errors) > MAX_FAULTS:
        faults.append(f"and {len(errors) - MAX_FAULTS} more faults")
    return faults


def _describe_one(error: ErrorDetails, lines: Lines) -> str:
    path = tuple(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        line = f", line {lines[path]}" if path in lines else ""
        return unknown_key(path, (".".join(path[:-1]) or "the top") + line)
    key = _shown_path(path, lines)
    text = _text_of(error) + _remedy_of(error)
    return f"{key}: {text}" if key else text


def _shown_path(path: tuple[str, ...], lines: Lines) -> str:
    """Return the path of a value; for a user's key that may be a secret, only section and line."""
    section = next((made_up for made_up in _MADE_UP if path[: len(made_up)] == made_up), None)
    if section is None or len(path) == len(section):
        return ".".join(path)
    place = path[: len(section) + 1]
    if _MADE_UP[section].fullmatch(place[-1]):
        return ".".join(place)
    line = f", line {lines[place]}" if place in lines else ""
    return f"{'.'.join(section)}{line}"


def _remedy_of(error: ErrorDetails) -> str:
    """Return the remedy for a key without a value, which YAML reads as null."""
    if error["input"] is not None:
        return ""
    if isinstance(error["loc"][-1], int):
        return "; it has no value: write one, or remove it from the list"
    return "; it has no value: write one, or leave the key out for its default"


def _text_of(error: ErrorDetails) -> str:
    facts = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch":
        return PATTERNS[facts["pattern"]]
    if error["type"] in _TEXTS:
        return _TEXTS[error["type"]].format(**facts)
    # Our own checks raise ValueError, and pydantic adds this prefix to their text.
    return error["msg"].removeprefix("Value error, ")


def unknown_key(path: Sequence[str], place: str) -> str:
    """Describe an unknown key; `place` replaces its path if that must not be quoted."""
    *sections, key = path
    prefix = "".join(f"{section}." for section in sections)
    place_in = "".join("*." if section.isdecimal() else f"{section}." for section in sections)
    known = known_keys(in_lists=True)
    siblings = [name.removeprefix(place_in) for name in known if name.startswith(place_in)]
    meant = did_you_mean(key, siblings, prefix)
    subject = f"{prefix}{key}" if may_be_shown(key, is_known=bool(meant)) else place
    return f"{subject}: unknown key{meant}"


def may_be_shown(key: str, *, is_known: bool = False) -> bool:
    """Whether a key looks like the name of a setting, and not like a secret or a number.

    `{password:hunter}` is one key in YAML, because no space follows the colon. A key that is
    similar to the name of a setting (`is_known`) may also have capitals.
    """
    if len(key) > MAX_SHOWN_KEY_CHARACTERS:
        return False
    if not re.fullmatch("[A-Za-z]+(?:[_-][A-Za-z]+)*", key):
        return False
    return is_known or key.islower()
