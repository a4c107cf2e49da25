"""Tokens: what they must hold, who may have signed them, and how long they are good."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jwt
import pytest

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.json_web_tokens import MAX_TIME, MAX_TOKEN_BYTES, is_usable
from bridge.webhook.signatures.schemes import SCHEMES, Scheme
from bridge.webhook.signatures.verify import Verified, sign, verify

KEY = b"a shared secret that is long enough for every algorithm, as it has 64 bytes"
NOW = 1700000000
BODY = b'{"type": "message.received"}'
URL = "https://bridge.example/webhooks"
VONAGE = SCHEMES["vonage"]
MESSAGEBIRD = replace(SCHEMES["messagebird"], url=URL)
HASH = hashlib.sha256(BODY).hexdigest()
VONAGE_CLAIMS = {"iat": NOW, "payload_hash": HASH}
MESSAGEBIRD_CLAIMS = {
    "iss": "MessageBird",
    "nbf": NOW,
    "exp": NOW + 60,
    "payload_hash": HASH,
    "url_hash": hashlib.sha256(URL.encode()).hexdigest(),
}


def check(
    scheme: Scheme, value: str, *, now: float = NOW, keys: tuple[bytes, ...] = (KEY,), **rest: Any
) -> Verified:
    headers = [(scheme.header.lower().encode(), value.encode())]
    return verify(scheme, keys, headers, rest.pop("body", BODY), now=now, **rest)


def fault(scheme: Scheme, value: str, **rest: Any) -> str:
    with pytest.raises(InvalidSignatureError) as caught:
        check(scheme, value, **rest)
    return caught.value.fault


def token(scheme: Scheme, claims: object = None, **changes: Any) -> str:
    if claims is None:
        claims = {**(VONAGE_CLAIMS if scheme is VONAGE else MESSAGEBIRD_CLAIMS), **changes}
        claims = {name: value for name, value in claims.items() if value is not None}
    prefix = "Bearer " if scheme is VONAGE else ""
    return prefix + jwt.PyJWS().encode(json.dumps(claims).encode(), KEY, algorithm="HS256")


both = pytest.mark.parametrize("scheme", [VONAGE, MESSAGEBIRD], ids=["vonage", "messagebird"])


@both
def test_a_genuine_token_is_taken(scheme: Scheme) -> None:
    """The signature is right, the hashes are those of the request, and the time is now."""
    assert check(scheme, token(scheme)) == Verified(0, None, float(NOW))
    assert check(scheme, token(scheme), keys=(b"another", KEY)).key_index == 1


@both
def test_the_same_is_signed_the_same(scheme: Scheme) -> None:
    """A token has nothing of chance in it, so that whoever tries many can try them again."""
    one, other, third = (
        sign(scheme, KEY, BODY, now=NOW, event_id=event_id) for event_id in ("a", "a", "b")
    )

    assert one == other != third


@both
def test_short_secrets_are_the_services_affair(scheme: Scheme) -> None:
    """A secret of few bytes works, as services hand them out, and no warning is printed."""
    signed = sign(scheme, b"short", BODY, now=NOW, event_id="")

    assert check(scheme, signed.headers[0][1], keys=(b"short",)).key_index == 0


@both
def test_another_body_or_key_is_a_mismatch(scheme: Scheme) -> None:
    """The token is good for one body, and of one signer."""
    assert fault(scheme, token(scheme), body=BODY + b" ") == "mismatch"
    assert fault(scheme, token(scheme), body=b"") == "mismatch"
    assert fault(scheme, token(scheme), keys=(b"another",)) == "mismatch"
    assert fault(scheme, token(scheme), keys=()) == "mismatch"


def test_another_address_is_a_mismatch() -> None:
    """MessageBird signs the address with its query."""
    value = token(MESSAGEBIRD, url_hash=hashlib.sha256(f"{URL}?a=1".encode()).hexdigest())

    assert check(MESSAGEBIRD, value, query=b"a=1").key_index == 0
    assert fault(MESSAGEBIRD, value) == "mismatch"
    assert fault(MESSAGEBIRD, value, query=b"a=2") == "mismatch"


QUERY = b"id=a-1&status=delivered"
GET_CLAIMS = MESSAGEBIRD_CLAIMS | {
    "payload_hash": None,
    "url_hash": hashlib.sha256(URL.encode() + b"?" + QUERY).hexdigest(),
}


def test_a_get_is_signed_by_its_address() -> None:
    """Its token has no hash of a body, and is good for one query."""
    value = token(MESSAGEBIRD, **GET_CLAIMS)
    get: dict[str, Any] = {"body": b"", "method": "GET"}

    assert check(MESSAGEBIRD, value, query=QUERY, **get).key_index == 0
    assert fault(MESSAGEBIRD, value, query=QUERY + b"&a=1", **get) == "mismatch"
    assert fault(MESSAGEBIRD, value, query=QUERY, body=QUERY, method="GET") == "missing"


@pytest.mark.parametrize("body", [BODY, b""])
def test_a_get_and_a_post_are_not_taken_for_each_other(body: bytes) -> None:
    """Who has seen one signed cannot make the other of it."""
    of_get = token(MESSAGEBIRD, **GET_CLAIMS)
    of_post = token(MESSAGEBIRD, payload_hash=hashlib.sha256(body).hexdigest())

    assert fault(MESSAGEBIRD, of_get, query=QUERY, body=b"") == "missing"
    assert check(MESSAGEBIRD, of_post, body=body).key_index == 0
    assert fault(MESSAGEBIRD, of_post, body=b"", method="GET") == "mismatch"


@pytest.mark.parametrize(
    "scheme", [VONAGE, replace(MESSAGEBIRD, signed_content="{body}")], ids=["vonage", "no-url"]
)
def test_a_get_whose_query_is_not_signed_is_refused(scheme: Scheme) -> None:
    """Where the token does not hold the address, it says nothing of a GET."""
    value = token(scheme, **({"payload_hash": None} if scheme is VONAGE else GET_CLAIMS))

    assert not scheme.takes_get
    assert fault(scheme, value, query=QUERY, body=b"", method="GET") == "missing"


CLAIMS: dict[str, tuple[Scheme, dict[str, Any], str]] = {
    "no hash": (VONAGE, {"payload_hash": None}, "missing"),
    "no hash of the address": (MESSAGEBIRD, {"url_hash": None}, "missing"),
    "a hash that is no text": (VONAGE, {"payload_hash": [HASH]}, "malformed"),
    "a hash that is not ASCII": (VONAGE, {"payload_hash": "é" * 32}, "malformed"),
    "no issuer": (MESSAGEBIRD, {"iss": None}, "mismatch"),
    "another issuer": (MESSAGEBIRD, {"iss": "Vonage"}, "mismatch"),
    "no time": (VONAGE, {"iat": None}, "malformed"),
    "no end": (MESSAGEBIRD, {"exp": None}, "malformed"),
    "a time in a text": (VONAGE, {"iat": str(NOW)}, "malformed"),
    "a time with a fraction": (VONAGE, {"iat": NOW + 0.5}, "malformed"),
    "no number that a clock has": (VONAGE, {"iat": MAX_TIME}, "malformed"),
    "a huge number": (VONAGE, {"iat": 10**400}, "malformed"),
    "an end that is none": (VONAGE, {"exp": "never"}, "malformed"),
    "milliseconds": (VONAGE, {"iat": NOW * 1000}, "future"),
}


@pytest.mark.parametrize(("scheme", "changes", "expected"), CLAIMS.values(), ids=CLAIMS.keys())
def test_claims_that_are_missing_or_wrong(
    scheme: Scheme, changes: dict[str, Any], expected: str
) -> None:
    """A token that the service's key signed is refused when it does not bind what it must."""
    assert fault(scheme, token(scheme, **changes)) == expected


@pytest.mark.parametrize("claims", [[], "text", 1, [VONAGE_CLAIMS]])
def test_claims_are_an_object(claims: object) -> None:
    """Anything else in the token's middle is malformed."""
    assert fault(VONAGE, token(VONAGE, claims)) == "malformed"


AGES = {
    "as old as may be": (VONAGE, NOW + 300, None),
    "older": (VONAGE, NOW + 300.1, "stale"),
    "as early as may be": (VONAGE, NOW - 300, None),
    "earlier": (VONAGE, NOW - 300.1, "future"),
    "at its end": (MESSAGEBIRD, NOW + 61, None),
    "over": (MESSAGEBIRD, NOW + 61.1, "stale"),
    "just before its begin": (MESSAGEBIRD, NOW - 300, None),
    "before its begin": (MESSAGEBIRD, NOW - 300.1, "future"),
}


@pytest.mark.parametrize(("scheme", "now", "expected"), AGES.values(), ids=AGES.keys())
def test_the_time_of_a_token(scheme: Scheme, now: float, expected: str | None) -> None:
    """A token is good around its time, and never behind its end but for a second."""
    if expected is None:
        assert check(scheme, token(scheme), now=now).key_index == 0
    else:
        assert fault(scheme, token(scheme), now=now) == expected


def test_an_end_counts_where_none_is_needed() -> None:
    assert fault(VONAGE, token(VONAGE, exp=NOW + 10), now=NOW + 12) == "stale"


@both
def test_a_forgery_is_no_matter_of_time(scheme: Scheme) -> None:
    """`stale` and `future` are said only of what is signed correctly."""
    assert fault(scheme, token(scheme), now=NOW + 10**6, keys=(b"another",)) == "mismatch"
    assert fault(scheme, token(scheme), now=NOW - 10**6, body=b"{}") == "mismatch"


@pytest.mark.parametrize("algorithm", ["none", "HS384", "HS512"])
def test_another_algorithm_is_malformed(algorithm: str) -> None:
    """The scheme says which algorithm it is, never the token."""
    key = "" if algorithm == "none" else KEY
    value = jwt.encode(VONAGE_CLAIMS, key, algorithm=algorithm)

    assert fault(VONAGE, f"Bearer {value}") == "malformed"


def test_an_algorithm_can_be_set() -> None:
    """`webhook.signature.algorithm` chooses a longer one."""
    scheme = replace(VONAGE, algorithm="sha512")
    value = f"Bearer {jwt.encode(VONAGE_CLAIMS, KEY, algorithm='HS512')}"

    assert check(scheme, value).key_index == 0
    assert fault(scheme, token(VONAGE)) == "malformed"


@pytest.mark.parametrize("word", ["bearer ", "BEARER ", "Bearer  ", "Bearer\t", "  beaRer \t "])
def test_bearer_is_written_in_any_case_with_any_blanks(word: str) -> None:
    """The name of the scheme has no case (RFC 9110, 11.1), and a proxy may change the blanks."""
    value = token(VONAGE).replace("Bearer ", word)

    assert check(VONAGE, f"{value} ").key_index == 0


GENUINE = token(VONAGE).removeprefix("Bearer ")
SPELLINGS = {
    "no word before it": GENUINE,
    "another word": f"Basic {GENUINE}",
    "no blank": f"Bearer{GENUINE}",
    "a blank within": f"Bearer {GENUINE[:9]} {GENUINE[9:]}",
    "the word alone": "Bearer ",
    "two parts": f"Bearer {GENUINE.rpartition('.')[0]}",
    "padded": f"Bearer {GENUINE}=",
    "a bit that no byte needs": f"Bearer {GENUINE[:-1]}{chr(ord(GENUINE[-1]) + 1)}",
    "too long": f"Bearer {'A' * MAX_TOKEN_BYTES}.A.AAAA",
    "no JSON": "Bearer AAAA.AAAA.AAAA",
}


@pytest.mark.parametrize("value", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_token_has_one_spelling(value: str) -> None:
    """What is not exactly one token, written as the service does, is malformed."""
    assert fault(VONAGE, value) in {"malformed", "mismatch"}


def test_a_public_key_is_no_secret() -> None:
    """PyJWT refuses what looks like a public key, so that none is taken for a shared secret."""
    assert is_usable(KEY)
    assert not is_usable(b"-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n")


def test_who_uses_no_token_loads_no_library() -> None:
    """The libraries of tokens and of Ed25519 cost nothing where no scheme needs them."""
    program = "import bridge.webhook.receiver, sys; print([m in sys.modules for m in sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", program, "jwt", "cryptography"],
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    )

    assert done.stdout.strip() == "[False, False]"
