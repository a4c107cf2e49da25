"""Any fields with any message: what a standard decoder reads back is what was meant."""

import json
from typing import Any
from urllib.parse import parse_qsl

from hypothesis import given
from hypothesis import strategies as st

from bridge.config import SmsApiSettings
from bridge.worker.envelope import Envelope
from bridge.worker.request import SendRequest, count_segments
from bridge.worker.service.shape import shape_from

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# Small alphabets, so that what needs an escape is met.
ODD = st.text('aé"\\/~{}%&=+ #*\n\x00\U0001f600', max_size=6)
WORDS = TEXT | ODD
# Of control characters only these three.
MESSAGE_TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], include_characters="\t\n\r"),
    min_size=1,
    max_size=12,
)
NAMES = WORDS.filter(
    lambda name: not (name == "*" or name.endswith("#") or name.isdecimal() or "needed" in name)
)
SLOTS = ["to", "from", "text", "key", "key:36", "encoding", "encoding:a|b", "account", "secret"]

# A value as it is written below `fields`, in parts: what a text means is known only of its parts.
PARTS = st.lists(
    st.tuples(st.just("constant"), WORDS) | st.tuples(st.just("slot"), st.sampled_from(SLOTS))
)


class Template(list[tuple[str, str]]):
    """The parts of a text."""


TEMPLATES = PARTS.map(Template)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    TEMPLATES | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.fixed_dictionaries(
    {
        "to": st.from_regex(r"\+[1-9][0-9]{3,14}", fullmatch=True),
        "from": st.text("Acme é+1", min_size=1, max_size=11),
        "text": MESSAGE_TEXT,
    }
)
KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=36)


def written(value: Any) -> Any:
    """Write a value as a user does below `fields`."""
    if isinstance(value, Template):
        return "".join(
            text.replace("{", "{{").replace("}", "}}") if kind == "constant" else f"{{{text}}}"
            for kind, text in value
        )
    if isinstance(value, list):
        return [written(member) for member in value]
    if isinstance(value, dict):
        return {name: written(member) for name, member in value.items()}
    return value


def filled(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, Template):
        return "".join(text if kind == "constant" else words[text] for kind, text in value)
    if isinstance(value, list):
        return [filled(member, words) for member in value]
    if isinstance(value, dict):
        return {name: filled(member, words) for name, member in value.items()}
    return value


def pointers(value: Any, way: str = "") -> dict[str, Any]:
    """Write a document as fields: each leaf with the pointer to it."""
    if isinstance(value, dict) and value:
        steps = [
            (name.replace("~", "~0").replace("/", "~1"), below) for name, below in value.items()
        ]
    elif isinstance(value, list) and value and not isinstance(value, Template):
        steps = [(str(number), below) for number, below in enumerate(value)]
    else:
        return {way: value}
    return {
        pointer: leaf
        for name, below in steps
        for pointer, leaf in pointers(below, f"{way}/{name}").items()
    }


def encoded(message: dict[str, str], key: str, login: dict[str, str], **request: Any) -> bytes:
    api: dict[str, Any] = {"base_url": "https://x.example", "auth": {"scheme": "none"}, **login}
    api |= {"request": request, "idempotency": "none"}
    envelope = Envelope(key=key, message_id=key, published_at=None, first_delivered_at=0)
    made = SendRequest.model_validate(message)
    return shape_from(SmsApiSettings.model_validate(api)).encode(made, envelope).body


def words_of(message: dict[str, str], key: str, login: dict[str, str]) -> dict[str, str]:
    is_gsm7 = count_segments(message["text"])[0] == "gsm7"
    said = {name: message[name] for name in ("to", "from", "text")}
    return said | {
        "key": key,
        "key:36": key,
        "account": login["account"],
        "secret": login["key"],
        "encoding": "gsm7" if is_gsm7 else "ucs2",
        "encoding:a|b": "a" if is_gsm7 else "b",
    }


LOGINS = st.fixed_dictionaries(
    {"account": WORDS.filter(bool), "key": WORDS.map(str.strip).filter(bool)}
)
NEEDED = {"to": Template([("slot", "to")]), "text": Template([("slot", "text")])}


@given(st.dictionaries(NAMES, VALUES, max_size=4), MESSAGES, KEYS, LOGINS, st.booleans())
def test_any_json_is_read_back(
    members: dict[str, Any],
    message: dict[str, str],
    key: str,
    login: dict[str, str],
    whole: bool,  # noqa: FBT001  drawn
) -> None:
    """Objects, lists, constants and texts are read back, as one field or as one for each leaf."""
    document = members | {"needed": NEEDED}
    if whole:
        fields = {place_of(name): value for name, value in document.items()}
    else:
        fields = pointers(document)
    body = encoded(message, key, login, fields={at: written(leaf) for at, leaf in fields.items()})

    assert json.loads(body) == filled(document, words_of(message, key, login))


def place_of(name: str) -> str:
    (place,) = pointers({name: None})
    return place


FORM_VALUES = (
    TEMPLATES | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)


@given(
    st.dictionaries(
        NAMES | st.integers(0, 99).map(str),
        FORM_VALUES | st.lists(FORM_VALUES, max_size=3),
        max_size=4,
    ),
    MESSAGES,
    KEYS,
    LOGINS,
)
def test_any_form_is_read_back(
    members: dict[str, Any], message: dict[str, str], key: str, login: dict[str, str]
) -> None:
    """Every name has its values in their order, a list one for each of its members."""
    document = {f"needed-{name}": value for name, value in NEEDED.items()} | members
    words = words_of(message, key, login)
    expected = [
        (name, as_form(filled(one, words)))
        for name, value in document.items()
        for one in (value if type(value) is list else [value])
    ]
    fields = {place_of(name): written(value) for name, value in document.items()}
    body = encoded(message, key, login, body="form", fields=fields)

    assert parse_qsl(body.decode("ascii"), keep_blank_values=True, strict_parsing=True) == expected


def as_form(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
