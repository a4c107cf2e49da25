"""`check --render`: the HTTP request for a send request, and the fate of each answer."""

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, assert_never
from urllib.parse import quote_plus

from pydantic import SecretStr

from bridge.config import Settings
from bridge.config.api_answers import AcceptedSettings, ErrorFate
from bridge.config.presets import code_meanings, documented_answers
from bridge.errors import ConfigError, InvalidMessageError
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Fate
from bridge.worker.request import parse_request
from bridge.worker.service.shape import Shape, shape_from
from bridge.worker.service.transport import Header, Reply

# The message_id of the rendered request.
MESSAGE_ID: Final = "the-message-id"
_MASK: Final = "***"


class RenderedAnswer(NamedTuple):
    """An answer of the service, and the fate of the message; `status` None means any status."""

    status: int | None
    code: str | None
    means: str | None
    becomes: str


class Rendering(NamedTuple):
    """A request as it would be posted, with masked secrets, and the answers to it."""

    url: str
    headers: dict[str, str]
    body: str
    answers: Sequence[RenderedAnswer]


def render(settings: Settings, body: str, answers: Sequence[str] = ()) -> Rendering:
    """Return the HTTP request that the worker would post for a body, and judge answers to it.

    Each of `answers` is a status, a space and a body. Without any, the preset's own examples are
    judged. Raises ConfigError if the body is not a send request, an answer has no status, or the
    worker could not start.
    """
    shape_from(settings.sms_api, settings.callback_url)
    # The real key has been checked; a mask replaces it from here on, so that it cannot be shown.
    request = settings.sms_api.request
    headers = dict.fromkeys(request.headers, SecretStr(_MASK))
    masked = settings.sms_api.model_copy(
        update={
            "key": SecretStr(_MASK),
            "key_file": None,
            "request": request.model_copy(update={"headers": headers}),
        }
    )
    shape = shape_from(masked, settings.callback_url)
    envelope = Envelope(
        key=MESSAGE_ID, message_id=MESSAGE_ID, published_at=None, first_delivered_at=0
    )
    try:
        short_codes = settings.sms_api.request.short_codes
        read = parse_request(body.encode(), settings.worker, short_codes=short_codes)
        asked = shape.encode(read, envelope)
    except (InvalidMessageError, UnicodeEncodeError) as error:
        why = str(error) if isinstance(error, InvalidMessageError) else "is not UTF-8"
        raise ConfigError(f"--render: {why}") from None
    login = shape.login.header()
    judged = [_judge(settings, shape, *_read_answer(answer)) for answer in answers]
    if not answers:
        judged += _documented(settings, shape)
        judged += _by_code_alone(settings, judged)
    return Rendering(
        url=asked.url,
        headers=dict(
            _shown(header, is_secret=header == login) for header in (*asked.common, *asked.headers)
        ),
        # In a form the mask is percent-encoded.
        body=asked.body.decode().replace(quote_plus(_MASK), _MASK),
        answers=judged,
    )


def _shown(header: Header, *, is_secret: bool) -> tuple[str, str]:
    name, value = header[0].decode(), header[1].decode()
    # The word before the secret names the scheme.
    before, space, _ = value.rpartition(" ")
    return name, f"{before}{space}{_MASK}" if is_secret else value


def _read_answer(answer: str) -> tuple[int, bytes]:
    status, _, body = answer.partition(" ")
    if not re.fullmatch("[1-5][0-9][0-9]", status):
        raise ConfigError("--answer: must be a status, and after a space the body of the answer")
    return int(status), body.encode(errors="replace")


def _judge(
    settings: Settings, shape: Shape, status: int, body: bytes, means: str | None = None
) -> RenderedAnswer:
    judged = shape.judge(Reply(status, (), body))
    becomes = _becomes(judged.fate, judged.pause or judged.about, settings)
    return RenderedAnswer(status, judged.code, means or judged.meaning, becomes)


def _documented(settings: Settings, shape: Shape) -> list[RenderedAnswer]:
    """Judge the preset's examples, unless settings of `generic` describe another service."""
    api = settings.sms_api
    if api.preset == "generic" and api.response.accepted != AcceptedSettings():
        return []
    return [
        _judge(
            settings,
            shape,
            answer["status"],
            json.dumps(answer["body"]).encode() if "body" in answer else b"",
            answer["means"],
        )
        for answer in documented_answers(api.preset)
    ]


def _by_code_alone(
    settings: Settings, documented: Sequence[RenderedAnswer]
) -> list[RenderedAnswer]:
    """Judge the codes that no example has; an example without a code counts by its status."""
    api = settings.sms_api
    accepted, meanings = api.response.accepted, code_meanings(api.preset)
    shown = {answer.code or str(answer.status) for answer in documented}
    if set(api.error_code_pointers) == {accepted.pointer}:
        # The accepted values are where codes would be, and are not errors.
        shown |= set(accepted.values)
    return [
        RenderedAnswer(None, code, meanings.get(code), _becomes(*_read_fate(fate), settings))
        for code, fate in api.response.errors.items()
        if code not in shown
    ]


def _read_fate(fate: ErrorFate) -> tuple[Fate, str]:
    kind, _, more = fate.partition(":")
    return Fate(kind), more


def _becomes(fate: Fate, more: str | None, settings: Settings) -> str:
    match fate:
        case Fate.SENT:
            return "sent"
        case Fate.REFUSED:
            return "dead letter: refused"
        case Fate.RETRY | Fate.NOT_SENT:
            return "retried later"
        case Fate.SLOW_DOWN:
            only_sender = more == "sender"
            return "only this sender's messages wait" if only_sender else "the worker slows down"
        case Fate.SETUP:
            return f"the worker pauses: {more}"
        case Fate.AMBIGUOUS:
            return f"retried later; the worker pauses if all messages get it: {more}"
        case Fate.UNCERTAIN if settings.worker.on_uncertain == "park":
            return "dead letter: uncertain"
        case Fate.UNCERTAIN:
            return "retried with the same key, then dead letter: uncertain"
        case _:
            assert_never(fate)
