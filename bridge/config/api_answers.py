"""Settings for the meaning of the SMS service's answers."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bridge.config.fields import (
    ErrorCode,
    List,
    Map,
    Pointer,
    Section,
    ServiceSection,
    write_number,
)
from bridge.json_pointer import is_like_a_phone_number

# The meaning of a service's own error code for the message. After `setup:` comes the reason of the
# pause; with `slow_down:sender` only the messages of that sender wait.
ErrorFate = Literal[
    "refused",
    "retry",
    "slow_down",
    "slow_down:sender",
    "setup:credentials_rejected",
    "setup:insufficient_funds",
    "setup:misconfigured",
]
MAX_CODES: Final = 200
# A pointer to a word of plain text. The first 100 words are read, so two digits suffice.
_WORD: Final = re.compile("/(?:0|[1-9][0-9]?)")
NO_WORD: Final = (
    "cannot lead into plain text; write /0 for its first word, /1 for the second, or leave out "
    "sms_api.response.body"
)
_ERRORS: Final[dict[str, ErrorFate]] = {}
_YES: Final = re.compile("2(?:[0-9][0-9]|xx)")
# Such a status cannot mark a repeat without a code: it has another meaning, or many.
_SAYS_NO_REPEAT: Final = frozenset((401, 402, 403, 404, 405, 407, 408, 410, 421, 425, 426, 429))


def _check_code(value: str) -> str:
    if is_like_a_phone_number(value):
        raise ValueError("is like a phone number, which is never read as a code; leave it out")
    return value


def _check_yes(status: str) -> str:
    if not _YES.fullmatch(status):
        raise ValueError(
            "must be a status like 202, or 2xx for all of them; put the status for a repeated "
            "key into response.duplicate"
        )
    return status


ReadCode = Annotated[ErrorCode, AfterValidator(_check_code)]
YesStatus = Annotated[str, BeforeValidator(write_number), AfterValidator(_check_yes)]


class AcceptedSettings(ServiceSection):
    """The answers that mean success: by status and, if the body decides, by a value in it.

    A pointer without values requires only that there is a value, such as an id.
    """

    statuses: Annotated[tuple[YesStatus, ...], List, Field(min_length=1, max_length=20)] = ("2xx",)
    pointer: Pointer | None = None
    values: Annotated[tuple[ErrorCode, ...], List, Field(max_length=100)] = ()

    @model_validator(mode="after")
    def _says_what_means_yes(self) -> "AcceptedSettings":
        if self.values and self.pointer is None:
            raise ValueError("values need a pointer to their place in the body")
        return self


class DuplicateSettings(Section):
    """The answer to a request whose idempotency key was accepted before.

    Without status and code, the service has no such answer.
    """

    status: Annotated[int, Field(ge=200, le=599)] | None = None
    code: ReadCode | None = None

    @model_validator(mode="after")
    def _says_nothing_else(self) -> "DuplicateSettings":
        if self.status is None or self.code is not None:
            return self
        if self.status not in range(400, 500) or self.status in _SAYS_NO_REPEAT:
            raise ValueError(
                f"status {self.status} alone is ambiguous, and messages could be lost; "
                "set duplicate.code too"
            )
        return self


class ResponseSettings(ServiceSection):
    """The meaning of answers, apart from that of the status alone.

    In a `body` of plain text, pointers lead to words: `/0` to the first.
    """

    body: Literal["json", "text"] = "json"
    accepted: AcceptedSettings = AcceptedSettings()
    errors: Annotated[dict[ReadCode, ErrorFate], Map, Field(max_length=MAX_CODES)] = _ERRORS
    duplicate: DuplicateSettings = DuplicateSettings()

    @model_validator(mode="after")
    def _leads_to_words(self) -> "ResponseSettings":
        pointer = self.accepted.pointer
        if pointer is not None and not self.can_follow(pointer):
            raise ValueError(f"accepted.pointer: {NO_WORD}")
        return self

    def can_follow(self, pointer: str) -> bool:
        """Whether a pointer can lead to a value in this kind of body."""
        return self.body == "json" or _WORD.fullmatch(pointer) is not None

    @model_validator(mode="after")
    def _says_one_thing(self) -> "ResponseSettings":
        if self.duplicate.status is None and self.duplicate.code in self.errors:
            raise ValueError("duplicate.code is in errors too; leave it out of one of them")
        return self
