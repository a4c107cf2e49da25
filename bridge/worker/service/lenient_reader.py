"""Read an HTTP/1.1 answer that violates the protocol, if its meaning is unambiguous.

Only the first line can be the status line, or the first line after a complete 1xx answer. Framing
errors after it are tolerated: bare LF, folded headers, blanks before a colon or after a chunk size,
control characters, lines that are not headers, a duplicate length or a length beside chunks, and
meaningless transfer encodings.

For answers only: lenient parsing of requests enables request smuggling. A connection whose answer
was read here must not be used again, because the server may disagree about where the answer ends.
"""

import re
from typing import Final

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


class LenientReader:
    """Reads one answer from its first byte; call `feed` until `is_complete`.

    `status` is None until the status line of a final answer (not a 1xx) was read. At most
    `most_bytes` are kept of the body, and accepted as a header together with all 1xx answers before
    it.
    """

    def __init__(self, most_bytes: int) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.is_complete = False
        self._most_bytes = most_bytes
        self._head_bytes_left = most_bytes
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
            return self._is_in_no_chunks()
        self._left = int(size[1], 16)
        del self._unread[: size.end()]
        self._is_in_chunk = self._left > 0
        # The trailer is ignored.
        self.is_complete = not self._is_in_chunk
        return self._is_in_chunk

    def _is_in_no_chunks(self) -> bool:
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
        room = self._most_bytes - len(self.body)
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
