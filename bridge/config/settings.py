"""The whole configuration, and the sections that have no module of their own.

Each section is a class with the types and defaults of its keys; those of `sms_api` and `webhook`
are in the modules of these names.

`config.example.yaml` explains each key. A `Duration` is in seconds, in whatever unit it was
written.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
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
    List,
    Name,
    Port,
    QueueName,
    RetryDelay,
    Secret,
    Section,
    SenderName,
    write_on_or_off,
)
from bridge.config.sms_api import SmsApiSettings
from bridge.config.urls import BrokerUrls, OtlpUrl, mask_url
from bridge.config.webhook import WebhookSettings

Role = Literal["worker", "webhook"]
TopologyMode = Literal["declare", "verify", "off"]
# After an attempt with an unknown result, a message is sent again with its idempotency key
# (`retry`), or becomes a dead letter (`park`).
OnUncertain = Literal["retry", "park"]

ENV_PREFIX: Final = "SMS_BRIDGE_"
URGENT_BY_DEFAULT: Final = "{queue}.urgent"
# The default sender if requests to the service contain no sender.
NO_SENDER: Final = "unused"


class TlsSettings(Section):
    """TLS to the broker: trusted authorities, and a client certificate."""

    ca_file: FilePath | None = None
    cert_file: FilePath | None = None
    key_file: FilePath | None = None
    server_name: str | None = None


class RabbitMQSettings(Section):
    """The connection to RabbitMQ."""

    url: BrokerUrls = (SecretStr("amqp://guest:guest@localhost:5672/"),)
    username: Name | None = None
    username_file: FilePath | None = None
    password: Secret | None = None
    password_file: FilePath | None = None
    heartbeat_seconds: Annotated[int, Field(ge=1, le=300)] = 10
    connect_timeout_seconds: Duration = 10
    publish_timeout_seconds: Duration = 3
    tls: TlsSettings = TlsSettings()
    topology: Annotated[TopologyMode, BeforeValidator(write_on_or_off)] = "declare"


class RateLimitSettings(Section):
    """Limits of the send rate; `per_sender` limits each `from` separately."""

    per_second: Annotated[float, Field(gt=0)] | None = None
    burst: Annotated[int, Field(ge=1)] | None = None
    per_sender: Annotated[float, Field(gt=0)] | None = None
    scope: Literal["process", "cluster"] = "process"


class WorkerSettings(Section):
    """The worker, which sends the messages of a queue to the SMS API."""

    queue: QueueName = "sms.outbound"
    urgent_queue: Annotated[QueueName | None, Field(validate_default=True)] = URGENT_BY_DEFAULT
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
    coordination: Annotated[Literal["on", "off"], BeforeValidator(write_on_or_off)] = "on"
    redelivery_wait: Duration = 10
    deduplicate: Duration | None = None
    deduplicate_by: Literal["message_id", "text"] = "message_id"
    shutdown_timeout_seconds: Duration = 25

    @field_validator("urgent_queue", mode="before")
    @classmethod
    def _follow_the_queue(cls, name: object, info: ValidationInfo) -> object:
        if name != URGENT_BY_DEFAULT:
            return name
        # `queue` is missing here if its own value is invalid.
        return URGENT_BY_DEFAULT.format(queue=info.data.get("queue", "sms.outbound"))

    @property
    def most_in_flight(self) -> int:
        return self.max_concurrency if self.concurrency == "auto" else self.concurrency

    @model_validator(mode="after")
    def _delays_ascend(self) -> "WorkerSettings":
        if list(self.retry_delays) != sorted(set(self.retry_delays)):
            raise ValueError("retry_delays must ascend and not repeat, like [5s, 30s, 2m]")
        return self

    @model_validator(mode="after")
    def _urgent_queue_is_another(self) -> "WorkerSettings":
        own = (self.queue, f"{self.queue}.dead", f"{self.queue}.paused")
        urgent = self.urgent_queue
        if urgent is not None and (urgent in own or urgent.startswith(f"{self.queue}.retry.")):
            raise ValueError(
                "urgent_queue: must differ from the worker's other queues; name another queue, or "
                "set it to null"
            )
        return self

    @model_validator(mode="after")
    def _equal_texts_have_a_window(self) -> "WorkerSettings":
        if self.deduplicate_by == "text" and self.deduplicate is None:
            raise ValueError("deduplicate_by: text needs deduplicate, for how long, like 1m")
        return self


class AdminSettings(Section):
    """The port for probes and metrics; 0 takes any free port and logs it."""

    host: Name = "0.0.0.0"  # noqa: S104  probes come from outside the pod
    port: Port = 9090


class LogSettings(Section):
    """Level and format of the log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console", "auto"] = "auto"


class TracingSettings(Section):
    """Export of spans. W3C trace headers are passed on even if nothing is exported."""

    otlp_endpoint: OtlpUrl | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class Settings(BaseSettings):
    """The whole configuration. Create it with `load_settings`."""

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
        """Choose the defaults that depend on the service.

        If the service does not recognise repeats, a retry could send a second SMS: park. If
        requests to it contain no sender, a message needs none.
        """
        api, chosen = info.data.get("sms_api"), dict[str, str]()
        if not isinstance(api, SmsApiSettings):
            return worker
        if worker.on_uncertain is None:
            chosen["on_uncertain"] = "retry" if api.knows_repeats else "park"
        if worker.default_from is None and "from" not in api.request.placeholders:
            chosen["default_from"] = NO_SENDER
        return worker.model_copy(update=chosen)

    @model_validator(mode="after")
    def _queues_differ(self) -> "Settings":
        urgent = self.worker.urgent_queue
        if self.webhook.queue in (self.worker.queue, urgent):
            name = "urgent_queue" if self.webhook.queue == urgent else "queue"
            raise ValueError(
                f"worker.{name}: must differ from webhook.queue, or the worker would take the "
                "events for requests; name another queue, or set webhook.queue to null"
            )
        return self

    @model_validator(mode="after")
    def _endpoints_can_stand(self) -> "Settings":
        fault = next(self.webhook.endpoint_faults(), None)
        if fault is not None:
            raise ValueError(fault)
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
        """Use only the given values, because `load_settings` reads the environment itself."""
        return (init_settings,)

    @property
    def callback_url(self) -> str | None:
        """The address for receipts that the worker gives to the SMS service, if it is known.

        It is the public address of the first endpoint with the preset of `sms_api`.
        """
        for endpoint in self.webhook.all_endpoints:
            if endpoint.preset == self.sms_api.preset and endpoint.public_url is not None:
                return endpoint.public_url
        return None

    @property
    def receipt_exchange(self) -> str | None:
        """The exchange to which the webhook receiver publishes the outcomes in delivery receipts.

        None if no outcome exchange is configured, or no endpoint reads receipts.
        """
        endpoints = self.webhook.all_endpoints
        has_receipts = any(endpoint.receipts.status_pointers for endpoint in endpoints)
        return self.worker.outcome_exchange if has_receipts else None

    def masked(self) -> dict[str, Any]:
        """Return the effective configuration as plain data, with every secret masked."""
        values = self.model_dump(mode="json")
        values["rabbitmq"]["url"] = [mask_url(url) for url in self.rabbitmq.url]
        proxy = self.sms_api.proxy
        values["sms_api"]["proxy"] = None if proxy is None else mask_url(proxy)
        return values


def known_keys(
    model: type[BaseModel] = Settings, prefix: str = "", *, in_lists: bool = False
) -> Iterator[str]:
    """Yield the path of every section and key, as `worker.queue`.

    With `in_lists`, also the paths of keys in members of lists, as `webhook.endpoints.*.path`.
    """
    for name, field in model.model_fields.items():
        yield prefix + name
        is_list = get_origin(field.annotation) is tuple
        if is_list and not in_lists:
            continue
        below = f"{prefix}{name}.*." if is_list else f"{prefix}{name}."
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from known_keys(option, below, in_lists=in_lists)
