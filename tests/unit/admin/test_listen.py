"""What `listen` makes of an event: always something that is JSON when it is written."""

import json
from typing import Any, NoReturn

import aio_pika
import pytest

from bridge.admin.listen import _event


class Event(aio_pika.Message):
    """An event as it is delivered."""

    routing_key = "message.received"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"type": "message.received"}', {"type": "message.received"}),
        (b"[" * 60_000 + b"]" * 60_000, "[" * 60_000 + "]" * 60_000),
        (b'{"a":' * 60_000 + b"1" + b"}" * 60_000, '{"a":' * 60_000 + "1" + "}" * 60_000),
        (b'{"data": NaN}', '{"data": NaN}'),
        (b'{"data": -Infinity}', '{"data": -Infinity}'),
        (b'{"data": 1e999}', '{"data": 1e999}'),
        (b"9" * 5000, "9" * 5000),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
        (b'"\\ud800"', "\ud800"),
    ],
    ids=[
        *("json", "deep", "deep-object", "nan", "infinite", "too-large", "long-number", "bytes"),
        *("empty", "half-a-surrogate"),
    ],
)
def test_a_body_that_is_no_json_is_shown_as_text(body: bytes, shown: object) -> None:
    message: Any = Event(body)
    line = json.dumps(_event(message))

    assert json.loads(line, parse_constant=_refuse)["body"] == shown
