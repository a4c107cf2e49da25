"""Which bodies are send requests, and how many segments a text takes."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config import WorkerSettings
from bridge.errors import InvalidMessageError
from bridge.worker.request import SendRequest, count_segments, parse_request

NUMBER = "+491713920001"
SENDER = "CanarySender"
WORDS = "Canary words"
GOOD: dict[str, Any] = {"to": NUMBER, "from": SENDER, "text": WORDS}
DEFAULTS = WorkerSettings()
FORWARD = WorkerSettings(extra_fields="forward")
WITH_DEFAULT = WorkerSettings(default_from="Default")
each_mode = pytest.mark.parametrize("mode", [DEFAULTS, FORWARD], ids=["refuse", "forward"])


def parse(body: object, mode: WorkerSettings = DEFAULTS) -> SendRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(raw, mode)


def refusal(body: object, mode: WorkerSettings = DEFAULTS) -> str:
    """Parse a body that must be refused and return the text of the refusal."""
    with pytest.raises(InvalidMessageError) as caught:
        parse(body, mode)
    return str(caught.value)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def sent(body: object, mode: WorkerSettings = DEFAULTS) -> dict[str, Any]:
    """Parse a body and return what goes to the service, read as JSON."""
    members: dict[str, Any] = json.loads(parse(body, mode).model_dump_json())
    return members


# --- Good requests -------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("code", ["110", "40404", "12345678"])
def test_short_code(code: str, mode: WorkerSettings) -> None:
    """A short code is a recipient where the service sends to those, and nowhere else."""
    body = json.dumps({**GOOD, "to": code}).encode()

    assert parse_request(body, mode, short_codes=True).to == code
    assert refusal(body, mode).startswith("to: must be +")


@pytest.mark.parametrize(
    "to", ["12", "123456789", "4040a", "", "+110", "٤٠٤٠٤", "404 04", "40404\n"]
)
def test_no_short_code(to: str) -> None:
    """Other digits are none, and a number keeps its form."""
    body = json.dumps({**GOOD, "to": to}).encode()
    with pytest.raises(InvalidMessageError):
        parse_request(body, DEFAULTS, short_codes=True)
    good = json.dumps(GOOD).encode()
    assert parse_request(good, DEFAULTS, short_codes=True).to == NUMBER


@pytest.mark.parametrize("sender", ["A", "x" * 32, "Grüße 😀"])
def test_sender(sender: str) -> None:
    """A sender is 1 to 32 characters."""
    assert parse({**GOOD, "from": sender}).sender == sender


TEXTS = {
    "longest of emoji": "😀" * 1600,
    "lines": "a\r\nb\tc",
    "blank": " ",
    "byte-order mark inside": "a\ufeffb",
    "right to left": "\u202eabc",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text(text: str) -> None:
    """A text of 1 to 1,600 characters is passed on unchanged."""
    assert sent({**GOOD, "text": text})["text"] == text


@pytest.mark.parametrize("limit", [1, 65_536])
def test_text_of_the_length_that_is_set(limit: int) -> None:
    """A text as long as worker.max_text_length allows is accepted, whatever that is."""
    mode = WorkerSettings(max_text_length=limit)

    assert len(parse({**GOOD, "text": "é" * limit}, mode).text) == limit


@pytest.mark.parametrize("limit", [1, 1600])
def test_text_over_the_length_that_is_set(limit: int) -> None:
    """One character more is refused, and the setting is named."""
    mode = WorkerSettings(max_text_length=limit)

    assert "worker.max_text_length" in refusal({**GOOD, "text": "x" * (limit + 1)}, mode)


@pytest.mark.parametrize("space", [" ", "\n", "\t\r\n  "])
def test_white_space_around_the_body(space: str) -> None:
    """White space around the object is JSON."""
    assert parse(f"{space}{json.dumps(GOOD)}{space}".encode()).text == WORDS


# --- The sender that may be left out -------------------------------------------------------------


def test_default_sender() -> None:
    """Without `from` the default one is sent."""
    assert sent(without("from"), WITH_DEFAULT)["from"] == "Default"


def test_no_sender_at_all() -> None:
    """Without `from` and a default the request is invalid."""
    assert refusal(without("from")).startswith("from: is missing")


@pytest.mark.parametrize("sender", [None, ""], ids=["null", "empty"])
def test_sender_that_is_there_but_empty(sender: object) -> None:
    """A `from` that says nothing is a mistake, not a wish for the default."""
    assert refusal({**GOOD, "from": sender}, WITH_DEFAULT).startswith("from: ")


# --- Members that are not ours -------------------------------------------------------------------


def test_unknown_member_is_refused() -> None:
    """A typo is told, not swallowed."""
    assert refusal({**GOOD, "txt": "a"}).startswith("txt: unknown member")


@pytest.mark.parametrize("name", ["sender", "model_config", "", "é"])
def test_any_name_is_forwarded(name: str) -> None:
    """With `forward` no name of a member means anything to the bridge itself."""
    assert sent({**GOOD, name: "x"}, FORWARD) == {**GOOD, name: "x"}


def test_member_of_the_same_name_inside_does_not_stop_the_default() -> None:
    """The service's own member `sender` says nothing about `from`."""
    mode = WorkerSettings(extra_fields="forward", default_from="Default")

    assert sent({**without("from"), "sender": "x"}, mode)["from"] == "Default"


def test_number_too_large_is_not_changed_in_silence() -> None:
    """A number that no program can hold is refused; it never becomes null on its way."""
    body = json.dumps(GOOD)[:-1] + ', "extra": 1e400}'

    assert refusal(body.encode(), FORWARD)


# --- Bad bodies ----------------------------------------------------------------------------------


def deep(depth: int) -> bytes:
    return json.dumps(GOOD)[:-1].encode() + b', "a": ' + b"[" * depth + b"]" * depth + b"}"


TEXT = json.dumps(GOOD)
# The digits of East Asian type, which are digits to str.isdigit.
WIDE = {ord("0") + n: 0xFF10 + n for n in range(10)}
NO_JSON: dict[str, bytes] = {
    "empty": b"",
    "white space": b" \n",
    "cut": TEXT[:-1].encode(),
    "two objects": (TEXT * 2).encode(),
    "something after": (TEXT + "x").encode(),
    "newline in a text": TEXT.replace("Canary words", "Canary\nwords").encode(),
    "byte-order mark": b"\xef\xbb\xbf" + TEXT.encode(),
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-16 without a mark": TEXT.encode("utf-16-le"),
    "Latin-1": json.dumps({**GOOD, "text": "Größe"}, ensure_ascii=False).encode("latin-1"),
    "cut UTF-8": TEXT.encode()[:-3] + b'\xc3"}',
    "surrogate as bytes": TEXT.encode()[:-2] + b'\xed\xa0\x80"}',
    "lone surrogate": TEXT.replace(WORDS, "\\ud800").encode(),
    "lone surrogate as a name": (TEXT[:-1] + ', "\\ud800": 1}').encode(),
    "nested a thousand deep": deep(1000),
    "200,000 brackets": b"[" * 200_000,
    "a number of 5,000 digits": TEXT[:-1].encode() + b', "a": ' + b"9" * 5000 + b"}",
}
NO_OBJECT: dict[str, bytes] = {
    "null": b"null",
    "list": f"[{TEXT}]".encode(),
    "truth": b"true",
}
CONSTANTS: dict[str, bytes] = {
    name: TEXT[:-1].encode() + b', "extra": ' + name.encode() + b"}"
    for name in ("NaN", "Infinity", "-Infinity", '{"a": [NaN]}')
}
TWICE: dict[str, bytes] = {
    "to": (TEXT[:-1] + ', "to": "+491713920099"}').encode(),
    "the same value": (TEXT[:-1] + f', "to": "{NUMBER}"}}').encode(),
    "escaped name": (TEXT[:-1] + ', "t\\u006f": "+491713920099"}').encode(),
    "unknown member": (TEXT[:-1] + ', "a": 1, "a": 1}').encode(),
    "nested": (TEXT[:-1] + ', "a": {"b": 1, "b": 2}}').encode(),
    "nested in a list": (TEXT[:-1] + ', "a": [[{"b": 1, "b": 2}]]}').encode(),
    "number as a name": (TEXT[:-1] + f', "a": {{"{NUMBER}": 1, "{NUMBER}": 2}}}}').encode(),
}
MISSHAPEN: dict[str, object] = {
    "no number": without("to"),
    "no text": without("text"),
    "number as a number": {**GOOD, "to": 491713920001},
    "number without plus": {**GOOD, "to": "491713920001"},
    "number that begins with 0": {**GOOD, "to": "+0491713920001"},
    "number too short": {**GOOD, "to": "+123"},
    "number too long": {**GOOD, "to": "+9994567890123456"},
    "number with a newline": {**GOOD, "to": NUMBER + "\n"},
    "number with a NUL": {**GOOD, "to": NUMBER + "\0"},
    "number in Arabic digits": {**GOOD, "to": "+٤٩١٧٠١٢٣٤٥"},
    "number in wide digits": {**GOOD, "to": NUMBER.translate(WIDE)},
    "no sender": without("from"),
    "sender as a number": {**GOOD, "from": 12345},
    "empty sender": {**GOOD, "from": ""},
    "sender too long": {**GOOD, "from": "x" * 33},
    "sender with a newline": {**GOOD, "from": "Canary\n"},
    "sender with DEL": {**GOOD, "from": "Canary\x7f"},
    "sender with a C1 control": {**GOOD, "from": "Canary\x85"},
    **{
        f"text with {ord(control):#04x}": {**GOOD, "text": f"Canary{control}words"}
        for control in "\0\x08\x0b\x0c\x0e\x1f\x7f\x9f"
    },
    "text as a number": {**GOOD, "text": 123456789},
    "empty text": {**GOOD, "text": ""},
    "text too long": {**GOOD, "text": WORDS * 1600},
    "other case": {"To": NUMBER, "From": SENDER, "Text": WORDS},
}
BAD: dict[str, object] = {
    **NO_JSON,
    **{f"{name} for an object": body for name, body in NO_OBJECT.items()},
    **{f"constant {name}": body for name, body in CONSTANTS.items()},
    **{f"twice: {name}": body for name, body in TWICE.items()},
    **MISSHAPEN,
    "too large": {**GOOD, "text": WORDS * 100_000},
}


@each_mode
@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_bad_body_is_invalid(body: object, mode: WorkerSettings) -> None:
    """The refusal is one short line for logs and headers, and quotes nothing of the message."""
    with pytest.raises(InvalidMessageError) as caught:
        parse(body, mode)
    told = str(caught.value)

    assert not [part for part in ("Canary", "49170", "17012345", "123456") if part in told]
    assert told.isprintable()
    assert 0 < len(told) <= 500
    # A traceback shows the parser's own error, which quotes the input, only if it is chained.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


FIELDS: dict[str, tuple[object, str]] = {
    "to": ({**GOOD, "to": "x"}, "to: must be + and 4 to 15 digits"),
    "to missing": (without("to"), "to: is missing"),
    "to as a number": ({**GOOD, "to": 5}, "to: must be a string"),
    "from": ({**GOOD, "from": "a\n"}, "from: must not hold control characters"),
    "from too long": ({**GOOD, "from": "x" * 33}, "from: is too long"),
    "text": ({**GOOD, "text": ""}, "text: is empty"),
    "object": ([], "body: must be a JSON object"),
    "control character": (
        {**GOOD, "text": "a\0b"},
        "text: must hold no control characters but tab, line feed and carriage return",
    ),
    "JSON": (b"{", "body: is not UTF-8 JSON"),
    "nothing": (b"", "body: is empty"),
    "white space": (b" \r\n\t", "body: is empty"),
    "byte-order mark": (b"\xef\xbb\xbf" + TEXT.encode(), "body: begins with a byte-order mark"),
    "byte-order mark alone": (b"\xef\xbb\xbf", "body: begins with a byte-order mark"),
    "UTF-16": (TEXT.encode("utf-16"), "body: is UTF-16; write UTF-8"),
    "deep nesting": (deep(1000), "body: is nested too deep"),
    "deep objects": (b'{"a":' * 1000 + b"1" + b"}" * 1000, "body: is nested too deep"),
    "twice": (TWICE["to"], "to: appears twice"),
    "size": (b"{" * 10_000_000, "body: larger than"),
}


@pytest.mark.parametrize(("body", "begins"), FIELDS.values(), ids=FIELDS)
def test_refusal_names_the_field(body: object, begins: str) -> None:
    """The text of the refusal says which field is wrong, and how."""
    assert refusal(body).startswith(begins)


@pytest.mark.parametrize(
    "name", [NUMBER, "491713920001", "Canary words, all of them", "Canary\n", "Canary" * 20, "é"]
)
def test_refusal_does_not_quote_an_odd_name(name: str) -> None:
    """A member's name may be a number or a text itself, and is then not told."""
    assert refusal({**GOOD, name: 1}).startswith("a member: unknown member")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NEARLY_GOOD = st.fixed_dictionaries(
    {"to": st.just(NUMBER) | JSON_VALUES, "text": st.just(WORDS) | JSON_VALUES},
    optional={"from": st.just(SENDER) | JSON_VALUES, "extra": JSON_VALUES},
)


def survives(body: bytes, mode: WorkerSettings) -> bool:
    """Parse a body and say whether it ended as it may: with a request, or as invalid."""
    try:
        return parse(body, mode).sender is not None
    except InvalidMessageError as error:
        return bool(str(error))


@each_mode
@given(body=JSON_VALUES | NEARLY_GOOD)
def test_any_json(mode: WorkerSettings, body: object) -> None:
    """Whatever JSON comes, only InvalidMessageError is raised."""
    assert survives(json.dumps(body).encode(), mode)


@each_mode
@given(position=st.integers(0, len(TEXT) - 1), odd=st.binary(min_size=1, max_size=4))
def test_any_odd_bytes(mode: WorkerSettings, position: int, odd: bytes) -> None:
    """Whatever a few bytes are changed to, only InvalidMessageError is raised."""
    body = bytearray(TEXT.encode())
    body[position : position + len(odd)] = odd

    assert survives(bytes(body), mode)


@given(extra=JSON_VALUES)
def test_what_is_forwarded_is_not_changed(extra: object) -> None:
    """What is accepted with `forward` arrives at the service as the same JSON."""
    body = {**GOOD, "extra": extra}
    try:
        arrived = sent(body, FORWARD)
    except InvalidMessageError:
        arrived = body

    assert json.dumps(arrived) == json.dumps(body)


# --- Segments ------------------------------------------------------------------------------------

SEGMENTS: dict[str, tuple[str, Literal["gsm7", "ucs2"], int]] = {
    "full": ("a" * 160, "gsm7", 1),
    "one more": ("a" * 161, "gsm7", 2),
    "all full": ("a" * 307, "gsm7", 3),
    "national letters": ("äöüßÄÖÜñÑåÅæÆøØàèéìòùÇ£¥§¿¡ΔΦΓΛΩΠΨΣΘΞ\r\n", "gsm7", 1),
    "braces take two": ("{" * 80, "gsm7", 1),
    "braces over one": ("{" * 81, "gsm7", 2),
    "euro takes two": ("a" * 159 + "€", "gsm7", 2),
    "pair is not split": ("a" * 152 + "€" + "a" * 152, "gsm7", 3),
    "all of the extension": ("\f^{}\\[~]|€", "gsm7", 1),
    "Cyrillic": ("я" * 70, "ucs2", 1),
    "Cyrillic, one more": ("я" * 71, "ucs2", 2),
    "Cyrillic, two full": ("я" * 134, "ucs2", 2),
    "Cyrillic, three": ("я" * 135, "ucs2", 3),
    "one odd letter changes all": ("a" * 70 + "ç", "ucs2", 2),
    "tab": ("\t", "ucs2", 1),
    "emoji takes two": ("😀" * 35, "ucs2", 1),
    "emoji over one": ("😀" * 36, "ucs2", 2),
    "emoji is not split": ("😀" * 67, "ucs2", 3),
}


@pytest.mark.parametrize(("text", "encoding", "count"), SEGMENTS.values(), ids=SEGMENTS)
def test_segments(text: str, encoding: str, count: int) -> None:
    """A text takes as many SMS as phones and networks split it into."""
    assert count_segments(text) == (encoding, count)


@given(st.text(min_size=1, max_size=400))
def test_more_text_takes_no_less(text: str) -> None:
    """A text takes at least as many SMS as its beginning."""
    assert count_segments(text)[1] >= count_segments(text[:-1])[1]
