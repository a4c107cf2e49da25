"""Builds the signed content from the parts of a request, by the scheme's template.

Refuses a request if its signed content could also be split into other parts.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from bridge.callback import is_reference
from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.forms import check_no_form, check_row, read_form, signed_row
from bridge.webhook.signatures.header import Given, only
from bridge.webhook.signatures.schemes import PLACEHOLDER, Scheme

# The query parameter with the digest of the body, for schemes that sign only the URL.
_BODY_DIGEST: Final = b"bodySHA256"

# An event's id, or a nonce.
_TOKEN: Final = re.compile(rb"[!-~]{1,255}")
# The characters of RFC 3986 and brackets. Without braces and quotes, no JSON object can begin in a
# query.
_QUERY: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]-]*")
# As Plivo signs a form: with a query, its end takes the place of the question mark.
_NO_QUERY: Final = "{url}?{params}"
_QUERY_END: Final = "{url}.{params}"
_AFTER_URL: Final = re.compile(r"\{url\}(.*?)\{(?:body|id)\}")


def read_event_id(scheme: Scheme, given: Given) -> bytes:
    """Return the event's id from its header, b"" if there is none.

    Raises InvalidSignatureError if the scheme signs the id, and it is missing or invalid.
    """
    if scheme.id_header is None:
        return b""
    try:
        return checked_token(scheme, "id", only(given, scheme.id_header))
    except InvalidSignatureError:
        if "{id}" in scheme.signed_content:
            raise
        # The id is unsigned, so it is no reason to refuse an authentic event.
        return b""


def read_nonce(scheme: Scheme, header: str, given: Given) -> bytes:
    """Return the nonce from its header; raises InvalidSignatureError if missing or invalid."""
    return checked_token(scheme, "nonce", only(given, header))


def checked_token(scheme: Scheme, name: str, token: bytes) -> bytes:
    """Return a valid id or nonce, whose place in the signed content is unambiguous.

    Raises InvalidSignatureError for any other.
    """
    if not _TOKEN.fullmatch(token):
        raise InvalidSignatureError("malformed")
    # A separator inside would allow the content to be split in two ways.
    if _separators(scheme.signed_content, name) & set(token.decode()):
        raise InvalidSignatureError("malformed")
    return token


def read_parameters(
    scheme: Scheme, given: Given, body: bytes, query: bytes
) -> Sequence[tuple[str, str]] | None:
    """Return the parameters of a form if the scheme signs them, else None.

    Raises InvalidSignatureError if neither parameters nor a digest in the query bind the body, or
    if the query could be taken for another part of the content. Call `check_parameters` afterwards.
    """
    content = scheme.signed_content
    if "{url}" in content and not _QUERY.fullmatch(query):
        raise InvalidSignatureError("malformed")
    if query and _may_run_on(content) and not (_marks_query(content) and is_reference(query)):
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
    return read_form(body, only(given, "content-type").decode())


def check_parameters(
    scheme: Scheme, params: Sequence[tuple[str, str]] | None, query: bytes
) -> None:
    """Raise InvalidSignatureError if a different form would have the same signed row.

    That includes an empty form with the row in the query.
    """
    if scheme.parameters is not None and params is not None:
        # Behind a query of Plivo's stands a dot, which is no part of it.
        check_row(scheme.parameters, params, b"" if _marks_query(scheme.signed_content) else query)


def with_digest(query: bytes, body: bytes) -> bytes:
    """Return the query with the digest of the body added, which `read_parameters` expects."""
    digest = _BODY_DIGEST + b"=" + hashlib.sha256(body).hexdigest().encode()
    return query + b"&" + digest if query else digest


def build_content(  # noqa: PLR0913  all parts of the content
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
    template = scheme.signed_content
    if query and _marks_query(template):
        template = template.replace(_NO_QUERY, _QUERY_END)
    pieces = _parts(template)
    return b"".join(values[p] if i % 2 else p.encode() for i, p in enumerate(pieces))


def full_url(url: str | None, query: bytes) -> bytes:
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
    """Whether the end of a query is ambiguous in the signed content.

    That is so if every character between the address and the next part may also occur in a query,
    or if the template itself has a question mark after the address.
    """
    if "{url}?" in template:
        return True
    after = _AFTER_URL.search(template)
    return after is not None and bool(_QUERY.fullmatch(PLACEHOLDER.sub("", after[1]).encode()))


def _marks_query(template: str) -> bool:
    """Whether a dot ends the query in the signed content, and a question mark replaces both."""
    return _NO_QUERY in template


# One template for each endpoint; only tests use more.
@lru_cache(maxsize=64)
def _parts(template: str) -> tuple[str, ...]:
    """Split a template: literals at even indexes, placeholder names at odd ones."""
    return tuple(PLACEHOLDER.split(template))


@lru_cache(maxsize=64)
def _separators(template: str, name: str) -> frozenset[str]:
    """Return the characters that delimit `{id}` or `{nonce}` in the template."""
    parts = _parts(template)
    places = [i for i in range(1, len(parts), 2) if parts[i] == name]
    ends = {parts[i + 1][:1] for i in places}
    begins = {parts[i - 1][-1:] for i in places if i > 1}
    return frozenset((ends | begins) - {""})
