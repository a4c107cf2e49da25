"""The preset `infobip` and Infobip's client."""

import json
from typing import Any

from tests.services.comparison import (
    SECRET,
    Message,
    Service,
    by_code,
)
from tests.services.stub import GUARD_SECONDS, Recorded, Stub, Told, in_json


class NotTakenError(Exception):
    """Infobip answered 200, but the message's status is not accepted."""


def send(stub: Stub, message: Message) -> str | None:
    """Send with the client. Numbers have no +, as in all of Infobip's examples."""
    from infobip_api_client import (
        ApiClient,
        Configuration,
        SmsApi,
        SmsDestination,
        SmsMessage,
        SmsMessageContent,
        SmsRequest,
        SmsTextContent,
    )

    content = SmsMessageContent(SmsTextContent(text=message.text))
    destination = SmsDestination(to=message.to.removeprefix("+"), message_id=message.key)
    sender = message.sender.removeprefix("+")
    request = SmsRequest(
        messages=[SmsMessage(sender=sender, destinations=[destination], content=content)]
    )
    configuration = Configuration(host=stub.url, api_key=SECRET, ssl_ca_cert=str(stub.certificate))
    with ApiClient(configuration) as client:
        answer = SmsApi(client).send_sms_messages(request, _request_timeout=GUARD_SECONDS)
    for sent in answer.messages:
        if sent.status.group_name not in {"PENDING", "ACCEPTED", "DELIVERED"}:
            raise NotTakenError(sent.status.name)
    message_id: str | None = answer.messages[0].message_id
    return message_id


def code_of(error: Exception) -> str | None:
    if isinstance(error, NotTakenError):
        name: str | None = error.args[0]
        return name
    from infobip_api_client.exceptions import ApiException

    if not isinstance(error, ApiException):
        return None
    code: str | None = None
    if error.data is not None:
        code = error.data.error_code
    elif error.status == 429:  # The client has no model for it.
        code = json.loads(error.body)["errorCode"]
    return code


def key_in(request: Recorded) -> str:
    """Find the key, which delivery reports return."""
    key: str = request.document["messages"][0]["destinations"][0]["messageId"]
    return key


def group_of(name: str) -> str:
    if name in {"MISSING_TO", "SIGNALS_BLOCKED", "UNDELIVERABLE_REJECTED_PLATFORM"}:
        return "REJECTED"
    return name.partition("_")[0]


def statuses(*names: str) -> Told:
    messages: list[dict[str, Any]] = [
        {
            "messageId": f"an-id-{number}",
            "status": {"groupName": group_of(name), "name": name, "description": "a text"},
            "destination": "447700900123",
        }
        for number, name in enumerate(names)
    ]
    return in_json(200, {"bulkId": "an-id", "messages": messages})


DUPLICATE, DND = "REJECTED_DUPLICATE_MESSAGE_ID", "REJECTED_DND"
SERVICE = Service(
    "infobip",
    send,
    code_of,
    key_characters=200,
    code_of_another_key="E401",
    key_in=key_in,
    api={"account": None},
    otherwise={
        "documented: The message id was used before.": ("sent", "it was accepted before"),
        "each part was there before": ("sent", "as above"),
        "an error in the older form": (
            "setup:credentials_rejected",
            "the client reads it in answers of Infobip's older methods only",
        ),
    },
    also={
        **by_code("infobip", statuses),
        "pending": (statuses("PENDING_ENROUTE"), "sent"),
        "accepted": (statuses("ACCEPTED"), "sent"),
        "delivered already": (statuses("DELIVERED_TO_OPERATOR"), "sent"),
        "undeliverable": (statuses("UNDELIVERABLE_REJECTED_OPERATOR"), "uncertain"),
        "expired": (statuses("EXPIRED_EXPIRED"), "uncertain"),
        "each part was taken": (statuses("PENDING_ENROUTE", "PENDING_ACCEPTED"), "sent"),
        "a part was taken": (statuses("PENDING_ENROUTE", DND), "uncertain"),
        "each part was there before": (statuses(DUPLICATE, DUPLICATE), "sent"),
        "a part was there before, the other refused": (statuses(DUPLICATE, DND), "uncertain"),
        "a part was refused, the other there before": (statuses(DND, DUPLICATE), "uncertain"),
        "a part was there before, the other was taken": (
            statuses(DUPLICATE, "PENDING_ENROUTE"),
            "uncertain",
        ),
        "each part was refused": (statuses(DND, "REJECTED_SOURCE"), "refused"),
        "no messages": (in_json(200, {"messages": []}), "uncertain"),
        "a message without a status": (
            in_json(200, {"messages": [{"messageId": "an-id"}]}),
            "uncertain",
        ),
        "an error in the older form": (
            in_json(401, {"requestError": {"serviceException": {"messageId": "UNAUTHORIZED"}}}),
            "setup:credentials_rejected",
        ),
    },
)
