"""An httpx transport, for an SMS API behind a proxy.

httpx connects, negotiates with the proxy and writes the request. `LenientReader` reads the answer,
so that it is interpreted identically with and without a proxy.
"""

import contextlib
import ssl
from collections.abc import Sequence
from typing import Any, Final

import httpx

from bridge.deadline import Deadline
from bridge.errors import PostError, PostFault
from bridge.worker.service.lenient_reader import LenientReader
from bridge.worker.service.transport import Header, Reply, connect_fault


class HttpxTransport:
    """Posts with httpx, through a proxy if any, on a new connection for each request.

    It is slower than `Transport`, and more failures are uncertain, because httpx does not report
    whether the request was sent. No connection is kept: a cancelled request can block a slot of
    httpx's pool for ever, and leftover bytes of one answer would be read as part of the next one.
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
        """Send a request; if a status was read, it is returned even if the request then fails.

        The proxy's own 407 to CONNECT is returned as well (RFC 9110, 15.5.8). Any other error in
        answer to CONNECT concerns the path to the server, and is `proxy_failed`.
        """
        answer = LenientReader()
        diversion = _Diversion(answer)
        request = httpx.Request(
            "POST",
            url,
            headers=[*common, *headers],
            content=body,
            extensions={"timeout": self._timeouts, "trace": diversion},
        )
        connection = httpx.AsyncHTTPTransport(
            proxy=self._proxy, verify=self._tls, trust_env=False, http2=False
        )
        try:
            async with Deadline(self._timeout_seconds):
                await connection.handle_async_request(request)
        except (httpx.HTTPError, OSError) as error:
            # httpx reports the proxy's status only in the text of the error.
            if isinstance(error, httpx.ProxyError) and str(error).startswith("407 "):
                return Reply(407)
            if answer.status is None:
                fault = _fault_of(error)
                raise PostError(
                    fault if diversion.is_asked else _BEFORE_THE_POST.get(fault, fault)
                ) from error
        finally:
            with contextlib.suppress(Exception):
                await connection.aclose()
        return Reply(answer.status or 0, answer.headers, bytes(answer.body))


class _Diversion:
    """Redirects the answer to the POST into a reader; for httpx, the connection just ends.

    It is httpx's trace callback. It wraps each stream that is opened, with or without TLS, and sets
    `is_asked` when httpx starts to write the POST, as opposed to a CONNECT.
    """

    def __init__(self, answer: LenientReader) -> None:
        self._answer = answer
        self.is_asked = False

    async def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event == "http11.send_request_headers.started":
            self.is_asked = info["request"].method == b"POST"
        elif event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._divert(info["return_value"])

    def _divert(self, stream: Any) -> None:  # noqa: ANN401  httpcore's, whose types are not ours
        read = stream.read

        async def divert(max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
            if not self.is_asked:
                data: bytes = await read(max_bytes, timeout=timeout)
                return data
            while not self._answer.is_complete:
                data = await read(max_bytes, timeout=timeout)
                if not data:
                    break
                self._answer.feed(data)
            return b""

        stream.read = divert


# Faults of a proxy tunnel that fails before the POST is started.
_BEFORE_THE_POST: Final[dict[PostFault, PostFault]] = {
    "answer_timeout": "connect_timeout",
    "connection_lost": "proxy_failed",
    "not_http": "proxy_failed",
}


def _fault_of(error: httpx.HTTPError | OSError) -> PostFault:
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
