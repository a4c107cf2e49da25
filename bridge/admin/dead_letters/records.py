"""Dead letters as plain data, in full or with all masked that could be personal."""

import base64
import json
import time
from datetime import UTC, datetime
from typing import Any, Final

from bridge.admin.dead_letters.letter import DeadLetter
from bridge.amqp.properties import as_facts
from bridge.amqp.wire import LARGE_BODY_BYTES, Body
from bridge.worker import envelope


def as_record(letter: DeadLetter) -> dict[str, Any]:
    """Make plain data of a letter, body and all: `body` is text, else there is `body_base64`."""
    properties = {
        name: value
        for name, value in as_facts(letter.properties).items()
        if name not in {"headers", "cluster_id"} and value not in {None, ""}
    }
    return {
        **as_summary(letter),
        "properties": _plain(properties),
        "headers": _plain(letter.properties.headers or {}),
        **_body(letter.body),
    }


def as_summary(letter: DeadLetter) -> dict[str, Any]:
    """Make plain data of what is known of a letter without its body."""
    return {
        "message_id": letter.message_id,
        "reason": letter.reason,
        "detail": letter.detail,
        "attempts": letter.attempts,
        "status": letter.status,
        "code": letter.code,
        "meaning": letter.meaning,
        "dead_at": None
        if letter.dead_at is None
        else datetime.fromtimestamp(letter.dead_at, UTC).isoformat(timespec="milliseconds"),
        "age_seconds": None if letter.dead_at is None else round(time.time() - letter.dead_at),
    }


def _body(body: Body) -> dict[str, str]:
    try:
        return {"body": body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _plain(value: Any) -> Any:  # noqa: ANN401  a header may be anything
    match value:
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes() | bytearray():
            return {"base64": base64.b64encode(value).decode()}
        case datetime():
            return value.isoformat()
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def mask_number(number: str) -> str:
    """Write a number so that it is recognised by who knows it: `+491*****78`."""
    shown = 9
    return f"{number[:4]}*****{number[-2:]}" if len(number) >= shown else "***"


_SHOWN_PROPERTIES: Final = frozenset(
    (
        *("content_type", "content_encoding", "delivery_mode", "priority"),
        *("message_id", "timestamp", "message_type", "app_id"),
    )
)
_SHOWN_HEADERS: Final = frozenset(
    (
        *(envelope.EXPIRES_AT, envelope.NOT_BEFORE, envelope.ON_UNCERTAIN, envelope.REASON),
        *(envelope.DETAIL, envelope.ATTEMPTS, envelope.UNCERTAIN_ATTEMPTS, envelope.STATUS),
        *(envelope.FIRST_DELIVERED_AT, envelope.COPIES, envelope.DEAD_AT, envelope.DELIVERY_COUNT),
        *(envelope.CODE, envelope.MEANING, envelope.EARLIER_SPAN),
        *("traceparent", "tracestate"),
    )
)
_HIDDEN: Final = "***"


def mask_record(record: dict[str, Any]) -> dict[str, Any]:
    """Hide in a record of `as_record` whatever could be personal; names of members stay."""
    masked = dict(record)
    for part, shown in (("properties", _SHOWN_PROPERTIES), ("headers", _SHOWN_HEADERS)):
        masked[part] = {
            name: value if name in shown else _HIDDEN for name, value in record[part].items()
        }
    masked.pop("body_base64", None)
    masked["body"] = _mask_body(record.get("body", ""))
    return masked


def _mask_body(body: str) -> str:
    if len(body) > LARGE_BODY_BYTES:
        return f"<{len(body)} characters>"
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return f"<{len(body)} characters, no JSON>"
    if not isinstance(document, dict):
        return "<no JSON object>"
    return json.dumps({name: _mask_member(name, value) for name, value in document.items()})


def _mask_member(name: str, value: object) -> str:
    if not isinstance(value, str):
        return _HIDDEN
    return {"to": mask_number(value), "text": f"<{len(value)} characters>"}.get(name, _HIDDEN)
