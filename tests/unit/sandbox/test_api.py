"""The stand-in SMS service over real sockets: its API, faults, webhooks and stop."""

import asyncio
import hashlib
import hmac
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.errors import BridgeError, ConfigError
from bridge.sandbox.api import MAX_BODY_BYTES, MAX_WAITING, create_app
from bridge.sandbox.server import serve
from bridge.sandbox.webhooks import Signer

SECRET = "webhook-secret"
MESSAGE = {"to": "+491713920001", "from": "Acme", "text": "Hello\nthere 👋"}
BEARER = {"Authorization": "Bearer any-key"}


@asynccontextmanager
async def running(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an application on a free port and yield a client of it."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(app, port=0, announce=url.set_result))
    try:
        base_url = await asyncio.wait_for(url, 5)
        async with httpx.AsyncClient(
            base_url=base_url, headers=BEARER, trust_env=False, timeout=5
        ) as client:
            yield client
    finally:
        server.cancel()
        with suppress(asyncio.CancelledError):
            await server


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[httpx.AsyncClient]:
    """One sandbox for the whole file, because each takes a moment to stop."""
    async with running(create_app()) as client:
        yield client


@pytest.fixture
async def sandbox(
    served: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[httpx.AsyncClient]:
    """Empty the sandbox for a test, and see that it has logged nothing by the end."""
    for kind in ("messages", "requests", "faults"):
        (await served.delete(f"/sandbox/{kind}")).raise_for_status()
    yield served

    assert caplog.records == []


@dataclass
class Bridge:
    """What takes the sandbox's webhooks in these tests; answers as the bridge does."""

    bodies: list[bytes] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    silent: bool = False

    async def take(self, request: Request) -> Response:
        """Record one webhook and answer 200 to a true signature, 401 to any other."""
        body = await request.body()
        self.bodies.append(body)
        self.signatures.append(request.headers["x-service-signature"])
        if self.silent:
            request.state.close_connection()
        expected = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        return Response(status_code=200 if self.signatures[-1] == expected else 401)


@pytest.fixture
async def bridge() -> Bridge:
    return Bridge()


@pytest.fixture
async def phone(bridge: Bridge) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        routes = [Route("/webhooks", bridge.take, methods=["POST"])]
        taker = await stack.enter_async_context(running(Starlette(routes=routes)))
        app = create_app(signer=Signer("generic", f"{taker.base_url}/webhooks", SECRET))
        yield await stack.enter_async_context(running(app))


async def send(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.post("/v1/messages", json=MESSAGE, headers=headers)


async def kept(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    return list((await client.get("/sandbox/messages")).json()["messages"])


async def attempts(client: httpx.AsyncClient) -> list[tuple[str | None, str | None, int | None]]:
    """Fetch number, key and status of every POST that reached the sandbox."""
    requests = (await client.get("/sandbox/requests")).json()["requests"]
    return [(r["to"], r["idempotency_key"], r["status"]) for r in requests]


async def set_faults(client: httpx.AsyncClient, *faults: dict[str, Any]) -> None:
    (await client.put("/sandbox/faults", json=faults)).raise_for_status()


async def until_attempted(client: httpx.AsyncClient, number: int) -> None:
    async with asyncio.timeout(5):
        while len(await attempts(client)) < number:
            pass


async def test_message_is_accepted_and_kept(sandbox: httpx.AsyncClient) -> None:
    """A good message is answered 202 with its id and is shown as it came."""
    answer = await send(sandbox, **{"Idempotency-Key": "key-1"})
    (message,) = await kept(sandbox)
    received_at = datetime.fromisoformat(message.pop("received_at"))

    assert answer.status_code == 202
    assert message == {"id": answer.json()["id"], **MESSAGE, "idempotency_key": "key-1"}
    assert received_at.tzinfo is not None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"[" * 100_000, "body"),
        ({"from": "Acme", "text": "secret-value"}, "to"),
        ({**MESSAGE, "to": "491713920001"}, "to"),
        ({**MESSAGE, "to": "+491713920001\n"}, "to"),
        ({**MESSAGE, "to": "+49171392000٣"}, "to"),
        ({"to": "+491713920001", "text": "secret-value"}, "from"),
        ({**MESSAGE, "from": "secret-value" * 3}, "from"),
        ({**MESSAGE, "from": "Ac\tme"}, "from"),
        ({**MESSAGE, "text": 5}, "text"),
        ({**MESSAGE, "text": "secret-value \ud800"}, "text"),
    ],
)
async def test_bad_body_is_refused_by_field(
    sandbox: httpx.AsyncClient, body: bytes | dict[str, Any], field: str
) -> None:
    """A body that breaks the contract gets 400 with the field's name and no value."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await sandbox.post("/v1/messages", content=content)

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f"{field}: ")
    assert not re.search(r"secret|\d{5}", answer.text)
    assert await kept(sandbox) == []


async def test_large_body_is_refused(sandbox: httpx.AsyncClient) -> None:
    """A body over the limit gets 413 and counts as a request."""
    answer = await sandbox.post("/v1/messages", content=b"x" * (MAX_BODY_BYTES + 1))

    assert answer.status_code == 413
    assert await attempts(sandbox) == [(None, None, 413)]


@pytest.mark.parametrize("header", ["", "Bearer", "Basic abc"])
async def test_missing_key_is_refused(sandbox: httpx.AsyncClient, header: str) -> None:
    """Without a bearer key the answer is 401, and the request is recorded with it."""
    answer = await send(sandbox, Authorization=header)

    assert answer.status_code == 401
    assert await attempts(sandbox) == [(MESSAGE["to"], None, 401)]


async def test_memory_is_bounded() -> None:
    """The oldest messages and requests give way to new ones."""
    async with running(create_app(max_messages=2)) as client:
        for key in "abc":
            await send(client, **{"Idempotency-Key": key})
        messages, requests = await kept(client), await attempts(client)

    assert [m["idempotency_key"] for m in messages] == ["b", "c"]
    assert [key for _, key, _ in requests] == ["b", "c"]


async def take(client: httpx.AsyncClient, key: str, to: str) -> str:
    answer = await client.post(
        "/v1/messages", json={**MESSAGE, "to": to}, headers={"Idempotency-Key": key}
    )
    return str(answer.raise_for_status().json()["id"])


async def keys(client: httpx.AsyncClient, query: str) -> list[str]:
    answer = await client.get(f"/sandbox/messages?{query}", timeout=60)
    return [one["idempotency_key"] for one in answer.raise_for_status().json()["messages"]]


async def test_messages_for_a_number_and_after_another(sandbox: httpx.AsyncClient) -> None:
    """The + may be missing, or be a space, which an unescaped + means in a query."""
    first = await take(sandbox, "a", "+15550100")
    await take(sandbox, "b", "+15550101")
    await take(sandbox, "c", "+15550100")

    assert await keys(sandbox, f"after={first}") == ["b", "c"]
    assert await keys(sandbox, f"to=%2B15550100&after={first}") == ["c"]
    assert await keys(sandbox, "to=15550100") == ["a", "c"]
    assert await keys(sandbox, "to=+15550101") == ["b"]
    assert await keys(sandbox, "to=+15550101&wait_seconds=60") == ["b"]


@pytest.mark.parametrize(
    ("query", "status", "error"),
    [
        ("too=%2B15550100", 400, "too: extra inputs are not permitted"),
        ("to=me", 400, "to: must be + and 4 to 15 digits, the first not 0"),
        ("wait_seconds=61", 400, "wait_seconds: input should be less than or equal to 60"),
        ("wait_seconds=nan", 400, "wait_seconds: input should be a finite number"),
        ("after=z", 404, "after: no message with this id is kept"),
    ],
)
async def test_a_query_that_cannot_be_answered_is_refused(
    sandbox: httpx.AsyncClient, query: str, status: int, error: str
) -> None:
    """A misspelt or unusable member is named, and nobody else's message is shown."""
    answer = await sandbox.get(f"/sandbox/messages?{query}")

    assert (answer.status_code, answer.json()) == (status, {"error": error})


async def test_a_wait_ends_with_the_next_message(sandbox: httpx.AsyncClient) -> None:
    """The answer comes with the first message that fits, or is empty when the time is up."""
    old = await take(sandbox, "old", "+15550100")
    query = f"to=15550100&after={old}"
    waiting = asyncio.create_task(keys(sandbox, f"{query}&wait_seconds=30"))
    await take(sandbox, "other", "+15550101")

    assert await keys(sandbox, f"{query}&wait_seconds=0.05") == []
    assert not waiting.done()
    await take(sandbox, "new", "+15550100")
    assert await waiting == ["new"]


async def test_the_number_of_waiting_requests_is_bounded() -> None:
    """Another request than `MAX_WAITING` at a time is answered 503."""
    app = create_app()
    transport = httpx.ASGITransport(app)
    url, wait = "http://127.0.0.1", "/sandbox/messages?wait_seconds=30"
    async with httpx.AsyncClient(transport=transport, base_url=url, headers=BEARER) as client:
        waiting = [asyncio.create_task(client.get(wait)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0.2)
        refused = await client.get(wait)
        await take(client, "one", "+15550100")
        answers = await asyncio.gather(*waiting)

    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert {len(answer.json()["messages"]) for answer in answers} == {1}


async def test_a_request_is_shown_with_its_answer(sandbox: httpx.AsyncClient) -> None:
    """Headers and bodies are shown as they were on the wire, except for the key."""
    sent = await send(sandbox, Authorization="Bearer the-key")
    (listed,) = (await sandbox.get("/sandbox/requests")).json()["requests"]
    shown = (await sandbox.get(f"/sandbox/requests/{listed['number']}")).json()

    assert (listed["status"], listed["seconds"] >= 0) == (202, True)
    assert ["authorization", "Bearer ***"] in shown["headers"]
    assert json.loads(shown["body"]) == MESSAGE
    assert json.loads(shown["answer_body"]) == sent.json()
    assert "the-key" not in json.dumps([listed, shown])
    assert (await sandbox.get("/sandbox/requests/999999")).status_code == 404


async def test_refused_requests_use_up_no_fault(sandbox: httpx.AsyncClient) -> None:
    """What is refused for its body or key does not count against a fault."""
    await set_faults(sandbox, {"status": 500, "count": 1})
    await sandbox.post("/v1/messages", content=b"{}")

    assert (await send(sandbox)).status_code == 500


@pytest.mark.parametrize(("status", "count"), [(200, 1), (299, 1), (301, 0), (503, 0)])
async def test_fault_status_decides_what_is_kept(
    sandbox: httpx.AsyncClient, status: int, count: int
) -> None:
    """A fault that answers with a 2xx keeps the message, any other does not."""
    await set_faults(sandbox, {"status": status})

    assert (await send(sandbox)).status_code == status
    assert len(await kept(sandbox)) == count


async def test_slow_answer_keeps_the_message(sandbox: httpx.AsyncClient) -> None:
    """A client that gives up waiting was sent its message all the same, and got no status."""
    await set_faults(sandbox, {"latency_seconds": 60})
    with pytest.raises(httpx.ReadTimeout):
        await sandbox.post("/v1/messages", json=MESSAGE, timeout=0.1)

    assert len(await kept(sandbox)) == 1
    assert await attempts(sandbox) == [(MESSAGE["to"], None, None)]


async def test_hang_ends_when_the_client_leaves(sandbox: httpx.AsyncClient) -> None:
    """It has no answer and keeps no message, and nothing of the request stays behind."""
    await set_faults(sandbox, {"mode": "hang"})
    before = asyncio.all_tasks()
    with pytest.raises(httpx.ReadTimeout):
        await sandbox.post("/v1/messages", json=MESSAGE, timeout=0.1)
    async with asyncio.timeout(5):
        while asyncio.all_tasks() - before:
            await sandbox.get("/")

    assert await kept(sandbox) == []
    assert await attempts(sandbox) == [(MESSAGE["to"], None, None)]


@pytest.mark.parametrize(("mode", "count"), [("cut", 0), ("accept_then_cut", 1)])
async def test_cut_closes_unanswered(sandbox: httpx.AsyncClient, mode: str, count: int) -> None:
    """Both cuts close the connection without an answer; one of them keeps the message."""
    await set_faults(sandbox, {"mode": mode, "count": 1})
    with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        await send(sandbox)

    assert len(await kept(sandbox)) == count
    assert await attempts(sandbox) == [(MESSAGE["to"], None, None)]


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        ({}, "body"),
        ([{"status": 99}], "0.status"),
        ([{"count": 0}], "0.count"),
        ([{"mode": "explode-value"}], "0.mode"),
        ([{"colour": 1}], "0.colour"),
        ([{"headers": {"Retry-After": "2\r\nX: explode-value"}}], "0.headers.Retry-After"),
        ([{"headers": {"Content-Length": "0"}}], "0.headers.Content-Length"),
    ],
)
async def test_bad_fault_is_refused_by_field(
    sandbox: httpx.AsyncClient, fault: Any, field: str
) -> None:
    """A fault that is none gets 400 with the field's path and no value; nothing changes."""
    await set_faults(sandbox, {"status": 503})
    answer = await sandbox.put("/sandbox/faults", json=fault)

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(field)
    assert "explode-value" not in answer.text
    assert len((await sandbox.get("/sandbox/faults")).json()["faults"]) == 1


async def test_reply_becomes_a_signed_webhook(phone: httpx.AsyncClient, bridge: Bridge) -> None:
    """A reply is sent as a signed message.received, and the bridge's answer is told.

    A forged one has a signature too, but that of other bytes.
    """
    reply = {"from": "+491713920001", "text": "YES ✓"}
    answer = await phone.post("/sandbox/replies", json=reply)
    forged = await phone.post("/sandbox/replies", json=reply | {"forged": True})
    event = json.loads(bridge.bodies[0])
    event_id = event["data"].pop("id")

    assert (answer.json(), forged.json()) == ({"answers": [200]}, {"answers": [401]})
    assert event == {"type": "message.received", "data": reply}
    assert event_id
    assert len(bridge.signatures[1]) == 64


async def test_event_is_sent_byte_for_byte(phone: httpx.AsyncClient, bridge: Bridge) -> None:
    """An event goes out as the very bytes that came in, signed over them."""
    bodies = [b'{ "type" :"x",\n "data": {}}', b"\xff\x00 no json", b""]
    for body in bodies:
        answer = await phone.post("/sandbox/events", content=body)
        assert answer.json() == {"answers": [200]}

    assert bridge.bodies == bodies


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        ({"from": "+491713920001"}, "text"),
        ({"from": "+491713920001", "text": "hi", "repeat": 0}, "repeat"),
        ({"from": "+491713920001", "text": "hi", "sender": "x"}, "sender"),
    ],
)
async def test_bad_reply_is_refused_by_field(
    sandbox: httpx.AsyncClient, reply: dict[str, Any], field: str
) -> None:
    """A reply that is none gets 400 with the field's name."""
    answer = await sandbox.post("/sandbox/replies", json=reply)

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f"{field}: ")


@pytest.mark.parametrize("path", ["replies", "events"])
async def test_webhooks_need_a_url(sandbox: httpx.AsyncClient, path: str) -> None:
    """Without a webhook URL the answer is 409 and says which option is missing."""
    answer = await sandbox.post(f"/sandbox/{path}", json={"from": "+491713920001", "text": "hi"})

    assert answer.status_code == 409
    assert "--webhook-url" in answer.json()["error"]


@pytest.mark.parametrize("url", ["", "localhost:8080", "http://[::1"])
async def test_unusable_webhook_url_is_told_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="--webhook-url"):
        Signer("generic", url, SECRET)


async def test_used_port_is_told(sandbox: httpx.AsyncClient) -> None:
    port = sandbox.base_url.port
    assert port is not None
    with pytest.raises(
        BridgeError, match=f"^--port: cannot listen on 127.0.0.1:{port}: it is in use"
    ):
        await serve(create_app(), port=port, announce=print)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 204),
        ({"Host": "[::1]:8025"}, 204),
        ({"Host": "sandbox:8025"}, 204),
        ({"Host": "Sandbox.Example.com:8025"}, 204),
        ({"Host": "evil.example:8025"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost:8025", "Origin": "http://localhost:8025"}, 204),
        ({"Host": "localhost:8025", "Origin": "http://localhost:9000"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_pages_of_other_sites_are_refused(headers: dict[str, str], status: int) -> None:
    """A foreign Origin may order nothing, and a foreign Host (DNS rebinding) see nothing."""
    app = create_app(hosts=["sandbox.example.com"])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        ordered = await client.delete("/sandbox/faults", headers=headers)
        seen = await client.get("/sandbox/messages", headers=headers)

    assert ordered.status_code == status
    assert seen.status_code == (200 if status == 204 else status)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/messages", "text/plain"),
        ("/sandbox/replies", "application/x-www-form-urlencoded"),
        ("/sandbox/events", "multipart/form-data; boundary=x"),
        ("/sandbox/faults", "text/plain"),
        ("/sandbox/faults", "Application/JSON; charset=utf-8"),
    ],
)
async def test_what_a_form_can_send_is_refused(
    sandbox: httpx.AsyncClient, path: str, kind: str
) -> None:
    """A body of a type that any page may send without asking first is refused with 415."""
    method = "PUT" if path == "/sandbox/faults" else "POST"
    answer = await sandbox.request(
        method, path, content=b"[]", headers={"Content-Type": kind, "Origin": str(sandbox.base_url)}
    )

    if kind.startswith("Application/JSON"):
        assert answer.status_code == 200
    else:
        assert answer.status_code == 415
        assert answer.json() == {"error": "Content-Type: must be application/json"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_stops_it_while_requests_hang(number: signal.Signals) -> None:
    """A signal ends the process cleanly and soon, hanging and half-sent requests too."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bridge", "sandbox", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    url = re.fullmatch(r"sandbox: (http://127\.0\.0\.1:\d+)\n", line)
    assert url is not None
    async with httpx.AsyncClient(base_url=url[1], headers=BEARER, trust_env=False) as client:
        await set_faults(client, {"mode": "hang", "count": 1}, {"latency_seconds": 60})
        hanging = [asyncio.create_task(send(client)) for _ in range(2)]
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await until_attempted(client, 3)
        process.send_signal(number)
        # It takes half a second; a busy computer is given more, and no request ends by itself.
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        answers = await asyncio.gather(*hanging, return_exceptions=True)
    writer.close()

    assert (process.returncode, errors) == (0, b"")
    assert [type(answer) for answer in answers] == [httpx.RemoteProtocolError] * 2
