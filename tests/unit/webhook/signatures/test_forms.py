"""Forms that are signed as a row: which are read, and that each row can be cut in one way only."""

import base64
import hmac
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.forms import (
    MAX_PARAMETERS,
    MAX_SIGNED_FORM_BYTES,
    PLIVO,
    TWILIO,
    Parameters,
    check_no_form,
    check_row,
    read_form,
    signed_row,
)
from bridge.webhook.signatures.header import only
from bridge.webhook.signatures.schemes import SCHEMES
from bridge.webhook.signatures.verify import verify

FORM = "application/x-www-form-urlencoded"
SID = "0123456789abcdef0123456789abcdef"
INCOMING = {
    "AccountSid": f"AC{SID}",
    "ApiVersion": "2010-04-01",
    "Body": "hello",
    "From": "+12025550101",
    "FromCity": "SAN FRANCISCO",
    "FromZip": "",
    "MessageSid": f"SM{SID}",
    "NumMedia": "0",
    "SmsMessageSid": f"SM{SID}",
    "SmsStatus": "received",
    "To": "+12025550102",
}
STATUS = {
    "AccountSid": f"AC{SID}",
    "ErrorCode": "30003",
    "From": "Acme",
    "MessageSid": f"SM{SID}",
    "MessageStatus": "undelivered",
    "To": "+12025550101",
}
PLIVO_INCOMING = {
    "From": "12025550101",
    "MessageUUID": "00000000-0000-4000-8000-000000000002",
    "Text": "hello",
    "To": "12025550102",
    "Type": "sms",
    "Units": "1",
}


def read(body: bytes, *content_types: str) -> list[tuple[str, str]]:
    given = [(b"content-type", kind.encode()) for kind in content_types or (FORM,)]
    return read_form(body, only(given, "content-type").decode())


def row_of(form: dict[str, str], known: Parameters = TWILIO, query: bytes = b"") -> str:
    pairs = list(form.items())
    check_row(known, pairs, query)
    return signed_row(pairs)


def is_refused(form: dict[str, str], known: Parameters = TWILIO, query: bytes = b"") -> bool:
    with pytest.raises(InvalidSignatureError) as caught:
        row_of(form, known, query)
    return caught.value.fault == "ambiguous"


# --- Reading -------------------------------------------------------------------------------------


def test_a_form_is_read_with_its_empty_values() -> None:
    """Plus and percent are decoded, and a name without a value has an empty one."""
    assert read(b"a=1+2&b=%E2%9C%93%26&c=") == [("a", "1 2"), ("b", "✓&"), ("c", "")]


@pytest.mark.parametrize("kind", [FORM, f"{FORM}; charset=UTF-8", FORM.upper(), f"{FORM} ;"])
def test_types_of_forms(kind: str) -> None:
    """The type may be written in any case, and say that the character set is UTF-8."""
    assert read(b"a=1", kind) == [("a", "1")]


OTHER_TYPES = {
    "json": (("application/json",), "missing"),
    "multipart": (("multipart/form-data; boundary=x",), "missing"),
    "empty": (("",), "missing"),
    "another character set": ((f"{FORM}; charset=utf-16",), "malformed"),
    "twice": ((FORM, FORM), "malformed"),
    "two in one": ((f"{FORM}, application/json",), "missing"),
}


@pytest.mark.parametrize(("kinds", "fault"), OTHER_TYPES.values(), ids=OTHER_TYPES.keys())
def test_other_types_are_no_forms(kinds: tuple[str, ...], fault: str) -> None:
    """A body of another type, or in another character set, binds nothing."""
    with pytest.raises(InvalidSignatureError) as caught:
        read(b"a=1", *kinds)

    assert caught.value.fault == fault


LOOSE = {
    "a name twice": b"a=1&a=1",
    "a name twice, spelled otherwise": b"a=1&%61=2",
    "no equals sign": b"a=1&b",
    "an empty pair": b"a=1&&b=2",
    "a bare percent sign": b"a=100%",
    "half an escape": b"a=%4",
    "no UTF-8": b"a=%ff",
    "no ASCII": "a=é".encode(),
    "too many": b"&".join(b"a%d=1" % number for number in range(MAX_PARAMETERS + 1)),
    "too long": b"a=".ljust(MAX_SIGNED_FORM_BYTES + 1, b"1"),
}


@pytest.mark.parametrize("body", LOOSE.values(), ids=LOOSE.keys())
def test_what_readers_differ_about_is_refused(body: bytes) -> None:
    """A body that some reader would take for another form is no form."""
    with pytest.raises(InvalidSignatureError) as caught:
        read(body)

    assert caught.value.fault == "malformed"


@given(body=st.binary(max_size=60))
def test_no_body_raises_anything_else(body: bytes) -> None:
    """Whatever comes is read, or refused."""
    with suppress(InvalidSignatureError):
        assert read(body) or not body


# --- The row -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "known"), [(INCOMING, TWILIO), (STATUS, TWILIO), (PLIVO_INCOMING, PLIVO)]
)
def test_the_row_is_sorted(form: dict[str, str], known: Parameters) -> None:
    """Names and values stand in a row, in the order of the names."""
    shuffled = dict(reversed(form.items()))

    assert row_of(shuffled, known) == "".join(name + form[name] for name in sorted(form))


ORDINARY = (
    "",
    "From Berlin To Paris",
    "Body lotion",
    "To",
    "From",
    "Text me, Status?",
    "Typewriter",
    "Units and Media",
    "+447700900123",
    "call +447700900123 From 5 To 7",
    "a=b&c=d?e#f",
    "line\nbreak\0✓😀",
    "ErrorCode",
)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_are_taken(text: str) -> None:
    """What people write is never taken for a parameter."""
    assert row_of(INCOMING | {"Body": text})
    assert row_of(PLIVO_INCOMING | {"Text": text}, PLIVO)
    assert row_of({k: v for k, v in PLIVO_INCOMING.items() if k != "Text"} | {"Body": text}, PLIVO)


def test_a_new_parameter_is_taken() -> None:
    """Twilio adds parameters without notice, and they make no form unreadable."""
    assert row_of(INCOMING | {"OptOutKind": "x", "Zone": ""})
    assert row_of(STATUS | {"ChannelKind": "x"})


PLANTED = ("From+447700900123", "To+447700900123", "FromCity", "NumMedia1", f"MessageSidSM{SID}")


@pytest.mark.parametrize("planted", PLANTED)
def test_a_text_may_hold_a_parameter(planted: str) -> None:
    """A name in a text, before a value of its kind, is taken as text and never as a parameter."""
    name, value = next(
        (name, planted.removeprefix(name))
        for name in sorted(INCOMING, reverse=True)
        if planted.startswith(name)
    )
    text = INCOMING | {"Body": f"YES{planted}"}
    row = "".join(key + text[key] for key in sorted(text))
    swallowed = "".join(key + text[key] for key in sorted(text) if "Body" < key <= name)
    cut = {key: text[key] for key in text if key < "Body" or key > name}
    cut |= {"Body": "YES", name: value + swallowed}

    assert "".join(key + cut[key] for key in sorted(cut)) == row
    assert row_of(text) == row
    assert is_refused(cut)


def test_two_forms_of_one_row_are_refused_both() -> None:
    """Where the service could have sent either of two forms, neither is taken."""
    behind = {"MediaContentType0": "image/png", "MediaUrl0": "https://a.example/"}
    form = {name: value for name, value in INCOMING.items() if not name.startswith("From")}
    genuine = {**form, "From": "12345", "MessageSid": f"SM{SID}"}
    planted = "From+447700900123" + "".join(map("".join, behind.items()))
    one = {**genuine, "Body": f"YES{planted}"}
    other = {**genuine, **behind, "Body": "YES", "From": "+447700900123"}
    other["MediaUrl0"] += "From12345"

    assert signed_row(list(one.items())) == signed_row(list(other.items()))
    assert is_refused(one)
    assert is_refused(other)


def test_a_row_of_many_names_is_refused_soon() -> None:
    """A text that is nothing but names is read within a bound, or refused."""
    began = time.process_time()
    for text in ("To", "FromTo", "FromCity", "From+1555", "From+1555To+1555MediaUrl0https://a/"):
        for count in (20, 300, 3000):
            with suppress(InvalidSignatureError):
                row_of(INCOMING | {"Body": text * count})

    assert time.process_time() - began < 2


RECUT = {
    "a shorter name": {"Body": None, "Bod": "yhello"},
    "a longer name": {"Body": None, "Bodyhello": ""},
    "swallowed by a text": {"Body": "helloFrom+12025550101", "From": None},
    "swallowed by a place": {"FromZip": f"MessageSidSM{SID}", "MessageSid": None},
    "swallowed by a number": {"NumMedia": f"0SmsMessageSidSM{SID}", "SmsMessageSid": None},
    "a text in two": {"Body": "hel", "Clo": ""},
    "a text and an error": {"ErrorCode": "30003"},
    "no account": {"AccountSid": None},
    "another account": {"AccountSid": "hello"},
    "no sender": {"From": None},
    "no recipient": {"To": None},
    "an odd name": {"?a": "1"},
    "a name that is a number": {"0": "1"},
}


@pytest.mark.parametrize("changes", RECUT.values(), ids=RECUT.keys())
def test_a_form_that_is_cut_elsewhere_is_refused(changes: dict[str, str | None]) -> None:
    """What no service sends, but would have the row of something that it does."""
    form = {**INCOMING, **changes}

    assert is_refused({name: value for name, value in form.items() if value is not None})


# A text with a number in it, of a sender that does not begin as a number does.
NAMED_SENDER = INCOMING | {"Body": "YESFrom+447700900123", "From": "Acme"}
SHORT_SENDER = NAMED_SENDER | {"From": "2020", "Zone": "1"}
# With a text as the value of Body, where Text could be one, too.
PLIVO_PLANTED = {
    **{name: PLIVO_INCOMING[name] for name in ("From", "MessageUUID", "To", "Type", "Units")},
    "Body": f"YESFrom447700900123MessageUUID{PLIVO_INCOMING['MessageUUID']}Texthello",
    "Zone": "1",
}
AGREED = {"Body": "I do not agree. BodyI agree", "Zone": "1"}
SPOOFS = {
    "a sender as a new parameter": (
        TWILIO,
        NAMED_SENDER,
        {"Body": "YES", "From": "+447700900123", "FromAcme": ""},
    ),
    "a sender as a part of another": (
        TWILIO,
        NAMED_SENDER,
        {"Body": "YES", "From": "+447700900123FromAcme"},
    ),
    "a short sender": (
        TWILIO,
        SHORT_SENDER,
        {"Body": "YES", "From": "+447700900123", "From2": "020"},
    ),
    "a text that begins later": (
        TWILIO,
        INCOMING | AGREED,
        {"ApiVersion": "2010-04-01BodyI do not agree. ", "Body": "I agree"},
    ),
    "a text of Plivo that begins later": (
        PLIVO,
        PLIVO_INCOMING | {"Text": "No. TextYes", "Zone": "1"},
        {"MessageUUID": f"{PLIVO_INCOMING['MessageUUID']}TextNo. ", "Text": "Yes"},
    ),
    "another text of Plivo": (
        PLIVO,
        PLIVO_PLANTED,
        {
            "Body": None,
            "BodyYES": "",
            "From": "447700900123",
            "Text": f"helloFrom12025550101MessageUUID{PLIVO_INCOMING['MessageUUID']}",
        },
    ),
}


@pytest.mark.parametrize(("known", "genuine", "changes"), SPOOFS.values(), ids=SPOOFS.keys())
def test_no_text_names_its_sender_or_loses_its_begin(
    known: Parameters, genuine: dict[str, str], changes: dict[str, str | None]
) -> None:
    """What a stranger wrote is no sender, nor a shorter text, in a form with something unusual."""
    recut = {k: v for k, v in {**genuine, **changes}.items() if v is not None}

    assert signed_row(list(recut.items())) == signed_row(list(genuine.items()))
    assert is_refused(recut, known)


UNUSUAL: tuple[dict[str, str], ...] = ({"Zone": "1"}, {"From": "Acme"}, {"From": "2020"})


@pytest.mark.parametrize("changes", UNUSUAL)
@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_are_taken_in_unusual_forms(text: str, changes: dict[str, str]) -> None:
    """What people write is taken beside a new parameter, and of a sender that has a name."""
    assert row_of(INCOMING | {"Body": text} | changes)
    assert row_of(PLIVO_INCOMING | {"Text": text} | changes, PLIVO)


def test_two_texts_are_refused() -> None:
    """Plivo sends a text as Text, or with media as Body: one could be a part of the other."""
    assert is_refused(PLIVO_INCOMING | {"Body": "hello"}, PLIVO)


def test_a_query_may_hold_no_form() -> None:
    """The row begins behind the query, which could hold its begin: one reading is taken at most."""
    begin = f"a=1AccountSidAC{SID}"

    assert row_of(INCOMING, query=b"a=1").startswith("AccountSid")
    assert row_of(INCOMING, query=begin.encode())
    assert is_refused({**INCOMING, "ZZ": ""}, query=begin.encode())
    assert is_refused({"Aa": "1", **INCOMING}, query=b"a=1")
    moved = {name: value for name, value in INCOMING.items() if name != "AccountSid"}
    assert is_refused(moved, query=begin.encode())


QUERIES = (
    b"template=OrderBody",
    b"FromCountry=US",
    b"Body",
    b"To=+447700900123&From=+447700900123",
    b"a=1&MessageSid=" + SID.encode(),
    b"x=" + b"ToCity" * 20,
)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    "form", [INCOMING, STATUS, {**INCOMING, "Zone": "1"}, STATUS | {"From": "TowerCity"}]
)
def test_a_query_may_hold_names(query: bytes, form: dict[str, str]) -> None:
    """No form begins in a query that holds no account, whatever else it holds."""
    assert row_of(form, query=query)


def test_a_query_that_holds_a_form_is_none_of_json() -> None:
    """A form's signature is none of a body of JSON, whose digest a text could hold."""
    check_no_form(TWILIO, b"a=1&AccountSid=1")
    with pytest.raises(InvalidSignatureError):
        check_no_form(TWILIO, urlencode({"a": f"AccountSidAC{SID}"}).encode())


PIECES = [*INCOMING, *INCOMING.values(), "x", "ErrorCode", "30003"]


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=6),
    subsets=st.lists(st.sets(st.sampled_from(sorted({*INCOMING, "ErrorCode"}))), max_size=8),
)
def test_one_row_is_one_form(pieces: list[str], subsets: list[set[str]]) -> None:
    """Of all ways to cut a row into known names and values at most one is taken."""
    form = INCOMING | {"Body": "".join(pieces)}
    row = "".join(key + form[key] for key in sorted(form))
    taken = set()
    for names in (set(form), *subsets):
        for find in (str.find, str.rfind):
            cut = _cut(row, sorted(names), find)
            with suppress(InvalidSignatureError):
                if cut is not None and row_of(cut) == row:
                    taken.add(tuple(sorted(cut.items())))

    assert len(taken) <= 1


def _cut(row: str, names: list[str], find: Callable[[str, str, int], int]) -> dict[str, str] | None:
    """Cut a row before each of these names, where they first or last are; None if it cannot be."""
    form: dict[str, str] = {}
    for name, following in pairwise([*names, ""]):
        if not row.startswith(name):
            return None
        place = find(row, following, len(name)) if following else len(row)
        if place < 0:
            return None
        form[name], row = row[len(name) : place], row[place:]
    return form


def test_a_long_row_is_searched_only_for_who_has_signed_it() -> None:
    """To search takes a hundred times as long as to check the signature, which comes first."""
    form = INCOMING | {"Body": "From+12025550103", "New": ""}
    body, scheme = urlencode(form).encode(), replace(SCHEMES["twilio"], url="https://a.example/")
    row = f"{scheme.url}" + signed_row(list(form.items()))

    def fault(key: bytes) -> str:
        signature = base64.b64encode(hmac.digest(key, row.encode(), "sha1"))
        headers = [(b"x-twilio-signature", signature), (b"content-type", FORM.encode())]
        with pytest.raises(InvalidSignatureError) as caught:
            verify(scheme, [b"key"], headers, body, now=0.0)
        return caught.value.fault

    assert fault(b"key") == "ambiguous"
    assert fault(b"another") == "mismatch"


def test_a_row_moved_into_the_query_is_refused() -> None:
    """An empty form behind an address that ends with a whole row has its signature, and is none."""
    scheme = replace(SCHEMES["twilio"], url="https://example.com/webhooks")
    query = b"a=1" + row_of({**INCOMING, "Body": "", "FromCity": ""}).replace(" ", "").encode()
    signed = hmac.digest(b"key", b"https://example.com/webhooks?" + query, "sha1")
    headers = [
        (b"x-twilio-signature", base64.b64encode(signed)),
        (b"content-type", FORM.encode()),
    ]

    with pytest.raises(InvalidSignatureError) as caught:
        verify(scheme, [b"key"], headers, b"", now=0.0, query=query)

    assert caught.value.fault == "ambiguous"
