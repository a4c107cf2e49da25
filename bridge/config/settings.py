"""Every key of the configuration with its type and its default, a class for each section.

`config.example.yaml` says what each is for. A `Duration` is in seconds, however it was written.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    BaseModel,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from bridge.config.fields import (
    MAX_CONCURRENCY,
    Concurrency,
    Duration,
    ExchangeName,
    FilePath,
    HeaderName,
    List,
    Name,
    Pointer,
    Port,
    QueueName,
    RequestPath,
    RetryDelay,
    Secret,
    SenderName,
    SignatureFormat,
    SignedContent,
)
from bridge.config.section import Section
from bridge.config.sms_api import SmsApiSettings
from bridge.config.urls import BrokerUrls, HttpUrl, mask_url

Role = Literal["worker", "webhook"]
TopologyMode = Literal["declare", "verify", "off"]
# What becomes of a message that may have been sent: it is sent again with its key, or never.
OnUncertain = Literal["retry", "park"]
# How services sign their webhooks.
Preset = Literal["plain", "github", "stripe", "slack", "shopify", "standard-webhooks", "twilio"]
Algorithm = Literal["sha256", "sha1", "sha384", "sha512"]
Encoding = Literal["auto", "hex", "base64", "base64url"]
TimestampUnit = Literal["s", "ms"]
SecretEncoding = Literal["utf8", "base64", "hex", "whsec"]

ENV_PREFIX: Final = "SMS_BRIDGE_"
# Stands for the sender where the service is told none.
NO_SENDER: Final = "unused"


class TlsSettings(Section):
    """How to trust the broker and be trusted by it."""

    ca_file: FilePath | None = None
    cert_file: FilePath | None = None
    key_file: FilePath | None = None
    server_name: str | None = None


class RabbitMQSettings(Section):
    """The broker."""

    url: BrokerUrls = (SecretStr("amqp://guest:guest@localhost:5672/"),)
    username: Name | None = None
    username_file: FilePath | None = None
    password: Secret | None = None
    password_file: FilePath | None = None
    heartbeat_seconds: Annotated[int, Field(ge=1, le=300)] = 10
    connect_timeout_seconds: Duration = 10
    publish_timeout_seconds: Duration = 3
    tls: TlsSettings = TlsSettings()
    topology: TopologyMode = "declare"


class RateLimitSettings(Section):
    """How fast to send; `per_sender` limits each `from` on its own."""

    per_second: Annotated[float, Field(gt=0)] | None = None
    burst: Annotated[int, Field(ge=1)] | None = None
    per_sender: Annotated[float, Field(gt=0)] | None = None
    scope: Literal["process", "cluster"] = "process"


class WorkerSettings(Section):
    """From the queue to the API."""

    queue: QueueName = "sms.outbound"
    concurrency: Concurrency = 50
    max_concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] = 200
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 6
    max_uncertain_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    on_uncertain: OnUncertain | None = None
    retry_delays: Annotated[tuple[RetryDelay, ...], List, Field(min_length=1, max_length=20)] = (
        5.0,
        30.0,
        120.0,
        600.0,
        3600.0,
    )
    outage_after: Duration = 10
    max_age: Duration | None = None
    default_from: SenderName | None = None
    max_text_length: Annotated[int, Field(ge=1, le=65536)] = 1600
    extra_fields: Literal["refuse", "forward"] = "refuse"
    ordering: Literal["none", "recipient"] = "none"
    rate_limit: RateLimitSettings = RateLimitSettings()
    outcome_exchange: ExchangeName | None = None
    shutdown_timeout_seconds: Duration = 25

    @property
    def most_in_flight(self) -> int:
        """How many requests may ever be in flight at once."""
        return self.max_concurrency if self.concurrency == "auto" else self.concurrency

    @model_validator(mode="after")
    def _delays_ascend(self) -> "WorkerSettings":
        if list(self.retry_delays) != sorted(set(self.retry_delays)):
            raise ValueError("retry_delays must ascend and not repeat, like [5s, 30s, 2m]")
        return self


class SignatureSettings(Section):
    """How the service signs; a preset sets every knob, and a single knob overrides it."""

    preset: Preset = "plain"
    header: HeaderName | None = None
    algorithm: Algorithm | None = None
    encoding: Encoding | None = None
    format: SignatureFormat | None = None
    signed_content: SignedContent | None = None
    timestamp_from: Name | None = None
    timestamp_unit: TimestampUnit | None = None
    tolerance_seconds: Duration | None = None
    id_header: HeaderName | None = None
    secret_encoding: SecretEncoding | None = None


class WebhookSettings(Section):
    """From the service's webhooks to the exchange."""

    host: Name = "0.0.0.0"  # noqa: S104  the role exists to be reached
    port: Port = 8080
    path: RequestPath = "/webhooks"
    exchange: ExchangeName = "sms.inbound"
    queue: QueueName | None = "sms.inbound"
    secrets: Annotated[tuple[Secret, ...], List, Field(min_length=1, max_length=5)] | None = None
    secret_files: (
        Annotated[tuple[FilePath, ...], List, Field(min_length=1, max_length=5)] | None
    ) = None
    signature: SignatureSettings = SignatureSettings()
    event_id_pointers: Annotated[tuple[Pointer, ...], List] = (
        "/id",
        "/data/id",
        "/data/message_id",
    )
    repeat_window: Duration = 600
    event_types: Annotated[tuple[Name, ...], List, Field(max_length=20)] = ("message.received",)
    public_url: HttpUrl | None = None
    max_header_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024)] = 16384
    max_headers: Annotated[int, Field(ge=10, le=10_000)] = 100
    max_body_bytes: Annotated[int, Field(ge=1, le=16 * 1024 * 1024)] = 262144
    max_buffered_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    max_connections: Annotated[int, Field(ge=1, le=50_000)] = 1024
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] = 512
    response_timeout_seconds: Duration = 2.5
    body_timeout_seconds: Duration = 10
    idle_timeout_seconds: Duration = 15
    keep_alive_seconds: Duration = 75
    shutdown_timeout_seconds: Duration = 20

    @model_validator(mode="after")
    def _buffers_hold_a_body(self) -> "WebhookSettings":
        if self.max_buffered_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_bytes must not be less than max_body_bytes")
        return self


class AdminSettings(Section):
    """Probes and metrics; port 0 takes any free port and logs it."""

    host: Name = "0.0.0.0"  # noqa: S104  probes come from outside the pod
    port: Port = 9090


class LogSettings(Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console", "auto"] = "auto"


class TracingSettings(Section):
    """Where spans go. W3C trace headers are passed on with tracing on or off."""

    otlp_endpoint: HttpUrl | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class Settings(BaseSettings):
    """The whole configuration. Make one with `load_settings`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        enable_decoding=False,
        env_parse_none_str="null",
    )

    rabbitmq: RabbitMQSettings = RabbitMQSettings()
    sms_api: SmsApiSettings = Field(default_factory=SmsApiSettings)
    worker: WorkerSettings = WorkerSettings()
    webhook: WebhookSettings = WebhookSettings()
    admin: AdminSettings = AdminSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()

    @field_validator("worker")
    @classmethod
    def _suit_the_service(cls, worker: WorkerSettings, info: ValidationInfo) -> WorkerSettings:
        """Choose the defaults that depend on what the service can do.

        Where it cannot tell a repeat, one would be a second text: park. Where it is told no
        sender, a request needs none.
        """
        api, chosen = info.data.get("sms_api"), dict[str, str]()
        if not isinstance(api, SmsApiSettings):
            return worker
        if worker.on_uncertain is None:
            chosen["on_uncertain"] = "retry" if api.knows_repeats else "park"
        if worker.default_from is None and not api.request.sends_sender:
            chosen["default_from"] = NO_SENDER
        return worker.model_copy(update=chosen)

    @model_validator(mode="after")
    def _queues_differ(self) -> "Settings":
        if self.worker.queue == self.webhook.queue:
            raise ValueError(
                "worker.queue: is webhook.queue too, so the worker would take the events for "
                "requests; name another one, or set webhook.queue to null"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  pydantic-settings' own signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what is handed in: `load_settings` reads the environment, once."""
        return (init_settings,)

    def masked(self) -> dict[str, Any]:
        """Return the effective configuration as plain data, every secret masked."""
        values = self.model_dump(mode="json")
        values["rabbitmq"]["url"] = [mask_url(url) for url in self.rabbitmq.url]
        proxy = self.sms_api.proxy
        values["sms_api"]["proxy"] = None if proxy is None else mask_url(proxy)
        return values


def known_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Yield the path of every section and key, as `worker.queue`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from known_keys(option, f"{prefix}{name}.")
