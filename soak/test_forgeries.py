"""No forgery is accepted, and the forgeries expose every faulty verifier."""

import base64
import binascii
import hmac
import json
import re
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

import bridge
from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures import content, forms, header, json_web_tokens, verify
from bridge.webhook.signatures.schemes import Scheme
from soak.forgeries import (
    FORGERS,
    Tally,
    attack,
    attack_in_parallel,
    is_same,
)
from soak.genuine_requests import SCHEMES, make_genuine

FORGERIES = 10_000
# Enough to expose each of the faulty verifiers below.
FEW_FORGERIES = 6_000


@pytest.fixture(scope="module")
def tally() -> Tally:
    """Try several thousand forgeries on the verifier."""
    return attack(FORGERIES, seed="suite")


def test_no_forgery_is_accepted(tally: Tally) -> None:
    """Of some thousand forgeries over all presets and kinds none is accepted."""
    assert tally.accepted == []
    assert (tally.count, tally.refused_genuine) == (FORGERIES, 0)
    assert {name for name, _ in tally.tried} == set(SCHEMES)
    assert {kind for _, kind in tally.tried} == set(FORGERS)


def test_what_means_the_same_is_counted_apart(tally: Tally) -> None:
    """Few forgeries turn out to mean the same as the genuine request, and they are not hidden."""
    assert 0 < tally.same < FORGERIES / 30


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_white_space_around_a_header_means_nothing(scheme: Scheme) -> None:
    """HTTP does not count it to the value, so it makes no forgery."""
    space = " \t"
    genuine = make_genuine(Random(1), scheme)
    value = genuine.request.value(scheme.header)

    assert is_same(scheme, f"{space}{value}", value)
    assert is_same(scheme, f"{value}{space}", value)
    assert not is_same(scheme, f"x{value}", value)


def test_a_verifier_that_refuses_everything_is_not_clean() -> None:
    """Refusing all forgeries is no merit of a verifier that refuses genuine requests too."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise InvalidSignatureError("mismatch")

    assert not attack(100, seed="suite", verifier=refuse).is_clean


def _compare_eight_bytes(a: bytes, b: bytes) -> bool:
    return a[:8] == b[:8]


def _lenient_base64(scheme: Scheme, text: bytes) -> bytes:
    return base64.b64decode(text, header._altchars(scheme))


def _unchecked_bits(scheme: Scheme, text: bytes) -> bytes:
    return base64.b64decode(text, header._altchars(scheme), validate=True)


def _lenient_hex(text: bytes) -> bytes:
    return bytes.fromhex(text.decode("ascii", "replace"))


def _first_value(given: Iterable[tuple[bytes, bytes]], name: str) -> bytes:
    values = [value for key, value in given if key == name.lower().encode()]
    if not values:
        raise InvalidSignatureError("missing")
    return values[0].strip()


def _always_fresh(_scheme: Any, timestamp: bytes, **_now: float) -> float:
    return float(timestamp)


def _only_too_old(scheme: Scheme, timestamp: bytes, *, now: float) -> float:
    if now - float(timestamp) > scheme.tolerance_seconds:
        raise InvalidSignatureError("stale")
    return float(timestamp)


def _any_token(_scheme: Any, _name: str, token: bytes) -> bytes:
    return token


def _nothing(*_args: Any) -> None:
    return


def _times_only(claims: dict[str, Any], name: str) -> int:
    value = claims.get(name)
    return value if isinstance(value, int) and value < 10**13 else 2**31


def _claims_of_anybody(_scheme: Any, _keys: Any, token: bytes) -> tuple[int, dict[str, Any]]:
    try:
        claims = json.loads(base64.urlsafe_b64decode(token.split(b".")[1] + b"=="))
    except ValueError:
        claims = None
    if not isinstance(claims, dict):
        raise InvalidSignatureError("malformed")
    return 0, claims


def _loose_token(_scheme: Any, value: bytes) -> bytes:
    return value.rpartition(b" ")[2].rstrip(b"=")


def _content_without(name: str) -> Callable[..., bytes]:
    genuine = content.build_content

    def changed(scheme: Any, body: bytes, **values: Any) -> bytes:
        if name == "body":
            return genuine(scheme, b"", **values)
        return genuine(scheme, body, **(values | {name: b""}))

    return changed


def _content_of_a_number(scheme: Any, body: bytes, *, timestamp: bytes, **values: Any) -> bytes:
    try:
        number = b"%d" % int(timestamp) if timestamp else b""
    except ValueError:
        raise InvalidSignatureError("malformed") from None
    return _CONTENT(scheme, body, timestamp=number, **values)


def _any_prefix(scheme: Scheme, value: bytes) -> Iterable[tuple[bytes, bytes]]:
    if scheme.format.startswith("prefix:"):
        return [(b"v1", value.partition(b"=")[2])]
    return _ENTRIES(scheme, value)


def _any_version(scheme: Scheme, value: bytes) -> Iterable[tuple[bytes, bytes]]:
    known = _ENTRIES(scheme, value)
    return [(b"v1" if name.lower().startswith(b"v") else name, text) for name, text in known]


_CONTENT = content.build_content
_ENTRIES = header._entries
_ANY_TIME = [
    (header, "_TIMESTAMP", re.compile(rb"[0-9_+ ]+")),
    (verify, "build_content", _content_of_a_number),
]
BROKEN: dict[str, list[tuple[Any, str, Any]]] = {
    "compares eight bytes": [(hmac, "compare_digest", _compare_eight_bytes)],
    "compares nothing": [(hmac, "compare_digest", lambda _a, _b: True)],
    "skips characters in base64": [(header, "_from_base64", _lenient_base64)],
    "takes unused bits in base64": [(header, "_from_base64", _unchecked_bits)],
    "skips spaces in hex": [(binascii, "unhexlify", _lenient_hex)],
    "takes the first of two headers": [
        (module, "only", _first_value) for module in (header, content)
    ],
    "takes any number of signatures": [(header, "MAX_CANDIDATES", 1000)],
    "takes any prefix": [(header, "_entries", _any_prefix)],
    "takes any version": [(header, "_entries", _any_version)],
    "takes any writing of the time": _ANY_TIME,
    "never looks at the clock": [(verify, "_fresh", _always_fresh)],
    "takes times to come": [(verify, "_fresh", _only_too_old)],
    "takes dots in ids": [(content, "checked_token", _any_token)],
    "does not bind the body to the query": [(verify, "read_parameters", _nothing)],
    "does not sign the body": [(verify, "build_content", _content_without("body"))],
    "does not sign the time": [(verify, "build_content", _content_without("timestamp"))],
    "does not sign the id": [(verify, "build_content", _content_without("event_id"))],
    "does not sign the nonce": [(verify, "build_content", _content_without("nonce"))],
    "does not sign the form": [(verify, "build_content", _content_without("params"))],
    "does not look where a form is cut": [(content, "check_row", _nothing)],
    "does not look which names a form has": [(forms, "_check_names", _nothing)],
    "takes a form for anything": [(forms, "is_form_type", lambda _type: True)],
    "takes any token": [(json_web_tokens, "_signed_claims", _claims_of_anybody)],
    "takes any spelling of a token": [(json_web_tokens, "_compact", _loose_token)],
    "does not hash what a token is of": [(json_web_tokens, "_check_hash", _nothing)],
    "takes tokens without an end": [(json_web_tokens, "_time", _times_only)],
    "does not sign the query": [(verify, "build_content", _content_without("query"))],
}


@pytest.mark.thorough
@pytest.mark.skipif(bridge.is_compiled(), reason="compiled callers keep what it would replace")
@pytest.mark.parametrize("patches", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_verifier_is_found_out(
    monkeypatch: pytest.MonkeyPatch, patches: list[tuple[Any, str, Any]]
) -> None:
    """A verifier with one rule less accepts some forgeries, and every genuine request."""
    for place, name, value in patches:
        monkeypatch.setattr(place, name, value)

    tally = attack(FEW_FORGERIES, seed="suite")

    assert tally.accepted
    assert tally.refused_genuine == 0
    assert not tally.is_clean


def test_the_work_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes try the same forgeries as one would, each its part."""
    monkeypatch.setattr("soak.forgeries.CHUNK", 200)
    expected = Tally()
    for number in range(2):
        expected.add(attack(200, seed=f"7/{number}"))

    assert attack_in_parallel(400, seed=7, processes=2) == expected
