"""The sandbox's web page: its files, what it starts from, and the stream that keeps it up to date.

The page takes a snapshot and is told from there on, by server-sent events (WHATWG HTML, 9.2), all
that changes. Whoever has missed more than is kept is told to take a new snapshot.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources
from itertools import islice
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bridge.sandbox.events import Events
from bridge.sandbox.feed import Happening
from bridge.sandbox.memory import Memory
from bridge.sandbox.service import Service
from bridge.sandbox.validation import validate

MAX_STREAMS: Final = 100
# A page is shown so many messages, webhooks and requests, the newest.
MAX_SHOWN: Final = 10_000
MAX_SHOWN_REQUESTS: Final = 1000
# Proxies close what is silent, and only a write shows that a page is gone.
ALIVE_SECONDS: Final = 15
# So long is waited for more of what comes in a burst, to be sent as one piece.
_BURST_SECONDS: Final = 0.02
_RECONNECT_MILLISECONDS: Final = 1000
# The run of this process, and the number that was told last.
_POSITION: Final = re.compile(r"([0-9a-f]+)-([0-9]{1,18})")

# Nothing but the page's own files and the sandbox; no text becomes markup or code.
SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
FILES: Final = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


class Read(BaseModel):
    """Up to which message of the feed a number's conversation was seen."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    to: Annotated[str, Field(min_length=1, max_length=32)]
    number: Annotated[int, Field(ge=0)]


_READ: Final = TypeAdapter(Read)


class _Stream(StreamingResponse):
    """Server-sent events; `ended` is called once they have ended, begun or not."""

    def __init__(
        self, told: AsyncIterator[str], *, headers: dict[str, str], ended: Callable[[], object]
    ) -> None:
        super().__init__(told, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


class Page:
    """What the page asks for."""

    def __init__(self, service: Service, memory: Memory, *, webhook_url: str | None) -> None:
        self._service = service
        self._memory = memory
        self._webhook_url = webhook_url
        self._streams = 0
        folder = resources.files("bridge.sandbox") / "page"
        self._files = {name: (folder / name).read_bytes() for name in FILES}

    def routes(self) -> list[Route]:
        """Return the page's own endpoints, but for GET /."""
        return [
            Route("/sandbox/page/{name}", self.show_file),
            Route("/sandbox/snapshot", self.show_snapshot),
            Route("/sandbox/stream", self.stream),
            Route("/sandbox/read", self.mark_read, methods=["PUT"]),
            Route("/sandbox/requests/{number:int}", self.show_exchange),
        ]

    def show(self) -> Response:
        """Return the page itself."""
        return self._file("index.html")

    async def show_file(self, request: Request) -> Response:
        """Return a file of the page."""
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        return Response(self._files[name], media_type=FILES[name], headers=SECURITY)

    async def show_snapshot(self, _request: Request) -> Response:
        """Return all that the page starts from, and the position in the feed that it stands for."""
        memory, service = self._memory, self._service
        snapshot = {
            "run": memory.feed.run,
            "at": memory.feed.last,
            "preset": service.preset,
            "path": service.path,
            "has_key": memory.key is not None,
            "webhook_url": self._webhook_url,
            "answers": service.list_answers(),
            "deliveries": Events(service.preset).deliveries,
            "total": len(memory.messages),
            "messages": [one.for_page() for one in _newest(memory.messages, MAX_SHOWN)],
            "requests": [one.for_page() for one in _newest(memory.attempts, MAX_SHOWN_REQUESTS)],
            "webhooks": [one.as_json() for one in memory.webhooks],
            "faults": memory.show_faults(),
            "read": memory.read,
        }
        return JSONResponse(snapshot, headers={"Cache-Control": "no-store"})

    async def show_exchange(self, request: Request) -> Response:
        """Return the headers and bodies of one request and its answer."""
        attempt = self._memory.find_attempt(request.path_params["number"])
        if attempt is None or attempt.exchange is None:
            raise HTTPException(404, "number: of this request headers and body are not kept")
        return JSONResponse({**attempt.for_page(), **attempt.exchange.as_json()})

    async def mark_read(self, request: Request) -> Response:
        """Take down what somebody has seen, for all pages that are open."""
        read = validate(_READ, await request.body())
        self._memory.mark_read(read.to, read.number)
        return Response(status_code=204)

    async def stream(self, request: Request) -> Response:
        """Tell what happens as server-sent events, on from the `Last-Event-ID` if that is known."""
        if self._streams >= MAX_STREAMS:
            raise HTTPException(
                503, f"{MAX_STREAMS} pages are open; close some", {"Retry-After": "5"}
            )
        # Counted where it is checked; the response gives the place back when it has ended.
        self._streams += 1
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        told = self._tell(request.headers.get("last-event-id", ""))
        return _Stream(told, headers=headers, ended=self._end_stream)

    def _end_stream(self) -> None:
        self._streams -= 1

    async def _tell(self, position: str) -> AsyncIterator[str]:
        feed = self._memory.feed
        yield f"retry: {_RECONNECT_MILLISECONDS}\n\n"
        found = _POSITION.fullmatch(position)
        at = int(found[2]) if found and found[1] == feed.run else -1
        while True:
            news = feed.after(at)
            at = feed.last
            yield self._reset(at) if news is None else self._write(news)
            if not await feed.wait(at, ALIVE_SECONDS):
                yield ": alive\n\n"
            await asyncio.sleep(_BURST_SECONDS)

    def _write(self, news: Sequence[Happening]) -> str:
        return "".join(self._event(one.number, one.kind, one.show()) for one in news)

    def _reset(self, at: int) -> str:
        return self._event(at, "reset", {})

    def _event(self, number: int, kind: str, data: object) -> str:
        shown = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return f"id: {self._memory.feed.run}-{number}\nevent: {kind}\ndata: {shown}\n\n"


def _newest(kept: Any, count: int) -> list[Any]:  # noqa: ANN401  a deque of anything
    return [*islice(kept, max(0, len(kept) - count), None)]
