"""httpx's own transport, for the SMS API behind a proxy."""

import asyncio
import contextlib
import ssl
from collections.abc import Sequence

import httpx

from bridge.errors import AttemptError, AttemptFault
from bridge.outbound.posting.connection import MAX_ANSWER_BYTES, Header, Reply, connect_fault


class HttpxTransport:
    """httpx's own transport, through a proxy if any, with a new connection for each request.

    Slower, and what it cannot tell counts as uncertain. Nothing is kept: a cancelled request can
    block a slot of httpx's pool for ever, and bytes that are left of one answer would be taken
    for the next one.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
        tls: ssl.SSLContext,
        proxy: str | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._timeouts = httpx.Timeout(timeout_seconds, connect=connect_timeout_seconds).as_dict()
        self._tls = tls
        self._proxy = proxy

    async def aclose(self) -> None:
        """Do nothing: no connection is kept."""

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """Send a request; a status that was read is returned in any case.

        That is also the proxy's own 407 to CONNECT (RFC 9110, 15.5.8). What else it answers to
        CONNECT speaks of the way to the server, and is `proxy_failed`.
        """
        request = httpx.Request(
            "POST",
            url,
            headers=[*common, *headers],
            content=body,
            extensions={"timeout": self._timeouts},
        )
        connection = httpx.AsyncHTTPTransport(
            proxy=self._proxy, verify=self._tls, trust_env=False, http2=False
        )
        response: httpx.Response | None = None
        start = bytearray()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await connection.handle_async_request(request)
                async for chunk in response.aiter_raw():
                    start += chunk[: MAX_ANSWER_BYTES - len(start)]
                    if len(start) >= MAX_ANSWER_BYTES:
                        break
        except (httpx.HTTPError, OSError) as error:
            # httpx gives the proxy's status only in the error's text.
            if isinstance(error, httpx.ProxyError) and str(error).startswith("407 "):
                return Reply(407)
            if response is None:
                raise AttemptError(_fault_of(error)) from error
        finally:
            with contextlib.suppress(Exception):
                await connection.aclose()
        return Reply(response.status_code, response.headers.raw, bytes(start))


def _fault_of(error: httpx.HTTPError | OSError) -> AttemptFault:
    match error:
        case httpx.ConnectError() | httpx.UnsupportedProtocol():
            return connect_fault(error)
        case httpx.ConnectTimeout():
            return "connect_timeout"
        case httpx.PoolTimeout():
            return "pool_exhausted"
        case httpx.ProxyError():
            return "proxy_failed"
        case httpx.TimeoutException() | TimeoutError():
            return "answer_timeout"
        case httpx.ProtocolError():
            return "not_http"
        case _:
            return "connection_lost"
