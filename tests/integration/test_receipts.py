"""From a request to the receipt of its delivery: the publisher finds his message again."""

import json
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest
from aio_pika.abc import AbstractIncomingMessage

from bridge.config.presets import documented_webhooks
from tests.amqp_client import Amqp
from tests.integration.conftest import (
    SIGNATURE,
    Canaries,
    HttpStub,
    Launcher,
    Post,
    Running,
    eventually,
    http_answer,
    http_stub,
    run_program,
    unique,
)

REPORTS = "sms_bridge_webhook_delivery_reports_total"
RECEIPT_HEADERS = ("delivery", "provider-id", "message-id")


class Vonage:
    """A stub of Vonage's Messages API, which takes everything."""

    stub: HttpStub

    def answer(self, _post: Post) -> bytes:
        message_uuid = str(uuid.UUID(int=len(self.stub.posts)))
        return http_answer(202, json.dumps({"message_uuid": message_uuid}).encode())

    @staticmethod
    def receipt(status: str, **members: Any) -> bytes:
        webhooks = documented_webhooks("vonage")
        example = next(one["body"] for one in webhooks if one["body"].get("status") == status)
        return json.dumps({**example, **members}).encode()


@pytest.fixture(scope="module")
async def vonage() -> AsyncIterator[Vonage]:
    ours = Vonage()
    async with http_stub(ours.answer) as ours.stub:
        yield ours


@dataclass
class Line:
    """Both roles with the preset `vonage`, a service in front and subscribers behind."""

    amqp: Amqp
    canaries: Canaries
    http: httpx.AsyncClient
    bridge: Running
    settings: dict[str, Any]
    outcomes: str

    @property
    def queue(self) -> str:
        """Where requests go."""
        return str(self.settings["worker.queue"])

    async def post(self, body: bytes) -> int:
        headers = {SIGNATURE: self.canaries.sign(body)}
        answer = await self.http.post(self.bridge.webhook_url, content=body, headers=headers)
        return answer.status_code

    async def event(self, body: bytes) -> AbstractIncomingMessage:
        return await self.amqp.take(str(self.settings["webhook.queue"]), body=body)

    async def outcome(self, **wanted: object) -> tuple[str, dict[str, Any]]:
        while True:
            message = await self.amqp.take(self.outcomes)
            event = json.loads(message.body)
            if wanted.items() <= event.items():
                return str(message.routing_key), event


@pytest.fixture(scope="module")
async def line(
    launcher: Launcher,
    amqp: Amqp,
    amqp_url: str,
    canaries: Canaries,
    http: httpx.AsyncClient,
    vonage: Vonage,
) -> Line:
    """Start both roles in one process."""
    name = unique("receipts")
    settings: dict[str, Any] = {
        "rabbitmq.url": amqp_url,
        "worker.queue": name,
        "worker.retry_delays": ["1s"],
        "worker.outcome_exchange": f"{name}.outcome",
        "sms_api.preset": "vonage",
        "sms_api.base_url": vonage.stub.url,
        "sms_api.account": "an-account",
        "sms_api.key": canaries.key,
        "webhook.preset": "vonage",
        "webhook.body": "raw",
        "webhook.signature.preset": "plain",
        "webhook.secrets": [canaries.secret],
        "webhook.exchange": f"{name}.inbound",
        "webhook.queue": f"{name}.inbound",
    }
    bridge = await launcher.role("all", settings=settings)
    await bridge.until_metric("sms_bridge_amqp_connection_up", 1)
    outcomes = await amqp.channel.declare_queue(f"{name}.heard", exclusive=True)
    await outcomes.bind(f"{name}.outcome", "#")
    return Line(amqp, canaries, http, bridge, settings, outcomes.name)


def headers_of(event: AbstractIncomingMessage) -> list[Any]:
    return [event.headers.get(f"sms-bridge-{name}") for name in RECEIPT_HEADERS]


async def test_the_publisher_finds_his_message(line: Line, vonage: Vonage) -> None:
    message_id = uuid.uuid4().hex
    body = json.dumps(line.canaries.request()).encode()
    await line.amqp.publish(line.queue, body, message_id=message_id)
    accepted, sent = await line.outcome(message_id=message_id)
    posted, provider_id = json.loads(vonage.stub.posts[-1].body), sent["provider_id"]
    delivered_before = await line.bridge.metric(REPORTS, status="delivered")

    receipt = vonage.receipt(
        "delivered",
        message_uuid=provider_id,
        client_ref=posted["client_ref"],
        to=posted["to"],
    )
    status = await line.post(receipt)
    event = await line.event(receipt)
    told, outcome = await line.outcome(message_id=message_id)

    assert (accepted, sent["message_id"], status) == ("sent", message_id, 200)
    assert headers_of(event) == ["delivered", provider_id, message_id]
    assert event.routing_key == "delivered"
    assert told == "delivered"
    assert (outcome["message_id"], outcome["provider_id"]) == (message_id, provider_id)
    assert sent.keys() == outcome.keys()
    assert await line.bridge.metric(REPORTS, status="delivered") == delivered_before + 1


async def test_what_was_accepted_need_not_be_delivered(line: Line, vonage: Vonage) -> None:
    message_id = uuid.uuid4().hex
    pending = vonage.receipt("submitted", client_ref=message_id)
    failed = vonage.receipt("rejected", client_ref=message_id)

    assert [await line.post(pending), await line.post(failed)] == [200, 200]
    told, _ = await line.outcome(message_id=message_id)
    assert told == "undelivered"
    assert headers_of(await line.event(pending))[0] == "pending"
    assert headers_of(await line.event(failed))[0] == "failed"


async def test_a_receipt_without_a_reference_has_the_providers_id(
    line: Line, vonage: Vonage
) -> None:
    for reference in (None, ["order-1"], line.canaries.number(), 7.5):
        receipt = vonage.receipt("delivered", message_uuid="m-1", client_ref=reference)

        assert await line.post(receipt) == 200
        assert headers_of(await line.event(receipt)) == ["delivered", "m-1", None]
        _, outcome = await line.outcome(provider_id="m-1")
        assert outcome["message_id"] is None


async def test_what_a_full_queue_refuses_comes_with_the_repeat(line: Line, vonage: Vonage) -> None:
    full = await line.amqp.channel.declare_queue(
        exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    await line.amqp.publish(full.name, b"in the way")
    await full.bind(f"{line.queue}.outcome", "undelivered")
    receipt = vonage.receipt("rejected", message_uuid="m-2", client_ref=uuid.uuid4().hex)

    repeats = "sms_bridge_webhook_events_total"
    repeats_before = await line.bridge.metric(repeats, outcome="duplicate")
    first = await line.post(receipt)
    await full.purge()
    again = [await line.post(receipt) for _ in range(2)]

    assert [first, *again] == [503, 200, 200]
    outcome = json.loads((await line.amqp.take(full.name)).body)
    assert (outcome["outcome"], outcome["provider_id"]) == ("undelivered", "m-2")
    await line.event(receipt)
    # The second repeat: the first brought what was missing.
    assert await line.bridge.metric(repeats, outcome="duplicate") == repeats_before + 1
    await full.delete(if_unused=False, if_empty=False)


async def test_only_the_receiver_may_need_the_exchange(line: Line) -> None:
    shown = ("topology", "show", "--role", "webhook", "--format", "definitions")
    with_receipts = await run_program(*shown, settings=line.settings)
    without = await run_program(*shown, settings={**line.settings, "webhook.preset": "generic"})

    assert f"{line.queue}.outcome" in with_receipts.stdout.decode()
    assert f"{line.queue}.outcome" not in without.stdout.decode()


async def test_listen_shows_what_a_receipt_says(
    launcher: Launcher, line: Line, vonage: Vonage
) -> None:
    """`listen` prints it beside the event, in which services write it each in their own way."""
    listener = launcher.start("listen", settings=line.settings)

    async def is_listening() -> bool:
        return "listening on" in listener.output

    async def heard() -> dict[str, Any] | None:
        lines = [one for one in listener.output.splitlines() if '"m-3"' in one]
        return json.loads(lines[0]) if lines else None

    await eventually(is_listening, what="it listens")
    assert await line.post(vonage.receipt("delivered", message_uuid="m-3", client_ref="order-3"))
    event = await eventually(heard, what="the event")
    listener.child.signal(signal.SIGINT)
    await listener.ended()

    assert [event[name] for name in ("delivery", "provider_id", "message_id")] == [
        *("delivered", "m-3", "order-3")
    ]


async def test_what_is_published_is_what_the_contract_says(line: Line, vonage: Vonage) -> None:
    printed = await run_program("schema", "asyncapi", settings=line.settings)
    messages = json.loads(printed.stdout)["components"]["messages"]
    receipt = vonage.receipt("delivered", message_uuid="m-4", client_ref=None)

    assert await line.post(receipt) == 200
    _, outcome = await line.outcome(provider_id="m-4")
    jsonschema.validate(outcome, messages["outcome"]["payload"])
    event = await line.event(receipt)
    jsonschema.validate(dict(event.headers), messages["inboundEvent"]["headers"])
