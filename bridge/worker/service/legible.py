"""What the body of an answer says, however it is packed and in whatever characters it is written.

The bridge asks for UTF-8 as it is. Some services compress all the same, put a byte-order mark in
front, or write in another charset that they declare.
"""

import json
import re
import zlib
from typing import Final

from bridge.worker.service.transport import MAX_ANSWER_BYTES, Reply

# zlib's words for "with gzip's or zlib's own header" and for "with none": `deflate` is either.
_WITH_HEADER: Final = 32 + zlib.MAX_WBITS
_WITHOUT_HEADER: Final = -zlib.MAX_WBITS
_GZIP: Final = b"\x1f\x8b"
_PACKED: Final = frozenset(("gzip", "x-gzip", "deflate"))
# Nobody packs more often, and each time costs as much as the first.
_MOST_CODINGS: Final = 4
_CHARSET: Final = re.compile(r""";\s*charset\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
# Besides UTF-8. Python has codecs that are no charsets, finds them by many a spelling, remembers
# each name that it was ever asked for, and some take far longer than their input is long.
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
    """Return the body unpacked and in UTF-8; what cannot be read is as it came, or replaced.

    No more than `MAX_ANSWER_BYTES` are unpacked.
    """
    return _in_utf8(_unpacked(reply), " ".join(reply.header_values("Content-Type")))


def is_page(reply: Reply, legible: bytes) -> bool:
    """Whether a legible body is a page for a browser: HTML by its first words, or as declared."""
    body = legible.lstrip()
    if _PAGE.match(body):
        return True
    is_html = any("html" in kind.lower() for kind in reply.header_values("Content-Type"))
    # Without a tag it is what many a gateway answers with its web server's default type.
    return is_html and body.startswith(b"<")


def _unpacked(reply: Reply) -> bytes:
    body = reply.body
    said = ",".join(reply.header_values("Content-Encoding")).lower().split(",")
    # The last one was applied last.
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
    # The start of many a text is that of such a stream, too, but not its end.
    is_whole = bare.eof or len(unpacked) == MAX_ANSWER_BYTES
    return unpacked if is_whole or len(body) >= MAX_ANSWER_BYTES else body


def _with_header(body: bytes) -> bytes:
    """Unpack one stream after the other, for gzip's may be several (RFC 1952, 2.2)."""
    unpacked = b""
    while len(unpacked) < MAX_ANSWER_BYTES:
        stream = zlib.decompressobj(_WITH_HEADER)
        try:
            unpacked += stream.decompress(body, MAX_ANSWER_BYTES - len(unpacked))
        except zlib.error:
            # What follows the first one may be none.
            if not unpacked:
                raise
            break
        body = stream.unused_data
        if not body.startswith(_GZIP):
            break
    return unpacked


def _in_utf8(body: bytes, content_type: str) -> bytes:
    # A byte-order mark, or the NULs of UTF-16 and UTF-32, prove more than what is declared.
    charset: str = json.detect_encoding(body)
    declared = _CHARSET.search(content_type)
    if charset == "utf-8" and declared is not None and declared[1].lower() in _CHARSETS:
        charset = declared[1].lower()
    return body.decode(charset, "replace").encode("utf-8", "replace")
