"""The endpoints of the web page: its files, and a stream of server-sent events (WHATWG HTML, 9.2).

A stream begins with a snapshot of everything that the page shows, followed by all changes. A page
gets a new snapshot if it falls behind or reconnects, and after records were dropped.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from importlib import resources
from itertools import islice
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bridge.sandbox.orders import ReadMark, validate
from bridge.sandbox.service import PlayedService
from bridge.sandbox.store import SandboxStore
from bridge.sandbox.webhooks import documented_deliveries

MAX_STREAMS: Final = 100
# The numbers of the newest messages and requests that a page shows.
MAX_SHOWN: Final = 10_000
MAX_SHOWN_REQUESTS: Final = 1000
# Proxies close idle connections, and only a write shows that a page is gone.
ALIVE_SECONDS: Final = 15
# The changes within this time are combined in one write.
_BURST_SECONDS: Final = 0.02
_RECONNECT_MILLISECONDS: Final = 1000

# The page may load only its own files, and text cannot become markup or code.
SECURITY_HEADERS: Final = {
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

T = TypeVar("T")


class _EventStream(StreamingResponse):
    """Server-sent events; `ended` is called when the response ends, even if it never began."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], object]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


class PageApi:
    """The page's endpoints."""

    def __init__(
        self, service: PlayedService, store: SandboxStore, *, webhook_url: str | None
    ) -> None:
        self._service = service
        self._store = store
        self._webhook_url = webhook_url
        self._streams = 0
        folder = resources.files("bridge.sandbox") / "page"
        self._files = {name: (folder / name).read_bytes() for name in FILES}

    def routes(self) -> list[Route]:
        """List the endpoints, except for `GET /`, which answers programs differently."""
        return [
            Route("/sandbox/page/{name}", self.show_file),
            Route("/sandbox/stream", self.stream),
            Route("/sandbox/read", self.mark_read, methods=["PUT"]),
        ]

    def show(self) -> Response:
        return self._file("index.html")

    async def show_file(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        return Response(self._files[name], media_type=FILES[name], headers=SECURITY_HEADERS)

    async def mark_read(self, request: Request) -> Response:
        """Store for all pages which messages have been seen."""
        mark = validate(ReadMark, await request.body())
        self._store.mark_read(mark.to, mark.number)
        return Response(status_code=204)

    async def stream(self, _request: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            raise HTTPException(
                503, f"{MAX_STREAMS} pages are open; close some", {"Retry-After": "5"}
            )
        # Counted from the check of the bound until the response has ended.
        self._streams += 1
        return _EventStream(self._events(), self._end_stream)

    def _end_stream(self) -> None:
        self._streams -= 1

    async def _events(self) -> AsyncIterator[str]:
        feed = self._store.feed
        at = feed.last
        yield f"retry: {_RECONNECT_MILLISECONDS}\n\n{_event('snapshot', self._snapshot())}"
        while True:
            if not await feed.wait(at, ALIVE_SECONDS):
                yield ": alive\n\n"
            await asyncio.sleep(_BURST_SECONDS)
            changes = feed.after(at)
            at = feed.last
            if changes is None:
                yield _event("snapshot", self._snapshot())
            elif changes:
                yield "".join(_event(change.kind, change.render()) for change in changes)

    def _snapshot(self) -> dict[str, object]:
        store, service = self._store, self._service
        return {
            "preset": service.preset,
            "path": service.path,
            "has_key": service.api_key is not None,
            "webhook_url": self._webhook_url,
            "answers": service.list_answers(),
            "deliveries": documented_deliveries(service.preset),
            "messages": [one.for_page() for one in _newest(store.messages, MAX_SHOWN)],
            "requests": [one.as_json() for one in _newest(store.requests, MAX_SHOWN_REQUESTS)],
            "webhooks": [one.as_json() for one in store.webhooks],
            "faults": store.render_faults(),
            "read": store.read,
        }


def _event(kind: str, data: object) -> str:
    shown = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {shown}\n\n"


def _newest(kept: deque[T], count: int) -> list[T]:
    return [*islice(kept, max(0, len(kept) - count), None)]
