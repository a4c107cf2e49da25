"""Several services that call one receiver: each has its path, its secrets, its names of things."""

import base64
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.amqp_client import Amqp
from tests.integration.conftest import (
    SIGNATURE,
    Canaries,
    Launcher,
    Running,
    eventually,
    run_program,
    unique,
)

FORM = "application/x-www-form-urlencoded"
ACCOUNT = "AC" + "0" * 32
TWILIO_URL = "https://sms.example.com/webhooks/twilio"


@dataclass
class Services:
    """One receiver with a default endpoint and three more, and the services that call them."""

    amqp: Amqp
    canaries: Canaries
    http: httpx.AsyncClient
    webhook: Running
    exchange: str
    settings: Mapping[str, object]
    folder: Path
    telnyx_key: Ed25519PrivateKey = field(repr=False)
    file_secret: str = field(repr=False)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> int:
        url = self.webhook.webhook_url.removesuffix("/webhooks") + path
        return (await self.http.post(url, content=body, headers=headers)).status_code

    def plain(self, body: bytes, secret: str | None = None) -> dict[str, str]:
        """Sign as our own service does, with the default endpoint's secret or another."""
        return {
            "Content-Type": "application/json",
            SIGNATURE: self.canaries.sign(body, secret),
        }

    def telnyx(self, body: bytes) -> dict[str, str]:
        seconds = str(int(time.time()))
        signature = self.telnyx_key.sign(f"{seconds}|".encode() + body)
        return {
            "Content-Type": "application/json",
            "telnyx-timestamp": seconds,
            "telnyx-signature-ed25519": base64.b64encode(signature).decode(),
        }

    def twilio(self, body: bytes) -> dict[str, str]:
        fields = sorted(parse_qsl(body.decode(), keep_blank_values=True))
        signed = TWILIO_URL + "".join(name + value for name, value in fields)
        digest = hmac.new(self.canaries.secret.encode(), signed.encode(), hashlib.sha1).digest()
        return {"Content-Type": FORM, "X-Twilio-Signature": base64.b64encode(digest).decode()}

    async def accepts(self, path: str, secret: str) -> bool:
        """Say whether an endpoint takes what this secret has signed."""
        body = _event()
        return await self.post(path, body, self.plain(body, secret)) == 200


def _event(**members: object) -> bytes:
    return json.dumps({"type": "message.received", "x": uuid.uuid4().hex} | members).encode()


def _public(key: Ed25519PrivateKey) -> str:
    raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return base64.b64encode(raw).decode()


@pytest.fixture(scope="module")
async def services(
    launcher: Launcher,
    amqp: Amqp,
    canaries: Canaries,
    http: httpx.AsyncClient,
    tmp_path_factory: pytest.TempPathFactory,
) -> Services:
    exchange = unique("endpoints")
    folder = tmp_path_factory.mktemp("secrets")
    file_secret = f"{canaries.secret}-of-a-file"
    (folder / "secret").write_text(f"{file_secret}\n", encoding="utf-8")
    telnyx_key = Ed25519PrivateKey.generate()
    settings = {
        "webhook.exchange": exchange,
        "webhook.queue": exchange,
        "webhook.secrets": [canaries.secret],
        "webhook.body": "raw",
        "webhook.endpoints": [
            {"path": "/webhooks/again", "secret_files": [str(folder / "secret")]},
            {"path": "/webhooks/telnyx", "preset": "telnyx", "secrets": [_public(telnyx_key)]},
            {
                "path": "/webhooks/twilio",
                "preset": "twilio",
                "secrets": [canaries.secret],
                "public_url": TWILIO_URL,
            },
        ],
    }
    webhook = await launcher.role("webhook", settings=settings)
    await webhook.until_metric("sms_bridge_amqp_connection_up", 1)
    return Services(
        amqp,
        canaries,
        http,
        webhook,
        exchange,
        settings,
        folder,
        telnyx_key,
        file_secret=file_secret,
    )


async def test_each_service_is_heard_in_its_own_words(services: Services) -> None:
    """Three services with a signature, a type and an id at places of their own call one port."""
    ours = _event(id=uuid.uuid4().hex)
    telnyx_data = {"event_type": "message.received", "id": uuid.uuid4().hex, "payload": {}}
    telnyx = json.dumps({"data": telnyx_data}).encode()
    sid = f"SM{uuid.uuid4().hex}"
    twilio = (
        f"ErrorCode=30003&MessageSid={sid}&MessageStatus=undelivered&AccountSid={ACCOUNT}".encode()
    )
    statuses = [
        await services.post("/webhooks", ours, services.plain(ours)),
        await services.post("/webhooks/telnyx", telnyx, services.telnyx(telnyx)),
        await services.post("/webhooks/twilio", twilio, services.twilio(twilio)),
    ]
    events = [
        await services.amqp.take(services.exchange, body=body) for body in (ours, telnyx, twilio)
    ]

    assert statuses == [200, 200, 200]
    assert [(event.routing_key, event.content_type) for event in events] == [
        ("message.received", "application/json"),
        ("message.received", "application/json"),
        ("undelivered", FORM),
    ]
    assert [event.headers["sms-bridge-event-id"] for event in events] == [
        json.loads(ours)["id"],
        telnyx_data["id"],
        sid,
    ]


async def test_a_form_is_published_byte_for_byte(services: Services) -> None:
    """What could be written otherwise stays as it was: order, escapes, plus signs, empty fields."""
    sid = f"SM{uuid.uuid4().hex}"
    body = (
        f"To=%2b12025550199&From=%2B15550100&Body=Gr%C3%BC%c3%9fe+%2B%20&FromCity=&ToCity="
        f"&MessageSid={sid}&AccountSid={ACCOUNT}"
    ).encode()
    headers = services.twilio(body) | {"Content-Type": f"{FORM}; charset=UTF-8"}
    status = await services.post("/webhooks/twilio", body, headers)
    event = await services.amqp.take(services.exchange, body=body)

    assert status == 200
    assert event.content_type == f"{FORM}; charset=UTF-8"
    # No status: what a phone has sent, for which the preset has a constant type.
    assert (event.routing_key, event.type) == ("message.received", "message.received")


@pytest.mark.parametrize("path", ["/webhooks", "/webhooks/again", "/webhooks/telnyx"])
async def test_a_signature_of_another_endpoint_is_refused(services: Services, path: str) -> None:
    """Whoever may call one endpoint may call no other."""
    body = _event()
    signed = {
        "/webhooks": services.plain(body),
        "/webhooks/again": services.plain(body, services.file_secret),
        "/webhooks/telnyx": services.telnyx(body),
    }
    answers = {own: await services.post(path, body, given) for own, given in signed.items()}

    assert answers == {own: 200 if own == path else 401 for own in signed}


async def test_the_same_event_at_two_endpoints_is_published_twice(services: Services) -> None:
    body = _event(id=uuid.uuid4().hex)
    for _ in range(2):
        assert await services.post("/webhooks", body, services.plain(body)) == 200
        signed = services.plain(body, services.file_secret)
        assert await services.post("/webhooks/again", body, signed) == 200
    source = await services.amqp.channel.get_queue(services.exchange, ensure=False)
    found = 0
    while (message := await source.get(fail=False, no_ack=True)) is not None:
        found += message.body == body

    assert found == 2


async def test_counts_and_lines_name_the_endpoint(services: Services) -> None:
    """Metrics and log say where something happened; a stranger's path is in neither."""
    name = "sms_bridge_webhook_http_requests_total"
    stranger = f"/webhooks/{uuid.uuid4().hex}"
    before = [
        await services.webhook.metric(name, route=route, code=code)
        for route, code in (("/webhooks/telnyx", "401"), ("unmatched", "404"))
    ]
    body = _event()
    await services.post("/webhooks/telnyx", body, services.plain(body))
    await services.post(stranger, body, services.plain(body))
    after = [
        await services.webhook.metric(name, route=route, code=code)
        for route, code in (("/webhooks/telnyx", "401"), ("unmatched", "404"))
    ]
    routes = {line["route"] for line in services.webhook.logged("webhook")}

    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1]
    assert "/webhooks/telnyx" in routes
    assert routes <= {"/webhooks", "/webhooks/again", "/webhooks/telnyx", "/webhooks/twilio"}
    metrics = (await services.webhook.ask("/metrics")).text
    assert stranger not in metrics
    # A type that only the preset of one endpoint names.
    assert 'event_type="message.finalized"' in metrics


async def test_the_secret_of_one_endpoint_is_rotated(services: Services) -> None:
    before, fresh = services.file_secret, f"{services.canaries.secret}-rotated"
    assert await services.accepts("/webhooks/again", before)
    written = services.folder / "fresh"
    written.write_text(fresh, encoding="utf-8")
    written.replace(services.folder / "secret")
    services.file_secret = fresh
    await eventually(
        lambda: services.accepts("/webhooks/again", fresh), what="the new secret", seconds=15
    )

    assert not await services.accepts("/webhooks/again", before)
    assert not await services.accepts("/webhooks", fresh)
    assert await services.accepts("/webhooks", services.canaries.secret)


@pytest.mark.parametrize(
    ("path", "options", "body"),
    [
        ("/webhooks/again", ["--path", "/webhooks/again"], _event()),
        (
            "/webhooks/twilio",
            ["--path", "/webhooks/twilio", "--content-type", FORM],
            f"AccountSid={ACCOUNT}&MessageStatus=sent".encode(),
        ),
    ],
    ids=["file", "form"],
)
async def test_sign_signs_as_the_endpoint_does(
    services: Services, path: str, options: list[str], body: bytes
) -> None:
    result = await run_program("sign", *options, settings=services.settings, given=body)
    headers = dict(line.split(": ", 1) for line in result.stdout.decode().splitlines())
    content_type = options[-1] if "--content-type" in options else "application/json"

    assert await services.post(path, body, headers | {"Content-Type": content_type}) == 200


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--path: must be the path of an endpoint: /webhooks, /webhooks/again, "),
        (["--curl", "http://localhost/nowhere"], "--path: must be the path of an endpoint: "),
        (["--curl", "http://localhost/webhooks/telnyx"], "/webhooks/telnyx: its secret is the ser"),
        (
            ["--path", "/webhooks/twilio", "--content-type", FORM],
            "/webhooks/twilio: the receiver would refuse this body with any signature",
        ),
    ],
    ids=["none", "url", "public-key", "no-form"],
)
async def test_what_sign_cannot_sign_is_told(
    services: Services, options: list[str], told: str
) -> None:
    result = await run_program("sign", *options, settings=services.settings, given=_event())

    assert (result.returncode, result.stdout) == (2, b"")
    assert told in result.stderr.decode()


@pytest.mark.parametrize(
    ("endpoints", "told"),
    [
        (
            [{"path": "/a", "preset": "telnyx", "secrets": ["canary-secret-91bc"]}],
            "webhook.endpoints.0.secrets.0: ",
        ),
        (
            [{"path": "/a", "preset": "twilio", "secret_files": ["/nowhere/secret"]}],
            "webhook.endpoints.0.public_url: is missing, but ",
        ),
    ],
    ids=["key", "url"],
)
async def test_an_endpoint_that_cannot_work_stops_the_start(
    endpoints: list[dict[str, Any]], told: str
) -> None:
    result = await run_program("webhook", settings={"webhook.endpoints": endpoints})
    said = result.stderr.decode()

    assert result.returncode == 2
    assert told in said
    assert "canary" not in said
