"""Webhooks of several services on one exchange, as events of one form."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from twilio.request_validator import RequestValidator

from tests.amqp_client import Amqp
from tests.integration.conftest import SIGNATURE, Canaries, Launcher, Running, unique

FORM = "application/x-www-form-urlencoded"
PUBLIC_URL = "https://sms.example.com"
EVENTS = "sms_bridge_webhook_events_total"
SENDER, RECIPIENT = "+12025550101", "+12025550102"


@dataclass
class Services:
    """A receiver with an endpoint for each service, and a subscriber to everything."""

    amqp: Amqp
    http: httpx.AsyncClient
    webhook: Running
    canaries: Canaries
    exchange: str
    outcomes: AbstractQueue
    settings: Mapping[str, Any]

    async def form(self, path: str, **members: str) -> tuple[int, bytes]:
        """Call as Twilio does, signed by its own library."""
        form = {"AccountSid": "AC" + "0" * 32, "From": SENDER, "To": RECIPIENT, **members}
        validator = RequestValidator(self.canaries.secret)
        signature = validator.compute_signature(PUBLIC_URL + path, form)
        body = urlencode(form).encode()
        headers = {"Content-Type": FORM, "X-Twilio-Signature": signature}
        return await self._post(path, body, headers), body

    async def post(self, path: str, body: bytes) -> int:
        """Call with JSON, signed as a proxy does."""
        headers = {"Content-Type": "application/json", SIGNATURE: self.canaries.sign(body)}
        return await self._post(path, body, headers)

    async def _post(self, path: str, body: bytes, headers: Mapping[str, str]) -> int:
        url = self.webhook.webhook_url.removesuffix("/webhooks") + path
        answer = await self.http.post(url, content=body, headers=headers)
        return answer.status_code

    async def event(self) -> tuple[AbstractIncomingMessage, dict[str, Any]]:
        message = await self.amqp.take(self.exchange)
        return message, json.loads(message.body)


@pytest.fixture(scope="module")
async def services(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, http: httpx.AsyncClient
) -> Services:
    exchange = unique("normalized")
    proxy = {"signature": {"preset": "plain"}}
    endpoints: list[dict[str, Any]] = [
        {"path": "/twilio", "preset": "twilio", "public_url": f"{PUBLIC_URL}/twilio"},
        {"path": "/raw", "preset": "twilio", "public_url": f"{PUBLIC_URL}/raw", "body": "raw"},
        {"path": "/vonage", "preset": "vonage", **proxy},
        {"path": "/infobip", "preset": "infobip", **proxy},
    ]
    settings = {
        "webhook.exchange": exchange,
        "webhook.queue": exchange,
        "webhook.endpoints": [one | {"secrets": [canaries.secret]} for one in endpoints],
        "worker.outcome_exchange": f"{exchange}.outcome",
    }
    webhook = await launcher.role("webhook", settings=settings)
    await webhook.until_metric("sms_bridge_amqp_connection_up", 1)
    outcomes = await amqp.channel.declare_queue(unique("heard"), exclusive=True)
    await outcomes.bind(f"{exchange}.outcome", "#")
    return Services(amqp, http, webhook, canaries, exchange, outcomes, settings)


async def test_two_services_send_the_same_event(services: Services) -> None:
    sid, text = f"SM{uuid.uuid4().hex}", services.canaries.text()
    status, form = await services.form("/twilio", MessageSid=sid, Body=text)
    message, twilio = await services.event()
    document = {"message_uuid": sid, "from": SENDER[1:], "to": RECIPIENT[1:], "text": text}
    body = json.dumps(document).encode()
    status_of_vonage = await services.post("/vonage", body)
    _, vonage = await services.event()

    assert (status, status_of_vonage) == (200, 200)
    assert (message.routing_key, message.type) == ("message.received", "message.received")
    assert message.content_type == "application/json"
    assert message.headers["sms-bridge-event-id"] == twilio["id"] == vonage["id"] == sid
    assert twilio["data"] == vonage["data"]
    assert twilio["data"] == {"from": SENDER, "to": RECIPIENT, "text": text, "provider_id": sid}
    assert (twilio["provider"], vonage["provider"]) == ("twilio", "vonage")
    assert twilio["raw"] == {"body": form.decode(), "content_type": FORM, "encoding": "utf-8"}
    assert vonage["raw"]["body"].encode() == body


async def test_an_opt_out_comes_beside_the_message_and_once(services: Services) -> None:
    sid = f"SM{uuid.uuid4().hex}"
    answers = [
        await services.form("/twilio", MessageSid=sid, Body="STOP", OptOutType="STOP")
        for _ in range(2)
    ]
    events = [await services.event() for _ in range(2)]

    assert [status for status, _ in answers] == [200, 200]
    assert {event["type"]: event["id"] for _, event in events} == {
        "message.received": sid,
        "opt_out": f"{sid}:opt_out",
    }
    assert len({message.message_id for message, _ in events}) == 2
    assert await services.amqp.count(services.exchange) == 0


async def test_a_receipt_says_why_a_message_was_not_delivered(services: Services) -> None:
    sid = f"SM{uuid.uuid4().hex}"
    status, _ = await services.form(
        "/twilio", MessageSid=sid, MessageStatus="undelivered", ErrorCode="21610"
    )
    message, event = await services.event()
    outcome = json.loads((await services.amqp.take(services.outcomes.name)).body)
    line = await services.webhook.until_logged("webhook", provider_id=sid)

    assert (status, message.routing_key) == (200, "receipt.failed")
    assert event["id"] == f"{sid}:receipt.failed:undelivered"
    assert event["data"] == {
        "provider_id": sid,
        "to": RECIPIENT,
        "status": "undelivered",
        "code": "21610",
        "meaning": outcome["meaning"],
    }
    assert message.headers["sms-bridge-delivery"] == "failed"
    assert message.headers["sms-bridge-provider-id"] == sid
    assert (outcome["outcome"], outcome["provider_id"]) == ("undelivered", sid)
    assert (line["type"], line["code"]) == ("receipt.failed", "21610")
    assert line["meaning"] == outcome["meaning"]


async def test_a_repeat_of_a_bundle_publishes_what_is_missing(services: Services) -> None:
    full = await services.amqp.channel.declare_queue(
        exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    await services.amqp.publish(full.name, b"in the way")
    await full.bind(services.exchange, "receipt.failed")
    ids = [uuid.uuid4().hex for _ in range(3)]
    words = ("DELIVERED", "REJECTED", "DELIVERED")
    items = [
        {"messageId": one, "to": RECIPIENT[1:], "status": {"groupName": word}}
        for one, word in zip(ids, words, strict=True)
    ]
    body = json.dumps({"results": items}).encode()

    first = await services.post("/infobip", body)
    await full.purge()
    again = [await services.post("/infobip", body) for _ in range(2)]
    missing = json.loads((await services.amqp.take(full.name)).body)
    await full.delete(if_unused=False, if_empty=False)

    assert [first, *again] == [503, 200, 200]
    # The queue that was not full has stored the refused one twice: the service's repeat of it.
    events = [await services.event() for _ in range(4)]
    assert await services.amqp.count(services.exchange) == 0
    counts = {one: sum(event["data"]["message_id"] == one for _, event in events) for one in ids}
    assert counts == dict(zip(ids, (1, 2, 1), strict=True))
    assert missing["data"]["message_id"] == ids[1]
    assert missing["bundle"] == {"index": 1, "count": 3}
    assert json.loads(missing["raw"]["body"]) == items[1]
    outcomes = [json.loads((await services.amqp.take(services.outcomes.name)).body) for _ in ids]
    assert sorted(one["message_id"] for one in outcomes) == sorted(ids)


async def test_the_items_of_a_bundle_keep_their_order(services: Services) -> None:
    """A receipt, which has an outcome event, is not overtaken by items without one."""
    ids = [uuid.uuid4().hex for _ in range(6)]
    receipt = {"to": RECIPIENT[1:], "status": {"groupName": "DELIVERED"}}
    message = {"from": RECIPIENT[1:], "text": "YES"}
    items = [{"messageId": one, **(message, receipt)[n % 2]} for n, one in enumerate(ids)]
    status = await services.post("/infobip", json.dumps({"results": items}).encode())
    events = [await services.event() for _ in ids]

    assert status == 200
    assert [event["data"]["provider_id"] for _, event in events] == ids
    for _ in ids[::2]:
        await services.amqp.take(services.outcomes.name)


@pytest.mark.parametrize("body", [b"\xff", b'{"results": [7]}'], ids=str)
async def test_what_cannot_be_read_is_published_all_the_same(
    services: Services, body: bytes
) -> None:
    before = await services.webhook.metric(EVENTS, outcome="unparsed")
    status = await services.post("/infobip", body)
    message, event = await services.event()

    assert (status, message.routing_key, event["type"], event["data"]) == (
        *(200, "unparsed", "unparsed"),
        {},
    )
    assert event["raw"]["encoding"] == ("base64" if body == b"\xff" else "utf-8")
    assert await services.webhook.metric(EVENTS, outcome="unparsed") == before + 1


async def test_an_endpoint_may_publish_what_came(services: Services) -> None:
    status, body = await services.form("/raw", MessageSid=f"SM{uuid.uuid4().hex}", Body="YES")
    message = await services.amqp.take(services.exchange)

    assert (status, message.body) == (200, body)
    assert (message.content_type, message.routing_key) == (FORM, "message.received")
