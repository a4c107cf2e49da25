"""Which admin ports are asked, and how often."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bridge.admin.admin_port import AdminPort
from bridge.admin.status import processes
from bridge.admin.status.processes import MAX_PORTS, ProcessReader
from bridge.errors import BridgeError

HEALTH = b'{"status": "ok", "checks": {}, "worker": {"queue": "q"}}'
METRICS = b'sms_bridge_worker_messages_processed_total{outcome="sent",reason="none"} %d\n'


@asynccontextmanager
async def a_worker(asked: list[str]) -> AsyncIterator[AdminPort]:
    """Give the admin port of a worker that has sent a message more each time that it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            if not request.startswith(b"GET "):
                continue
            await reader.readuntil(b"\r\n\r\n")
            page = request.split()[1].decode()
            asked.append(page)
            body = HEALTH if page == "/readyz" else METRICS % asked.count(page)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield AdminPort("127.0.0.1", server.sockets[0].getsockname()[1])


async def test_the_first_time_it_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate wants two readings: the first time both are made, later the last one counts."""
    monkeypatch.setattr(processes, "RATE_SECONDS", 0.01)
    asked: list[str] = []
    async with a_worker(asked) as port:
        reader = ProcessReader([port], queue="q")
        (first,) = await reader.read()
        asked_at_first = len(asked)
        (second,) = await reader.read()

    assert (asked_at_first, len(asked)) == (4, 6)
    for found, sent in ((first, 2), (second, 3)):
        assert found.worker is not None
        assert found.worker.sent == sent
        assert found.worker.rates is not None
        assert found.worker.rates.sent_per_second > 0


async def test_an_address_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of one address are one process, under the first name; one unknown is told."""
    monkeypatch.setattr(processes, "RATE_SECONDS", 0.01)
    asked: list[str] = []
    async with a_worker(asked) as port:
        names = [AdminPort(host, port.port) for host in ("localhost", port.host, "nobody.invalid")]
        unknown, found = await ProcessReader(names, queue="q").read()

    assert (unknown.address, unknown.fault) == (str(names[2]), "nobody knows the name")
    assert (found.name, found.address, found.fault) == (str(names[0]), str(port), None)
    assert len(asked) == 4


async def test_a_name_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """More addresses than there can be workers are refused, and none is asked."""

    async def addresses(name: AdminPort) -> list[AdminPort]:
        return [AdminPort(f"127.0.{n // 256}.{n % 256}", name.port) for n in range(MAX_PORTS + 1)]

    monkeypatch.setattr(processes, "addresses_of", addresses)
    with pytest.raises(BridgeError, match="more than 256 addresses"):
        await ProcessReader([AdminPort("many", 9)], queue="q").read()
