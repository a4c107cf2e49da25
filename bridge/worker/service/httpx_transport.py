"""httpx's own transport, for the SMS API behind a proxy.

httpx connects, asks the proxy, and writes the request; the answer is read by `LenientReader`, so
that it means the same with a proxy and without.
"""

import contextlib
import ssl
from collections.abc import Sequence
from typing import Any, Final

import httpx

from bridge.deadline import Deadline
from bridge.errors import AttemptError, AttemptFault
from bridge.worker.service.lenient_reader import LenientReader
from bridge.worker.service.transport import MAX_ANSWER_BYTES, Header, Reply, connect_fault


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
        answer = LenientReader(MAX_ANSWER_BYTES)
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
            # httpx gives the proxy's status only in the error's text.
            if isinstance(error, httpx.ProxyError) and str(error).startswith("407 "):
                return Reply(407)
            if answer.status is None:
                fault = _fault_of(error)
                raise AttemptError(
                    fault if diversion.is_asked else _BEFORE_THE_POST.get(fault, fault)
                ) from error
        finally:
            with contextlib.suppress(Exception):
                await connection.aclose()
        return Reply(answer.status or 0, answer.headers, bytes(answer.body))


class _Diversion:
    """Leads the answer to the POST into a reader; httpx sees a connection that ends.

    Follows httpx's trace of the request: each stream that it opens, with TLS or without, and the
    moment at which it begins to write the POST and not a CONNECT: `is_asked` from then on.
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


# Of a tunnel that breaks off, answers nonsense or says nothing, before the POST was begun.
_BEFORE_THE_POST: Final[dict[AttemptFault, AttemptFault]] = {
    "answer_timeout": "connect_timeout",
    "connection_lost": "proxy_failed",
    "not_http": "proxy_failed",
}


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
