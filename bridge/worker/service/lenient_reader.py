"""Read an HTTP/1.1 answer that violates the protocol, if its meaning is unambiguous.

Only the first line can be the status line, or the first line after a complete 1xx answer. Framing
errors after it are tolerated: bare LF, folded headers, blanks before a colon or after a chunk size,
control characters, lines that are not headers, a duplicate length or a length beside chunks, and
meaningless transfer encodings.

`LenientReader` reads the framing; `legible_body` decompresses a body and converts it to UTF-8. The
bridge asks for an uncompressed body, but some services compress anyway, prepend a byte-order mark,
or use another charset that they declare.

For answers only: lenient parsing of requests enables request smuggling. A connection whose answer
was read here must not be used again, because the server may disagree about where the answer ends.
"""

import json
import re
import zlib
from collections.abc import Sequence
from typing import Final

# Limit of the kept body, and of a header together with all 1xx answers before it.
MAX_ANSWER_BYTES: Final = 64 * 1024

_STATUS_LINE: Final = re.compile(
    rb"HTTP/[0-9](?:\.[0-9])?[ \t]+([1-9][0-9]{2})(?:[ \t][^\n]*)?\r?\n"
)
_END_OF_HEAD: Final = re.compile(rb"\n\r?\n")
_FOLD: Final = re.compile(rb"\r?\n[ \t]+")
_LINE_ENDS: Final = re.compile(rb"[\r\n]*+")
# All repeats are possessive and bounded, so that a service cannot make parsing slow.
_CHUNK_SIZE: Final = re.compile(
    rb"[ \t]{0,64}+([0-9A-Fa-f]{1,15})[ \t]{0,64}+(?:;[^\n]{0,4096}+)?+\r?\n"
)
# Matches an incomplete chunk size line, whose rest may still arrive.
_START_OF_SIZE: Final = re.compile(
    rb"[ \t]{0,64}+[0-9A-Fa-f]{0,15}+[ \t]{0,64}+(?:;[^\n]{0,4096}+)?+\r?"
)
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
# These answers never have a body.
_BODILESS: Final = frozenset((204, 304))
_FIRST_FINAL_STATUS: Final = 200


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


class LenientReader:
    """Reads one answer from its first byte; call `feed` until `is_complete`.

    `status` is None until the status line of a final answer (not a 1xx) was read. At most
    `MAX_ANSWER_BYTES` are kept of the body, and accepted as a header together with all 1xx answers
    before it.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.is_complete = False
        self._head_bytes_left = MAX_ANSWER_BYTES
        self._unread = bytearray()
        self._has_head = False
        self._is_chunked = False
        # Bytes left of a chunk or of the body; None if the body ends with the connection.
        self._left: int | None = None
        self._is_in_chunk = False

    def feed(self, data: bytes | bytearray) -> None:
        """Read more data; bytes after the end of the answer are ignored."""
        if not self.is_complete:
            self._unread += data
        while not self.is_complete and self._step():
            pass

    def _step(self) -> bool:
        """Parse the next element; return whether the data may contain another one."""
        if not self._has_head:
            return self._read_head()
        if self._is_chunked and not self._is_in_chunk:
            return self._read_size()
        return self._read_body()

    def _skip_line_ends(self) -> None:
        if (ends := _LINE_ENDS.match(self._unread)) is not None:
            del self._unread[: ends.end()]

    def _read_head(self) -> bool:
        self._skip_line_ends()
        line = _STATUS_LINE.match(self._unread)
        if line is None:
            self.is_complete = b"\n" in self._unread or len(self._unread) > self._head_bytes_left
            return False
        status = int(line[1])
        if status >= _FIRST_FINAL_STATUS:
            self.status = status
        # Search from the end of the status line, because there may be no headers.
        end = _END_OF_HEAD.search(self._unread, line.end() - 1)
        if end is None or end.end() > self._head_bytes_left:
            self.is_complete = len(self._unread) > self._head_bytes_left
            return False
        self._head_bytes_left -= end.end()
        if status >= _FIRST_FINAL_STATUS:
            self._take_headers(bytes(self._unread[line.end() : end.start() + 1]))
        del self._unread[: end.end()]
        return not self.is_complete

    def _take_headers(self, lines: bytes) -> None:
        self._has_head = True
        for one in _FOLD.sub(b" ", lines).split(b"\n"):
            name, colon, value = one.partition(b":")
            if colon:
                self.headers.append((name.strip(), value.strip()))
        said = [(name.lower(), value.lower()) for name, value in self.headers]
        self._is_chunked = any(
            name == b"transfer-encoding" and b"chunked" in value for name, value in said
        )
        lengths = [
            int(one)
            for name, value in said
            if name == b"content-length"
            for one in map(bytes.strip, value.split(b","))
            if _LENGTH.fullmatch(one)
        ]
        # If lengths differ, use the largest, so that no part of the body is lost.
        self._left = max(lengths, default=None)
        is_empty = self._left == 0 and not self._is_chunked
        self.is_complete = is_empty or self.status in _BODILESS

    def _read_size(self) -> bool:
        self._skip_line_ends()
        size = _CHUNK_SIZE.match(self._unread)
        if size is None:
            if _START_OF_SIZE.fullmatch(self._unread):
                return False
            return self._end_chunks()
        self._left = int(size[1], 16)
        del self._unread[: size.end()]
        self._is_in_chunk = self._left > 0
        # The trailer is ignored.
        self.is_complete = not self._is_in_chunk
        return self._is_in_chunk

    def _end_chunks(self) -> bool:
        """End after the last whole chunk; if there is none, the body is not chunked."""
        if self.body:
            self.is_complete = True
            return False
        self._is_chunked = False
        if self._left is None:
            self._left = len(self._unread)
        return True

    def _read_body(self) -> bool:
        size = len(self._unread) if self._left is None else min(len(self._unread), self._left)
        room = MAX_ANSWER_BYTES - len(self.body)
        self.body += self._unread[: min(size, room)]
        del self._unread[:size]
        if size > room:
            self.is_complete = True
        elif self._left is not None:
            self._left -= size
            if self._left == 0:
                self._is_in_chunk = False
                self.is_complete = not self._is_chunked
        return self._is_chunked and not self._is_in_chunk and not self.is_complete


def legible_body(body: bytes, codings: Sequence[str], content_types: Sequence[str]) -> bytes:
    """Return the body decompressed and in UTF-8; unreadable parts are left or replaced.

    At most `MAX_ANSWER_BYTES` are decompressed. `codings` and `content_types` are the values of the
    headers `Content-Encoding` and `Content-Type`.
    """
    return _in_utf8(_unpacked(body, codings), " ".join(content_types))


def is_page(legible: bytes, content_types: Sequence[str]) -> bool:
    """Whether a decoded body is an HTML page, by its first tag or by its declared type."""
    body = legible.lstrip()
    if _PAGE.match(body):
        return True
    is_html = any("html" in kind.lower() for kind in content_types)
    # A body without a tag is plain text that a web server declared as HTML by default.
    return is_html and body.startswith(b"<")


def _unpacked(body: bytes, codings: Sequence[str]) -> bytes:
    said = ",".join(codings).lower().split(",")
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
