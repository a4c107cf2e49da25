"""Check that raw bytes and headers are authentic and fresh, or make such headers.

`verify` is the receiver's side, `sign` the sender's; a scheme is data, in `schemes`. Nothing here
does I/O or reads the clock.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from bridge.errors import InvalidSignatureError
from bridge.inbound.schemes import DIGEST_BYTES, PLACEHOLDER, Scheme

# How many signatures one header may hold: a service that rotates its secret sends two or three.
MAX_CANDIDATES: Final = 10

# Names are in lower case; repeated headers are repeated.
_Given = Sequence[tuple[bytes, bytes]]
# Between entries, and between an entry's name and its value.
_SEPARATORS: Final = {"kv": (b",", b"="), "list": (b" ", b",")}
# The only version of `kv` and `list` schemes that is an HMAC with a shared secret.
_VERSION: Final = b"v1"
# The parameter of the query that binds the body where only the URL is signed.
_BODY_DIGEST: Final = b"bodySHA256"

# Without leading zeros: one could be the end of what stands before it.
_TIMESTAMP: Final = re.compile(rb"[1-9][0-9]{0,12}")
_EVENT_ID: Final = re.compile(rb"[!-~]{1,255}")
# RFC 3986, and brackets. No brace or quote, so that no JSON object can begin in a query.
_QUERY: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]-]*")
_AFTER_URL: Final = re.compile(r"\{url\}(.*?)\{(?:body|id)\}")


class Verified(NamedTuple):
    """Which key signed, which event, and when (unix seconds).

    Where the scheme does not sign `{id}`, the id is only a claim.
    """

    key_index: int
    event_id: str | None
    timestamp: float | None


@dataclass(frozen=True, slots=True)
class Signed:
    """What a sender puts on a request: headers, and the raw query (empty for most schemes)."""

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
) -> Verified:
    """Check that a holder of one of the keys sent exactly this body, just now.

    Header names are in lower case, and repeated headers are repeated; `now` is in unix seconds.
    Raises InvalidSignatureError. It says `stale` or `future` only of what is signed correctly, so
    that these mean a clock or a replay and never a forgery. `body` is not looked into.
    """
    given = list(headers)
    candidates, timestamp = _read_signature(scheme, given)
    event_id = _read_event_id(scheme, given)
    _check_query(scheme, query, body)
    content = _content(scheme, body, timestamp=timestamp, event_id=event_id, query=query)
    key_index = _matching_key(scheme, keys, content=content, candidates=candidates)
    if key_index is None:
        raise InvalidSignatureError("mismatch")
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
) -> Signed:
    """Make what a sender would add to a request with this body; `verify` accepts it.

    `query` is what the address has already; the answer's query replaces it. Raises
    InvalidSignatureError when the scheme has an id header and `verify` would refuse this id.
    """
    if "{body}" not in scheme.signed_content:
        digest = _BODY_DIGEST + b"=" + hashlib.sha256(body).hexdigest().encode()
        query = query + b"&" + digest if query else digest
    headers = []
    timestamp = str(int(now * scheme.units_per_second)).encode()
    if scheme.timestamp_from is not None and not scheme.has_time_entry:
        headers.append((scheme.timestamp_from, timestamp.decode()))
    if scheme.id_header is not None:
        headers.append((scheme.id_header, _checked_id(scheme, event_id.encode()).decode()))
    content = _content(scheme, body, timestamp=timestamp, event_id=event_id.encode(), query=query)
    signature = _encode(scheme, hmac.digest(key, content, scheme.algorithm))
    headers.append((scheme.header, _write_signature(scheme, signature, timestamp).decode()))
    return Signed(tuple(headers), query)


def _read_signature(scheme: Scheme, given: _Given) -> tuple[list[bytes], bytes]:
    """Return the digests to try, and the timestamp as it was signed, empty if there is none."""
    entries = list(_entries(scheme, _only(given, scheme.header)))
    texts = [text for name, text in entries if name == _VERSION]
    if not 1 <= len(texts) <= MAX_CANDIDATES:
        raise InvalidSignatureError("malformed")
    candidates = [_decode(scheme, text) for text in texts]
    if scheme.timestamp_from is None:
        return candidates, b""
    if scheme.has_time_entry:
        key = scheme.timestamp_from.encode()
        times = [text for name, text in entries if name == key]
    else:
        times = [_only(given, scheme.timestamp_from)]
    if len(times) != 1 or not _TIMESTAMP.fullmatch(times[0]):
        raise InvalidSignatureError("malformed")
    return candidates, times[0]


def _only(given: _Given, name: str) -> bytes:
    wanted = name.lower().encode()
    values = [value for key, value in given if key == wanted]
    if not values:
        raise InvalidSignatureError("missing")
    if len(values) > 1 or not values[0].isascii():
        raise InvalidSignatureError("malformed")
    # Not every HTTP parser drops the white space around a value, which is no part of it.
    return values[0].strip(b" \t")


def _entries(scheme: Scheme, value: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and values; a bare signature stands under the known version."""
    if scheme.format not in _SEPARATORS:
        prefix = _prefix(scheme)
        if not value.startswith(prefix) and scheme.format != "plain":
            raise InvalidSignatureError("malformed")
        yield _VERSION, value.removeprefix(prefix)
        return
    between, within = _SEPARATORS[scheme.format]
    for entry in value.split(between):
        name, separator, text = entry.strip(b" \t").partition(within)
        if not separator:
            raise InvalidSignatureError("malformed")
        yield name, text


def _write_signature(scheme: Scheme, signature: bytes, timestamp: bytes) -> bytes:
    if scheme.format == "plain":
        return signature
    if scheme.format not in _SEPARATORS:
        return _prefix(scheme) + signature
    between, within = _SEPARATORS[scheme.format]
    entries = [_VERSION + within + signature]
    if scheme.timestamp_from is not None and scheme.has_time_entry:
        entries.insert(0, scheme.timestamp_from.encode() + within + timestamp)
    return between.join(entries)


def _prefix(scheme: Scheme) -> bytes:
    named = f"{scheme.algorithm}=" if scheme.format == "plain" else scheme.format
    return named.removeprefix("prefix:").encode()


def _decode(scheme: Scheme, text: bytes) -> bytes:
    size = DIGEST_BYTES[scheme.algorithm]
    is_hex = scheme.encoding == "hex" or (scheme.encoding == "auto" and len(text) == 2 * size)
    try:
        digest = binascii.unhexlify(text) if is_hex else _from_base64(scheme, text)
    except ValueError:
        digest = b""
    if len(digest) != size:
        raise InvalidSignatureError("malformed")
    return digest


def _from_base64(scheme: Scheme, text: bytes) -> bytes:
    altchars = _altchars(scheme)
    if altchars:
        # RFC 4648 lets this alphabet, and only this one, do without padding.
        text += b"=" * (-len(text) % 4)
    digest = base64.b64decode(text, altchars, validate=True)
    # The decoder takes unused bits, and either alphabet's characters.
    return digest if base64.b64encode(digest, altchars) == text else b""


def _encode(scheme: Scheme, digest: bytes) -> bytes:
    if scheme.encoding in {"auto", "hex"}:
        return binascii.hexlify(digest)
    return base64.b64encode(digest, _altchars(scheme))


def _altchars(scheme: Scheme) -> bytes | None:
    return b"-_" if scheme.encoding == "base64url" else None


def _read_event_id(scheme: Scheme, given: _Given) -> bytes:
    if scheme.id_header is None:
        return b""
    try:
        return _checked_id(scheme, _only(given, scheme.id_header))
    except InvalidSignatureError:
        if "{id}" in scheme.signed_content:
            raise
        # Nobody vouches for this id, so an authentic event is not refused for it.
        return b""


def _checked_id(scheme: Scheme, event_id: bytes) -> bytes:
    if not _EVENT_ID.fullmatch(event_id):
        raise InvalidSignatureError("malformed")
    # With a separator inside an id, one signature would fit two ways to cut the content.
    if _separators(scheme.signed_content) & set(event_id.decode()):
        raise InvalidSignatureError("malformed")
    return event_id


def _check_query(scheme: Scheme, query: bytes, body: bytes) -> None:
    if "{url}" in scheme.signed_content and not _QUERY.fullmatch(query):
        raise InvalidSignatureError("malformed")
    if query and _may_run_on(scheme.signed_content):
        raise InvalidSignatureError("malformed")
    if "{body}" in scheme.signed_content:
        return
    pairs = [pair.partition(b"=") for pair in query.split(b"&")]
    digests = [text for name, _, text in pairs if name == _BODY_DIGEST]
    if not digests:
        raise InvalidSignatureError("missing")
    expected = hashlib.sha256(body).hexdigest().encode()
    if len(digests) > 1 or len(digests[0]) != len(expected):
        raise InvalidSignatureError("malformed")
    if not hmac.compare_digest(digests[0].lower(), expected):
        raise InvalidSignatureError("mismatch")


@lru_cache(maxsize=16)
def _may_run_on(template: str) -> bool:
    """Whether a query could be read on into the body or the id: nothing there ends it."""
    after = _AFTER_URL.search(template)
    return after is not None and bool(_QUERY.fullmatch(PLACEHOLDER.sub("", after[1]).encode()))


def _content(
    scheme: Scheme, body: bytes, *, timestamp: bytes, event_id: bytes, query: bytes
) -> bytes:
    if scheme.signed_content == "{body}":
        return body
    url = (scheme.url or "").encode()
    values = {
        "body": body,
        "timestamp": timestamp,
        "id": event_id,
        "url": url + b"?" + query if query else url,
    }
    parts = _parts(scheme.signed_content)
    return b"".join(values[p] if i % 2 else p.encode() for i, p in enumerate(parts))


# A process has one template; only tests have more.
@lru_cache(maxsize=16)
def _parts(template: str) -> tuple[str, ...]:
    """Cut a template: literals at the even places, names of placeholders at the odd ones."""
    return tuple(PLACEHOLDER.split(template))


@lru_cache(maxsize=16)
def _separators(template: str) -> frozenset[str]:
    """Return the characters that end `{id}`, or begin it after another placeholder."""
    parts = _parts(template)
    ids = [i for i in range(1, len(parts), 2) if parts[i] == "id"]
    ends = {parts[i + 1][:1] for i in ids}
    begins = {parts[i - 1][-1:] for i in ids if i > 1}
    return frozenset((ends | begins) - {""})


def _matching_key(
    scheme: Scheme, keys: Sequence[bytes], *, content: bytes, candidates: Sequence[bytes]
) -> int | None:
    # Everything is compared, found or not: the time taken tells nothing about the keys.
    matching = None
    for index, key in enumerate(keys):
        expected = hmac.digest(key, content, scheme.algorithm)
        for candidate in candidates:
            if hmac.compare_digest(expected, candidate) and matching is None:
                matching = index
    return matching


def _fresh(scheme: Scheme, timestamp: bytes, *, now: float) -> float:
    seconds = int(timestamp) / scheme.units_per_second
    if now - seconds > scheme.tolerance_seconds:
        raise InvalidSignatureError("stale")
    if seconds - now > scheme.tolerance_seconds:
        raise InvalidSignatureError("future")
    return seconds
