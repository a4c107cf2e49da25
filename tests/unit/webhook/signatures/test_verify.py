"""Signatures: published vectors, every rule of verification, and what no forger may do."""

import base64
import hmac
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures import schemes
from bridge.webhook.signatures.header import MAX_CANDIDATES
from bridge.webhook.signatures.schemes import Scheme, decode_secret
from bridge.webhook.signatures.verify import Signed, Verified, sign, verify

KEY = b"test_secret_key"
NOW = 1700000000.0
BODY = '{"type":"message.received","data":{"from":"+12025550101","text":"héllo"}}'.encode()
MAC_HEX = "48986fd1755d79fa9267ecbad43406c3429223910397532cc25b51d22aa125b7"
MAC_BASE64 = "SJhv0XVdefqSZ+y61DQGw0KSI5EDl1MswltR0iqhJbc="
STRIPE_HEX = "163088a1346e59f7f70935430bfd610d40996981339b12e1e98e81db9ba20017"
SVIX_MAC = "MptvJziB3rCFcqVNhl4KJ2QoMmUD5YT0UELb6yN3xWs="
URL = "https://mycompany.com/myapp.php"
TWILIO_BODY = b'{"property": "value", "boolean": true}'
TWILIO_SHA256 = b"0a1ff7634d9ab3b95db5c9a2dfe9416e41502b283a80c7cf19632632f96e6620"

# Those with a secret for both sides, and a body of JSON.
SCHEMES = {
    name: replace(scheme, url=URL)
    for name, scheme in schemes.SCHEMES.items()
    if name not in {"telnyx", "plivo"}
}
PLAIN = SCHEMES["plain"]
STRIPE = SCHEMES["stripe"]
SLACK = SCHEMES["slack"]
STANDARD = SCHEMES["standard-webhooks"]
TWILIO = SCHEMES["twilio"]

each_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


def raw(*headers: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers]


def check(
    scheme: Scheme,
    *headers: tuple[str, str],
    keys: tuple[bytes, ...] = (KEY,),
    body: bytes = BODY,
    now: float = NOW,
    query: bytes = b"",
) -> Verified:
    return verify(scheme, keys, raw(*headers), body, now=now, query=query)


def accepts(scheme: Scheme, *headers: tuple[str, str], **rest: Any) -> bool:
    return check(scheme, *headers, **rest).key_index == 0


def fault(scheme: Scheme, *headers: tuple[str, str], **rest: Any) -> str:
    with pytest.raises(InvalidSignatureError) as caught:
        check(scheme, *headers, **rest)
    return caught.value.fault


def plain(value: str) -> tuple[str, str]:
    return ("X-Service-Signature", value)


def stripe(value: str) -> tuple[str, str]:
    return ("Stripe-Signature", value)


def standard(value: str, *, event_id: str = "msg_1", time: str = "1700000000") -> list[Any]:
    return [("webhook-id", event_id), ("webhook-timestamp", time), ("webhook-signature", value)]


def mac(content: bytes, algorithm: str = "sha256") -> str:
    return hmac.new(KEY, content, algorithm).hexdigest()


# --- Vectors -------------------------------------------------------------------------------------

RFC_KEY = b"Jefe"
RFC_DATA = b"what do ya want for nothing?"
RFC_4231 = {
    "sha256": "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
    "sha384": "af45d2e376484031617f78d2b58a6b1b9c7ef464f5a01b47e42ec3736322445e"
    "8e2240ca5e69e2c78b3239ecfab21649",
    "sha512": "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea250554"
    "9758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737",
}


@pytest.mark.parametrize("algorithm", RFC_4231)
def test_rfc_4231_case_2(algorithm: Any) -> None:
    """The HMAC is the one of RFC 4231 for every SHA-2 that can be set."""
    scheme = replace(PLAIN, algorithm=algorithm)

    assert accepts(scheme, plain(RFC_4231[algorithm]), keys=(RFC_KEY,), body=RFC_DATA)


def test_github_vector() -> None:
    """GitHub's published example verifies."""
    header = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"

    assert accepts(
        SCHEMES["github"],
        ("X-Hub-Signature-256", header),
        keys=(b"It's a Secret to Everybody",),
        body=b"Hello, World!",
    )


def test_standard_webhooks_vector() -> None:
    """The published Standard Webhooks example verifies, and gives its id and time."""
    key = decode_secret(STANDARD, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = standard(
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        event_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        time="1614265330",
    )
    body = b'{"test": 2432232314}'

    assert check(STANDARD, *headers, keys=(key,), body=body, now=1614265330) == Verified(
        0, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330.0
    )


def test_slack_vector() -> None:
    """Slack's published example verifies."""
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow"
        b"&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner"
        b"&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands"
        b"%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = (
        ("X-Slack-Request-Timestamp", "1531420618"),
        (
            "X-Slack-Signature",
            "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
        ),
    )
    key = b"8f742231b10e8888abcd99yyyzzz85a5"

    assert accepts(SLACK, *headers, keys=(key,), body=body, now=1531420700)


def test_twilio_json_vector() -> None:
    """Twilio's published example of a JSON body verifies over the URL with its query."""
    query = b"foo=1&bar=2&bodySHA256=" + TWILIO_SHA256
    header = ("X-Twilio-Signature", "a9nBmqA0ju/hNViExpshrM61xv4=")

    assert accepts(TWILIO, header, keys=(b"12345",), body=TWILIO_BODY, query=query)


def test_twilio_form_vector() -> None:
    """Twilio's published example of a form is HMAC-SHA1 over the URL and what follows it."""
    scheme = replace(TWILIO, signed_content="{url}{body}", url=f"{URL}?foo=1&bar=2")
    fields = b"CallSidCA1234567890ABCDECaller+14158675309Digits1234From+14158675309To+18005551212"
    header = ("X-Twilio-Signature", "RSOYDt4T1cUTdK1PDd93/VVr8B8=")

    assert accepts(scheme, header, keys=(b"12345",), body=fields)


OWN = {
    "hex": (PLAIN, [plain(MAC_HEX)]),
    "base64": (PLAIN, [plain(MAC_BASE64)]),
    "github": (SCHEMES["github"], [("X-Hub-Signature-256", f"sha256={MAC_HEX}")]),
    "shopify": (SCHEMES["shopify"], [("X-Shopify-Hmac-SHA256", MAC_BASE64)]),
    "stripe": (STRIPE, [stripe(f"t=1700000000,v1={STRIPE_HEX}")]),
    "slack": (
        SLACK,
        [
            (
                "X-Slack-Signature",
                "v0=2164ee0fc9ce18df55b80662415a3813dfb698e1c02e170aa8c0236e8cbbeb7d",
            ),
            ("X-Slack-Request-Timestamp", "1700000000"),
        ],
    ),
    "svix": (STANDARD, standard(f"v1,{SVIX_MAC}")),
    "sha1": (
        replace(PLAIN, algorithm="sha1"),
        [plain("798cad76a93624faef08efda3e815bbf5dca7a18")],
    ),
}


@pytest.mark.parametrize(("scheme", "headers"), OWN.values(), ids=OWN.keys())
def test_own_vectors(scheme: Scheme, headers: list[tuple[str, str]]) -> None:
    """Signatures computed once, elsewhere, over one body with non-ASCII text verify."""
    secret = "whsec_dGVzdF9zZWNyZXRfa2V5" if scheme is STANDARD else "test_secret_key"

    assert accepts(scheme, *headers, keys=(decode_secret(scheme, secret),))


@pytest.mark.parametrize("name", [name for name in OWN if name not in {"base64", "svix"}])
def test_sign_writes_what_the_services_write(name: str) -> None:
    """A signature has the encoding and the order of the services' own."""
    scheme, headers = OWN[name]

    assert set(headers) <= set(send(scheme).headers)


# --- Round trip ----------------------------------------------------------------------------------


def send(scheme: Scheme, key: bytes = KEY, body: bytes = BODY) -> Signed:
    return sign(scheme, key, body, now=NOW, event_id="msg_1")


@each_scheme
def test_what_sign_makes_verifies(scheme: Scheme) -> None:
    """A request signed for a preset is accepted, with the id and time that the scheme carries."""
    signed = send(scheme)

    assert check(scheme, *signed.headers, query=signed.query) == Verified(
        0,
        "msg_1" if scheme.id_header else None,
        NOW if scheme.timestamp_from else None,
    )


VARIANTS = {
    "list with its time in ms": replace(STANDARD, timestamp_unit="ms"),
    "kv with its time in a header": replace(STRIPE, timestamp_from="X-Time"),
    "kv in base64": replace(STRIPE, encoding="base64"),
    "kv without a time": replace(STRIPE, signed_content="{body}", timestamp_from=None),
    "base64url": replace(PLAIN, encoding="base64url"),
    "sha512 with prefix": replace(PLAIN, algorithm="sha512", format="prefix:sha512="),
    "url and body": replace(PLAIN, signed_content="{url}|{body}", url=URL),
    "id first, header unsigned": replace(PLAIN, id_header="X-Id"),
}


@pytest.mark.parametrize("scheme", VARIANTS.values(), ids=VARIANTS.keys())
def test_single_knobs_work_together(scheme: Scheme) -> None:
    """Knobs that no preset combines still make signatures that verify."""
    signed = sign(scheme, KEY, BODY, now=NOW, event_id="msg_1", query=b"a=1")

    assert accepts(scheme, *signed.headers, query=signed.query)


def test_sign_adds_the_body_digest_to_the_query_that_is_there() -> None:
    """A scheme that signs only the URL gets the body's SHA-256 behind what the query holds."""
    signed = sign(TWILIO, b"12345", TWILIO_BODY, now=NOW, event_id="", query=b"foo=1&bar=2")

    assert signed == Signed(
        (("X-Twilio-Signature", "a9nBmqA0ju/hNViExpshrM61xv4="),),
        b"foo=1&bar=2&bodySHA256=" + TWILIO_SHA256,
    )
    assert send(TWILIO).query == b"bodySHA256=" + SHA


def test_an_address_has_no_query_unless_it_is_given() -> None:
    """Both sides take the address as it is configured."""
    scheme = replace(PLAIN, signed_content="{url}|{body}", url=URL)
    expected = hmac.digest(KEY, URL.encode() + b"|" + BODY, "sha256").hex()

    assert send(scheme).headers == (plain(expected),)
    assert verify(scheme, (KEY,), raw(plain(expected)), BODY, now=NOW).key_index == 0


def test_sign_refuses_an_id_that_verify_would_refuse() -> None:
    """A sender learns at once that an event id cannot be signed."""
    with pytest.raises(InvalidSignatureError):
        sign(STANDARD, KEY, BODY, now=NOW, event_id="msg.1")


# --- The signature header ------------------------------------------------------------------------


@each_scheme
def test_the_signature_is_needed_exactly_once(scheme: Scheme) -> None:
    """No signature is `missing`; two are refused, even when both are right."""
    signed = send(scheme)
    first = next(header for header in signed.headers if header[0] == scheme.header)
    others = [header for header in signed.headers if header[0] != scheme.header]

    assert fault(scheme, *others, query=signed.query) == "missing"
    assert fault(scheme, *signed.headers, first, query=signed.query) == "malformed"


MALFORMED = {
    "empty": "",
    "not ASCII": "é" * 32,
    "fullwidth digits": "\uff11" * 64,
    "hex too short": MAC_HEX[:-2],
    "space in hex": MAC_HEX[:10] + " " + MAC_HEX[10:],
    "0x": "0x" + MAC_HEX[2:],
    "no padding": MAC_BASE64[:-1],
    "too much padding": MAC_BASE64 + "=",
    "garbage after base64": MAC_BASE64 + "!!!!",
    "unused bits set": MAC_BASE64[:-2] + "1=",
    "another algorithm's prefix": f"sha512={MAC_HEX}",
    "another algorithm's digest": mac(BODY, "sha512"),
    "zero byte": MAC_HEX[:-1] + "\0",
    "a letter before": f"X{MAC_HEX}",
    "a form feed before": f"\f{MAC_HEX}",
}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED.keys())
def test_decoding_is_strict(value: str) -> None:
    """What is not exactly one digest in hex or base64 is `malformed`, and nothing is skipped."""
    assert fault(PLAIN, plain(value)) == "malformed"


def test_base64url_is_strict_too() -> None:
    """The URL alphabet may go without padding, and takes no character of the other one."""
    scheme = replace(PLAIN, encoding="base64url")
    text = MAC_BASE64.replace("+", "-").replace("/", "_")

    assert check(scheme, plain(text)) == check(scheme, plain(text.rstrip("=")))
    assert fault(scheme, plain(MAC_BASE64)) == "malformed"


@pytest.mark.parametrize(
    "value",
    [MAC_HEX.upper(), f"sha256={MAC_HEX}", f"sha256={MAC_BASE64}", f" {MAC_HEX}\t"],
    ids=["upper case", "prefix and hex", "prefix and base64", "white space around"],
)
def test_plain_takes_the_usual_spellings(value: str) -> None:
    """The plain preset takes either case, the algorithm's prefix, and space around the value."""
    assert accepts(PLAIN, plain(value))


def test_a_set_encoding_is_the_only_one() -> None:
    assert fault(replace(PLAIN, encoding="hex"), plain(MAC_BASE64)) == "malformed"
    assert fault(replace(PLAIN, encoding="base64"), plain(MAC_HEX)) == "malformed"


def test_a_set_prefix_is_required() -> None:
    """A scheme with a prefix takes no signature without it."""
    assert fault(SCHEMES["github"], ("X-Hub-Signature-256", MAC_HEX)) == "malformed"


def test_other_headers_do_not_count() -> None:
    """Bytes of any kind in a header that the scheme does not use change nothing."""
    others = [(b"x-other", b"\xff\x00"), (b"x-other", b""), (b"", b"")]
    headers = iter([*others, *raw(plain(MAC_HEX))])

    assert verify(PLAIN, [KEY], headers, BODY, now=NOW) == Verified(0, None, None)


# --- Keys and candidates -------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3), ids=["first", "second", "third"])
def test_any_key_will_do(index: int) -> None:
    """Every key is tried, and the answer names the one that fits."""
    keys = [b"a", b"b", b"c"]
    keys[index] = KEY

    assert check(PLAIN, plain(MAC_HEX), keys=tuple(keys)).key_index == index


@pytest.mark.parametrize("keys", [(), (b"other",), (b"",)], ids=["none", "other", "empty"])
def test_no_fitting_key_is_a_mismatch(keys: tuple[bytes, ...]) -> None:
    """Without the right key a request is refused as `mismatch`."""
    assert fault(PLAIN, plain(MAC_HEX), keys=keys) == "mismatch"


def test_everything_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key meets every candidate, though the first pair fits, so that time tells nothing."""
    compared: list[bytes] = []
    genuine = hmac.compare_digest

    def count(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return genuine(a, b)

    monkeypatch.setattr(hmac, "compare_digest", count)
    value = f"t=1700000000,v1={STRIPE_HEX},v1={'0' * 64},v1={'1' * 64}"
    verified = check(STRIPE, stripe(value), keys=(KEY, KEY, b"other"))

    assert len(compared) == 9
    assert verified.key_index == 0


def test_ten_candidates_and_no_more() -> None:
    """Ten signatures in a header are tried; one more and none is."""
    ten = ["v1,", *["v1,"] * (MAX_CANDIDATES - 1)]
    values = [entry + SVIX_MAC for entry in ten]

    assert accepts(STANDARD, *standard(" ".join(values)))
    assert fault(STANDARD, *standard(" ".join([*values, values[0]]))) == "malformed"


UNKNOWN = {
    "list": (STANDARD, standard(f"v1a,AAAA v2,{SVIX_MAC} v1,{SVIX_MAC}")),
    "kv": (STRIPE, [stripe(f"t=1700000000,v0=zz,v1={STRIPE_HEX},x=")]),
    "kv with spaces": (STRIPE, [stripe(f"t=1700000000, v1={STRIPE_HEX}")]),
}


@pytest.mark.parametrize(("scheme", "headers"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_versions_are_ignored(scheme: Scheme, headers: list[tuple[str, str]]) -> None:
    """Versions that came later, or use other means, do not disturb the one that is known."""
    assert accepts(scheme, *headers)


ENTRIES = {
    "list of unknown versions": (STANDARD, standard(f"v1a,{SVIX_MAC}")),
    "list without a version": (STANDARD, standard(SVIX_MAC)),
    "list with one bad entry": (STANDARD, standard(f"v1,{SVIX_MAC} v1,AAAA")),
    "kv without a signature": (STRIPE, [stripe("t=1700000000")]),
    "kv without a time": (STRIPE, [stripe(f"v1={STRIPE_HEX}")]),
    "kv with two times": (STRIPE, [stripe(f"t=1700000000,t=1700000000,v1={STRIPE_HEX}")]),
    "kv with a bare word": (STRIPE, [stripe(f"t=1700000000,v1,v1={STRIPE_HEX}")]),
    "kv with a byte that is not ASCII": (STRIPE, [stripe(f"t=1700000000,v1={STRIPE_HEX},x=é")]),
    "kv with a letter before a name": (STRIPE, [stripe(f"Xt=1700000000,v1={STRIPE_HEX}")]),
    "kv with a letter behind a digest": (STRIPE, [stripe(f"t=1700000000,v1={STRIPE_HEX}X")]),
    "kv with a comma too many": (STRIPE, [stripe(f"t=1700000000,v1={STRIPE_HEX},")]),
}


@pytest.mark.parametrize(("scheme", "headers"), ENTRIES.values(), ids=ENTRIES.keys())
def test_bad_entries_are_malformed(scheme: Scheme, headers: list[tuple[str, str]]) -> None:
    """A list or kv header is read whole, or not at all."""
    assert fault(scheme, *headers) == "malformed"


# --- Time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "expected"),
    [(NOW + 300, None), (NOW + 301, "stale"), (NOW - 300, None), (NOW - 301, "future")],
    ids=["old", "too old", "early", "too early"],
)
@pytest.mark.parametrize("scheme", [STRIPE, SLACK, STANDARD], ids=["stripe", "slack", "standard"])
def test_tolerance_is_the_same_both_ways(scheme: Scheme, now: float, expected: str | None) -> None:
    """A signature counts for 300 seconds before and after its time, the last one included."""
    headers = send(scheme).headers

    if expected is None:
        assert accepts(scheme, *headers, now=now)
    else:
        assert fault(scheme, *headers, now=now) == expected


def test_a_forged_time_is_a_mismatch() -> None:
    """Only a correctly signed request is `stale`; whoever changes the time changes the content."""
    assert fault(STRIPE, stripe(f"t=1600000000,v1={STRIPE_HEX}")) == "mismatch"
    assert fault(STRIPE, stripe(f"t=1700000301,v1={STRIPE_HEX}"), now=NOW + 301) == "mismatch"


TIMES = {
    "nan": "nan",
    "underscore": "1_700_000_000",
    "minus": "-1700000000",
    "exponent": "17e8",
    "14 digits": "17000000000000",
    "leading zero": "01700000000",
    "empty": "",
    "fullwidth": "\uff11" * 10,
}


@pytest.mark.parametrize("time", TIMES.values(), ids=TIMES.keys())
def test_time_is_digits_only(time: str) -> None:
    """A time that Python would read but that is not 1 to 13 ASCII digits is `malformed`."""
    content = f"v0:{time}:".encode() + BODY
    headers = [
        ("X-Slack-Signature", "v0=" + mac(content)),
        ("X-Slack-Request-Timestamp", time),
    ]

    assert fault(SLACK, *headers) == "malformed"


def test_time_with_a_line_break_is_malformed() -> None:
    """A line break after the digits is not overlooked."""
    value = b"t=1700000000\n,v1=" + mac(b"1700000000\n." + BODY).encode()

    with pytest.raises(InvalidSignatureError, match="malformed"):
        verify(STRIPE, [KEY], [(b"stripe-signature", value)], BODY, now=NOW)


def test_time_header_is_needed_exactly_once() -> None:
    signature, time = OWN["slack"][1]

    assert fault(SLACK, signature) == "missing"
    assert fault(SLACK, signature, time, time) == "malformed"


def test_milliseconds() -> None:
    """With the unit `ms` the time is told in seconds all the same."""
    scheme = replace(SLACK, timestamp_unit="ms")
    headers = sign(scheme, KEY, BODY, now=NOW + 0.25, event_id="").headers

    assert check(scheme, *headers).timestamp == NOW + 0.25
    assert fault(SLACK, *headers) == "future"


# --- Event ids -----------------------------------------------------------------------------------

IDS = {
    "empty": "",
    "space": "msg 1",
    "not ASCII": "msgé",
    "control character": "msg\x01",
    "256 characters": "m" * 256,
}


@pytest.mark.parametrize("event_id", IDS.values(), ids=IDS.keys())
def test_a_bad_id_is_malformed_if_signed_and_else_none(event_id: str) -> None:
    """An id has 1 to 255 visible ASCII characters.

    An authentic event is not refused for an id that the signature does not cover.
    """
    content = f"{event_id}.1700000000.".encode() + BODY
    value = base64.b64encode(hmac.digest(KEY, content, "sha256")).decode()
    headers = [("X-Shopify-Hmac-SHA256", MAC_BASE64), ("X-Shopify-Event-Id", event_id)]
    longest = sign(STANDARD, KEY, BODY, now=NOW, event_id="m" * 255)

    assert fault(STANDARD, *standard(f"v1,{value}", event_id=event_id)) == "malformed"
    assert check(SCHEMES["shopify"], *headers).event_id is None
    assert check(STANDARD, *longest.headers).event_id == "m" * 255


def test_an_unsigned_id_may_be_absent_but_not_ambiguous() -> None:
    """Without its id header an event has no id, and with two different ones it has none either."""
    signature = ("X-Shopify-Hmac-SHA256", MAC_BASE64)
    ids = [("X-Shopify-Event-Id", "a"), ("X-Shopify-Event-Id", "b")]

    assert check(SCHEMES["shopify"], signature).event_id is None
    assert check(SCHEMES["shopify"], signature, *ids).event_id is None


def test_a_signed_id_is_needed_exactly_once() -> None:
    event_id, *rest = standard(f"v1,{SVIX_MAC}")

    assert fault(STANDARD, *rest) == "missing"
    assert fault(STANDARD, event_id, event_id, *rest) == "malformed"


CUTS = {
    "dots": ("{id}.{timestamp}.{body}", "a.1", "."),
    "colons": ("v1:{id}:{body}", "a:1", ":"),
    "part of a separator": ("{id}..{body}", "a.", ".."),
    "after the body": ("{body}/{id}", "a/1", "/"),
}


@pytest.mark.parametrize(("content", "event_id", "between"), CUTS.values(), ids=CUTS.keys())
def test_an_id_holds_no_separator(content: str, event_id: str, between: str) -> None:
    """An id with the template's separator in it could be cut from the content in two ways."""
    scheme = replace(STANDARD, signed_content=content, format="plain", encoding="auto")
    filled = content.format(id=event_id, timestamp="1700000000", body="x").encode()
    headers = [
        ("webhook-id", event_id),
        ("webhook-timestamp", "1700000000"),
        ("webhook-signature", mac(filled)),
    ]

    assert between.encode() in filled
    assert fault(scheme, *headers, body=b"x") == "malformed"


def test_a_digit_cannot_move_from_an_id_to_the_time() -> None:
    """Where nothing separates the id from the time, a zero at its end is no part of the time."""
    scheme = replace(STANDARD, signed_content="{id}{timestamp}.{body}", format="plain")
    key = decode_secret(STANDARD, "whsec_dGVzdF9zZWNyZXRfa2V5")
    signed = sign(scheme, key, BODY, now=NOW, event_id="msg_0").headers
    moved = [("webhook-id", "msg_"), ("webhook-timestamp", "01700000000"), signed[-1]]

    assert accepts(scheme, *signed)
    assert fault(scheme, *moved) == "malformed"


@pytest.mark.parametrize(
    "content", ["v1.{body}", "v1.{id}:{body}"], ids=["not signed", "behind fixed text"]
)
def test_dots_in_an_id_are_fine_where_nothing_is_cut_at_them(content: str) -> None:
    scheme = replace(SCHEMES["shopify"], signed_content=content)
    signed = sign(scheme, KEY, BODY, now=NOW, event_id="a.b")

    assert check(scheme, *signed.headers).event_id == "a.b"


# --- Signed URLs ---------------------------------------------------------------------------------


def twilio(query: bytes) -> tuple[str, str]:
    content = URL.encode() + b"?" + query
    value = base64.b64encode(hmac.digest(KEY, content, "sha1")).decode()
    return ("X-Twilio-Signature", value)


SHA = b"9dfebb3e2cd8ae59c2aa884801c5d89a5c14adf317537fbcf5f854a9ed9d220d"
QUERIES = {
    "none": (b"a=1", "missing"),
    "twice": (b"bodySHA256=" + SHA + b"&bodySHA256=" + SHA, "malformed"),
    "too short": (b"bodySHA256=" + SHA[:-1], "malformed"),
    "another body": (b"bodySHA256=" + TWILIO_SHA256, "mismatch"),
    "another name": (b"bodysha256=" + SHA, "missing"),
    "more behind": (b"bodySHA256=" + SHA + b"=", "malformed"),
    "a brace": (b"bodySHA256=" + SHA + b"&a={", "malformed"),
    "not ASCII": (b"bodySHA256=" + SHA + b"&a=\xff", "malformed"),
}


@pytest.mark.parametrize(("query", "expected"), QUERIES.values(), ids=QUERIES.keys())
def test_a_url_signature_binds_the_body(query: bytes, expected: str) -> None:
    """Where only the URL is signed, it must hold the body's SHA-256 exactly once."""
    assert fault(TWILIO, twilio(query), query=query) == expected


def test_the_body_digest_may_be_upper_case() -> None:
    """The body's SHA-256 is hex in either case."""
    query = b"bodySHA256=" + SHA.upper()

    assert accepts(TWILIO, twilio(query), query=query)


MOVES = {
    "from the body": ("{url}|{body}", b"a=1", b"x|y", b"a=1|x", b"y"),
    "from a JSON body": ("{url}{body}", b"", b'?a=[1]{"x":1}', b"a=[1]", b'{"x":1}'),
    "from the query": ("{url}{body}", b"a=1", b'{"x":1}', b"a=", b'1{"x":1}'),
    "the whole query": ("{url}{body}", b"a=1", b'{"x":1}', b"", b'?a=1{"x":1}'),
    "over a dot": ("{url}.{body}", b"a=1", b'x.{"x":1}', b"a=1.x", b'{"x":1}'),
    "over a time": ("{url}.{timestamp}.{body}", b"a=1", b"1700000000.x", b"a=1.1700000000", b"x"),
}


@pytest.mark.parametrize(("content", "query", "body", "other_query", "other_body"), MOVES.values())
def test_nothing_moves_between_query_and_body(
    content: str, query: bytes, body: bytes, other_query: bytes, other_body: bytes
) -> None:
    """One signature is never good for two ways to cut the content into a query and a body."""
    scheme = replace(PLAIN, signed_content=content, url=URL, timestamp_from="X-Time")
    signed = sign(scheme, KEY, body, now=NOW, event_id="", query=query)
    moved = sign(scheme, KEY, other_body, now=NOW, event_id="", query=other_query)
    found = []
    for each_query, each_body in ((query, body), (other_query, other_body)):
        with suppress(InvalidSignatureError):
            check(scheme, *signed.headers, query=each_query, body=each_body)
            found.append(each_body)

    assert moved.headers == signed.headers
    assert len(found) < 2


@pytest.mark.parametrize("content", ["{url}|{body}", "{url}.{timestamp}|{body}", "{body}{url}"])
def test_a_query_is_fine_where_its_end_is_clear(content: str) -> None:
    scheme = replace(PLAIN, signed_content=content, url=URL, timestamp_from="X-Time")
    signed = sign(scheme, KEY, BODY, now=NOW, event_id="", query=b"a=1")

    assert accepts(scheme, *signed.headers, query=b"a=1")


def test_a_url_before_the_body_comes_without_a_query() -> None:
    scheme = replace(PLAIN, signed_content="{url}{body}", url=URL)

    assert accepts(scheme, plain(mac(URL.encode() + BODY)))
    assert fault(scheme, plain(mac(URL.encode() + b"?a=1" + BODY)), query=b"a=1") == "malformed"


# --- Properties ----------------------------------------------------------------------------------


def names_of(scheme: Scheme) -> list[bytes]:
    names = (scheme.header, scheme.timestamp_from, scheme.id_header, "x-other")
    return [name.lower().encode() for name in names if name is not None]


def pieces() -> st.SearchStrategy[bytes]:
    """Draw header values that get far: real parts of signatures, put together at random."""
    parts = [b"v1=", b"v1,", b"v0=", b"t=", b"sha256=", b",", b" ", b"=", b"1700000000", b"\xff"]
    parts += [MAC_HEX.encode(), MAC_BASE64.encode(), STRIPE_HEX.encode(), SVIX_MAC.encode()]
    return st.lists(st.sampled_from(parts), max_size=12).map(b"".join)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Scheme, list[tuple[bytes, bytes]]]:
    scheme = draw(st.sampled_from([*SCHEMES.values(), *VARIANTS.values()]))
    names = st.sampled_from(names_of(scheme)) | st.binary(max_size=8)
    return scheme, draw(st.lists(st.tuples(names, st.binary() | pieces()), max_size=6))


@given(request=requests(), body=st.binary(), query=st.binary())
def test_nothing_from_outside_raises_anything_else(
    request: tuple[Scheme, list[tuple[bytes, bytes]]], body: bytes, query: bytes
) -> None:
    """Whatever headers, body and query hold, they verify or raise InvalidSignatureError."""
    scheme, headers = request

    with pytest.raises(InvalidSignatureError):
        verify(scheme, [b"a key that signed none of these"], headers, body, now=NOW, query=query)


def with_value(signed: Signed, name: str, value: str) -> Iterator[tuple[str, str]]:
    for header, old in signed.headers:
        yield header, value if header == name else old


@given(
    scheme=st.sampled_from(list(SCHEMES.values())),
    place=st.integers(min_value=0),
    character=st.characters(min_codepoint=33, max_codepoint=126),
)
def test_a_changed_signature_is_never_accepted(scheme: Scheme, place: int, character: str) -> None:
    """No character of a signature's header can be another one; only the case of hex is free."""
    signed = send(scheme)
    value = dict(signed.headers)[scheme.header]
    place %= len(value)
    changed = value[:place] + character + value[place + 1 :]
    is_hex = scheme.encoding in {"hex", "auto"}
    if changed == value or (is_hex and changed.lower() == value.lower()):
        return

    headers = with_value(signed, scheme.header, changed)
    assert fault(scheme, *headers, query=signed.query) in {"malformed", "mismatch"}


@given(
    scheme=st.sampled_from(list(SCHEMES.values())),
    bit=st.integers(min_value=0, max_value=8 * len(BODY) - 1),
)
def test_a_changed_body_is_never_accepted(scheme: Scheme, bit: int) -> None:
    """Not one bit of the body can change."""
    signed = send(scheme)
    body = bytearray(BODY)
    body[bit // 8] ^= 1 << bit % 8

    assert fault(scheme, *signed.headers, body=bytes(body), query=signed.query) == "mismatch"


@given(
    scheme=st.sampled_from([SLACK, STANDARD]),
    place=st.integers(min_value=0),
    digit=st.sampled_from("0123456789"),
)
def test_a_changed_time_is_never_accepted(scheme: Scheme, place: int, digit: str) -> None:
    """Not one digit of the time can change."""
    signed = send(scheme)
    name = scheme.timestamp_from or ""
    value = dict(signed.headers)[name]
    place %= len(value)
    changed = value[:place] + digit + value[place + 1 :]
    if changed == value:
        return

    expected = "malformed" if changed.startswith("0") else "mismatch"
    assert fault(scheme, *with_value(signed, name, changed)) == expected
