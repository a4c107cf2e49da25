"""What delivery receipts say is told on the exchange of outcomes: 200 only when all is stored."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from pydantic import SecretStr

from bridge.amqp.properties import Properties
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.config import WebhookSettings
from bridge.config.webhook import ReceiptSettings
from bridge.errors import Confirm
from bridge.http.messages import Request
from bridge.telemetry.metrics import new_registry
from bridge.topology.declarations import webhook_topology
from bridge.topology.upkeep import Upkeep
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.metrics import WebhookMetrics
from bridge.webhook.publishing import MAX_AT_ONCE
from bridge.webhook.receiver import Receiver
from tests.ears import Ears
from tests.unit.webhook.publications import GUARD_SECONDS, PUBLISHED, answer_of, write

SECRET = "a-webhook-secret"
NUMBER = "+447700900001"
OUTCOMES = "sms.outcome"
RECEIPTS = ReceiptSettings(
    status_pointers=("/status",),
    delivered=("delivered",),
    failed=("failed",),
    pending=("sent",),
    provider_id_pointers=("/message",),
    message_id_pointers=("/reference",),
)


@dataclass
class Published:
    """One message as it was written."""

    exchange: str
    routing_key: str
    body: bytes
    properties: Properties


@dataclass
class Store:
    """Stands where the publisher stands; does with an exchange's messages what `fates` says."""

    fates: dict[str, "Confirm | asyncio.Future[Confirm]"] = field(default_factory=dict)
    published: list[Published] = field(default_factory=list)
    most_waiting: int = 0
    waiting: int = 0

    async def write(
        self,
        body: bytes,
        *,
        exchange: str,
        routing_key: str,
        properties: Properties,
        deadline: float,  # noqa: ARG002  the publisher's own signature
    ) -> Publication:
        return self._take(Published(exchange, routing_key, body, properties))

    def write_at_once(
        self, body: bytes, *, exchange: str, routing_key: str, properties: Properties
    ) -> Publication:
        return self._take(Published(exchange, routing_key, body, properties))

    def _take(self, published: Published) -> Publication:
        self.published.append(published)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        fate = self.fates.get(published.exchange, "confirmed")
        publication = write(fate, published.routing_key)
        publication.when_known(lambda _: self._end())
        return publication

    def _end(self) -> None:
        self.waiting -= 1

    def of(self, exchange: str) -> list[Published]:
        return [one for one in self.published if one.exchange == exchange]

    def outcomes(self) -> list[tuple[str, Any, Any]]:
        """Return the outcome, the message's id and the provider's of each outcome event."""
        events = [(one.routing_key, json.loads(one.body)) for one in self.of(OUTCOMES)]
        assert all(key == event["outcome"] for key, event in events)
        return [(key, event["message_id"], event["provider_id"]) for key, event in events]


@dataclass
class Line:
    """A receiver of receipts, and the publisher behind it."""

    store: Store
    metrics: WebhookMetrics
    receiver: Receiver

    async def post(self, document: object, **headers: str) -> int:
        body = json.dumps(document).encode()
        digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        given = {"x-service-signature": digest} | headers
        raw = [(name.encode(), value.encode()) for name, value in given.items()]
        async with asyncio.timeout(GUARD_SECONDS):
            answer = await answer_of(
                self.receiver,
                Request(method="POST", path="/webhooks", query=b"", headers=raw, body=body),
            )
        return answer.status

    def reports(self) -> dict[str, float]:
        (family,) = self.metrics.delivery_reports.collect()
        counts = {one.labels["status"]: one.value for one in family.samples if "_total" in one.name}
        return {status: count for status, count in counts.items() if count}


def make_line(
    exchange: str | None = OUTCOMES, items_pointer: str | None = None, **receipts: Any
) -> Line:
    settings = WebhookSettings(
        secrets=(SecretStr(SECRET),),
        items_pointer=items_pointer,
        receipts=ReceiptSettings.model_validate(RECEIPTS.model_dump() | receipts),
        response_timeout_seconds=0.3,
    )
    store = Store()
    metrics = WebhookMetrics(
        new_registry(), paths=("/webhooks",), event_types=("message.received",)
    )
    receiver = Receiver(
        settings,
        endpoints=[Endpoint(settings)],
        publisher=cast("Publisher", store),
        upkeep=Upkeep(webhook_topology(settings), "off", metrics=PUBLISHED),
        metrics=metrics,
        outcome_exchange=exchange,
    )
    return Line(store, metrics, receiver)


def receipt(status: str = "delivered", **members: object) -> dict[str, object]:
    about = {"id": "evt-1", "message": "p-1", "reference": "order-1", "to": NUMBER}
    return about | {"status": status} | members


def headers_of(line: Line) -> dict[str, Any]:
    headers = line.store.of("sms.inbound")[-1].properties.headers or {}
    names = ("delivery", "provider-id", "message-id")
    return {name: headers.get(f"sms-bridge-{name}") for name in names}


# --- What is told ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "delivery", "told"),
    [
        ("delivered", "delivered", [("delivered", "order-1", "p-1")]),
        ("failed", "failed", [("undelivered", "order-1", "p-1")]),
        ("sent", "pending", []),
        ("pondering", None, []),
    ],
)
async def test_receipt_is_told_on_both_exchanges(
    status: str, delivery: str | None, told: Sequence[tuple[str, str, str]]
) -> None:
    """The event has it in its headers; only what is final is an outcome."""
    line = make_line()

    assert await line.post(receipt(status)) == 200
    assert headers_of(line) == {
        "delivery": delivery,
        "provider-id": "p-1",
        "message-id": "order-1",
    }
    assert line.store.outcomes() == told
    assert line.reports() == {delivery or "unknown": 1}


async def test_no_number_is_told_or_logged(ears: Ears) -> None:
    """Neither outcome events nor headers nor the log hold a number that a receipt holds."""
    line = make_line()

    await line.post(receipt(message=NUMBER, reference=NUMBER))

    (told,) = line.store.of(OUTCOMES)
    (event,) = line.store.of("sms.inbound")
    for text in (told.body.decode(), str(told.properties), str(event.properties), str(ears.lines)):
        assert NUMBER[1:] not in text


# --- When it is not stored ------------------------------------------------------------------------


async def test_200_only_when_both_are_confirmed() -> None:
    """Whichever of the two is not stored: 503."""
    for exchange in ("sms.inbound", OUTCOMES):
        line = make_line()
        line.store.fates[exchange] = "nacked"

        assert await line.post(receipt()) == 503
        assert line.reports() == {}


@pytest.mark.parametrize("missing", ["sms.inbound", OUTCOMES])
async def test_a_repeat_publishes_what_is_missing(missing: str) -> None:
    """What was stored of an event with an id is not stored again, what was not is."""
    line = make_line()
    line.store.fates[missing] = "nacked"
    first = await line.post(receipt())
    line.store.fates.clear()
    again = [await line.post(receipt()) for _ in range(3)]

    assert [first, *again] == [503, 200, 200, 200]
    counts = {exchange: len(line.store.of(exchange)) for exchange in ("sms.inbound", OUTCOMES)}
    assert counts == {"sms.inbound": 1, OUTCOMES: 1} | {missing: 2}
    assert line.reports() == {"delivered": 1}


async def test_a_late_confirm_is_no_second_outcome() -> None:
    """An outcome event without a confirm at the deadline is 503, and not published anew."""
    line = make_line()
    confirm: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
    line.store.fates[OUTCOMES] = confirm

    during = [await line.post(receipt()) for _ in range(2)]
    confirm.set_result("confirmed")
    after = await line.post(receipt())

    assert (during, after) == ([503, 503], 200)
    assert len(line.store.of(OUTCOMES)) == 1


async def test_without_an_id_a_repeat_is_told_again() -> None:
    """Where repeats cannot be recognised, nothing is lost: both are published at least once."""
    line = make_line()
    document = {"status": "delivered", "message": "p-1"}
    line.store.fates["sms.inbound"] = "nacked"
    first = await line.post(document)
    line.store.fates.clear()

    assert (first, await line.post(document)) == (503, 200)
    assert line.store.outcomes() == [("delivered", None, "p-1")] * 2


async def test_an_outcome_that_nobody_wants_holds_nothing_up() -> None:
    """No queue is bound for `delivered`: the event is stored, and the service is told so."""
    line = make_line()
    line.store.fates[OUTCOMES] = "returned"

    assert [await line.post(receipt()) for _ in range(2)] == [200, 200]
    assert line.reports() == {"delivered": 1}


# --- Many in one call -----------------------------------------------------------------------------


async def test_each_receipt_of_a_bundle_is_told() -> None:
    """The event has no headers of one of them; each is counted, and its outcome told."""
    line = make_line(items_pointer="/results")
    members = [receipt("delivered"), receipt("failed", message="p-2"), receipt("sent")]

    assert await line.post({"id": "evt-1", "results": members}) == 200
    assert headers_of(line) == {"delivery": None, "provider-id": None, "message-id": None}
    assert line.store.outcomes() == [
        ("delivered", "order-1", "p-1"),
        ("undelivered", "order-1", "p-2"),
    ]
    assert line.reports() == {"delivered": 1, "failed": 1, "pending": 1}


async def test_a_large_bundle_is_told_in_parts() -> None:
    """However many receipts one call holds, only so many wait for their confirm at once."""
    line = make_line(items_pointer="/results")
    count = 3 * MAX_AT_ONCE + 1
    members = [receipt(message=f"p-{number}") for number in range(count)]

    assert await line.post({"id": "evt-1", "results": members}) == 200
    assert [told[2] for told in line.store.outcomes()] == [f"p-{n}" for n in range(count)]
    assert line.store.most_waiting <= MAX_AT_ONCE + 1
