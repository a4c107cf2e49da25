"""An HTTP proxy in front of the SMS service that cuts a connection at an exact byte."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Literal

import httpx

Point = Literal["head", "body", "status", "headers", "answer"]
# Takes a request and its answer; returns what the client reads before its connection is closed.
Spoil = Callable[[bytes, bytes], bytes]

_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


class HttpProxy:
    """Forwards requests to one server; `cuts` says where the next ones end.

    `head`: after the request's header, nothing is forwarded. `body`: the whole request is
    forwarded and its answer thrown away. `status`: inside the answer's status line. `headers`:
    after its status line. `answer`: inside its body. `spoil`, where there is one, alters what is
    answered.
    """

    def __init__(self, target: str) -> None:
        url = httpx.URL(target)
        self._target = (url.host, url.port or 80)
        self.cuts: list[Point] = []
        self.spoil: Spoil | None = None
        self.url = ""
        self._port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self) -> None:
        """Listen, on the same port each time."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{self._port}"

    async def refuse(self) -> None:
        """Refuse connections, and end those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on; return whether the connection is still good."""
        head = await reader.readuntil(_END)
        point = self.cuts.pop(0) if self.cuts else None
        if point == "head":
            return False
        request = head + await reader.readexactly(_length(head))
        answer_head, body = await self._ask(request, reader)
        status = answer_head.index(b"\r\n") + 2
        ends = {"body": 0, "status": 10, "headers": status, "answer": len(answer_head) + 1}
        answer = answer_head + body
        if point is not None or self.spoil is not None:
            spoiled = self.spoil(request, answer) if self.spoil is not None else answer
            writer.write(spoiled if point is None else answer[: ends[point]])
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            return False
        writer.write(answer)
        await writer.drain()
        return True

    async def _ask(self, request: bytes, client: asyncio.StreamReader) -> tuple[bytes, bytes]:
        """Ask the server; raises EOFError when it, or the client in the meantime, is gone."""
        reader, writer = await asyncio.open_connection(*self._target)
        writer.write(request)
        answer = asyncio.create_task(_read_answer(reader))
        # Until it is answered a client sends nothing more.
        gone = asyncio.create_task(client.read(1))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EOFError
            return await answer
        finally:
            writer.close()
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)


async def _read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(_END)
    return head, await reader.readexactly(_length(head))


def _length(head: bytes) -> int:
    found = _LENGTH.search(head)
    return int(found[1]) if found else 0


@asynccontextmanager
async def open_http_proxy(target: str) -> AsyncIterator[HttpProxy]:
    """Lend a proxy in front of a server."""
    proxy = HttpProxy(target)
    await proxy.accept()
    try:
        yield proxy
    finally:
        await proxy.refuse()
