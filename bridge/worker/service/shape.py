"""Translate between messages and the SMS API: `encode` writes requests, `judge` reads answers.

No other module knows the API's format. Everything is prepared once, at the start. The default
format, the preset `generic`, has a fast path in both.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, assert_never
from urllib.parse import quote

from bridge.config import RequestSettings, SmsApiSettings
from bridge.config.api_answers import ErrorFate
from bridge.config.api_request import slots_of
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
from bridge.worker.service.lenient_reader import is_page, legible_body
from bridge.worker.service.retry_after import read_retry_after
from bridge.worker.service.transport import Header, Reply

_CONTENT_TYPES: Final = {"json": b"application/json", "form": b"application/x-www-form-urlencoded"}


class ApiRequest:
    """URL, headers and body of one POST.

    `common` are the headers shared by all requests until a secret changes; they precede `headers`.
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
    """The format of the SMS API's requests and answers, as configured.

    The header of `login` is built again whenever one of its secrets has changed. Without a
    `callback_url`, requests have no field that contains `{callback}`.
    """

    def __init__(
        self, settings: SmsApiSettings, login: ApiLogin, callback_url: str | None = None
    ) -> None:
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
        fields = {
            pointer: value
            for pointer, value in settings.request.fields.items()
            if callback_url is not None or all(s.name != "callback" for s in slots_of(value))
        }
        if kind == "field":
            fields.setdefault(place, "{key}")
        # In the default format the request is its own body, which pydantic writes fastest.
        own = {"fields": fields, "headers": {}}
        is_request = settings.request.model_copy(update=own) == RequestSettings()
        self._write = (
            None if is_request else prepare_body(settings.request, fields, login, callback_url)
        )
        self._is_text = settings.response.body == "text"
        self._codes_like = CODE_IN_TEXT if self._is_text else CODE
        accepted, duplicate = settings.response.accepted, settings.response.duplicate
        self._accepted = _statuses(accepted.statuses)
        self._yes_pointer = accepted.pointer
        self._yes_values = frozenset(accepted.values)
        # A value that means acceptance is no error code at its pointer; elsewhere it may be one.
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
        """Build the POST of a message, with the trace headers of its span, else its publisher's.

        Raises InvalidMessageError if the message has a member for which the API's format has no
        place.
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
        """Interpret an answer; `detail` quotes nothing that the service wrote."""
        legible = b""
        document = NOT_JSON if self._is_text else read_document(reply.body)
        if document is NOT_JSON:
            legible = _legible_body(reply) if reply.body else b""
            if self._is_text:
                document = read_words(legible)
            elif legible != reply.body:
                document = read_document(legible)
        found = None if self._yes_pointer is None else find_all(document, self._yes_pointer)
        if reply.status in self._accepted and (found is None or self._all_say_yes(found)):
            # The path of nearly every answer: avoid every unnecessary call.
            provider_id = find_id(document, self._id_pointers)
            answer = Answer(Fate.SENT, "success", "accepted", reply.status, provider_id=provider_id)
            if found is None and legible and is_page(legible, reply.header_values("Content-Type")):
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
        """Add the preset's explanation of the code, or of the status if there is no code."""
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
        # Without configured values, a member means acceptance unless it is false, 0 or empty.
        return text in self._yes_values if self._yes_values else bool(value and text)

    def knows(self, code: str) -> bool:
        """Whether the settings list a code; other codes come from the service alone."""
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
        # Without an error code, the status is looked up in its place.
        fate = self._errors.get(str(status) if code is None else code)
        if fate is not None:
            known = [one in self._errors for one in self._codes_beside(code, document)]
            if len(known) == parts and not all(known):
                # The part without a known code may have been accepted.
                code = self._code_in(document, member=known.index(False))
                return _uncertain(status, "gave a known error code for only some parts", code)
            return _by_code(fate, status, code, wait_seconds)
        if status in range(200, 300):
            return _uncertain(status, "gave an answer that matches no rule", code)
        return judge_status(status, retry_after_seconds=wait_seconds)._replace(code=code)

    def _code_in(self, document: Any, *, member: int | None = None) -> str | None:  # noqa: ANN401  JSON
        """Find the error code; with `member`, only that of one part of the answer."""
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
        """Return, for each part that has a code, whether it reports an earlier acceptance."""
        duplicate = self._duplicate
        if duplicate.status not in (None, status):
            return ()
        if duplicate.code is None:
            return (duplicate.status is not None,)
        return [one == duplicate.code for one in self._codes_beside(code, document)]

    def _codes_beside(self, code: str | None, document: Any) -> Sequence[str | None]:  # noqa: ANN401  JSON
        """Return the codes of all parts of an answer, including `code`; empty without a code."""
        for pointer in self._code_pointers if code is not None else ():
            codes = [as_code(value, self._known_codes) for value in find_all(document, pointer)]
            if code in codes:
                return codes
        return ()


def shape_from(settings: SmsApiSettings, callback_url: str | None = None) -> Shape:
    """Create the shape that the settings describe, with the secrets that it needs.

    `callback_url` is the address to which the service sends receipts, if it is known.
    Raises ConfigError that names each missing setting, or a setting that cannot be used.
    """
    if settings.missing:
        raise ConfigError(*settings.missing)
    return Shape(settings, ApiLogin(settings), callback_url)


def url_of(settings: SmsApiSettings) -> str:
    """Return the URL to which requests are posted."""
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
    answer = _uncertain(status, "accepted only a part of the message", code)
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
            # The status may show that the fault is the service's own.
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


def _legible_body(reply: Reply) -> bytes:
    codings, types = reply.header_values("Content-Encoding"), reply.header_values("Content-Type")
    return legible_body(reply.body, codings, types)


def _wait_of(reply: Reply) -> float | None:
    date = next(iter(reply.header_values("Date")), None)
    waits = reply.header_values("Retry-After")
    return read_retry_after(waits, now=time.time(), server_date=date)
