"""Reads headers that must be unique; parses and writes the signature header, strictly."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Final

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.schemes import DIGEST_BYTES, Scheme

# Names are in lower case; a repeated header has several entries.
Given = Sequence[tuple[bytes, bytes]]

# Limit of signatures in one header. A service that rotates its secret sends two or three.
MAX_CANDIDATES: Final = 10

# Separators between entries, and between name and value; entries of `csv` have no name.
_SEPARATORS: Final = {"kv": (b",", b"="), "list": (b" ", b","), "csv": (b",", b"")}
# The only version of `kv` and `list` schemes that is an HMAC with a shared secret.
_VERSION: Final = b"v1"
# No leading zero, which could also belong to the content before the timestamp.
_TIMESTAMP: Final = re.compile(rb"[1-9][0-9]{0,12}")


def only(given: Given, name: str) -> bytes:
    """Return the value of a header that must occur exactly once.

    Raises InvalidSignatureError if it is missing, repeated or not ASCII.
    """
    wanted = name.lower().encode()
    values = [value for key, value in given if key == wanted]
    if not values:
        raise InvalidSignatureError("missing")
    if len(values) > 1 or not values[0].isascii():
        raise InvalidSignatureError("malformed")
    # Some HTTP parsers keep the white space around a value, which is not part of it.
    return values[0].strip(b" \t")


def read_signature(scheme: Scheme, given: Given) -> tuple[list[bytes], bytes]:
    """Return the digests to try, and the timestamp as it was signed (b"" if the scheme has none).

    Raises InvalidSignatureError unless each is present and written exactly as the scheme demands.
    """
    entries = list(_entries(scheme, only(given, scheme.header)))
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
        times = [only(given, scheme.timestamp_from)]
    if len(times) != 1 or not _TIMESTAMP.fullmatch(times[0]):
        raise InvalidSignatureError("malformed")
    return candidates, times[0]


def write_signature(scheme: Scheme, digest: bytes, timestamp: bytes) -> bytes:
    signature = _encode(scheme, digest)
    if scheme.format in {"plain", "csv"}:
        return signature
    if scheme.format not in _SEPARATORS:
        return _prefix(scheme) + signature
    between, within = _SEPARATORS[scheme.format]
    entries = [_VERSION + within + signature]
    if scheme.timestamp_from is not None and scheme.has_time_entry:
        entries.insert(0, scheme.timestamp_from.encode() + within + timestamp)
    return between.join(entries)


def _entries(scheme: Scheme, value: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and values; a bare signature is yielded under the known version."""
    if scheme.format not in _SEPARATORS:
        prefix = _prefix(scheme)
        if not value.startswith(prefix) and scheme.format != "plain":
            raise InvalidSignatureError("malformed")
        yield _VERSION, value.removeprefix(prefix)
        return
    between, within = _SEPARATORS[scheme.format]
    for entry in value.split(between):
        text = entry.strip(b" \t")
        if not within:
            yield _VERSION, text
            continue
        name, separator, text = text.partition(within)
        if not separator:
            raise InvalidSignatureError("malformed")
        yield name, text


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
        # RFC 4648 allows omitted padding for this alphabet only.
        text += b"=" * (-len(text) % 4)
    digest = base64.b64decode(text, altchars, validate=True)
    # Reject unused bits and characters of the other alphabet, which the decoder accepts.
    return digest if base64.b64encode(digest, altchars) == text else b""


def _encode(scheme: Scheme, digest: bytes) -> bytes:
    if scheme.encoding in {"auto", "hex"}:
        return binascii.hexlify(digest)
    return base64.b64encode(digest, _altchars(scheme))


def _altchars(scheme: Scheme) -> bytes | None:
    return b"-_" if scheme.encoding == "base64url" else None
