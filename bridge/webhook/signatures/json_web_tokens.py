"""JSON Web Tokens (RFC 7519) whose claims contain hashes of the webhook's body and address.

PyJWT verifies the signature. This module checks the claims against the request.
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
from bridge.webhook.signatures.header import Given, only
from bridge.webhook.signatures.schemes import Scheme

# Tokens of the known services have less than 1,000 bytes.
MAX_TOKEN_BYTES: Final = 4096
# Unix seconds; as many digits as a timestamp in a header may have.
MAX_TIME: Final = 10**13

_BEARER: Final = b"Bearer "
# The scheme's name in any case, followed by any number of blanks (RFC 9110, 11.1).
_ANY_BEARER: Final = re.compile(rb"bearer[ \t]+", re.IGNORECASE)
_COMPACT: Final = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)")
_ALGORITHMS: Final = {"sha256": "HS256", "sha384": "HS384", "sha512": "HS512"}
# Claims that contain hashes, by the hashed part.
_HASHES: Final = {"body": "payload_hash", "url": "url_hash"}
# MessageBird's own clients accept a token this long after its expiry.
_EXPIRY_LEEWAY_SECONDS: Final = 1
# Lifetime of the tokens that `write_token` creates.
_LIFETIME_SECONDS: Final = 60


class VerifiedToken(NamedTuple):
    """A verified token: index of the key that signed it, and its times in unix seconds."""

    key_index: int
    timestamp: int
    expires: int | None


def read_token(
    scheme: Scheme, keys: Sequence[bytes], given: Given, body: bytes | None, url: bytes
) -> VerifiedToken:
    """Verify that a holder of one of the keys signed this body, and the address if in the scheme.

    `body` is None for a GET, whose token must not contain a body hash: the token of a POST is not
    valid for a GET, nor the reverse. Raises InvalidSignatureError. The caller checks the token's
    age.
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
        return VerifiedToken(index, timestamp, None)
    return VerifiedToken(index, timestamp, _time(claims, "exp") + _EXPIRY_LEEWAY_SECONDS)


def write_token(
    scheme: Scheme, key: bytes, body: bytes, url: bytes, *, now: int, token_id: str
) -> str:
    """Build the header value that the service would send."""
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
    """Whether PyJWT accepts the secret; it refuses anything that looks like a public key."""
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
    # Reject unused bits, which the decoder accepts: a signature must have one encoding.
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
    # Try every key, also after a match, so that the duration reveals nothing about the keys.
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
    """Return a NumericDate. The services send whole seconds only."""
    value = claims.get(name)
    if type(value) is not int or not 0 < value < MAX_TIME:
        raise InvalidSignatureError("malformed")
    return value


@contextmanager
def _any_length() -> Iterator[None]:
    """Silence PyJWT's warning about short keys, whose length the service decides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jwt.InsecureKeyLengthWarning)
        yield
