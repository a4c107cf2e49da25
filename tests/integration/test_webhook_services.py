"""Webhooks as each service means them: its answers, its repeats, its addresses, its encodings."""

import base64
import gzip
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx
import jwt
import pytest
from twilio.request_validator import RequestValidator

from tests.amqp_client import Amqp
from tests.integration.conftest import Canaries, Launcher, Running, run_program, unique

FORM = "application/x-www-form-urlencoded"
ACCOUNT = "AC" + "0" * 32
TWILIO_URL = "https://sms.example.com/webhooks/twilio"
BIRD_URL = "https://sms.example.com/webhooks/bird"
VERIFICATIONS = "sms_bridge_webhook_signature_verifications_total"
EVENTS = "sms_bridge_webhook_events_total"


@dataclass
class Services:
    """One receiver, and the services that call it."""

    amqp: Amqp
    http: httpx.AsyncClient
    webhook: Running
    exchange: str
    secret: str
    settings: Mapping[str, Any]

    async def call(
        self, path: str, body: bytes, headers: Mapping[str, str], *, method: str = "POST"
    ) -> httpx.Response:
        """Call an address of the receiver."""
        url = self.webhook.webhook_url.removesuffix("/webhooks") + path
        return await self.http.request(method, url, content=body, headers=headers)

    async def text(
        self, text: str, *, query: str = "", url: str = TWILIO_URL
    ) -> tuple[httpx.Response, bytes]:
        token = uuid.uuid4().hex
        form = {
            "AccountSid": ACCOUNT,
            "ApiVersion": "2010-04-01",
            "Body": text,
            "From": "+12025550101",
            "FromCountry": "US",
            "MessageSid": f"SM{token}",
            "NumMedia": "0",
            "NumSegments": "1",
            "SmsMessageSid": f"SM{token}",
            "SmsSid": f"SM{token}",
            "SmsStatus": "received",
            "To": "+12025550102",
        }
        called = f"{url}?{query}" if query else url
        signature = RequestValidator(self.secret).compute_signature(called, form)
        body = urlencode(form).encode()
        headers = {"Content-Type": FORM, "X-Twilio-Signature": signature}
        path = f"/webhooks/twilio?{query}" if query else "/webhooks/twilio"
        return await self.call(path, body, headers), body

    def vonage(self, body: bytes, **claims: Any) -> str:
        says = {"iat": int(time.time()), "jti": uuid.uuid4().hex, "iss": "Vonage"}
        says |= {"payload_hash": hashlib.sha256(body).hexdigest()}
        return jwt.encode(says | claims, self.secret, algorithm="HS256")

    def sinch(self, body: bytes, *, at: float, secret: str | None = None) -> dict[str, str]:
        nonce, now = uuid.uuid4().hex, str(int(at))
        content = body + f".{nonce}.{now}".encode()
        digest = hmac.digest((secret or self.secret).encode(), content, "sha256")
        return {
            "x-sinch-webhook-signature": base64.b64encode(digest).decode(),
            "x-sinch-webhook-signature-nonce": nonce,
            "x-sinch-webhook-signature-timestamp": now,
        }

    async def counted(self, name: str, **labels: str) -> float:
        return await self.webhook.metric(name, **labels)


@pytest.fixture(scope="module")
async def services(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, http: httpx.AsyncClient
) -> Services:
    exchange, secret = unique("services"), canaries.secret + "-long-enough-for-a-token"
    paths = {"twilio": {"public_url": TWILIO_URL}, "vonage": {}, "sinch": {}}
    endpoints: list[dict[str, Any]] = [
        {"path": f"/webhooks/{preset}", "preset": preset, "secrets": [secret], **more}
        for preset, more in paths.items()
    ]
    endpoints += [
        {"path": "/webhooks/strict", "preset": "sinch", "secrets": [secret], "unsigned": 401},
        {
            "path": "/webhooks/bird",
            "signature": {"preset": "bird"},
            "event_type_pointers": ["/event"],
            "event_id_pointers": ["/payload/id"],
            "public_url": BIRD_URL,
            "secrets": [secret],
        },
    ]
    settings = {
        "webhook.exchange": exchange,
        "webhook.queue": exchange,
        "webhook.secrets": [secret],
        "webhook.body": "raw",
        "webhook.endpoints": endpoints,
        "webhook.health_path": "/",
        "webhook.receipts": {
            "type_values": ["message.status"],
            "status_pointers": ["/status"],
            "failed": ["undelivered"],
            "provider_id_pointers": ["/sid"],
            "code_pointers": ["/code"],
        },
        "worker.outcome_exchange": f"{exchange}.outcome",
    }
    webhook = await launcher.role("webhook", settings=settings)
    await webhook.until_metric("sms_bridge_amqp_connection_up", 1)
    return Services(amqp, http, webhook, exchange, secret, settings)


# --- Twilio ---------------------------------------------------------------------------------------


async def test_twilio_reads_an_answer_with_a_type(services: Services) -> None:
    """Twilio is answered with an empty piece of TwiML: it logs an error for a 200 without a type.

    Others are answered with an empty 200, and a repeat as its first was.
    """
    answer, body = await services.text("YES")
    event = await services.amqp.take(services.exchange, body=body)
    document = b'{"type": "message.received"}'
    plain = await services.call(
        "/webhooks",
        document,
        {"X-Service-Signature": hmac.digest(services.secret.encode(), document, "sha256").hex()},
    )

    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/xml")
    assert answer.text == "<Response/>"
    assert event.routing_key == "message.received"
    assert (plain.status_code, plain.content) == (200, b"")
    assert "content-type" not in plain.headers


@pytest.mark.parametrize("query", ["template=OrderBody", "a=1&To=+12025550199"])
async def test_a_query_of_names_is_taken(services: Services, query: str) -> None:
    answer, body = await services.text("YES", query=query)

    assert answer.status_code == 200
    assert (await services.amqp.take(services.exchange, body=body)).body == body


@pytest.mark.parametrize(
    "text",
    [
        "Body From+447700900123FromCountryUS To+447700900124",
        "NumMedia1MediaUrl0https://a.example/",
    ],
)
async def test_a_text_of_names_is_taken(services: Services, text: str) -> None:
    """A person may write the name of a parameter with a value behind it."""
    answer, body = await services.text(text)

    assert answer.status_code == 200
    assert (await services.amqp.take(services.exchange, body=body)).body == body


async def test_twilio_may_sign_the_port(services: Services) -> None:
    usual, body = await services.text("YES", url=TWILIO_URL.replace(".com/", ".com:443/"))
    other, _ = await services.text("YES", url=TWILIO_URL.replace(".com/", ".com:444/"))

    assert (usual.status_code, other.status_code) == (200, 401)
    assert (await services.amqp.take(services.exchange, body=body)).body == body


async def test_what_is_ambiguous_is_counted_apart(services: Services) -> None:
    """A form with the right signature that is also another's is refused, and is no forgery."""
    before = [
        await services.counted(VERIFICATIONS, result=result, key="none")
        for result in ("ambiguous", "mismatch")
    ]
    form = {
        "AccountSid": ACCOUNT,
        "Body": "YES",
        "ErrorCode": "30003",
        "From": "+12025550101",
        "To": "+12025550102",
    }
    signature = RequestValidator(services.secret).compute_signature(TWILIO_URL, form)
    headers = {"Content-Type": FORM, "X-Twilio-Signature": signature}
    answer = await services.call("/webhooks/twilio", urlencode(form).encode(), headers)
    after = [
        await services.counted(VERIFICATIONS, result=result, key="none")
        for result in ("ambiguous", "mismatch")
    ]

    assert answer.status_code == 401
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0]


# --- Vonage and Sinch, which repeat no 401 --------------------------------------------------------


async def test_vonage_writes_bearer_as_it_likes(services: Services) -> None:
    """The word has no case, and what is behind it may be more than one blank."""
    for word in ("bearer ", "BEARER  ", "Bearer\t"):
        body = json.dumps({"message_uuid": uuid.uuid4().hex, "text": "YES"}).encode()
        headers = {"Authorization": word + services.vonage(body)}

        assert (await services.call("/webhooks/vonage", body, headers)).status_code == 200


async def test_what_a_service_would_lose_by_a_401_is_503(services: Services) -> None:
    body = json.dumps({"type": "mo_text", "id": uuid.uuid4().hex}).encode()
    now = time.time()
    cases: dict[str, tuple[str, dict[str, str], int, str]] = {
        "no header": ("sinch", {}, 503, "missing"),
        "no nonce": ("sinch", {"x-sinch-webhook-signature": "AAAA"}, 503, "malformed"),
        "stale": ("sinch", services.sinch(body, at=now - 3600), 503, "stale"),
        "ahead": ("sinch", services.sinch(body, at=now + 3600), 503, "future"),
        "wrong": ("sinch", services.sinch(body, at=now, secret="other"), 401, "mismatch"),
        "wrong and stale": (
            "sinch",
            services.sinch(body, at=now - 3600, secret="other"),
            401,
            "mismatch",
        ),
        "no token": ("vonage", {}, 503, "missing"),
        "Basic": ("vonage", {"Authorization": "Basic YTpi"}, 503, "malformed"),
        "stale token": (
            "vonage",
            {"Authorization": f"Bearer {services.vonage(body, iat=int(now) - 3600)}"},
            503,
            "stale",
        ),
        "of another body": (
            "vonage",
            {"Authorization": f"Bearer {services.vonage(b'other')}"},
            401,
            "mismatch",
        ),
        "strict": ("strict", services.sinch(body, at=now - 3600), 401, "stale"),
        "strict, none": ("strict", {}, 401, "missing"),
    }
    for case, (path, headers, status, fault) in cases.items():
        counts = (
            (VERIFICATIONS, {"result": fault, "key": "none"}),
            (EVENTS, {"event_type": "unknown", "outcome": "invalid_signature"}),
        )
        before = [await services.counted(name, **labels) for name, labels in counts]
        answer = await services.call(f"/webhooks/{path}", body, headers)
        after = [await services.counted(name, **labels) for name, labels in counts]

        assert (case, answer.status_code) == (case, status)
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1], case
        assert ("retry-after" in answer.headers) == (status == 503), case

    fresh = await services.call("/webhooks/sinch", body, services.sinch(body, at=now))
    assert fresh.status_code == 200


# --- Any service ----------------------------------------------------------------------------------


async def test_a_gzipped_body_is_read_and_stays_as_it_is(services: Services) -> None:
    outcomes = await services.amqp.channel.declare_queue(unique("heard"), exclusive=True)
    await outcomes.bind(f"{services.exchange}.outcome", "#")
    document = {"type": "message.status", "status": "undelivered", "sid": "SM1", "code": "30003"}
    sent = {
        "message.status": gzip.compress(json.dumps({**document, "id": uuid.uuid4().hex}).encode()),
        "unparsed": gzip.compress(b" " * 2**21 + b'{"type": "message.status"}'),
        "unparsed ": b"no gzip",
    }
    for routing_key, body in sent.items():
        signature = hmac.digest(services.secret.encode(), body, "sha256").hex()
        headers = {"Content-Encoding": "gzip", "X-Service-Signature": signature}
        answer = await services.call("/webhooks", body, headers)
        event = await services.amqp.take(services.exchange, body=body)

        assert answer.status_code == 200
        assert (event.routing_key, event.content_encoding) == (routing_key.strip(), "gzip")
    outcome = await services.amqp.take(outcomes.name)
    line = await services.webhook.until_logged("webhook", delivery="failed")

    said = json.loads(outcome.body)
    assert (said["outcome"], said["provider_id"], said["code"]) == ("undelivered", "SM1", "30003")
    assert (line["type"], line["code"]) == ("message.status", "30003")


async def test_bird_signs_time_address_and_digest(services: Services) -> None:
    """Bird's own scheme: its repeats have the time of the first attempt, for up to a day."""
    document = {"service": "channels", "event": "sms.inbound", "payload": {"id": "a-1"}}
    body = json.dumps(document).encode()
    answers = []
    for late, key in ((0, services.secret), (4 * 3600, services.secret), (0, "other")):
        now = str(int(time.time()) - late)
        content = f"{now}\n{BIRD_URL}\n".encode() + hashlib.sha256(body).digest()
        digest = hmac.digest(key.encode(), content, "sha256")
        headers = {
            "messagebird-signature": base64.b64encode(digest).decode(),
            "messagebird-request-timestamp": now,
        }
        answers.append((await services.call("/webhooks/bird", body, headers)).status_code)
    event = await services.amqp.take(services.exchange, body=body)

    assert answers == [200, 200, 401]
    assert (event.routing_key, event.headers["sms-bridge-event-id"]) == ("sms.inbound", "a-1")


async def test_a_load_balancer_may_ask_the_public_port(services: Services) -> None:
    for method, status in (("GET", 200), ("HEAD", 200), ("POST", 405), ("PUT", 405)):
        answer = await services.call("/", b"", {}, method=method)
        assert answer.status_code == status, method
    healthy = await services.call("/", b"", {}, method="GET")
    other = await services.call("/other", b"", {}, method="GET")

    assert (healthy.content, other.status_code) == (b"", 404)
    name = "sms_bridge_webhook_http_requests_total"
    assert await services.counted(name, route="/", method="other", code="200") == 3


async def test_a_wrong_secret_is_told(
    launcher: Launcher, canaries: Canaries, http: httpx.AsyncClient
) -> None:
    exchange = unique("refused")
    settings: dict[str, Any] = {
        "webhook.exchange": exchange,
        "webhook.queue": exchange,
        "webhook.endpoints": [
            {
                "path": "/webhooks/twilio",
                "preset": "twilio",
                "public_url": TWILIO_URL,
                "secrets": [canaries.secret],
            }
        ],
    }
    webhook = await launcher.role("webhook", settings=settings)
    await webhook.until_metric("sms_bridge_amqp_connection_up", 1)
    services = Services(None, http, webhook, exchange, "another token", settings)  # type: ignore[arg-type]
    for _ in range(3):
        answer, _ = await services.text("YES")
        assert answer.status_code == 401
    line = await webhook.until_logged("webhooks_refused")
    admin = httpx.URL(str((await webhook.ask("/readyz")).url))
    checked = await run_program(
        *("check", "--online", "--role", "webhook", "--json"),
        settings=settings | {"admin.host": admin.host, "admin.port": admin.port},
    )
    found = [
        finding
        for finding in json.loads(checked.stdout)["findings"]
        if finding["subject"] == "webhook.endpoints.0"
    ]

    assert len(webhook.logged("webhooks_refused")) == 1
    assert (line["endpoint"], line["why"]) == ("webhook.endpoints.0", "mismatch")
    assert "public_url" in line["remedy"]
    assert len(found) == 1
    assert found[0]["result"] == "warn"
    assert "every webhook of the last hour was refused, 3 of them" in found[0]["text"]
