"""The addresses of admin ports, the answers that are believed, and the pauses they report."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import pytest

from bridge.admin import admin_port_client
from bridge.admin.admin_port_client import (
    AdminPort,
    HealthReport,
    PauseFacts,
    addresses_of,
    explain_local_pause,
    explain_pause,
    local_port,
    open_client,
    parse_admin_port,
    read_health,
    read_metrics,
    read_worker,
)
from bridge.config import AdminSettings, Settings
from bridge.errors import BridgeError
from bridge.topology.paused_queue import Note
from bridge.worker.fates import PauseReason


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("worker-metrics", "worker-metrics", 9090),
        (
            "worker-metrics.sms.svc.cluster.local.:9191",
            "worker-metrics.sms.svc.cluster.local.",
            9191,
        ),
        ("[2001:db8::7]", "2001:db8::7", 9090),
        ("::1", "::1", 9090),
    ],
)
def test_names(text: str, host: str, port: int) -> None:
    assert parse_admin_port(text, 9090) == AdminPort(host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":9090", "host:", "host:http", "host:99999", "host:-1", "a b", "user@host", "-h"),
        *("http://host:9090", "host/metrics", "[host]:9090", "[::1]:", "[::1]9090", "::1]"),
    ],
)
def test_names_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST or HOST:PORT"):
        parse_admin_port(text, 9090)


@pytest.mark.parametrize(("text", "default"), [("host", 0), ("host:0", 9090)])
def test_any_free_port_is_no_port(text: str, default: int) -> None:
    with pytest.raises(ValueError, match="needs a port"):
        parse_admin_port(text, default)


@pytest.mark.parametrize(
    ("host", "text"),
    [("0.0.0.0", "127.0.0.1:9090"), ("::", "[::1]:9090"), ("10.0.0.7", "10.0.0.7:9090")],
)
def test_this_computer(host: str, text: str) -> None:
    assert str(local_port(AdminSettings(host=host))) == text


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        four, six = socket.AF_INET, socket.AF_INET6
        return [
            (six, 1, 6, "", ("2001:db8::7", 9090, 0, 0)),
            *((four, 1, 6, "", (host, 9090)) for host in ("10.0.0.9", "10.0.0.7", "10.0.0.9")),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up, raising=False)
    found = await addresses_of(AdminPort("workers", 9090))

    assert [str(port) for port in found] == ["10.0.0.7:9090", "10.0.0.9:9090"]


async def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(BridgeError, match="the name has no address"):
        await addresses_of(AdminPort("nobody.invalid", 9090))


# What is believed


@asynccontextmanager
async def answering(answer: bytes | None, host: str = "127.0.0.1") -> AsyncIterator[AdminPort]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, host, 0) as server:
        yield AdminPort(host, server.sockets[0].getsockname()[1])


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def page(**worker: object) -> bytes:
    facts = {"queue": "q", "paused": None, **worker}
    return json.dumps({"status": "ok", "checks": {}, "worker": facts}).encode()


async def ask(answer: bytes) -> HealthReport:
    async with answering(answer) as port, open_client() as client:
        return await read_health(client, port)


async def test_what_a_worker_says() -> None:
    pause = {"reason": "misconfigured", "since": "2030-01-31T03:12:00Z", "status": 404, "code": "7"}
    note = {"reason": "wrong text", "since": "2030-01-31T03:12:00Z"}
    said = page(paused="operator", pauses=[pause], paused_by_operator=note, retry_after_seconds=2.5)
    health = await ask(http(said, "503 Service Unavailable"))

    assert health.worker is not None
    assert health.worker.pauses == (PauseFacts.model_validate(pause),)
    assert health.worker.paused_by_operator == Note("wrong text", 1_896_059_520.0)
    assert health.worker.retry_after_seconds == 2.5


@pytest.mark.parametrize(
    "answer",
    [
        http(b"Prometheus Server is Ready."),
        http(b"[]"),
        http(page(), "404 Not Found"),
        http(page(), "302 Found"),
        http(page(paused="\x1b[2J")),
        http(page(pauses=[{"reason": "call +491713920001"}])),
        http(page(pauses=[{"reason": "outage", "code": "a text"}])),
        http(page(pauses=[{"reason": "outage"}] * 51)),
        http(b'{"status": "ok", "checks": {"Ring +491713920001": "ok"}}'),
        b"220 mail.example.com ESMTP\r\n",
    ],
    ids=[
        *("text", "list", "status", "redirect", "escape", "reason", "code", "many", "check"),
        "smtp",
    ],
)
async def test_strangers(answer: bytes) -> None:
    with pytest.raises(BridgeError, match=r"^another program answers there$"):
        await ask(answer)


async def test_words_that_pause_would_refuse() -> None:
    note = {"reason": "call +491713920001", "since": "2030-01-31T03:12:00Z"}
    health = await ask(http(page(paused_by_operator=note)))

    assert health.worker is not None
    assert health.worker.paused_by_operator is None


async def test_an_endless_or_foreign_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_port_client, "MAX_ANSWER_BYTES", 1000)
    async with answering(http(b"#" * 1001)) as port, open_client() as client:
        with pytest.raises(BridgeError, match="another program"):
            await read_metrics(client, port)
    async with answering(http(b"#" * 1000)) as port, open_client() as client:
        assert (await read_metrics(client, port)).total("anything") == 0
    async with answering(http(b"<html>hello</html>")) as port, open_client() as client:
        with pytest.raises(BridgeError, match="another program"):
            await read_metrics(client, port)


async def test_nobody_listens() -> None:
    async with answering(b"") as port:
        pass
    async with open_client() as client:
        with pytest.raises(BridgeError, match=re.escape("no connection")):
            await read_health(client, port)


# The worker on this computer


async def read_local(answer: bytes | None, host: str = "127.0.0.1") -> PauseFacts | str:
    async with answering(answer, host) as port:
        admin = {"host": {"127.0.0.1": "0.0.0.0"}.get(host, host), "port": port.port}
        settings = Settings.model_validate({"admin": admin, "worker": {"queue": "q"}})
        worker = await read_worker(settings)
    return "no worker" if worker is None else worker.deciding_pause or "not paused"


@pytest.mark.parametrize(
    ("body", "host", "found"),
    [
        (page(paused="outage"), "127.0.0.1", PauseFacts(reason="outage")),
        (page(paused="outage"), "::1", PauseFacts(reason="outage")),
        (page(), "127.0.0.1", "not paused"),
        (page(queue="another", paused="outage"), "127.0.0.1", "no worker"),
        (b'{"status": "ok", "checks": {}}', "127.0.0.1", "no worker"),
    ],
    ids=["paused", "ipv6", "not-paused", "another-queue", "no-worker"],
)
async def test_the_local_worker(body: bytes, host: str, found: PauseFacts | str) -> None:
    assert await read_local(http(body), host) == found


async def test_silence_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_port_client, "ANSWER_SECONDS", 0.5)

    assert await read_local(None) == "no worker"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("nacked", "refuses messages for q.dead: it is full"),
        ("returned", "there is no queue q.dead"),
        ("timeout", "confirms no message in q.dead"),
        ("error", "before RabbitMQ stored a message in q.dead"),
    ],
)
def test_the_queue_that_refuses_is_named(fault: str, text: str) -> None:
    pause = PauseFacts(reason="broker_blocked", queue="q.dead", fault=fault)

    assert text in explain_pause(pause)[0]


@pytest.mark.parametrize("reason", get_args(PauseReason))
def test_every_reason_is_explained(reason: PauseReason) -> None:
    text, remedy = explain_local_pause(PauseFacts(reason=reason))

    assert text.startswith(f"the worker on this computer is paused ({reason}): ")
    assert "later version" not in text
    assert remedy
