"""Whether what a service answered repeats something of the message that it was sent."""

import re
from typing import Final

from pydantic_core import to_json

from bridge.worker.request import SendRequest

# Shorter ones say nothing of anybody, and stand in many texts by chance.
MIN_WORD_CHARACTERS: Final = 3
MIN_DIGITS: Final = 4
# A shorter number may stand in an id by chance.
MIN_NUMBER_DIGITS: Final = 7

_DIGITS: Final = re.compile(rf"[0-9]{{{MIN_DIGITS},}}")
_NO_DIGITS: Final = re.compile("[^0-9]+")
_BETWEEN_WORDS: Final = re.compile("[^0-9a-z]+")


def is_echo(code: str, request: SendRequest) -> bool:
    """Whether a code is some words of the message, or has digits of its text or of its number.

    Both are found however either side parts them: a one-time code `123-456` is `123456` too, and
    `Anna_Smith` is `Anna Smith`.
    """
    said = f"{request.to} {request.sender} {request.text}"
    if request.model_extra:
        said += to_json(request.model_extra).decode()
    word = _joined(code)
    if len(word) >= MIN_WORD_CHARACTERS and not word.isdigit() and word in _joined(said):
        return True
    digits = _NO_DIGITS.sub("", said)
    runs = {_NO_DIGITS.sub("", code), *_DIGITS.findall(code)}
    # In its own country a number has a 0 in place of the country code.
    runs |= {run.lstrip("0") for run in runs}
    return any(len(run) >= MIN_DIGITS and run in digits for run in runs)


def is_number(provider_id: str, request: SendRequest) -> bool:
    """Whether what a service gave as a message's id has the person's number in it."""
    digits = request.to.removeprefix("+")
    return len(digits) >= MIN_NUMBER_DIGITS and digits in provider_id


def _joined(text: str) -> str:
    return _BETWEEN_WORDS.sub("", text.lower())
