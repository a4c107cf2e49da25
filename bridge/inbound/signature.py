"""Are these raw bytes and headers authentic and fresh? A scheme is data; nothing here does I/O."""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from bridge.config import SignatureSettings
from bridge.errors import ConfigError, InvalidSignatureError

# As ASGI has them: names in lower case, repeated headers repeated.
Headers = Iterable[tuple[bytes, bytes]]
_Given = Sequence[tuple[bytes, bytes]]
Algorithm = Literal["sha256", "sha1", "sha384", "sha512"]
Encoding = Literal["auto", "hex", "base64", "base64url"]
SecretEncoding = Literal["utf8", "base64", "hex", "whsec"]

MAX_CANDIDATES: Final = 10

_DIGEST_BYTES: Final = {"sha256": 32, "sha1": 20, "sha384": 48, "sha512": 64}
# Between entries, and between an entry's name and its value.
_SEPARATORS: Final = {"kv": (b",", b"="), "list": (b" ", b",")}
# The only version of `kv` and `list` schemes that is an HMAC with a shared secret.
_VERSION: Final = b"v1"
_BODY_DIGEST: Final = b"bodySHA256"

_PLACEHOLDER: Final = re.compile(r"\{(body|timestamp|id|url)\}")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VISIBLE: Final = re.compile(r"[!-~]+")
# Without leading zeros: one could be the end of what stands before it.
_TIMESTAMP: Final = re.compile(rb"[1-9][0-9]{0,12}")
_EVENT_ID: Final = re.compile(rb"[!-~]{1,255}")
# RFC 3986, and brackets. No brace or quote, so that no JSON object can begin in a query.
_QUERY: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]-]*")
_AFTER_URL: Final = re.compile(r"\{url\}(.*?)\{(?:body|id)\}")
_TOUCHING_ID: Final = re.compile(r"\{id\}\{(?:body|url)\}|\{(?:body|url)\}\{id\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Hold every way in which services sign differently.

    Make one with `scheme_from`, which finds contradictions. `url` is what `{url}` stands for,
    without the query. In the kv format `timestamp_from` is a key, or a header if it has a dash.
    """

    header: str
    algorithm: Algorithm = "sha256"
    encoding: Encoding = "auto"
    format: str = "plain"
    signed_content: str = "{body}"
    timestamp_from: str | None = None
    timestamp_unit: Literal["s", "ms"] = "s"
    tolerance_seconds: float = 300.0
    id_header: str | None = None
    secret_encoding: SecretEncoding = "utf8"  # noqa: S105  the name of an encoding
    url: str | None = None


PRESETS: Final[Mapping[str, Scheme]] = MappingProxyType(
    {
        "plain": Scheme(header="X-Service-Signature"),
        "github": Scheme(header="X-Hub-Signature-256", encoding="hex", format="prefix:sha256="),
        "stripe": Scheme(
            header="Stripe-Signature",
            encoding="hex",
            format="kv",
            signed_content="{timestamp}.{body}",
            timestamp_from="t",
        ),
        "slack": Scheme(
            header="X-Slack-Signature",
            encoding="hex",
            format="prefix:v0=",
            signed_content="v0:{timestamp}:{body}",
            timestamp_from="X-Slack-Request-Timestamp",
        ),
        "shopify": Scheme(
            header="X-Shopify-Hmac-SHA256", encoding="base64", id_header="X-Shopify-Event-Id"
        ),
        "standard-webhooks": Scheme(
            header="webhook-signature",
            encoding="base64",
            format="list",
            signed_content="{id}.{timestamp}.{body}",
            timestamp_from="webhook-timestamp",
            id_header="webhook-id",
            secret_encoding="whsec",  # noqa: S106  the name of an encoding
        ),
        "twilio": Scheme(
            header="X-Twilio-Signature",
            algorithm="sha1",
            encoding="base64",
            signed_content="{url}",
        ),
    }
)


class Verified(NamedTuple):
    """Tell which key signed, which event, and when (unix seconds).

    The id is a claim, and not proven, where the scheme does not sign `{id}`.
    """

    key_index: int
    event_id: str | None
    timestamp: float | None


@dataclass(frozen=True, slots=True)
class Signed:
    """Hold what a sender puts on a request: headers, and the raw query (empty for most schemes)."""

    headers: tuple[tuple[str, str], ...]
    query: bytes


def scheme_from(settings: SignatureSettings, public_url: str | None) -> Scheme:
    """Lay the single knobs over the preset; None leaves the preset's value.

    Raises ConfigError with one line for each contradiction.
    """
    knobs = settings.model_dump(exclude={"preset"}, exclude_none=True)
    scheme = replace(PRESETS[settings.preset], **knobs, url=public_url)
    faults = [
        *_content_faults(scheme),
        *_timestamp_faults(scheme, knobs),
        *_name_faults(scheme),
    ]
    if faults:
        raise ConfigError(*faults)
    return scheme


def _content_faults(scheme: Scheme) -> Iterator[str]:
    used = set(_PLACEHOLDER.findall(scheme.signed_content))
    if set("{}") & set(_PLACEHOLDER.sub("", scheme.signed_content)):
        yield (
            "webhook.signature.signed_content: holds a brace that is not part of "
            "{body}, {timestamp}, {id} or {url}; take it out"
        )
    if _TOUCHING_ID.search(scheme.signed_content):
        yield (
            "webhook.signature.signed_content: needs a fixed character between {id} and the "
            "{body} or {url} beside it, or a part of one could be taken for the other"
        )
    needs = (
        ("timestamp", scheme.timestamp_from, "webhook.signature.timestamp_from", "a header or key"),
        ("id", scheme.id_header, "webhook.signature.id_header", "the header"),
        ("url", scheme.url, "webhook.public_url", "the whole address that the service calls"),
    )
    for name, value, key, remedy in needs:
        if name in used and value is None:
            yield f"{key}: is missing, but the service signs {{{name}}}; set it to {remedy}"
    if "url" in used and scheme.url is not None and not _VISIBLE.fullmatch(scheme.url):
        yield "webhook.public_url: must be ASCII, percent-encoded as the service calls it"


def _timestamp_faults(scheme: Scheme, knobs: Collection[str]) -> Iterator[str]:
    source = scheme.timestamp_from
    if source is None:
        for knob in ("timestamp_unit", "tolerance_seconds"):
            if knob in knobs:
                yield (
                    f"webhook.signature.{knob}: does nothing without timestamp_from; "
                    "set that too, or leave this out"
                )
        return
    if "{timestamp}" not in scheme.signed_content:
        yield (
            "webhook.signature.signed_content: must hold {timestamp} when there is a "
            "timestamp_from, or the time could be forged; without a time start from preset plain"
        )
    if not _TOKEN.fullmatch(source):
        yield "webhook.signature.timestamp_from: is neither a header name nor a kv key"
    elif scheme.format != "kv" and len(source) <= len("ts"):
        yield (
            "webhook.signature.timestamp_from: is a kv key, but the format is not kv; "
            "name a header, or set format: kv"
        )


def _name_faults(scheme: Scheme) -> Iterator[str]:
    time_header = None if _time_is_entry(scheme) else scheme.timestamp_from
    names = [scheme.header, scheme.id_header, time_header]
    lower = [name.lower() for name in names if name is not None]
    if len(set(lower)) != len(lower):
        yield (
            "webhook.signature.header: is also the header of the id or the timestamp, "
            "or these two are one; name different headers"
        )
    named = scheme.format.removeprefix("prefix:").removesuffix("=")
    if named in _DIGEST_BYTES and named != scheme.algorithm:
        yield (
            f"webhook.signature.format: the prefix says {named}, but the algorithm is "
            f"{scheme.algorithm}; set format to prefix:{scheme.algorithm}="
        )


def decode_secret(scheme: Scheme, secret: str, *, setting: str = "webhook.secrets") -> bytes:
    """Turn a configured secret into the HMAC key.

    Raises ConfigError that names the setting, without the secret in it, when it is empty or not in
    the encoding.
    """
    try:
        key = _secret_bytes(scheme.secret_encoding, secret)
    except ValueError:
        key = b""
    if not key or not secret.strip():
        # Raised out here, because a decoder's error may hold the secret.
        raise ConfigError(
            f"{setting}: the secret is empty or not {scheme.secret_encoding}; correct it, "
            "or say in webhook.signature.secret_encoding how it is written"
        )
    return key


def _secret_bytes(encoding: SecretEncoding, secret: str) -> bytes:
    match encoding:
        case "utf8":
            return secret.encode()
        case "hex":
            return binascii.unhexlify(secret)
        case "base64":
            return base64.b64decode(secret, validate=True)
        case "whsec":
            text = secret.removeprefix("whsec_")
            # Standard Webhooks' own libraries take it without padding, too.
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def verify(
    scheme: Scheme,
    keys: Sequence[bytes],
    headers: Headers,
    body: bytes,
    *,
    now: float,
    query: bytes = b"",
) -> Verified:
    """Check that a holder of one of the keys sent exactly this body, just now.

    Raises InvalidSignatureError. It says `stale` or `future` only of what is signed correctly,
    so that these mean a clock or a replay and never a forgery. `body` is not looked into.
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
    timestamp = str(int(now * _per_second(scheme))).encode()
    if scheme.timestamp_from is not None and not _time_is_entry(scheme):
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
    if _time_is_entry(scheme):
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
    if scheme.timestamp_from is not None and _time_is_entry(scheme):
        entries.insert(0, scheme.timestamp_from.encode() + within + timestamp)
    return between.join(entries)


def _prefix(scheme: Scheme) -> bytes:
    named = f"{scheme.algorithm}=" if scheme.format == "plain" else scheme.format
    return named.removeprefix("prefix:").encode()


def _time_is_entry(scheme: Scheme) -> bool:
    source = scheme.timestamp_from
    return scheme.format == "kv" and source is not None and "-" not in source


def _per_second(scheme: Scheme) -> int:
    return 1000 if scheme.timestamp_unit == "ms" else 1


def _decode(scheme: Scheme, text: bytes) -> bytes:
    size = _DIGEST_BYTES[scheme.algorithm]
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
    """Say whether a query could be read on into the body or the id: nothing there ends it."""
    after = _AFTER_URL.search(template)
    return after is not None and bool(_QUERY.fullmatch(_PLACEHOLDER.sub("", after[1]).encode()))


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
    return tuple(_PLACEHOLDER.split(template))


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
    seconds = int(timestamp) / _per_second(scheme)
    if now - seconds > scheme.tolerance_seconds:
        raise InvalidSignatureError("stale")
    if seconds - now > scheme.tolerance_seconds:
        raise InvalidSignatureError("future")
    return seconds
