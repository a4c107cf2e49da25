"""What is signed: the parts of a request, put together as the scheme's template says.

Wherever one signature would fit two ways to cut the content, the request is refused.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.forms import check_no_form, check_row, read_form, signed_row
from bridge.webhook.signatures.given import Given, only
from bridge.webhook.signatures.schemes import PLACEHOLDER, Scheme

# The parameter of the query that binds the body where only the URL is signed.
_BODY_DIGEST: Final = b"bodySHA256"

# An event's id, or a nonce.
_TOKEN: Final = re.compile(rb"[!-~]{1,255}")
# RFC 3986, and brackets. No brace or quote, so that no JSON object can begin in a query.
_QUERY: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]-]*")
_AFTER_URL: Final = re.compile(r"\{url\}(.*?)\{(?:body|id)\}")


def read_event_id(scheme: Scheme, given: Given) -> bytes:
    """Return the event's id from its header, empty if there is none.

    Raises InvalidSignatureError when it is signed, and missing or no id.
    """
    if scheme.id_header is None:
        return b""
    try:
        return checked_token(scheme, "id", only(given, scheme.id_header))
    except InvalidSignatureError:
        if "{id}" in scheme.signed_content:
            raise
        # Nobody vouches for this id, so an authentic event is not refused for it.
        return b""


def read_nonce(scheme: Scheme, header: str, given: Given) -> bytes:
    """Return the nonce from its header.

    Raises InvalidSignatureError when it is missing or no nonce.
    """
    return checked_token(scheme, "nonce", only(given, header))


def checked_token(scheme: Scheme, name: str, token: bytes) -> bytes:
    """Return an id or a nonce that can be cut out of the content in one way only.

    Raises InvalidSignatureError for any other.
    """
    if not _TOKEN.fullmatch(token):
        raise InvalidSignatureError("malformed")
    # With a separator inside, one signature would fit two ways to cut the content.
    if _separators(scheme.signed_content, name) & set(token.decode()):
        raise InvalidSignatureError("malformed")
    return token


def read_parameters(
    scheme: Scheme, given: Given, body: bytes, query: bytes
) -> Sequence[tuple[str, str]] | None:
    """Return the parameters of a form, where the scheme signs their row; else None.

    Raises InvalidSignatureError when neither they nor a digest in the query bind the body, or the
    query could be read as a part of something else. `check_parameters` must follow.
    """
    content = scheme.signed_content
    if "{url}" in content and not _QUERY.fullmatch(query):
        raise InvalidSignatureError("malformed")
    if query and _may_run_on(content):
        raise InvalidSignatureError("malformed")
    if "{body}" in content or "{body_sha256}" in content:
        return None
    if scheme.parameters is None:
        _check_digest(query, body)
        return None
    if _digests(query):
        _check_digest(query, body)
        check_no_form(scheme.parameters, query)
        return None
    return read_form(body, given)


def check_parameters(
    scheme: Scheme, params: Sequence[tuple[str, str]] | None, query: bytes
) -> None:
    """Raise InvalidSignatureError when the signed row could be that of another form.

    A form without parameters has a row, too: one that could all stand in the query.
    """
    if scheme.parameters is not None and params is not None:
        check_row(scheme.parameters, params, query)


def with_digest(query: bytes, body: bytes) -> bytes:
    """Return the query with the body's digest in it, as `read_parameters` wants it."""
    digest = _BODY_DIGEST + b"=" + hashlib.sha256(body).hexdigest().encode()
    return query + b"&" + digest if query else digest


def build_content(  # noqa: PLR0913  what may be signed
    scheme: Scheme,
    body: bytes,
    *,
    url: str | None,
    query: bytes,
    timestamp: bytes,
    event_id: bytes,
    nonce: bytes,
    params: Sequence[tuple[str, str]] | None,
) -> bytes:
    """Put the signed bytes together."""
    if scheme.signed_content == "{body}":
        return body
    has_digest = "{body_sha256}" in scheme.signed_content
    values = {
        "body": body,
        "timestamp": timestamp,
        "id": event_id,
        "nonce": nonce,
        "url": full_url(url, query),
        "body_sha256": hashlib.sha256(body).digest() if has_digest else b"",
        "params": b"" if params is None else signed_row(params).encode(),
    }
    pieces = _parts(scheme.signed_content)
    return b"".join(values[p] if i % 2 else p.encode() for i, p in enumerate(pieces))


def full_url(url: str | None, query: bytes) -> bytes:
    """Return an address with the query that the service called."""
    address = (url or "").encode()
    return address + b"?" + query if query else address


def _digests(query: bytes) -> list[bytes]:
    pairs = [pair.partition(b"=") for pair in query.split(b"&")]
    return [text for name, _, text in pairs if name == _BODY_DIGEST]


def _check_digest(query: bytes, body: bytes) -> None:
    digests = _digests(query)
    if not digests:
        raise InvalidSignatureError("missing")
    expected = hashlib.sha256(body).hexdigest().encode()
    if len(digests) > 1 or len(digests[0]) != len(expected):
        raise InvalidSignatureError("malformed")
    if not hmac.compare_digest(digests[0].lower(), expected):
        raise InvalidSignatureError("mismatch")


@lru_cache(maxsize=16)
def _may_run_on(template: str) -> bool:
    """Whether a query could be read on into what follows it: nothing there ends it.

    Where the template has a question mark of its own behind the address, a query would be a
    second one.
    """
    if "{url}?" in template:
        return True
    after = _AFTER_URL.search(template)
    return after is not None and bool(_QUERY.fullmatch(PLACEHOLDER.sub("", after[1]).encode()))


# A process has a template for each endpoint; only tests have more.
@lru_cache(maxsize=64)
def _parts(template: str) -> tuple[str, ...]:
    """Cut a template: literals at the even places, names of placeholders at the odd ones."""
    return tuple(PLACEHOLDER.split(template))


@lru_cache(maxsize=64)
def _separators(template: str, name: str) -> frozenset[str]:
    """Return the characters that end `{id}` or `{nonce}`, or begin it after another placeholder."""
    parts = _parts(template)
    places = [i for i in range(1, len(parts), 2) if parts[i] == name]
    ends = {parts[i + 1][:1] for i in places}
    begins = {parts[i - 1][-1:] for i in places if i > 1}
    return frozenset((ends | begins) - {""})
