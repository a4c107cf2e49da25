"""What the body of an answer says, however it is packed and in whatever characters it is written.

The bridge asks for UTF-8 as it is. Some services compress all the same, put a byte-order mark in
front, or write in another charset that they declare.
"""

import json
import re
import zlib
from typing import Final

from bridge.outbound.posting.connection import MAX_ANSWER_BYTES, Reply

# zlib's words for "with gzip's or zlib's own header" and for "with none": `deflate` is either.
_WITH_HEADER: Final = 32 + zlib.MAX_WBITS
_WITHOUT_HEADER: Final = -zlib.MAX_WBITS
_PACKED: Final = frozenset(("gzip", "x-gzip", "deflate"))
_CHARSET: Final = re.compile(r""";\s*charset\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
# Python's own, which are no charsets, and cost more time than their size tells.
_NO_CHARSETS: Final = frozenset(("idna", "punycode", "undefined"))
_PAGE: Final = re.compile(rb"<(?:!doctype\s+html|html)\b", re.IGNORECASE)


def legible_body(reply: Reply) -> bytes:
    """Return the body unpacked and in UTF-8; what cannot be read is as it came, or replaced.

    No more than `MAX_ANSWER_BYTES` are unpacked.
    """
    return _in_utf8(_unpacked(reply), " ".join(reply.header_values("Content-Type")))


def is_page(reply: Reply) -> bool:
    """Whether the body is a page for a browser: HTML by its first words, or as it is declared."""
    body = legible_body(reply).lstrip()
    if _PAGE.match(body):
        return True
    is_html = any("html" in kind.lower() for kind in reply.header_values("Content-Type"))
    # Without a tag it is what many a gateway answers with its web server's default type.
    return is_html and body.startswith(b"<")


def _unpacked(reply: Reply) -> bytes:
    body = reply.body
    said = ",".join(reply.header_values("Content-Encoding")).lower().split(",")
    # The last one was applied last.
    for coding in reversed([one.strip() for one in said]):
        if coding in _PACKED:
            body = _inflated(body)
    return body


def _inflated(body: bytes) -> bytes:
    for form in (_WITH_HEADER, _WITHOUT_HEADER):
        try:
            return zlib.decompressobj(form).decompress(body, MAX_ANSWER_BYTES)
        except zlib.error:
            continue
    return body


def _in_utf8(body: bytes, content_type: str) -> bytes:
    # A byte-order mark, or the NULs of UTF-16 and UTF-32, prove more than what is declared.
    charset: str = json.detect_encoding(body)
    declared = _CHARSET.search(content_type)
    if charset == "utf-8" and declared is not None:
        charset = declared[1].lower()
    if charset in _NO_CHARSETS or "escape" in charset:
        charset = "utf-8"
    try:
        text = body.decode(charset, "replace")
    except (LookupError, UnicodeError, ValueError):
        text = body.decode("utf-8", "replace")
    return text.encode("utf-8", "replace")
