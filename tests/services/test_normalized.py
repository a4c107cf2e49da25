"""Documented webhooks, read by the services' own clients: our events say the same."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bridge.callback import reference_in
from bridge.config import EndpointSettings
from bridge.config.presets import Preset, documented_webhooks
from bridge.webhook.normalize import EventFields, normalize
from bridge.webhook.signatures.verify import Verified

Event = dict[str, Any]


# The clients are imported where they are used, because importing them takes seconds.


def read_sinch(body: Mapping[str, Any]) -> Event:
    from sinch.domains.sms.sinch_events.v1.sms_sinch_event import SmsSinchEvent

    read: Any = SmsSinchEvent().parse_event(json.dumps(body))
    if read.type == "mo_text":
        return {"from": f"+{read.from_}", "to": f"+{read.to}", "text": read.body}
    if read.type == "mo_media":
        media = [{"url": one.url, "content_type": one.content_type} for one in read.body.media]
        numbers = {"from": f"+{read.from_}", "to": f"+{read.to}"}
        return numbers | {"text": read.body.message, "media": media}
    said = read.statuses[0].status if read.type == "delivery_report_sms" else read.status
    return {"provider_id": read.batch_id, "message_id": read.client_reference, "status": said}


def read_telnyx(body: Mapping[str, Any]) -> Event:
    from telnyx.types import InboundMessagePayload, OutboundMessagePayload

    payload = body["data"]["payload"]
    if payload["direction"] == "inbound":
        inbound: Any = InboundMessagePayload.model_validate(payload)
        numbers = {"from": inbound.from_.phone_number, "to": inbound.to[0].phone_number}
        media = [{"url": one.url, "content_type": one.content_type} for one in inbound.media or ()]
        own = {"text": inbound.text, "provider_id": inbound.id}
        return numbers | own | ({"media": media} if media else {})
    outbound: Any = OutboundMessagePayload.model_validate(payload)
    recipient = outbound.to[0]
    return {
        "provider_id": outbound.id,
        "to": recipient.phone_number,
        "status": recipient.status,
        "message_id": reference_in(outbound.webhook_url or ""),
    }


def read_infobip(body: Mapping[str, Any]) -> Event:
    from infobip_api_client.models.sms_delivery_result import SmsDeliveryResult
    from infobip_api_client.models.sms_inbound_message_result import SmsInboundMessageResult

    if "status" in body["results"][0]:
        report: Any = SmsDeliveryResult.from_dict(dict(body))
        (one,) = report.results
        return {
            "provider_id": one.message_id,
            "to": f"+{one.to}",
            "status": one.status.group_name.value,
        }
    inbound: Any = SmsInboundMessageResult.from_dict(dict(body))
    (message,) = inbound.results
    return {
        "from": f"+{message.var_from}",
        "to": f"+{message.to}",
        "text": message.text,
        "provider_id": message.message_id,
    }


CLIENTS: dict[Preset, Callable[[Mapping[str, Any]], Event]] = {
    "sinch": read_sinch,
    "telnyx": read_telnyx,
    "infobip": read_infobip,
}


@pytest.mark.parametrize(
    ("preset", "example"),
    [
        pytest.param(preset, example, id=f"{preset}: {example['means']}")
        for preset in CLIENTS
        for example in documented_webhooks(preset)
    ],
)
def test_the_client_reads_the_same(preset: Preset, example: Mapping[str, Any]) -> None:
    read = CLIENTS[preset](example["body"])
    fields = EventFields(EndpointSettings.model_validate({"path": "/webhooks", "preset": preset}))
    body = json.dumps(example["body"]).encode()
    event = normalize(body, "application/json", Verified(0, None, None), fields, now=time.time())[0]

    assert read.items() <= json.loads(event.body)["data"].items()
