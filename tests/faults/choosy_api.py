"""An SMS service that answers each request as a test says, by its number and its sender."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

ACCEPTED: Final = 201


class Post(NamedTuple):
    """One request, and what it was answered."""

    to: str
    sender: str
    status: int
    at: float


class Said(NamedTuple):
    """An answer: its status, its body and, for how long nothing is wanted, its `Retry-After`."""

    status: int
    body: Any = None
    retry_after: int | None = None

    def as_http(self) -> bytes:
        """Write it."""
        body = b"" if self.body is None else json.dumps(self.body).encode()
        wait = "" if self.retry_after is None else f"Retry-After: {self.retry_after}\r\n"
        head = f"HTTP/1.1 {self.status} x\r\nContent-Length: {len(body)}\r\n{wait}\r\n"
        return head.encode() + body


YES: Final = Said(ACCEPTED, {"id": "a-message", "sid": "SM00000000000000000000000000000001"})


class ChoosyApi:
    """Takes requests as JSON or as a form; `answer` says what one is answered, None for yes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answer: Callable[[str, str], Said | None] = lambda _to, _sender: None
        self.latency_seconds = 0.0
        self.posts: list[Post] = []

    def taken(self, numbers: Collection[str]) -> set[str]:
        """Return those of the numbers to which a message was accepted."""
        accepted = {post.to for post in self.posts if post.status == ACCEPTED}
        return accepted & set(numbers)

    def asked(self, numbers: Collection[str]) -> list[Post]:
        """Return the requests for these numbers."""
        return [post for post in self.posts if post.to in numbers]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                )
                request = _read(await reader.readexactly(length))
                to, sender = request["to"], request["from"]
                said = self.answer(to, sender) or YES
                await asyncio.sleep(self.latency_seconds)
                self.posts.append(Post(to, sender, said.status, time.monotonic()))
                writer.write(said.as_http())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _read(body: bytes) -> dict[str, str]:
    if body.startswith(b"{"):
        found: dict[str, str] = json.loads(body)
    else:
        found = {name: values[0] for name, values in parse_qs(body.decode()).items()}
    return {name.lower(): value for name, value in found.items()}


@asynccontextmanager
async def open_choosy_api() -> AsyncIterator[ChoosyApi]:
    """Serve one on a free port."""
    api = ChoosyApi("")
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    async with server:
        api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield api
