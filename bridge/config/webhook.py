"""Settings of the public port and its endpoints: paths, signatures, events, receipts.

The defaults of the keys that describe a service are those of the preset `generic`; `presets` has
the others.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from bridge.config.fields import (
    CONTENT_TYPE,
    Duration,
    EventPointer,
    EventType,
    ExchangeName,
    FilePath,
    HeaderName,
    List,
    Name,
    Pointer,
    Port,
    QueueName,
    RequestPath,
    Secret,
    Section,
    ServiceSection,
    SignatureFormat,
    SignedContent,
    allow_null,
    read_section,
    write_number,
)
from bridge.config.presets import (
    PRESETS,
    KnownPreset,
    Preset,
    as_map,
    lay_over,
    preset_endpoint,
)
from bridge.config.urls import PublicUrl

MAX_VALUES: Final = 50

# A service's own word for the delivery state of a message; some are numbers.
StatusValue = Annotated[
    str, StringConstraints(min_length=1, max_length=64), BeforeValidator(write_number)
]
StatusValues = Annotated[tuple[StatusValue, ...], List, Field(max_length=MAX_VALUES)]
Pointers = Annotated[tuple[Pointer, ...], List, Field(max_length=10)]
TypeValues = Annotated[tuple[Name, ...], List, Field(max_length=MAX_VALUES)]


class ReceiptSettings(ServiceSection):
    """How a delivery receipt is recognised and read; without `status_pointers` no event is one.

    In each list of pointers, the first one that finds a value counts. With `items_pointer` of the
    endpoint an event may contain several receipts, and the pointers start at each of its items.
    """

    type_values: TypeValues = ()
    status_pointers: Pointers = ()
    delivered: StatusValues = ()
    failed: StatusValues = ()
    pending: StatusValues = ()
    provider_id_pointers: Pointers = ()
    message_id_pointers: Pointers = ()
    callback_pointers: Pointers = ()
    to_pointers: Pointers = ()
    code_pointers: Pointers = ()

    @model_validator(mode="after")
    def _can_be_read(self) -> "ReceiptSettings":
        named = (*self.delivered, *self.failed, *self.pending)
        if self.status_pointers and not (self.delivered or self.failed):
            raise ValueError("delivered: is empty, and so is failed; list the service's statuses")
        if named and not self.status_pointers:
            raise ValueError(
                "status_pointers: is empty; set a pointer to the service's delivery status"
            )
        if len(set(named)) < len(named):
            raise ValueError("delivered, failed, pending: a status appears twice; keep one of them")
        return self


class MediaSettings(Section):
    """Where media are: a pointer with `*` for a list, or with `{n}` for the numbers from 0 on."""

    url: Pointer
    content_type: Pointer | None = None


class MessageSettings(ServiceSection):
    """How a person's message is recognised and read, for normalized events.

    An event is a message if its type is one of `type_values`, or if there are none and the event
    has no type. It needs a sender, and a text or media. The pointers are read like those of
    receipts.
    """

    type_values: TypeValues = ()
    from_pointers: Pointers = ()
    to_pointers: Pointers = ()
    text_pointers: Pointers = ()
    provider_id_pointers: Pointers = ()
    media: Annotated[tuple[MediaSettings, ...], List, Field(max_length=10)] = ()


class OptOutSettings(ServiceSection):
    """How the service says that a message was an opt-out or opt-in, for normalized events."""

    keyword_pointers: Pointers = ()
    stop: StatusValues = ()
    start: StatusValues = ()


# The types of normalized events that the bridge itself defines.
NORMALIZED_TYPES: Final = (
    "message.received",
    "receipt.delivered",
    "receipt.failed",
    "receipt.pending",
    "opt_out",
    "opt_in",
)
BodyForm = Literal["raw", "normalized"]
NumberForm = Literal["e164", "digits"]


def dotted_type(kind: str, preset: Preset) -> str:
    """Return an event type with a dot for each colon, unless the preset is `generic`.

    Some services have a colon in every type, and subscribers could otherwise not bind to one type.
    """
    return kind if preset == "generic" else kind.replace(":", ".")


# Names of signature schemes. A preset of a service (`Preset`) sets one of them.
SchemeName = Literal[
    "plain",
    "github",
    "stripe",
    "slack",
    "shopify",
    "standard-webhooks",
    "twilio",
    "telnyx",
    "vonage",
    "messagebird",
    "sinch",
    "plivo",
    "android-sms-gateway",
    "bird",
]
Algorithm = Literal["sha256", "sha1", "sha384", "sha512", "ed25519"]
Encoding = Literal["auto", "hex", "base64", "base64url"]
TimestampUnit = Literal["s", "ms"]
SecretEncoding = Literal["utf8", "base64", "hex", "whsec"]

MAX_ENDPOINTS: Final = 50
DEFAULT_RESPONSE_SECONDS: Final = 2.5
# The paths of the settings of the default endpoint, and of the others.
DEFAULT_ENDPOINT: Final = "webhook"
_OTHERS: Final = "webhook.endpoints"


def _as_number(value: object) -> object:
    """Convert a status from the environment, which is text, to a number."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


AnswerStatus = Annotated[Literal[200, 201, 202], BeforeValidator(_as_number)]
UnsignedStatus = Annotated[Literal[401, 503], BeforeValidator(_as_number)]


class AnswerSettings(ServiceSection):
    """The answer that the service expects to an accepted webhook."""

    status: AnswerStatus = 200
    content_type: Annotated[str, StringConstraints(pattern=CONTENT_TYPE)] | None = None
    body: Annotated[str, StringConstraints(max_length=1000)] = ""


class SignatureSettings(ServiceSection):
    """How the service signs: `preset` names a scheme, which single keys override."""

    preset: SchemeName = "plain"
    header: HeaderName | None = None
    algorithm: Algorithm | None = None
    encoding: Encoding | None = None
    format: SignatureFormat | None = None
    signed_content: SignedContent | None = None
    timestamp_from: Name | None = None
    timestamp_unit: TimestampUnit | None = None
    tolerance_seconds: Duration | None = None
    id_header: HeaderName | None = None
    nonce_header: HeaderName | None = None
    secret_encoding: SecretEncoding | None = None


class EndpointSettings(Section):
    """A path that one service calls, its secrets, and the structure of its events.

    A preset sets the keys that describe the service, and a single key overrides it.
    """

    model_config = ConfigDict(
        json_schema_extra=lambda schema: allow_null(schema, preset_endpoint("generic"))
    )

    path: RequestPath
    preset: KnownPreset = "generic"
    secrets: Annotated[tuple[Secret, ...], List, Field(min_length=1, max_length=5)] | None = None
    secret_files: (
        Annotated[tuple[FilePath, ...], List, Field(min_length=1, max_length=5)] | None
    ) = None
    signature: SignatureSettings = SignatureSettings()
    event_type_pointers: Annotated[tuple[EventPointer, ...], List] = ("/type",)
    event_type: EventType | None = None
    event_id_pointers: Annotated[tuple[EventPointer, ...], List] = (
        "/id",
        "/data/id",
        "/data/message_id",
    )
    event_types: Annotated[tuple[Name, ...], List, Field(max_length=20)] = ("message.received",)
    public_url: PublicUrl | None = None
    # None: as `webhook.body`; there, normalized for every preset but `generic`.
    body: BodyForm | None = None
    items_pointer: Pointer | None = None
    numbers: NumberForm = "e164"
    message: MessageSettings = MessageSettings(
        type_values=("message.received",),
        from_pointers=("/data/from",),
        to_pointers=("/data/to",),
        text_pointers=("/data/text",),
        provider_id_pointers=("/data/message_id", "/data/id"),
    )
    receipts: ReceiptSettings = ReceiptSettings()
    opt_out: OptOutSettings = OptOutSettings()
    answer: AnswerSettings = AnswerSettings()
    unsigned: UnsignedStatus = 401
    response_timeout_seconds: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _lay_over_preset(cls, value: object) -> object:
        given = read_section(value)
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", "generic")
        if preset not in PRESETS:
            return given
        below = preset_endpoint(preset)
        signature = as_map(given.get("signature"))
        if signature is None:
            given = {key: value for key, value in given.items() if key != "signature"}
        elif isinstance(signature, dict) and signature.get("preset") is not None:
            # The keys of the preset belong to its own signature scheme.
            below["signature"] = {}
        return lay_over(below, given)

    @model_validator(mode="after")
    def _names_its_events(self) -> "EndpointSettings":
        if not self.event_type_pointers and self.event_type is None:
            raise ValueError(
                "event_type_pointers: is empty, and there is no event_type; set one of them"
            )
        return self

    @property
    def knows_signature(self) -> bool:
        """Whether the preset or the user defines how the service signs."""
        return "signature" in self.model_fields_set

    @property
    def has_secrets(self) -> bool:
        """Whether secrets are configured, which shows that the endpoint is in use."""
        return self.secrets is not None or self.secret_files is not None

    @property
    def known_types(self) -> tuple[str, ...]:
        """The types that metrics and logs may name."""
        constant = () if self.event_type is None else (self.event_type,)
        return tuple(dict.fromkeys((*self.event_types, *constant)))


class WebhookSettings(EndpointSettings):
    """The webhook receiver: its port, its limits, the default endpoint, and other endpoints."""

    host: Name = "0.0.0.0"  # noqa: S104  the role exists to be reached
    port: Port = 8080
    path: RequestPath = "/webhooks"
    exchange: ExchangeName = "sms.inbound"
    queue: QueueName | None = "sms.inbound"
    endpoints: Annotated[tuple[EndpointSettings, ...], List, Field(max_length=MAX_ENDPOINTS)] = ()
    repeat_window: Duration = 600
    max_header_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024)] = 16384
    max_headers: Annotated[int, Field(ge=10, le=10_000)] = 100
    max_body_bytes: Annotated[int, Field(ge=1, le=16 * 1024 * 1024)] = 262144
    max_buffered_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    max_connections: Annotated[int, Field(ge=1, le=50_000)] = 1024
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] = 512
    # For the default endpoint, and for each endpoint that has none of its own.
    response_timeout_seconds: Duration = DEFAULT_RESPONSE_SECONDS
    health_path: RequestPath | None = None
    body_timeout_seconds: Duration = 10
    idle_timeout_seconds: Duration = 15
    keep_alive_seconds: Duration = 75
    shutdown_timeout_seconds: Duration = 20

    @model_validator(mode="after")
    def _buffers_hold_a_body(self) -> "WebhookSettings":
        if self.max_buffered_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_bytes must not be less than max_body_bytes")
        return self

    @property
    def all_endpoints(self) -> tuple[EndpointSettings, ...]:
        """Every endpoint that is served; if the default one is served, it comes first."""
        return tuple(self.endpoints_by_key.values())

    @property
    def endpoints_by_key(self) -> Mapping[str, EndpointSettings]:
        """Every endpoint that is served, by the key of its settings, as `webhook.endpoints.0`.

        The default one is served if it has secrets, or if there is no other.
        """
        default = {} if self.endpoints and not self.has_secrets else {DEFAULT_ENDPOINT: self}
        return default | {f"{_OTHERS}.{n}": one for n, one in enumerate(self.endpoints)}

    @property
    def known_types_of_all(self) -> tuple[str, ...]:
        """The types that metrics and logs may name, of every endpoint."""
        return tuple(dict.fromkeys(t for one in self.all_endpoints for t in self.types_of(one)))

    def types_of(self, endpoint: EndpointSettings) -> tuple[str, ...]:
        """Return the types of an endpoint's events that metrics and logs may name."""
        own = endpoint.known_types
        if self.is_raw(endpoint):
            return own
        read = {*endpoint.message.type_values, *endpoint.receipts.type_values, endpoint.event_type}
        others = (dotted_type(kind, endpoint.preset) for kind in own if kind not in read)
        return tuple(dict.fromkeys((*NORMALIZED_TYPES, *others)))

    def is_raw(self, endpoint: EndpointSettings) -> bool:
        """Whether an endpoint's events are the service's own bodies, instead of normalized ones."""
        by_preset = "raw" if endpoint.preset == "generic" else "normalized"
        return (endpoint.body or self.body or by_preset) == "raw"

    def response_seconds(self, endpoint: EndpointSettings) -> float:
        """Return the time in seconds within which an endpoint's webhooks are answered.

        The time in the default endpoint's preset does not apply to other endpoints, whose services
        may not wait as long.
        """
        if endpoint.response_timeout_seconds is not None:
            return endpoint.response_timeout_seconds
        own = self.response_timeout_seconds
        of_preset = preset_endpoint(self.preset).get("response_timeout_seconds")
        return DEFAULT_RESPONSE_SECONDS if own == of_preset else own

    def endpoint_faults(self) -> Iterator[str]:
        """Yield an error text for each conflict between endpoints."""
        taken: dict[str, str] = {}
        for key, endpoint in self.endpoints_by_key.items():
            earlier = taken.setdefault(endpoint.path, key)
            if earlier != key:
                yield f"{key}.path: must differ from {earlier}.path; give each endpoint its own"
        if self.health_path in taken:
            yield (
                f"{DEFAULT_ENDPOINT}.health_path: must differ from "
                f"{taken[self.health_path]}.path; give it a path of its own"
            )
        if DEFAULT_ENDPOINT in self.endpoints_by_key:
            return
        default = EndpointSettings(path=type(self).model_fields["path"].default)
        for name in EndpointSettings.model_fields:
            # These two hold for the other endpoints as well.
            if name in {"response_timeout_seconds", "body"}:
                continue
            if getattr(self, name) != getattr(default, name):
                yield (
                    f"{DEFAULT_ENDPOINT}.{name}: belongs to the default endpoint, which is not "
                    "served because it has no secrets; set it at an endpoint, or set "
                    f"{DEFAULT_ENDPOINT}.secret_files"
                )
