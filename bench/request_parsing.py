"""What it costs to read one webhook off the stream, beside h11, which uvicorn has for it too.

    python -m bench.request_parsing

Prints the microseconds of CPU time of each, as JSON; the least of some runs.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Final

import h11

from bridge.http.limits import Limits
from bridge.http.parser import RequestParser

REQUESTS: Final = 5_000
RUNS: Final = 10
LIMITS: Final = Limits(
    max_connections=1,
    max_header_bytes=16384,
    max_headers=100,
    max_body_bytes=262_144,
    max_buffered_bytes=1_000_000,
    idle_timeout_seconds=1,
    body_timeout_seconds=1,
    keep_alive_seconds=1,
)
BODY: Final = b'{"type": "message.received", "data": {"from": "+12025550101", "text": "yes"}}'
WEBHOOK: Final = b"\r\n".join(
    (
        b"POST /webhooks HTTP/1.1",
        b"Host: bridge.example",
        b"User-Agent: service",
        b"Content-Type: application/json",
        b"X-Service-Signature: " + b"a" * 64,
        b"Content-Length: %d" % len(BODY),
        b"",
        BODY,
    )
)


def ours() -> int:
    """Read webhooks with the parser of the listener; return the bytes of their bodies."""
    parser, size = RequestParser(LIMITS), 0
    for _ in range(REQUESTS):
        parser.feed(memoryview(WEBHOOK))
        size += len(parser.requests.popleft().body)
    return size


def with_h11() -> int:
    """Read them with h11, which wants a connection for each if nothing is answered."""
    size = 0
    for _ in range(REQUESTS):
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(WEBHOOK)
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                size += len(event.data)
    return size


def measure(read: Callable[[], int]) -> float:
    """Return the microseconds for one webhook, the least of some runs."""
    seconds = []
    for _ in range(RUNS):
        started = time.process_time()
        if read() != REQUESTS * len(BODY):
            raise ValueError("a body was not read")
        seconds.append(time.process_time() - started)
    return round(min(seconds) / REQUESTS * 1e6, 1)


if __name__ == "__main__":
    json.dump({"sms-bridge": measure(ours), "h11": measure(with_h11)}, sys.stdout)
    sys.stdout.write("\n")
