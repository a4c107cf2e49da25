"""Services that echo nothing of ours: the address for receipts brings the message's id back."""

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from plivo.utils.signature_v3 import construct_post_url, get_signature_v3
from twilio.request_validator import RequestValidator

from tests.amqp_client import Amqp
from tests.integration.conftest import (
    Canaries,
    HttpStub,
    Launcher,
    Running,
    http_answer,
    http_stub,
    unique,
)

PUBLIC_URL = "https://sms.example.com/webhooks/receipts"
FORM = "application/x-www-form-urlencoded"
TWILIO_ID, PLIVO_ID = f"SM{'1' * 32}", "00000000-0000-4000-8000-000000000001"
TAKEN = {"twilio": {"sid": TWILIO_ID}, "plivo": {"message_uuid": [PLIVO_ID]}}
KEY = "a-token-of-the-account"


def twilio_receipt(url: str, to: str) -> tuple[bytes, dict[str, str]]:
    """Write a receipt as Twilio does, signed by its own library."""
    form = {"AccountSid": f"AC{'0' * 32}", "From": "+12025550102", "To": to}
    form |= {"MessageSid": TWILIO_ID, "MessageStatus": "delivered", "SmsStatus": "delivered"}
    signature = RequestValidator(KEY).compute_signature(url, form)
    return urlencode(form).encode(), {"X-Twilio-Signature": signature}


def plivo_receipt(url: str, to: str) -> tuple[bytes, dict[str, str]]:
    """Write a receipt as Plivo does, signed by its own library."""
    form = {"From": "12025550102", "To": to[1:], "MessageUUID": PLIVO_ID, "Status": "delivered"}
    form |= {"TotalRate": "0.0045", "TotalAmount": "0.0045", "Units": "1"}
    nonce = uuid.uuid4().hex
    signature = get_signature_v3(KEY, construct_post_url(url, dict(form)).decode(), nonce)
    headers = {"X-Plivo-Signature-V3": signature.decode(), "X-Plivo-Signature-V3-Nonce": nonce}
    return urlencode(form).encode(), headers


@pytest.fixture(params=["twilio", "plivo"])
async def service(request: Any) -> AsyncIterator[tuple[str, HttpStub]]:
    taken = json.dumps(TAKEN[request.param]).encode()
    async with http_stub(lambda _: http_answer(202, taken)) as stub:
        yield request.param, stub


async def run_both(
    launcher: Launcher, amqp_url: str, name: str, service: tuple[str, HttpStub]
) -> Running:
    preset, stub = service
    settings = {
        "rabbitmq.url": amqp_url,
        "worker.queue": name,
        "worker.outcome_exchange": f"{name}.outcome",
        "sms_api.preset": preset,
        "sms_api.base_url": stub.url,
        "sms_api.account": "an-account",
        "sms_api.key": KEY,
        "webhook.preset": preset,
        "webhook.secrets": [KEY],
        "webhook.public_url": PUBLIC_URL,
        "webhook.exchange": f"{name}.inbound",
        "webhook.queue": f"{name}.inbound",
    }
    bridge = await launcher.role("all", settings=settings)
    await bridge.until_metric("sms_bridge_amqp_connection_up", 1)
    return bridge


async def test_a_receipt_has_the_id_of_its_message(
    launcher: Launcher,
    amqp: Amqp,
    amqp_url: str,
    canaries: Canaries,
    http: httpx.AsyncClient,
    service: tuple[str, HttpStub],
) -> None:
    """The receipt is sent to the very address that the worker has given with the message."""
    (preset, stub), message_id = service, "order:17/a.b"
    name = unique("callback")
    bridge = await run_both(launcher, amqp_url, name, service)
    heard = await amqp.channel.declare_queue(f"{name}.heard", exclusive=True)
    await heard.bind(f"{name}.outcome", "#")
    body = json.dumps(canaries.request()).encode()
    await amqp.publish(name, body, message_id=message_id)
    sent = json.loads((await amqp.take(heard.name)).body)
    posted = stub.posts[-1].body
    if preset == "twilio":
        ((_, (given,)),) = [
            one for one in parse_qs(posted.decode()).items() if one[0] == "StatusCallback"
        ]
        url, _, options = given.partition("#")
        assert options == "rc=5&rp=all"
    else:
        url = json.loads(posted)["url"]

    write = twilio_receipt if preset == "twilio" else plivo_receipt
    receipt, headers = write(url, "+12025550101")
    parts = urlsplit(url)
    answer = await http.post(
        f"{bridge.webhook_url}?{parts.query}",
        content=receipt,
        headers={"Content-Type": FORM, **headers},
    )
    message = await amqp.take(f"{name}.inbound")
    event = json.loads(message.body)
    outcome = json.loads((await amqp.take(heard.name)).body)

    assert (sent["outcome"], answer.status_code) == ("sent", 200)
    assert parts._replace(query="").geturl() == PUBLIC_URL
    assert event["type"] == "receipt.delivered"
    assert event["data"]["message_id"] == message_id
    assert event["raw"]["body"].encode() == receipt
    assert message.headers["sms-bridge-message-id"] == message_id
    assert (outcome["outcome"], outcome["message_id"]) == ("delivered", message_id)

    forged = await http.post(
        f"{bridge.webhook_url}?{parts.query}x",
        content=receipt,
        headers={"Content-Type": FORM, **headers},
    )
    assert forged.status_code == 401
