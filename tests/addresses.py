"""Addresses that never answer, and names with several addresses."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest


class FullPort:
    """A port with a full accept queue, so that new connections wait."""

    def __init__(self, listening: socket.socket, waiting: list[socket.socket]) -> None:
        self._waiting = waiting
        self.listening = listening
        self.port: int = listening.getsockname()[1]

    def free(self) -> socket.socket:
        """Empty the accept queue, and return the socket."""
        for place in self._waiting:
            place.close()
        return self.listening


@contextlib.contextmanager
def hold_full_port(host: str = "127.0.0.1", port: int = 0) -> Iterator[FullPort]:
    """Open a port, by default a free one, whose accept queue is full."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listening = socket.create_server((host, port), family=family, backlog=0)
        stack.enter_context(listening)
        full = FullPort(listening, [stack.enter_context(socket.socket(family)) for _ in range(8)])
        for place in full._waiting:
            place.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                place.connect(listening.getsockname())
        yield full


def give_addresses(patch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    """Let the running event loop resolve a name to these addresses, in this order."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def getaddrinfo(host: str | bytes, port: int, **options: Any) -> list[Any]:
        if host not in {name, name.encode()}:
            return await resolve(host, port, **options)
        answers = [await resolve(address, port, **options) for address in addresses]
        return [answer for found in answers for answer in found]

    patch.setattr(loop, "getaddrinfo", getaddrinfo)
