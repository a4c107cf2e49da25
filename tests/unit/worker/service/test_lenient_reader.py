"""The reader of sloppy answers: no answer takes longer than its length tells."""

import time

import pytest

from bridge.worker.service.lenient_reader import MAX_ANSWER_BYTES, LenientReader

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = OK + b"Content-Length: "
BLANKS = b" " * 50_000
SLOW: dict[str, bytes] = {
    "blanks for a chunk's size": CHUNKED + BLANKS + b"Z",
    "blanks behind a chunk's size": CHUNKED + b"1" + BLANKS + b"Z",
    "blanks, and no end": CHUNKED + BLANKS,
    "an extension without end": CHUNKED + b"1;" + BLANKS,
    "line ends for a chunk's size": CHUNKED + b"\r\n" * 50_000 + b"Z",
    "tabs in a length": LENGTH + b"1" + b"\t" * 50_000 + b"x,1\r\n\r\n",
    "many lengths": LENGTH + b"1," * 25_000 + b"\r\n\r\n",
    "blanks behind the version": b"HTTP/1.1" + BLANKS + b"x\r\n",
    "a header of folds": OK + b"A: b\r\n" + b" \r\n" * 15_000 + b"\r\n",
    "small chunks": CHUNKED + b"1\nx" * 30_000,
}


@pytest.mark.parametrize("slow", SLOW)
def test_no_answer_takes_longer_than_its_length_tells(slow: str) -> None:
    """While one answer is read nothing else runs, not even the heartbeat to the broker."""
    started = time.process_time()
    LenientReader().feed(SLOW[slow])

    assert time.process_time() - started < 5


@pytest.mark.parametrize("more", [b" ", b"1;", b"\r\n"])
def test_size_of_a_chunk_that_never_ends_is_not_kept(more: bytes) -> None:
    """What might become a chunk's size is given up, or dropped, before it is long."""
    reader = LenientReader()
    reader.feed(CHUNKED)
    for _ in range(200):
        reader.feed(more * 500)

    assert len(reader._unread) < 8192
    assert len(reader.body) <= MAX_ANSWER_BYTES
