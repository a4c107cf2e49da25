"""Verifies the signature and age of a webhook, and signs one for tests and the sandbox.

`verify` is the receiver's side, `sign` the service's. Schemes are data, see `schemes`. Pure: no
I/O, no clock.
"""

import functools
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.content import (
    build_content,
    check_parameters,
    checked_token,
    full_url,
    read_event_id,
    read_nonce,
    read_parameters,
    with_digest,
)
from bridge.webhook.signatures.forms import is_form_type
from bridge.webhook.signatures.header import Given, read_signature, write_signature
from bridge.webhook.signatures.schemes import Scheme


class Verified(NamedTuple):
    """Index of the key that signed, the event's id, and the signed time in unix seconds.

    If the scheme does not sign `{id}`, the id is unverified.
    """

    key_index: int
    event_id: str | None
    timestamp: float | None


@dataclass(frozen=True, slots=True)
class Signed:
    """The headers of a signed request, and its raw query (empty for most schemes)."""

    headers: tuple[tuple[str, str], ...]
    query: bytes


def verify(
    scheme: Scheme,
    keys: Sequence[bytes],
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    *,
    now: float,
    query: bytes = b"",
    method: str = "POST",
) -> Verified:
    """Verify that a holder of one of the keys sent exactly this body, within the tolerance.

    Header names are in lower case, and a repeated header has several entries; `now` is in unix
    seconds. Raises InvalidSignatureError. Its fault is `stale` or `future` only if the signature is
    correct, so these mean a wrong clock or a replay, never a forgery. Schemes for forms sign only
    names and values; a form is `ambiguous` if a different form would have the same signature.
    """
    given = list(headers)
    if scheme.format == "jwt":
        whole = None if method == "GET" and not body else body
        return _verify_token(scheme, keys, given, whole, now=now, query=query)
    candidates, timestamp = read_signature(scheme, given)
    event_id = read_event_id(scheme, given)
    nonce = b"" if scheme.nonce_header is None else read_nonce(scheme, scheme.nonce_header, given)
    params = read_parameters(scheme, given, body, query)
    urls = (scheme.url,) if scheme.other_url is None else (scheme.url, scheme.other_url)
    key_index = None
    for url in urls:
        content = build_content(
            scheme,
            body,
            url=url,
            query=query,
            timestamp=timestamp,
            event_id=event_id,
            nonce=nonce,
            params=params,
        )
        key_index = _matching_key(scheme, keys, content=content, candidates=candidates)
        if key_index is not None:
            break
    if key_index is None:
        raise InvalidSignatureError("mismatch")
    check_parameters(scheme, params, query)
    return Verified(
        key_index=key_index,
        event_id=event_id.decode() or None,
        timestamp=_fresh(scheme, timestamp, now=now) if timestamp else None,
    )


def sign(
    scheme: Scheme,
    key: bytes,
    body: bytes,
    *,
    now: float,
    event_id: str,
    query: bytes = b"",
    content_type: str = "application/json",
) -> Signed:
    """Sign a body as the service would; `verify` accepts the result.

    Ed25519 takes the private key. The event's id also serves as the nonce and as the token's id.
    `query` is the query of the address; the returned query replaces it. Raises
    InvalidSignatureError if `verify` would refuse this id or form.
    """
    given = [(b"content-type", content_type.encode())]
    if scheme.format == "jwt":
        return _sign_token(scheme, key, body, now=now, event_id=event_id, query=query)
    is_form = scheme.parameters is not None and is_form_type(content_type)
    binds_body = "{body}" in scheme.signed_content or "{body_sha256}" in scheme.signed_content
    if not binds_body and not is_form:
        query = with_digest(query, body)
    headers = []
    timestamp = str(int(now * scheme.units_per_second)).encode()
    if scheme.timestamp_from is not None and not scheme.has_time_entry:
        headers.append((scheme.timestamp_from, timestamp.decode()))
    token = event_id.encode()
    for name, header in (("id", scheme.id_header), ("nonce", scheme.nonce_header)):
        if header is not None:
            headers.append((header, checked_token(scheme, name, token).decode()))
    params = read_parameters(scheme, given, body, query) if is_form else None
    check_parameters(scheme, params, query)
    content = build_content(
        scheme,
        body,
        url=scheme.url,
        query=query,
        timestamp=timestamp,
        event_id=token,
        nonce=token,
        params=params,
    )
    digest = _digest(scheme, key, content)
    headers.append((scheme.header, write_signature(scheme, digest, timestamp).decode()))
    return Signed(tuple(headers), query)


def is_usable(scheme: Scheme, key: bytes) -> bool:
    """Whether the scheme's library accepts the key. Loads the library before the first webhook."""
    if scheme.format == "jwt":
        from bridge.webhook.signatures import json_web_tokens  # noqa: PLC0415

        return json_web_tokens.is_usable(key)
    if scheme.algorithm == "ed25519":
        from bridge.webhook.signatures import ed25519  # noqa: PLC0415

        return ed25519.is_usable(key)
    return True


def _matching_key(
    scheme: Scheme, keys: Sequence[bytes], *, content: bytes, candidates: Sequence[bytes]
) -> int | None:
    if scheme.algorithm == "ed25519":
        return _matching_public_key(keys, content=content, candidates=candidates)
    # Compare every pair, also after a match, so that the duration reveals nothing about the keys.
    matching = None
    for index, key in enumerate(keys):
        signing = _keyed(key, scheme.algorithm).copy()
        signing.update(content)
        expected = signing.digest()
        for candidate in candidates:
            if hmac.compare_digest(expected, candidate) and matching is None:
                matching = index
    return matching


# Keying is half the work of a short HMAC, so keyed objects are cached: room for the secrets of
# several endpoints, and for some replaced ones.
@functools.lru_cache(maxsize=64)
def _keyed(key: bytes, algorithm: str) -> hmac.HMAC:
    return hmac.new(key, digestmod=algorithm)


def _matching_public_key(
    keys: Sequence[bytes], *, content: bytes, candidates: Sequence[bytes]
) -> int | None:
    # Imported here, so that other schemes do not load the library.
    from bridge.webhook.signatures.ed25519 import is_signed  # noqa: PLC0415

    for index, key in enumerate(keys):
        if any(is_signed(key, content, candidate) for candidate in candidates):
            return index
    return None


def _digest(scheme: Scheme, key: bytes, content: bytes) -> bytes:
    if scheme.algorithm != "ed25519":
        return hmac.digest(key, content, scheme.algorithm)
    from bridge.webhook.signatures.ed25519 import signature_of  # noqa: PLC0415

    return signature_of(key, content)


def _fresh(scheme: Scheme, timestamp: bytes, *, now: float) -> float:
    seconds = int(timestamp) / scheme.units_per_second
    if now - seconds > scheme.tolerance_seconds:
        raise InvalidSignatureError("stale")
    if seconds - now > scheme.tolerance_seconds:
        raise InvalidSignatureError("future")
    return seconds


def _verify_token(
    scheme: Scheme,
    keys: Sequence[bytes],
    given: Given,
    body: bytes | None,
    *,
    now: float,
    query: bytes,
) -> Verified:
    from bridge.webhook.signatures.json_web_tokens import read_token  # noqa: PLC0415

    token = read_token(scheme, keys, given, body, full_url(scheme.url, query))
    is_over = token.expires is not None and now > token.expires
    # A token with an expiry is judged by that, not by its age.
    is_old = not scheme.expires and now - token.timestamp > scheme.tolerance_seconds
    if is_over or is_old:
        raise InvalidSignatureError("stale")
    if token.timestamp - now > scheme.tolerance_seconds:
        raise InvalidSignatureError("future")
    return Verified(token.key_index, None, float(token.timestamp))


def _sign_token(
    scheme: Scheme, key: bytes, body: bytes, *, now: float, event_id: str, query: bytes
) -> Signed:
    from bridge.webhook.signatures.json_web_tokens import write_token  # noqa: PLC0415

    url = full_url(scheme.url, query)
    value = write_token(scheme, key, body, url, now=int(now), token_id=event_id)
    return Signed(((scheme.header, value),), query)
