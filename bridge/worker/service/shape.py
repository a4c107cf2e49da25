"""The shape of the SMS API, and the one place that knows it: `encode` asks, `judge` understands.

Everything is prepared once, at the start. The shape that the bridge was made for, the preset
`generic`, is a fast way through both.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, assert_never
from urllib.parse import quote

from bridge.config import RequestSettings, SmsApiSettings
from bridge.config.api_answers import ErrorFate
from bridge.config.presets import code_meanings
from bridge.errors import ConfigError
from bridge.json_pointer import (
    CODE,
    CODE_IN_TEXT,
    NOT_JSON,
    as_code,
    find_all,
    find_code,
    find_id,
    in_member,
    read_document,
    read_words,
)
from bridge.telemetry.trace_context import TraceHeaders
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Answer, Fate, PauseReason, Result, judge_status
from bridge.worker.request import SendRequest
from bridge.worker.service.api_login import ApiLogin
from bridge.worker.service.body_template import prepare_body, write_json
from bridge.worker.service.legible import is_page, legible_body
from bridge.worker.service.retry_after import read_retry_after
from bridge.worker.service.transport import Header, Reply

_CONTENT_TYPES: Final = {"json": b"application/json", "form": b"application/x-www-form-urlencoded"}


class ApiRequest:
    """What is posted, and where.

    `common` are the headers that all have until a secret changes; they come before its own.
    """

    __slots__ = ("body", "common", "headers", "url")

    def __init__(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header]
    ) -> None:
        self.url = url
        self.headers = headers
        self.body = body
        self.common = common


class Shape:
    """How a request is written for the SMS API, and what its answers mean.

    `login` is asked for its header anew whenever one of its secrets has changed.
    """

    def __init__(self, settings: SmsApiSettings, login: ApiLogin) -> None:
        self.login = login
        self._key, self._username = login.key, login.username
        self._known_login: tuple[str, str] | None = None
        self._common_headers: tuple[Header, ...] = ()
        self._url = url_of(settings)
        self._fixed_headers: tuple[Header, ...] = (
            (b"Content-Type", _CONTENT_TYPES[settings.request.body]),
            (b"Accept-Encoding", b"identity"),
            (b"User-Agent", b"sms-bridge"),
            *(
                (name.encode("ascii"), value.get_secret_value().encode("ascii"))
                for name, value in settings.request.headers.items()
            ),
        )
        kind, _, place = settings.idempotency.partition(":")
        self._idempotency_header = place.encode("ascii") if kind == "header" else None
        fields = dict(settings.request.fields)
        if kind == "field":
            fields.setdefault(place, "{key}")
        # The request as it came is its own body, which pydantic writes faster than we could.
        own = {"fields": fields, "headers": {}}
        is_request = settings.request.model_copy(update=own) == RequestSettings()
        self._write = None if is_request else prepare_body(settings.request, fields, login)
        self._is_text = settings.response.body == "text"
        self._codes_like = CODE_IN_TEXT if self._is_text else CODE
        accepted, duplicate = settings.response.accepted, settings.response.duplicate
        self._accepted = _statuses(accepted.statuses)
        self._yes_pointer = accepted.pointer
        self._yes_values = frozenset(accepted.values)
        # What means yes is no error where it stands; elsewhere the same word may be one.
        self._no_errors = {accepted.pointer or "": self._yes_values}
        self._errors = dict(settings.response.errors)
        self._meanings = code_meanings(settings.preset)
        self._duplicate = duplicate
        self._known_codes = frozenset(filter(None, (*self._errors, duplicate.code)))
        self._id_pointers = settings.message_id_pointers
        self._code_pointers = settings.error_code_pointers

    def encode(
        self, request: SendRequest, envelope: Envelope, span: TraceHeaders | None = None
    ) -> ApiRequest:
        """Write a request, with the headers of its span if it has one, else the publisher's.

        Raises InvalidMessageError when it has a member that has no place in the service's.
        """
        login = (self._key.current, self._username.current)
        if login != self._known_login:
            header = self.login.header()
            self._common_headers = (*self._fixed_headers, *(() if header is None else (header,)))
            self._known_login = login
        headers: list[Header] = []
        if self._idempotency_header is not None:
            headers.append((self._idempotency_header, envelope.key.encode("ascii")))
        trace = envelope.trace if span is None else span
        if trace:
            headers += [(name.encode("ascii"), value.encode("ascii")) for name, value in trace]
        body = write_json(request) if self._write is None else self._write(request, envelope)
        return ApiRequest(self._url, headers, body, self._common_headers)

    def judge(self, reply: Reply) -> Answer:
        """Say what an answer means; nothing that the service wrote is in the detail."""
        legible = b""
        document = NOT_JSON if self._is_text else read_document(reply.body)
        if document is NOT_JSON:
            legible = legible_body(reply) if reply.body else b""
            if self._is_text:
                document = read_words(legible)
            elif legible != reply.body:
                document = read_document(legible)
        found = None if self._yes_pointer is None else find_all(document, self._yes_pointer)
        if reply.status in self._accepted and (found is None or self._all_say_yes(found)):
            # The way of nearly every answer: no call that it can do without.
            provider_id = find_id(document, self._id_pointers)
            answer = Answer(Fate.SENT, "success", "accepted", reply.status, provider_id=provider_id)
            if found is None and legible and is_page(reply, legible):
                return answer._replace(is_page=True)
            return answer
        if found is None:
            return self._explained(self._judge_refusal(reply, document))
        said = [self._is_yes(value) for value in found]
        if any(said) and not all(said):
            code = self._code_in(document, member=said.index(False))
            return self._explained(_in_part(reply.status, code))
        return self._explained(self._judge_refusal(reply, document, parts=len(said)))

    def _explained(self, answer: Answer) -> Answer:
        """Add what the code says; without one of its own, an answer's status stands for it."""
        code = str(answer.status) if answer.code is None else answer.code
        meaning = None if answer.fate is Fate.SENT else self._meanings.get(code)
        return answer if meaning is None else answer._replace(meaning=meaning)

    def _all_say_yes(self, found: Sequence[Any]) -> bool:
        for value in found:  # a loop, because a generator costs more
            if not self._is_yes(value):
                return False
        return bool(found)

    def _is_yes(self, value: object) -> bool:
        text = as_code(value, self._yes_values)
        # Without values, neither false nor 0 is something that stands there.
        return text in self._yes_values if self._yes_values else bool(value and text)

    def knows(self, code: str) -> bool:
        """Whether a code is one that the settings list; any other one is the service's alone."""
        return code in self._known_codes

    def _judge_refusal(self, reply: Reply, document: Any, *, parts: int = 1) -> Answer:  # noqa: ANN401  JSON
        status = reply.status
        code = self._code_in(document)
        repeats = self._repeats(status, code, document)
        if any(repeats):
            if not all(repeats):
                return _in_part(status, code)
            provider_id = find_id(document, self._id_pointers)
            return Answer(Fate.SENT, "success", "accepted before", status, provider_id=provider_id)
        wait_seconds = _wait_of(reply)
        # Without a code of its own, an answer's status stands for it.
        fate = self._errors.get(str(status) if code is None else code)
        if fate is not None:
            known = [one in self._errors for one in self._codes_beside(code, document)]
            if len(known) == parts and not all(known):
                # The part that has no known code may have been taken.
                code = self._code_in(document, member=known.index(False))
                return _uncertain(status, "gave a known error code for some parts only", code)
            return _by_code(fate, status, code, wait_seconds)
        if status in range(200, 300):
            return _uncertain(status, "gave an answer that fits no rule", code)
        return judge_status(status, retry_after_seconds=wait_seconds)._replace(code=code)

    def _code_in(self, document: Any, *, member: int | None = None) -> str | None:  # noqa: ANN401  JSON
        """Find the code, of one member only where a pointer leads to each."""
        pointers = self._code_pointers
        if member is not None:
            pointers = tuple(in_member(pointer, member) for pointer in pointers)
        return find_code(
            document,
            pointers,
            known=self._known_codes,
            but=self._no_errors,
            like=self._codes_like,
        )

    def _repeats(self, status: int, code: str | None, document: Any) -> Sequence[bool]:  # noqa: ANN401  JSON
        """Say, of each part that has a code, whether it repeats one that was accepted before."""
        duplicate = self._duplicate
        if duplicate.status not in (None, status):
            return ()
        if duplicate.code is None:
            return (duplicate.status is not None,)
        return [one == duplicate.code for one in self._codes_beside(code, document)]

    def _codes_beside(self, code: str | None, document: Any) -> Sequence[str | None]:  # noqa: ANN401  JSON
        """Return a code that was found, and those of the answer's other parts if it has some."""
        for pointer in self._code_pointers if code is not None else ():
            codes = [as_code(value, self._known_codes) for value in find_all(document, pointer)]
            if code in codes:
                return codes
        return ()


def shape_from(settings: SmsApiSettings) -> Shape:
    """Prepare the shape that settings describe, with the secrets that it needs.

    Raises ConfigError that names each setting that is missing, or one that cannot be used.
    """
    if settings.missing:
        raise ConfigError(*settings.missing)
    return Shape(settings, ApiLogin(settings))


def url_of(settings: SmsApiSettings) -> str:
    """Return where requests are posted to."""
    account = quote(settings.account or "", safe="")
    return f"{settings.base_url}{settings.path.replace('{account}', account)}"


def _statuses(written: Sequence[str]) -> frozenset[int]:
    return frozenset(
        status
        for one in written
        for status in (
            range(int(one[0]) * 100, int(one[0]) * 100 + 100) if one.endswith("xx") else (int(one),)
        )
    )


def _uncertain(status: int, what: str, code: str | None) -> Answer:
    return Answer(Fate.UNCERTAIN, "protocol_error", f"the SMS API {what}", status, code=code)


def _in_part(status: int, code: str | None) -> Answer:
    answer = _uncertain(status, "accepted a part of the message only", code)
    return answer._replace(in_part=True)


def _by_code(fate: ErrorFate, status: int, code: str | None, wait_seconds: float | None) -> Answer:
    detail = f"the SMS API answered {status} with an error code"
    answer = Answer(
        Fate.REFUSED,
        "rejected",
        detail,
        status,
        code=code,
        retry_after_seconds=wait_seconds,
        by_code=True,
    )
    match fate:
        case "refused":
            return answer
        case "retry":
            # Of the service's own trouble it may tell by a status as well.
            result: Result = "server_error" if status in range(500, 600) else "rejected"
            return answer._replace(fate=Fate.RETRY, result=result)
        case "slow_down":
            return answer._replace(fate=Fate.SLOW_DOWN, result="rate_limited")
        case "slow_down:sender":
            return answer._replace(fate=Fate.SLOW_DOWN, result="rate_limited", about="sender")
        case "setup:credentials_rejected":
            return _setup(answer, "credentials_rejected")._replace(result="unauthorized")
        case "setup:insufficient_funds":
            return _setup(answer, "insufficient_funds")
        case "setup:misconfigured":
            return _setup(answer, "misconfigured")
        case _:
            assert_never(fate)


def _setup(answer: Answer, pause: PauseReason) -> Answer:
    return answer._replace(fate=Fate.SETUP, pause=pause)


def _wait_of(reply: Reply) -> float | None:
    date = next(iter(reply.header_values("Date")), None)
    waits = reply.header_values("Retry-After")
    return read_retry_after(waits, now=time.time(), server_date=date)
