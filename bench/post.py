"""What one POST costs our transport, beside httpx's.

    python -m bench.post URL

Prints the microseconds of CPU time of each, as JSON.
"""

import asyncio
import json
import ssl
import sys
import time
from collections.abc import Sequence
from typing import Final

import httpx
import uvloop

from bench.lineup import OURS
from bridge.worker.service.connection import Header, Reply
from bridge.worker.service.httpx_transport import HttpxTransport
from bridge.worker.service.transport import ApiTransport, Transport

KEPT: Final = "httpx, connections kept"
ANEW: Final = "httpx, a connection for each request"
POSTS: Final = 400
RUNS: Final = 8
AT_ONCE: Final = 10
TIMEOUT_SECONDS: Final = 20.0
HEADERS: Final[Sequence[Header]] = (
    (b"Content-Type", b"application/json"),
    (b"Authorization", b"Bearer a-key"),
    (b"Idempotency-Key", b"id-00000001"),
)
BODY: Final = b'{"to":"+15550100","from":"Acme","text":"Your code is 123456."}'


class _KeptConnections:
    """httpx's transport as everybody uses it."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._timeouts = httpx.Timeout(TIMEOUT_SECONDS).as_dict()

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """Send a request, and read all of its answer."""
        request = httpx.Request(
            "POST",
            url,
            headers=[*common, *headers],
            content=body,
            extensions={"timeout": self._timeouts},
        )
        response = await self._transport.handle_async_request(request)
        return Reply(response.status_code, response.headers.raw, await response.aread())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


def _transports() -> dict[str, ApiTransport]:
    tls = ssl.create_default_context()
    return {
        OURS: Transport(
            timeout_seconds=TIMEOUT_SECONDS,
            connect_timeout_seconds=TIMEOUT_SECONDS,
            tls=tls,
            max_connections=AT_ONCE,
        ),
        KEPT: _KeptConnections(),
        ANEW: HttpxTransport(
            timeout_seconds=TIMEOUT_SECONDS, connect_timeout_seconds=TIMEOUT_SECONDS, tls=tls
        ),
    }


async def _microseconds(transport: ApiTransport, url: str) -> float:
    left = iter(range(POSTS))

    async def go_on() -> None:
        for _ in left:
            reply = await transport.post(url, HEADERS, BODY)
            assert reply.status == 202

    begun = time.process_time()
    await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
    return (time.process_time() - begun) / POSTS * 1e6


async def _measure(url: str) -> dict[str, float]:
    """Measure in turn, and return the least of each, which is what nothing has disturbed."""
    transports = _transports()
    runs = [
        {name: await _microseconds(one, url) for name, one in transports.items()}
        for _ in range(RUNS)
    ]
    for transport in transports.values():
        await transport.aclose()
    return {name: min(run[name] for run in runs) for name in transports}


def main() -> None:
    """Post to the URL over each of the transports."""
    sys.stdout.write(json.dumps(uvloop.run(_measure(sys.argv[1]))))


if __name__ == "__main__":
    main()
