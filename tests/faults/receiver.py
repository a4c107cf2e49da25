"""A webhook receiver as a process of its own, as it runs in production, and raw clients of it."""

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bridge.sandbox.processes import Child, Guard
from tests.faults.bench import (
    PROGRAM,
    SECONDS,
    SIGNATURE,
    Bench,
    eventually,
    make_environ,
    make_event,
    post_event,
    sign,
)
from tests.forked import ForkedChild

FORGED: Final = "0" * 64


@dataclass
class Target:
    """A receiver, and a good sender."""

    bench: Bench
    child: Child
    client: httpx.AsyncClient
    ids: "itertools.count[int]" = field(default_factory=itertools.count)
    promised: set[str] = field(default_factory=set)

    @property
    def facts(self) -> dict[str, Any]:
        return next(iter(self.logged("started")), {})

    @functools.cached_property
    def port(self) -> int:
        """Where webhooks come in; found once, for each post would read the whole log."""
        return int(self.facts["webhook_port"])

    @property
    def url(self) -> str:
        """Where webhooks go."""
        return f"http://127.0.0.1:{self.port}/webhooks"

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory that it ever had."""
        return self._memory_bytes("VmHWM")

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes("VmRSS")

    def _memory_bytes(self, name: str) -> int:
        status = Path(f"/proc/{self.child.pid}/status").read_text(encoding="ascii")
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024

    def logged(self, event: str) -> list[dict[str, Any]]:
        # The last one may be half written.
        whole, _, _ = self.child.log.read_text(encoding="utf-8").rpartition("\n")
        lines = map(json.loads, whole.splitlines())
        return [line for line in lines if line["event"] == event]

    async def livez(self) -> int:
        """Ask whether it lives."""
        return (await self._admin("livez")).status_code

    async def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families((await self._admin("metrics")).text)
        samples = (sample for family in families for sample in family.samples)
        return sum(
            one.value
            for one in samples
            if one.name == name and labels.items() <= one.labels.items()
        )

    async def _admin(self, page: str) -> httpx.Response:
        return await self.client.get(f"http://127.0.0.1:{self.facts['admin_port']}/{page}")

    async def post(self) -> tuple[int, float]:
        """Post one good event; return the status and how long it took."""
        event_id = f"event-{next(self.ids)}"
        answer, seconds = await post_event(self.client, self.url, event_id)
        if answer.status_code == 200:
            self.promised.add(event_id)
        return answer.status_code, seconds

    def write_event(self) -> bytes:
        """Write the request of one good event."""
        body = make_event(f"event-{next(self.ids)}")
        return write_request(body, signature=sign(body)[SIGNATURE])


def write_request(body: bytes, *, signature: str | None, length: int | None = None) -> bytes:
    """Write a webhook; with another length it is one that has only begun."""
    signed = "" if signature is None else f"{SIGNATURE}: {signature}\r\n"
    head = f"POST /webhooks HTTP/1.1\r\nHost: localhost\r\n{signed}"
    size = len(body) if length is None else length
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


@asynccontextmanager
async def open_target(
    bench: Bench,
    guard: Guard,
    log: Path,
    *,
    client_limits: httpx.Limits = httpx.Limits(),  # noqa: B008  it never changes
    open_files: int | None = None,
    is_measured: bool = False,
    **changed: Any,
) -> AsyncIterator[Target]:
    """Start a receiver, and wait until it answers 200; it may have only so many files open.

    One whose memory is measured is not forked: it has no more than its own.
    """
    values = bench.values(rabbitmq__url=[bench.broker.url], **changed)
    del values["sms_api.base_url"], values["sms_api.key"]
    environ = make_environ(values)
    limit = () if open_files is None else ("sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh")
    if limit or is_measured:
        command = [*limit, *PROGRAM, "webhook"]
        child = Child(command, guard=guard, log=log, environ=environ)
    else:
        child = ForkedChild(["webhook"], guard=guard, log=log, environ=environ)
    try:
        async with httpx.AsyncClient(
            trust_env=False, timeout=SECONDS, limits=client_limits
        ) as client:
            ours = Target(bench, child, client)
            await eventually(lambda: ours.facts, what="a start")

            async def is_linked() -> bool:
                return (await ours.post())[0] == 200

            await eventually(is_linked, what="200")
            yield ours
    finally:
        await asyncio.to_thread(child.end, grace_seconds=SECONDS)


class RawClient:
    """One connection to the receiver."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, data: bytes) -> None:
        """Send bytes; what the other side no longer takes is lost."""
        self._writer.write(data)

    async def flush(self) -> None:
        """Wait until all is sent, or the other side takes no more."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def hear(self) -> int | str:
        """Return the status of the next answer, or how the connection ended without one."""
        try:
            async with asyncio.timeout(SECONDS):
                head = await self._reader.readuntil(b"\r\n\r\n")
                _, _, size = head.lower().partition(b"content-length: ")
                await self._reader.readexactly(int(size.split(b"\r\n")[0]))
        except asyncio.IncompleteReadError:
            return "closed"
        except OSError:
            return "reset"
        return int(head.split(b" ")[1])

    def leave(self) -> None:
        """Close, whatever is still to come."""
        self._writer.transport.abort()


class Crowd:
    """Raw clients of one receiver."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[RawClient] = []

    async def enter(self, count: int) -> list[RawClient]:
        opening = (asyncio.open_connection("127.0.0.1", self._port) for _ in range(count))
        fresh = [RawClient(*streams) for streams in await asyncio.gather(*opening)]
        self._clients += fresh
        return fresh

    def leave(self) -> None:
        """Close all of them."""
        for client in self._clients:
            client.leave()


@contextmanager
def crowd_at(port: int) -> Iterator[Crowd]:
    """Lend raw clients, and close them at the end."""
    crowd = Crowd(port)
    try:
        yield crowd
    finally:
        crowd.leave()


async def all_hear(clients: list[RawClient]) -> list[int | str]:
    """Return what each of them hears next."""
    return await asyncio.gather(*(client.hear() for client in clients))
