"""What a command learns of the worker on this computer, whoever listens on its admin port."""

import asyncio
import json
from typing import get_args

import pytest

from bridge.admin import admin_port
from bridge.admin.admin_port import PauseFacts
from bridge.admin.worker_status import explain_local_pause, explain_pause, read_worker
from bridge.config import Settings
from bridge.worker.fates import PauseReason


async def ask(body: bytes | None, host: str = "127.0.0.1") -> PauseFacts | str:
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /readyz ")
        asked.set()
        if body is not None:
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
        else:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, host, 0) as server:
        port = server.sockets[0].getsockname()[1]
        admin = {"host": {"127.0.0.1": "0.0.0.0"}.get(host, host), "port": port}
        worker = await read_worker(Settings.model_validate({"admin": admin}))
    assert asked.is_set()
    return "no worker" if worker is None else worker.deciding_pause or "not paused"


def page(**worker: object) -> bytes:
    return json.dumps({"status": "ok", "checks": {}, "worker": worker}).encode()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_reason_of_a_paused_worker(host: str) -> None:
    pause = PauseFacts(reason="outage")
    assert await ask(page(queue="sms.outbound", paused="outage"), host) == pause


async def test_worker_that_is_not_paused() -> None:
    assert await ask(page(queue="sms.outbound", paused=None)) == "not paused"


@pytest.mark.parametrize(
    "body", [page(queue="another", paused="outage"), b'{"status": "ok", "checks": {}}', b"[]"]
)
async def test_no_reason_is_made_up(body: bytes) -> None:
    assert await ask(body) == "no worker"


async def test_silence_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_port, "ANSWER_SECONDS", 0.5)

    assert await ask(None) == "no worker"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("nacked", "refuses to store in q.dead: it is full"),
        ("returned", "there is no queue q.dead"),
        ("timeout", "confirms nothing in q.dead"),
        ("error", "before RabbitMQ stored in q.dead"),
    ],
)
async def test_the_queue_that_refuses_is_named(fault: str, text: str) -> None:
    pause = {"reason": "broker_blocked", "queue": "q.dead", "fault": fault}
    told = await ask(page(queue="sms.outbound", paused="broker_blocked", pauses=[pause]))

    assert told == PauseFacts.model_validate(pause)
    assert text in explain_pause(told)[0]


@pytest.mark.parametrize("reason", get_args(PauseReason))
def test_every_reason_is_explained(reason: PauseReason) -> None:
    text, remedy = explain_local_pause(PauseFacts(reason=reason))

    assert text.startswith(f"the worker on this computer is paused ({reason}): ")
    assert "later version" not in text
    assert remedy
