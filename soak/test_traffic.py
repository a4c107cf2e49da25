"""The publisher of the soaks stops when asked."""

import asyncio
from collections.abc import Awaitable

import aio_pika
import pytest

from soak import traffic
from soak.traffic import Publisher

LIMIT_SECONDS = 20.0


class _ClosingConnection:
    """A connection that fails at once, and whose close hangs until it is cancelled."""

    closes = asyncio.Event()

    def __init__(self, _url: object) -> None:
        pass

    async def connect(self, timeout: float) -> None:  # noqa: ARG002, ASYNC109
        raise ConnectionError

    def close(self) -> Awaitable[bool]:
        self.closes.set()
        return asyncio.Event().wait()


async def test_publishing_ends_while_a_connection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that arrives during a close ends the publisher, too."""
    monkeypatch.setattr(aio_pika, "Connection", _ClosingConnection)
    monkeypatch.setattr(traffic, "CLOSE_SECONDS", LIMIT_SECONDS * 2)
    monkeypatch.setattr(_ClosingConnection, "closes", asyncio.Event())
    publisher = Publisher(["amqp://localhost"], "q", [], per_second=1.0)

    async with asyncio.timeout(LIMIT_SECONDS):
        async with publisher.publishing():
            await _ClosingConnection.closes.wait()
