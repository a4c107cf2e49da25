"""Decode the body of an answer: decompress it, and convert it to UTF-8.

The bridge asks for an uncompressed body. Some services compress anyway, prepend a byte-order mark,
or use another charset that they declare.
"""

import json
import re
import zlib
from typing import Final

from bridge.worker.service.transport import MAX_ANSWER_BYTES, Reply

# zlib's window sizes for "gzip or zlib header" and "no header"; `deflate` can be either.
_WITH_HEADER: Final = 32 + zlib.MAX_WBITS
_WITHOUT_HEADER: Final = -zlib.MAX_WBITS
_GZIP: Final = b"\x1f\x8b"
_PACKED: Final = frozenset(("gzip", "x-gzip", "deflate"))
# More layers do not occur, and each costs as much as the first.
_MOST_CODINGS: Final = 4
_CHARSET: Final = re.compile(r""";\s*charset\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
# Charsets accepted besides UTF-8. Python's codec registry is not used: it includes codecs that are
# not charsets, accepts many spellings and caches every name, and some codecs are very slow.
_CHARSETS: Final = frozenset(
    (
        *("utf-16", "utf-16le", "utf-16be", "utf-32", "utf-32le", "utf-32be", "latin1", "latin-1"),
        *(f"iso-8859-{n}" for n in range(1, 17) if n != 12),  # noqa: PLR2004  there is none
        *(f"{name}125{n}" for name in ("windows-", "cp") for n in range(9)),
        *("cp437", "cp850", "cp874", "ibm437", "ibm850", "koi8-r", "koi8-u", "macintosh"),
        *("big5", "euc-jp", "euc-kr", "gb18030", "gb2312", "gbk", "iso-2022-jp", "iso-2022-kr"),
        *("ks_c_5601-1987", "shift_jis", "sjis", "tis-620"),
    )
)
_PAGE: Final = re.compile(rb"<(?:!doctype\s+html|html)\b", re.IGNORECASE)


def legible_body(reply: Reply) -> bytes:
    """Return the body decompressed and in UTF-8; unreadable parts are left or replaced.

    At most `MAX_ANSWER_BYTES` are decompressed.
    """
    return _in_utf8(_unpacked(reply), " ".join(reply.header_values("Content-Type")))


def is_page(reply: Reply, legible: bytes) -> bool:
    """Whether a decoded body is an HTML page, by its first tag or by its declared type."""
    body = legible.lstrip()
    if _PAGE.match(body):
        return True
    is_html = any("html" in kind.lower() for kind in reply.header_values("Content-Type"))
    # A body without a tag is plain text that a web server declared as HTML by default.
    return is_html and body.startswith(b"<")


def _unpacked(reply: Reply) -> bytes:
    body = reply.body
    said = ",".join(reply.header_values("Content-Encoding")).lower().split(",")
    # The last coding was applied last.
    for coding in reversed([one.strip() for one in said[-_MOST_CODINGS:]]):
        if coding in _PACKED:
            body = _inflated(body)
    return body


def _inflated(body: bytes) -> bytes:
    try:
        return _with_header(body)
    except zlib.error:
        pass
    bare = zlib.decompressobj(_WITHOUT_HEADER)
    try:
        unpacked = bare.decompress(body, MAX_ANSWER_BYTES)
    except zlib.error:
        return body
    # A plain text may look like the start of a deflate stream, but not like a whole one.
    is_whole = bare.eof or len(unpacked) == MAX_ANSWER_BYTES
    return unpacked if is_whole or len(body) >= MAX_ANSWER_BYTES else body


def _with_header(body: bytes) -> bytes:
    """Decompress consecutive streams, because gzip allows several (RFC 1952, 2.2)."""
    unpacked = b""
    while len(unpacked) < MAX_ANSWER_BYTES:
        stream = zlib.decompressobj(_WITH_HEADER)
        try:
            unpacked += stream.decompress(body, MAX_ANSWER_BYTES - len(unpacked))
        except zlib.error:
            # The bytes after the first stream may not be another one.
            if not unpacked:
                raise
            break
        body = stream.unused_data
        if not body.startswith(_GZIP):
            break
    return unpacked


def _in_utf8(body: bytes, content_type: str) -> bytes:
    # A byte-order mark, or the NULs of UTF-16 and UTF-32, are more reliable than the declaration.
    charset: str = json.detect_encoding(body)
    declared = _CHARSET.search(content_type)
    if charset == "utf-8" and declared is not None and declared[1].lower() in _CHARSETS:
        charset = declared[1].lower()
    return body.decode(charset, "replace").encode("utf-8", "replace")
