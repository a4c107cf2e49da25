"""Models of the messages' bodies, headers and properties, the source of the JSON Schemas."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints

from bridge.config import OnUncertain
from bridge.config.fields import ErrorCode
from bridge.config.presets import Preset
from bridge.outcome_event import ReceiptOutcome
from bridge.webhook.receipts import DeliveryState
from bridge.worker.fates import DeadReason, FinalOutcome

# Unix seconds, or RFC 3339 with a time zone.
Moment = float | datetime
TraceParent = Annotated[
    str, StringConstraints(pattern="^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
]
VisibleId = Annotated[str, StringConstraints(pattern="^[!-~]{1,255}$")]


class _Described(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RequestHeaders(_Described):
    """The headers that a publisher may set on a message.

    Any other name that begins with `sms-bridge-` makes the message invalid, unless the bridge
    itself writes it.
    """

    expires_at: Moment | None = Field(
        None,
        alias="sms-bridge-expires-at",
        description="A message that has not been sent by this time becomes a dead letter with the "
        "reason `expired`. The time is in Unix seconds, or in RFC 3339 with a time zone.",
    )
    not_before: Moment | None = Field(
        None,
        alias="sms-bridge-not-before",
        description="The message is not sent before this time. The formats are the same as for "
        "`sms-bridge-expires-at`.",
    )
    on_uncertain: OnUncertain | None = Field(
        None,
        alias="sms-bridge-on-uncertain",
        description="`retry` or `park`. It overrides `worker.on_uncertain` for the message.",
    )
    ordering_key: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        None,
        alias="sms-bridge-ordering-key",
        description="With `worker.ordering: recipient`, messages with the same key are sent in "
        "order. The key takes the place of the recipient's number.",
    )
    traceparent: TraceParent | None = Field(
        None,
        description="W3C trace context. The worker passes it on to the service. If spans are "
        "exported, the service receives the context of the POST's span instead.",
    )
    tracestate: str | None = Field(None, description="W3C trace state. The worker passes it on.")


class DeadLetterHeaders(_Described):
    """The headers of a dead letter, in addition to the headers of its request."""

    reason: DeadReason = Field(
        alias="sms-bridge-reason", description="Why the message was given up."
    )
    detail: Annotated[str, StringConstraints(max_length=500)] = Field(
        alias="sms-bridge-detail",
        description="What was wrong, in a sentence that names the field but not its value. For the "
        "reason `drained`, the operator's text.",
    )
    attempts: Annotated[int, Field(ge=0)] = Field(
        alias="sms-bridge-attempts",
        description="Number of attempts that counted towards `worker.max_attempts`.",
    )
    status: Annotated[int, Field(ge=100, le=599)] | None = Field(
        None, alias="sms-bridge-status", description="The last HTTP status code, if there was one."
    )
    code: ErrorCode | None = Field(
        None, alias="sms-bridge-code", description="The service's error code, if there was one."
    )
    meaning: str | None = Field(
        None,
        alias="sms-bridge-meaning",
        description="The code's meaning, if the preset knows it.",
    )
    dead_at: datetime = Field(
        alias="sms-bridge-dead-at", description="When the message was given up, in RFC 3339."
    )
    queue: str = Field(
        alias="sms-bridge-queue",
        description="The queue that the message came from. `dlq replay` returns it there.",
    )
    traceparent: TraceParent | None = Field(None, description="As on the request.")
    tracestate: str | None = Field(None, description="As on the request.")


class OutcomeBody(_Closed):
    """The outcome of a request: to its `reply_to`, and to `worker.outcome_exchange`.

    `delivered` and `undelivered` come from delivery receipts, and go to the exchange only.
    """

    message_id: str | None = Field(
        description="The request's `message_id`, or the key that the worker generated. For a "
        "receipt, the reference that the service echoes, or null."
    )
    outcome: Literal[FinalOutcome, ReceiptOutcome] = Field(
        description="`sent`, `dead`, `delivered` or `undelivered`."
    )
    reason: DeadReason | None = Field(
        description="Why the message became a dead letter, or null if the outcome is not `dead`."
    )
    attempts: Annotated[int, Field(ge=0)] | None = Field(
        description="Number of attempts that counted towards `worker.max_attempts`. Null for a "
        "receipt."
    )
    status: int | None = Field(description="The last HTTP status code, or null.")
    provider_id: str | None = Field(description="The service's id for the message, or null.")
    at: datetime = Field(description="Time of the outcome, in RFC 3339.")
    code: ErrorCode | None = Field(
        None, description="The service's error code. Omitted if there is none."
    )
    meaning: str | None = Field(
        None,
        description="The code's meaning. Omitted if the preset does not know it.",
    )
    duplicate: bool = Field(
        False,
        description="True if the request repeats one that was already sent. Otherwise omitted.",
    )


class EventHeaders(_Described):
    """The headers of an inbound event."""

    body_sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] = Field(
        alias="sms-bridge-body-sha256",
        description="SHA-256 of the webhook's whole body, in hexadecimal.",
    )
    event_id: VisibleId | None = Field(
        None,
        alias="sms-bridge-event-id",
        description="Id of the event, which is the same for a repeat. For a raw event, this is the "
        "service's own id. Omitted if the service gives none.",
    )
    delivery: DeliveryState | None = Field(
        None,
        alias="sms-bridge-delivery",
        description="For a receipt, the state of the message: `delivered`, `failed` or `pending`. "
        "If a raw body has several receipts, this header and the next two are omitted.",
    )
    provider_id: VisibleId | None = Field(
        None,
        alias="sms-bridge-provider-id",
        description="For a receipt, the service's id for the message.",
    )
    message_id: VisibleId | None = Field(
        None,
        alias="sms-bridge-message-id",
        description="For a receipt, the message's idempotency key, if the service echoes it.",
    )
    traceparent: TraceParent | None = Field(
        None,
        description="W3C trace context of the webhook. If spans are exported, the context of the "
        "span for publishing.",
    )
    tracestate: str | None = Field(None, description="W3C trace state of the webhook.")


class EventProperties(_Described):
    """The AMQP properties of an inbound event."""

    content_type: str | None = Field(
        "application/json",
        description="`application/json`, or the service's own type if a raw body is not JSON.",
    )
    delivery_mode: Literal[2] = Field(description="Always 2 (persistent).")
    message_id: str = Field(
        description="A new id for each published message. To recognise repeats, use "
        "`sms-bridge-event-id`."
    )
    timestamp: datetime = Field(description="When the webhook was received, in Unix seconds.")
    type: str | None = Field(None, description="The event's type, truncated to 255 bytes.")


class EventBody(_Described):
    """The webhook's body, byte for byte (`webhook.body: raw`). If `unparsed`, anything."""

    type: str
    data: dict[str, Any] | None = None


class Media(_Closed):
    """A file of a message."""

    url: str
    content_type: str | None = None


class ReceivedData(_Closed):
    """An inbound message, with a text, media, or both."""

    sender: str = Field(alias="from", description="+ and digits, a short code or a name")
    to: str | None = None
    text: str | None = None
    provider_id: VisibleId | None = Field(None, description="the service's id of the message")
    media: Annotated[list[Media], Field(min_length=1)] | None = None


class ReceiptData(_Closed):
    """The delivery state of a message."""

    message_id: VisibleId | None = Field(
        None, description="the idempotency key of the message, if the service echoes it"
    )
    provider_id: VisibleId | None = Field(None, description="the service's id of the message")
    to: str | None = None
    status: str = Field(description="the service's own word")
    code: ErrorCode | None = Field(None, description="the service's error code")
    meaning: str | None = Field(None, description="the meaning of the code")


class OptOutData(_Closed):
    """An opt-out or an opt-in."""

    sender: str = Field(alias="from", description="+ and digits, a short code or a name")
    to: str | None = None
    keyword: str = Field(description="as the service classes it, such as STOP")
    provider_id: VisibleId | None = Field(None, description="the service's id of the message")


class RawWebhook(_Closed):
    """The webhook, or its item, from which the event was read, byte for byte."""

    body: str
    content_type: str | None = None
    encoding: Literal["utf-8", "base64"]
    content_encoding: str | None = Field(None, description="such as gzip; body is still compressed")


class Bundle(_Closed):
    """The position of the item in the webhook."""

    index: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=2)]


class _Normalized(_Closed):
    id: VisibleId | None = Field(None, description="the same for a repeat of the event")
    provider: Preset
    received_at: datetime
    raw: RawWebhook
    bundle: Bundle | None = None


class ReceivedEvent(_Normalized):
    """A person sent a message."""

    type: Literal["message.received"]
    data: ReceivedData


class ReceiptEvent(_Normalized):
    """The service reports the state of a message."""

    type: Literal["receipt.delivered", "receipt.failed", "receipt.pending"]
    data: ReceiptData


class OptOutEvent(_Normalized):
    """The service classed a message as an opt-out or an opt-in."""

    type: Literal["opt_out", "opt_in"]
    data: OptOutData


class OtherEvent(_Normalized):
    """Any other event of the service, under its own type, or `unparsed`."""

    type: str
    data: Annotated[dict[str, Any], Field(max_length=0)]


class NormalizedEvent(RootModel[ReceivedEvent | ReceiptEvent | OptOutEvent | OtherEvent]):
    """An event in the form that all services share."""


class InboundEvent(_Closed):
    """A message on the exchange of inbound events: its body, headers and properties."""

    routing_key: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$", max_length=120),
        Field(
            description="The event's type, with dots for colons; `other` if the type cannot be "
            "a routing key, or `unparsed`."
        ),
    ]
    properties: EventProperties
    headers: EventHeaders
    body: EventBody | Any
