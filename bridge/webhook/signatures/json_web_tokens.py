"""JSON Web Tokens (RFC 7519) that hold the hashes of what a webhook brings.

PyJWT checks the signature; what the claims must say of the request is checked here.
"""

import base64
import hashlib
import hmac
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import jwt

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.given import Given, only
from bridge.webhook.signatures.schemes import Scheme

# Those of the services have less than a thousand.
MAX_TOKEN_BYTES: Final = 4096
# In unix seconds: as many digits as a timestamp in a header may have.
MAX_TIME: Final = 10**13

_BEARER: Final = b"Bearer "
# The scheme's name in any case, with any blanks behind it (RFC 9110, 11.1).
_ANY_BEARER: Final = re.compile(rb"bearer[ \t]+", re.IGNORECASE)
_COMPACT: Final = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)")
_ALGORITHMS: Final = {"sha256": "HS256", "sha384": "HS384", "sha512": "HS512"}
# The claims that hold hashes, by what is hashed.
_HASHES: Final = {"body": "payload_hash", "url": "url_hash"}
# As long as MessageBird's own clients take a token after its end.
_EXPIRY_LEEWAY_SECONDS: Final = 1
# How long a token holds that is made here.
_LIFETIME_SECONDS: Final = 60


class Token(NamedTuple):
    """What a genuine token says: whose key signed it, and its times in unix seconds."""

    key_index: int
    timestamp: int
    expires: int | None


def read_token(
    scheme: Scheme, keys: Sequence[bytes], given: Given, body: bytes | None, url: bytes
) -> Token:
    """Check that a holder of one of the keys signed this body, and the address if the scheme does.

    `body` is None for a GET: its token must have no hash of one, so that none of a POST fits, nor
    it a POST. Raises InvalidSignatureError. Times are only read: whether it is too old is not
    decided here.
    """
    index, claims = _signed_claims(scheme, keys, _compact(scheme, only(given, scheme.header)))
    if scheme.issuer is not None and claims.get("iss") != scheme.issuer:
        raise InvalidSignatureError("mismatch")
    if body is None and not scheme.takes_get:
        raise InvalidSignatureError("missing")
    for name, value in (("body", body), ("url", url)):
        if f"{{{name}}}" in scheme.signed_content:
            _check_hash(claims.get(_HASHES[name]), value)
    timestamp = _time(claims, scheme.timestamp_from or "")
    if "exp" not in claims and not scheme.expires:
        return Token(index, timestamp, None)
    return Token(index, timestamp, _time(claims, "exp") + _EXPIRY_LEEWAY_SECONDS)


def write_token(
    scheme: Scheme, key: bytes, body: bytes, url: bytes, *, now: int, token_id: str
) -> str:
    """Make the value of the header that such a service would send."""
    claims: dict[str, Any] = {scheme.timestamp_from or "iat": now, "jti": token_id}
    if scheme.issuer is not None:
        claims["iss"] = scheme.issuer
    if scheme.expires:
        claims["exp"] = now + _LIFETIME_SECONDS
    for name, value in (("body", body), ("url", url)):
        if f"{{{name}}}" in scheme.signed_content:
            claims[_HASHES[name]] = hashlib.sha256(value).hexdigest()
    with _any_length():
        token = jwt.encode(claims, key, algorithm=_ALGORITHMS[scheme.algorithm])
    return _prefix(scheme).decode() + token


def is_usable(key: bytes) -> bool:
    """Say whether it can be a secret: PyJWT refuses what looks like a public key."""
    try:
        with _any_length():
            jwt.encode({}, key, algorithm="HS256")
    except jwt.InvalidKeyError:
        return False
    return True


def _compact(scheme: Scheme, value: bytes) -> bytes:
    begin = 0
    if _prefix(scheme):
        bearer = _ANY_BEARER.match(value)
        if bearer is None:
            raise InvalidSignatureError("malformed")
        begin = bearer.end()
    token = value[begin:]
    compact = _COMPACT.fullmatch(token)
    if len(token) > MAX_TOKEN_BYTES or compact is None:
        raise InvalidSignatureError("malformed")
    # The decoder takes unused bits: one signature must have one spelling.
    padded = compact[1] + b"=" * (-len(compact[1]) % 4)
    try:
        spelled = base64.urlsafe_b64encode(base64.urlsafe_b64decode(padded))
    except ValueError:
        spelled = b""
    if spelled != padded:
        raise InvalidSignatureError("malformed")
    return token


def _prefix(scheme: Scheme) -> bytes:
    return _BEARER if scheme.header.lower() == "authorization" else b""


def _signed_claims(
    scheme: Scheme, keys: Sequence[bytes], token: bytes
) -> tuple[int, dict[str, Any]]:
    found: tuple[int, bytes] | None = None
    # Every key is tried, found or not: the time taken tells nothing about them.
    for index, key in enumerate(keys):
        try:
            with _any_length():
                payload = jwt.PyJWS().decode(token, key, algorithms=[_ALGORITHMS[scheme.algorithm]])
        except jwt.InvalidSignatureError:
            continue
        except jwt.InvalidTokenError:
            raise InvalidSignatureError("malformed") from None
        found = found or (index, payload)
    if found is None:
        raise InvalidSignatureError("mismatch")
    try:
        claims = json.loads(found[1])
    except (ValueError, RecursionError):
        claims = None
    if not isinstance(claims, dict):
        raise InvalidSignatureError("malformed")
    return found[0], claims


def _check_hash(claimed: object, value: bytes | None) -> None:
    if value is None:
        if claimed:
            raise InvalidSignatureError("mismatch")
        return
    if claimed is None:
        raise InvalidSignatureError("missing")
    expected = hashlib.sha256(value).hexdigest()
    if not isinstance(claimed, str) or not claimed.isascii():
        raise InvalidSignatureError("malformed")
    if not hmac.compare_digest(claimed.lower(), expected):
        raise InvalidSignatureError("mismatch")


def _time(claims: dict[str, Any], name: str) -> int:
    """Return a NumericDate, of which the services send whole seconds only."""
    value = claims.get(name)
    if type(value) is not int or not 0 < value < MAX_TIME:
        raise InvalidSignatureError("malformed")
    return value


@contextmanager
def _any_length() -> Iterator[None]:
    """Have PyJWT not warn of short keys: how long they are is the service's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jwt.InsecureKeyLengthWarning)
        yield
