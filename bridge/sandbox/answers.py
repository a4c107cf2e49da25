"""What a service answers: its documented answers, found by name and given with new ids."""

import copy
import json
import re
import secrets
import string
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from pydantic import SecretStr

from bridge.config import SmsApiSettings
from bridge.config.fields import did_you_mean
from bridge.config.presets import documented_answers
from bridge.json_pointer import split_pointer
from bridge.worker.service.connection import Reply
from bridge.worker.service.shape import shape_from

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Shorter runs may be what the service's ids have in common, such as a time.
_DIGITS: Final = re.compile(r"[0-9a-f]{8,}|[0-9A-F]{8,}")
ACCEPTED: Final = "sent"


class Answer(NamedTuple):
    """One answer of the service; `body` is None where there is none, `means` where it has no name.

    `code` is the service's own error code; `missing` names what a request lacks that is answered
    so (`to`, `from`, `text`).
    """

    status: int
    body: Any = None
    means: str | None = None
    fate: str | None = None
    code: str | None = None
    missing: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}


class Answers:
    """The documented answers of one service."""

    def __init__(self, settings: SmsApiSettings) -> None:
        self._id_pointer = settings.message_id_pointers[0]
        self._answers = [*_documented(settings)]
        yes = [answer for answer in self._answers if answer.fate == ACCEPTED]
        self.acceptance = yes[0]
        # What else says yes says that it had said so before.
        self._duplicate = next(iter(yes[1:]), None)

    def accept(self, message_id: str) -> Answer:
        """Make the answer to a message that was taken."""
        body = copy.deepcopy(self.acceptance.body)
        return self.acceptance._replace(body=put(body, self._id_pointer, message_id))

    def new_id(self) -> str:
        """Make an id of the form that the service's have."""
        node = self.acceptance.body
        for name in split_pointer(self._id_pointer):
            node = node[int(name) if isinstance(node, list) else name]
        return like(str(node))

    @property
    def duplicate(self) -> Answer | None:
        """The answer to a repeat of a key; None where a repeat is taken as another message."""
        return self._duplicate

    def refusal(self, *, missing: str | None = None) -> Answer:
        """Return the answer to a request that is wrong, or lacks something."""
        refused = [answer for answer in self._answers if answer.fate == "refused"]
        wrong = next(answer for answer in refused if not answer.missing)
        return next((answer for answer in refused if missing in answer.missing), wrong)

    def login_refusal(self) -> Answer:
        """Return the answer to a key that is not known."""
        rejected = "setup:credentials_rejected"
        return next(answer for answer in self._answers if answer.fate == rejected)

    def listed(self) -> list[dict[str, Any]]:
        """List the answers, each by the name that `named` finds it by first."""
        return [
            {
                "name": one.means or one.code,
                "status": one.status,
                "code": one.code,
                "fate": one.fate,
            }
            for one in self._answers
        ]

    def with_status(self, status: int) -> Answer | None:
        """Return the first answer that has a status."""
        return next((answer for answer in self._answers if answer.status == status), None)

    def named(self, name: str) -> Answer:
        """Find an answer by what it means, else by its code, else by its fate.

        Raises ValueError that lists the answers when there is none.
        """
        for names in (
            {answer.means: answer for answer in self._answers},
            {answer.code: answer for answer in reversed(self._answers)},
            {answer.fate: answer for answer in reversed(self._answers)},
        ):
            if name in names:
                return names[name]
        known = [text for answer in self._answers for text in (answer.means, answer.code) if text]
        listed = "; ".join(map(_listed, self._answers))
        raise ValueError(f"is unknown{did_you_mean(name, known) or ';'} there are: {listed}")


def _documented(settings: SmsApiSettings) -> Iterator[Answer]:
    # The code is what the bridge reads for one. It asks nobody here, whatever it needs for that.
    asking = {"base_url": "http://sandbox", "account": "any", "key": SecretStr("any")}
    shape = shape_from(settings.model_copy(update=asking))
    for given in documented_answers(settings.preset):
        content = json.dumps(given["body"]).encode() if "body" in given else b""
        yield Answer(
            given["status"],
            given.get("body"),
            given["means"],
            given["fate"],
            shape.judge(Reply(given["status"], (), content)).code,
            tuple(given.get("missing", ())),
        )


def _listed(answer: Answer) -> str:
    return f"{answer.means} ({', '.join(filter(None, (answer.code, answer.fate)))})"


def like(example: str) -> str:
    """Make an id of the form of an example; one of our own for an example without a form."""
    if _UUID.fullmatch(example):
        return str(uuid.uuid4())
    if not _DIGITS.search(example):
        return f"sandbox-{uuid.uuid4().hex}"
    return _DIGITS.sub(_random_digits, example)


def _random_digits(run: re.Match[str]) -> str:
    if run[0].isdecimal():
        return "".join(secrets.choice(string.digits) for _ in run[0])
    digits = secrets.token_hex(len(run[0]))[: len(run[0])]
    return digits.upper() if run[0].isupper() else digits


def put(document: Any, pointer: str, value: object) -> Any:  # noqa: ANN401  JSON
    """Put a value where a pointer leads that leads somewhere, and return the document."""
    *way, last = split_pointer(pointer)
    node = document
    for name in way:
        node = node[int(name) if isinstance(node, list) else name]
    node[int(last) if isinstance(node, list) else last] = value
    return document
