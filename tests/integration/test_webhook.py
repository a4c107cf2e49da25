"""The webhook receiver as a process: what it answers, and what it publishes."""

import asyncio
import base64
import hashlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aio_pika
import httpx
import pytest
from aio_pika.abc import AbstractIncomingMessage

from tests.amqp_client import Amqp
from tests.integration.conftest import SIGNATURE, Canaries, Launcher, Running, eventually, unique

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MAX_BODY_BYTES = 262_144


@dataclass
class Line:
    """One webhook receiver, a service in front of it, and a subscriber behind it."""

    amqp: Amqp
    canaries: Canaries
    http: httpx.AsyncClient
    webhook: Running
    exchange: str

    def event(self, **members: object) -> bytes:
        """Make up the body of an event that nobody has seen before."""
        data = {"from": self.canaries.number(), "text": self.canaries.text()}
        return json.dumps({"type": "message.received", "data": data} | members).encode()

    async def post(self, body: bytes, **headers: str) -> httpx.Response:
        signed = {SIGNATURE: self.canaries.sign(body), **headers}
        return await self.post_as(body, list(signed.items()))

    async def post_as(
        self, body: bytes, headers: Sequence[tuple[str, str | bytes]]
    ) -> httpx.Response:
        pairs = [(k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in headers]
        return await self.http.post(self.webhook.webhook_url, content=body, headers=pairs)

    async def published(self, body: bytes) -> AbstractIncomingMessage:
        return await self.amqp.take(self.exchange, body=body)

    async def heard(self, body: bytes, **headers: str) -> AbstractIncomingMessage:
        """Post a webhook and return the event that becomes of it."""
        answer = await self.post(body, **headers)
        assert answer.status_code == 200
        return await self.published(body)

    async def count(self, body: bytes) -> int:
        source = await self.amqp.channel.get_queue(self.exchange, ensure=False)
        found = 0
        while (message := await source.get(fail=False, no_ack=True)) is not None:
            found += message.body == body
        return found


@pytest.fixture(scope="module")
async def line(launcher: Launcher, amqp: Amqp, canaries: Canaries, http: httpx.AsyncClient) -> Line:
    """Start the receiver that most tests share: two secrets."""
    exchange = unique("webhook")
    settings = {
        "webhook.exchange": exchange,
        "webhook.queue": exchange,
        "webhook.secrets": [canaries.secret, canaries.old_secret],
    }
    webhook = await launcher.role("webhook", settings=settings)
    await _until_connected(webhook)
    return Line(amqp, canaries, http, webhook, exchange)


async def _until_connected(webhook: Running) -> None:
    # The receiver is ready, and answers 503, before the broker is.
    await webhook.until_metric("sms_bridge_amqp_connection_up", 1)


@dataclass
class FileLine(Line):
    """A receiver whose secrets are in files, with no queue behind its exchange at first."""

    folder: Path
    secrets: dict[int, str] = field(default_factory=dict)

    def write_secret(self, number: int, secret: str) -> None:
        """Put a secret in the place of another, all at once."""
        self.secrets[number] = secret or self.secrets[number]
        fresh = self.folder / "fresh"
        fresh.write_text(f"{secret}\n", encoding="utf-8")
        fresh.replace(self.folder / f"secret-{number}")

    async def accepts(self, secret: str) -> bool:
        body = self.event()
        answer = await self.post_as(body, [(SIGNATURE, self.canaries.sign(body, secret))])
        return answer.status_code != 401


@pytest.fixture(scope="module")
async def file_line(
    launcher: Launcher,
    amqp: Amqp,
    canaries: Canaries,
    http: httpx.AsyncClient,
    tmp_path_factory: pytest.TempPathFactory,
) -> FileLine:
    exchange = unique("files")
    folder = tmp_path_factory.mktemp("secrets")
    settings = {
        "webhook.exchange": exchange,
        "webhook.queue": "null",
        "webhook.secret_files": [str(folder / "secret-0"), str(folder / "secret-1")],
    }
    for number, secret in enumerate((canaries.secret, canaries.old_secret)):
        (folder / f"secret-{number}").write_text(f"{secret}\n", encoding="utf-8")
    webhook = await launcher.role("webhook", settings=settings)
    await _until_connected(webhook)
    secrets = {0: canaries.secret, 1: canaries.old_secret}
    return FileLine(amqp, canaries, http, webhook, exchange, folder, secrets)


# What is published


async def test_a_webhook_is_published(line: Line) -> None:
    """A verified webhook is answered 200, empty, and its body goes out byte for byte."""
    body = b' {"type" : "message.received",\t"data":{"text":"Gr\xc3\xbc\\u00dfe"} }\n'
    answer = await line.post(body)
    event = await line.published(body)

    assert (answer.status_code, answer.content) == (200, b"")
    assert event.routing_key == "message.received"


async def test_an_event_has_its_properties(line: Line) -> None:
    event = await line.heard(line.event())
    age = datetime.now(UTC) - (event.timestamp or datetime.min.replace(tzinfo=UTC))

    assert event.content_type == "application/json"
    assert event.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert event.type == "message.received"
    assert event.exchange == line.exchange
    assert event.message_id
    assert timedelta(seconds=-2) < age < timedelta(seconds=30)


async def test_an_event_has_its_headers_and_no_others(line: Line) -> None:
    body = line.event(id="evt-headers")
    event = await line.heard(body, traceparent=TRACE, tracestate="vendor=1", Cookie="a=b")

    # A quorum queue adds its own count of deliveries.
    assert {k: v for k, v in event.headers.items() if k != "x-delivery-count"} == {
        "sms-bridge-body-sha256": hashlib.sha256(body).hexdigest(),
        "sms-bridge-event-id": "evt-headers",
        "traceparent": TRACE,
        "tracestate": "vendor=1",
    }


@pytest.mark.parametrize(
    ("kind", "routing_key"),
    [
        ("a" * 120, "a" * 120),
        ("a" * 121, "other"),
        ("message.received\n", "other"),
    ],
    ids=["longest", "too-long", "newline"],
)
async def test_the_type_is_the_routing_key(line: Line, kind: str, routing_key: str) -> None:
    event = await line.heard(line.event(type=kind))

    assert (event.routing_key, event.type or "") == (routing_key, kind)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'["type", "message.received"]',
        b'{"type": "\xff"}',
        b"[" * 100_000,
        os.urandom(64),
    ],
    ids=["empty", "array", "no-utf-8", "nested-deep", "random"],
)
async def test_what_is_authentic_is_never_refused(line: Line, body: bytes) -> None:
    answer = await line.post(body)
    event = await line.published(body)

    assert (answer.status_code, event.routing_key) == (200, "unparsed")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("text/plain; charset=utf-8", "text/plain; charset=utf-8"),
        ("a" * 300, "a" * 255),
        (None, None),
    ],
    ids=["text", "too-long", "none"],
)
async def test_a_body_that_is_no_json_keeps_its_content_type(
    line: Line, given: str | None, kept: str | None
) -> None:
    headers = {} if given is None else {"Content-Type": given}
    event = await line.heard(b"From=%2B49170&Body=" + uuid.uuid4().hex.encode(), **headers)

    assert (event.content_type, event.routing_key) == (kept, "unparsed")


@pytest.mark.parametrize(
    "rest",
    [
        b'"id": ' + b"7" * 5000 + b', "data": {"id": "second"}',
        b'"data": {"id": "second", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["digits", "nested-deep"],
)
async def test_an_odd_event_keeps_its_type_and_id(line: Line, rest: bytes) -> None:
    """A number of 5,000 digits, or 100,000 levels, make no event one that cannot be read."""
    event = await line.heard(b'{"type": "message.received", ' + rest + b"}")

    assert event.routing_key == "message.received"
    assert event.headers.get("sms-bridge-event-id") == "second"


async def test_a_type_that_is_not_configured_is_not_logged(line: Line) -> None:
    number = line.canaries.number().removeprefix("+")
    event = await line.heard(line.event(type=number))
    await line.webhook.until_logged("webhook", type="other")
    logged = [one["type"] for one in line.webhook.logged("webhook")]

    assert event.routing_key == number
    assert number not in logged


def _with_id(value: object) -> str:
    return json.dumps({"type": "t", "id": value, "data": {"id": "second"}, "x": uuid.uuid4().hex})


@pytest.mark.parametrize(
    ("body", "event_id"),
    [
        (_with_id(12345678901234567890), "12345678901234567890"),
        (_with_id("a" * 256), "second"),
        ('{"type": "t", "data": {"message_id": {}}}', None),
    ],
    ids=["integer", "too-long", "none-fits"],
)
async def test_the_event_id_is_the_first_that_fits(
    line: Line, body: str, event_id: str | None
) -> None:
    event = await line.heard(body.encode())

    assert event.headers.get("sms-bridge-event-id") == event_id


# Repeats


@pytest.mark.parametrize(("more", "count"), [({"id": uuid.uuid4().hex}, 1), ({}, 3)])
async def test_a_repeat_with_an_id_is_published_once(
    line: Line, more: dict[str, str], count: int
) -> None:
    """Without an id each is an event: a person who answers YES twice said it twice."""
    body = line.event(**more)
    answers = [(await line.post(body)).status_code for _ in range(3)]

    assert answers == [200, 200, 200]
    assert await line.count(body) == count


# Signatures


def _forms(canaries: Canaries, body: bytes) -> dict[str, str]:
    signature = canaries.sign(body)
    digest = bytes.fromhex(signature)
    return {
        "hex": signature,
        "upper-case": signature.upper(),
        "prefix": f"sha256={signature}",
        "base64": base64.b64encode(digest).decode(),
        "prefix-base64": f"sha256={base64.b64encode(digest).decode()}",
        "second-secret": canaries.sign(body, canaries.old_secret),
    }


@pytest.mark.parametrize("form", _forms(Canaries(), b""))
async def test_a_valid_signature_is_accepted(line: Line, form: str) -> None:
    body = line.event()
    answer = await line.post_as(body, [(SIGNATURE, _forms(line.canaries, body)[form])])

    assert answer.status_code == 200


def _forgeries(canaries: Canaries, body: bytes) -> dict[str, list[tuple[str, str | bytes]]]:
    good = canaries.sign(body)
    other = canaries.sign(body + b"\n")
    return {
        "missing": [],
        "empty": [(SIGNATURE, "")],
        "twice": [(SIGNATURE, good), (SIGNATURE, good)],
        "twice-differing": [(SIGNATURE, other), (SIGNATURE, good)],
        "joined": [(SIGNATURE, f"{other}, {good}")],
        "non-ascii": [(SIGNATURE, b"\xff\xfe" * 32)],
        "non-ascii-digits": [(SIGNATURE, "²" * 64)],
        "cut": [(SIGNATURE, good[:-1])],
        "longer": [(SIGNATURE, good + "00")],
        "other-body": [(SIGNATURE, other)],
        "other-secret": [(SIGNATURE, canaries.sign(body, "canary-secret-of-a-forger"))],
        "empty-secret": [(SIGNATURE, hashlib.sha256(body).hexdigest())],
        "api-key": [(SIGNATURE, canaries.sign(body, canaries.key))],
        "prefix-only": [(SIGNATURE, "sha256=")],
        "other-prefix": [(SIGNATURE, f"sha1={good}")],
        "other-header": [("X-Signature", good)],
        "huge": [(SIGNATURE, "a" * 10_000)],
    }


@pytest.mark.parametrize("kind", _forgeries(Canaries(), b""))
async def test_a_forged_webhook_is_refused(line: Line, kind: str) -> None:
    """What fails the check is answered 401 in the same words, and is not published."""
    body = line.event()
    answer = await line.post_as(body, _forgeries(line.canaries, body)[kind])
    reference = await line.post_as(body, [])

    assert answer.status_code == 401
    assert answer.content == reference.content
    assert await line.count(body) == 0


async def _post_unsigned(line: Line) -> httpx.Response:
    return await line.post_as(line.event(), [])


async def _post_elsewhere(line: Line) -> httpx.Response:
    return await line.http.post(f"{line.webhook.webhook_url}/x", content=b"{}")


async def _get(line: Line) -> httpx.Response:
    return await line.http.get(line.webhook.webhook_url)


async def _post_a_long_header(line: Line) -> httpx.Response:
    return await line.post(line.event(), Cookie="x" * 20_000)


async def _post_too_much(line: Line) -> httpx.Response:
    return await line.post(b"x" * (MAX_BODY_BYTES + 1))


@pytest.mark.parametrize(
    ("provoke", "status"),
    [
        *((_post_unsigned, 401), (_post_elsewhere, 404), (_get, 405), (_post_too_much, 413)),
        (_post_a_long_header, 431),
    ],
    ids=["401", "404", "405", "413", "431"],
)
async def test_an_error_is_a_problem(line: Line, provoke: Any, status: int) -> None:
    answer = await provoke(line)
    problem = answer.json()

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem == {"title": problem["title"], "status": status}


# Paths, methods, sizes, times


@pytest.mark.parametrize("path", ["/webhooks/", "/webhooksx", "/metrics"])
async def test_another_path_is_not_found(line: Line, path: str) -> None:
    """There is one path on the public port, and the admin's are not on it."""
    url = line.webhook.webhook_url.replace("/webhooks", path)
    body = line.event()
    answer = await line.http.post(url, content=body, headers={SIGNATURE: line.canaries.sign(body)})

    assert answer.status_code == 404


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_another_method_is_not_allowed(line: Line, method: str) -> None:
    answer = await line.http.request(method, line.webhook.webhook_url)

    assert (answer.status_code, answer.headers.get("allow")) == (405, "POST")


async def test_the_largest_body_is_accepted(line: Line) -> None:
    frame = len(line.event(x=""))
    body = line.event(x="x" * (MAX_BODY_BYTES - frame))

    assert len(body) == MAX_BODY_BYTES
    assert (await line.post(body)).status_code == 200


async def _in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 65536):
        yield body[start : start + 65536]


@pytest.mark.parametrize("has_length", [True, False], ids=["content-length", "chunked"])
async def test_a_body_over_the_limit_is_refused(line: Line, *, has_length: bool) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    answer = await line.http.post(
        line.webhook.webhook_url,
        content=body if has_length else _in_chunks(body),
        headers={SIGNATURE: line.canaries.sign(body)},
    )

    assert answer.status_code == 413


async def _converse(line: Line, *parts: bytes, seconds: float) -> bytes:
    host, port = "127.0.0.1", httpx.URL(line.webhook.webhook_url).port
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


HEAD = b"POST /webhooks HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"], ids=["plain", "expect"])
@pytest.mark.parametrize(
    ("line_and_host", "status"),
    [
        (HEAD, 401),
        (HEAD.replace(b"POST", b"PUT"), 405),
        (HEAD.replace(b"/webhooks", b"/nowhere"), 404),
    ],
    ids=["unsigned", "method", "path"],
)
async def test_a_body_that_nobody_wants_is_not_waited_for(
    line: Line, line_and_host: bytes, status: int, expect: bytes
) -> None:
    head = line_and_host + expect + b"Content-Length: 100\r\n\r\n"
    answer = await _converse(line, head, seconds=10)

    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in answer


# Where nothing can be stored; secrets in files


@pytest.mark.parametrize(("number", "key"), [(0, "current"), (1, "previous")])
async def test_the_metric_tells_which_secret_signed(
    file_line: FileLine, number: int, key: str
) -> None:
    name = "sms_bridge_webhook_signature_verifications_total"

    async def count() -> list[float]:
        keys = ("current", "previous")
        return [await file_line.webhook.metric(name, result="valid", key=key) for key in keys]

    before = await count()
    assert await file_line.accepts(file_line.secrets[number])
    after = await count()

    expected = [float(key == "current"), float(key == "previous")]
    assert [b - a for a, b in zip(before, after, strict=True)] == expected


@pytest.fixture(scope="module")
async def rotated(file_line: FileLine) -> list[str]:
    old = list(file_line.secrets.values())
    for number in file_line.secrets:
        file_line.write_secret(number, f"{file_line.canaries.secret}-new-{number}")
    fresh = file_line.secrets[0]
    await eventually(lambda: file_line.accepts(fresh), what="the new secret", seconds=15)
    return old


async def test_a_secret_is_rotated_without_a_restart(
    file_line: FileLine, rotated: list[str]
) -> None:
    accepted = [await file_line.accepts(secret) for secret in file_line.secrets.values()]

    assert rotated
    assert accepted == [True, True]


async def test_a_secret_that_is_gone_is_refused(file_line: FileLine, rotated: list[str]) -> None:
    assert [await file_line.accepts(secret) for secret in rotated] == [False, False]


async def test_an_empty_secret_file_changes_nothing(file_line: FileLine) -> None:
    last = file_line.secrets[0]
    await eventually(lambda: file_line.accepts(last), what="the last secret", seconds=15)
    failed = "sms_bridge_secret_reloads_total"
    before = await file_line.webhook.metric(failed, outcome="failed")
    file_line.write_secret(0, "")
    await file_line.webhook.until_metric(failed, before + 1, outcome="failed")

    assert await file_line.accepts(last)
