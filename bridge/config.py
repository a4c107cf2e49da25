"""Every setting: one YAML file, overridden by the environment, overridden by secret files."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.sources.utils import parse_env_vars
from yarl import URL

from bridge.errors import ConfigError

Role = Literal["worker", "webhook"]

ENV_PREFIX = "SMS_BRIDGE_"

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)")
_MASK = "***"
MAX_CONCURRENCY: Final = 5000
MAX_RETRY_DELAY_SECONDS: Final = 3650 * 86400
# A configuration is a few KiB of a few hundred values, three levels deep.
MAX_FILE_BYTES: Final = 256 * 1024
MAX_YAML_VALUES: Final = 10_000
MAX_YAML_DEPTH: Final = 20
MAX_FAULTS: Final = 20
MAX_SHOWN_KEY: Final = 32
# AMQP has 255 for a name, and retry queues put their delay behind it.
MAX_NAME_BYTES: Final = 200


def parse_duration(value: object) -> object:
    """Turn `90`, `10s`, `5m`, `2h` or `30d` into seconds; leave what is no text to the model."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a number of seconds or like 10s, 5m, 2h, 30d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def format_duration(seconds: float) -> str:
    """Write seconds in the largest unit that divides them: 120 is `2m`. Queue names use it."""
    for unit in "dhms":
        if seconds % _UNITS[unit] == 0:
            return f"{int(seconds // _UNITS[unit])}{unit}"
    return f"{seconds:g}s"


def _amqp_url(value: SecretStr) -> SecretStr:
    url = _url_of_login(value, ", or give them in rabbitmq.password_file", "amqp://host:5672/vhost")
    if url.scheme not in {"amqp", "amqps"} or not url.host:
        raise ValueError("must look like amqp://host:5672/vhost or amqps://...")
    if url.raw_fragment:
        raise ValueError("must not hold a #")
    if "no_verify_ssl" in url.query:
        raise ValueError("no_verify_ssl is refused; name your CA in rabbitmq.tls.ca_file")
    return value


def _url_of_login(value: SecretStr, place: str, example: str) -> URL:
    text = value.get_secret_value()
    # Where user and password of a URL end, whatever stands behind it.
    _, _, rest = re.sub("[?#]", "/", text.partition("://")[2]).partition("/")
    if "@" in rest:
        raise ValueError(
            "holds a /, ? or # before an @; percent-encode the user and the password "
            f"(/ is %2F){place}"
        )
    return _parse_url(text, example)


def _parse_url(value: str, example: str) -> URL:
    # The text of yarl's own error quotes the URL, which may hold a password.
    try:
        return URL(value)
    except ValueError:
        raise ValueError(f"is not a URL like {example}") from None


def _http_url(value: str) -> str:
    url = _parse_url(value, "https://api.example.com")
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError("must look like https://api.example.com")
    if url.user is not None or url.password is not None:
        # An HTTP client would send it as Basic, in place of the API key.
        raise ValueError("must not hold a user or password; the API key goes in sms_api.key_file")
    if url.query_string or url.fragment:
        raise ValueError("must not hold a query or a fragment")
    return value


def _without_slash(value: str) -> str:
    return value.rstrip("/")


def _proxy_url(value: SecretStr) -> SecretStr:
    url = _url_of_login(value, "", "http://proxy.example.com:3128")
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError("must look like http://proxy.example.com:3128")
    return value


def _not_blank(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().strip():
        raise ValueError("is empty; give a secret or leave the key out")
    return value


def _json_list(value: object) -> object:
    # In the environment a list is JSON text.
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError('must be a list; in the environment as JSON, like ["a", "b"]') from None


def _one_or_many(value: object) -> object:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [value]
    return _json_list(value)


def _count_or_auto(value: object) -> object:
    # Said at once: of a union each member would complain on its own.
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    is_count = type(value) is int and 1 <= value <= MAX_CONCURRENCY
    if not is_count and value != "auto":
        raise ValueError(f"must be a whole number from 1 to {MAX_CONCURRENCY}, or auto")
    return value


def _retry_delay(seconds: float) -> float:
    if seconds > MAX_RETRY_DELAY_SECONDS:
        most = format_duration(MAX_RETRY_DELAY_SECONDS)
        raise ValueError(f"must be at most {most}, RabbitMQ's longest x-message-ttl")
    return seconds


def _entity_name(name: str) -> str:
    if name.startswith("amq."):
        raise ValueError("must not begin with amq., which RabbitMQ keeps for itself")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"must have at most {MAX_NAME_BYTES} bytes in UTF-8")
    # All that pamqp writes into a frame; with another name a role would connect for ever.
    if not re.fullmatch("[a-zA-Z0-9_.:@#,/+ -]*", name):
        raise ValueError("must be of letters and digits of ASCII, spaces and - _ . : @ # , / +")
    return name


def _exchange_name(name: str) -> str:
    # The one topic exchange that every vhost has.
    return name if name == "amq.topic" else _entity_name(name)


def _header_name(value: str) -> str:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", value):
        raise ValueError("is not an HTTP header name")
    return value


_POINTER = r"^(/[^/]*)+$"
_SENDER = r"^[^\x00-\x1f\x7f-\x9f]*$"
_FORMAT = r"^(plain|kv|list|prefix:[!-~]{1,32})$"
_SIGNED = r"\{(body|url)\}"
# A request's path is compared decoded.
_PATH = r"^/[^?#%{}\s]*$"
# A fault tells these words in place of the pattern.
PATTERNS: Final = {
    _POINTER: "must be a JSON pointer like /data/id",
    _SENDER: "must not hold line breaks or control characters",
    _FORMAT: "must be plain, kv, list, or prefix: and what stands before the signature",
    _SIGNED: "must hold {body} or {url}",
    _PATH: "must begin with / and hold no space, ?, #, %, { or }",
}
# The same for pydantic's own words, by the type of the error.
_TEXTS: Final = {
    "string_type": "must be text; a number needs quotes",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} in its list",
    "too_long": "must have at most {max_length} in its list",
    "tuple_type": "must be a list",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt:.15g}",
    "greater_than_equal": "must be at least {ge:.15g}",
    "less_than_equal": "must be at most {le:.15g}",
    "literal_error": "must be {expected}",
    "path_type": "must be the path of a file",
    "model_type": "must hold keys, indented below it",
}

# Durations are numbers of seconds inside the program.
Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, allow_inf_nan=False)]
Secret = Annotated[SecretStr, AfterValidator(_not_blank)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
QueueName = Annotated[Name, AfterValidator(_entity_name)]
ExchangeName = Annotated[Name, AfterValidator(_exchange_name)]
RetryDelay = Annotated[Duration, AfterValidator(_retry_delay)]
Port = Annotated[int, Field(ge=0, le=65535)]
Pointer = Annotated[str, StringConstraints(pattern=_POINTER)]
SenderName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=32, pattern=_SENDER),
]
# Marks a list, so that the environment can give it as JSON.
List = BeforeValidator(_json_list)


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _read_map(cls, value: object) -> object:
        """Take an empty section for all defaults, and JSON where the environment gives a map."""
        if value is None:
            return {}
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must hold keys; in the environment it is JSON") from None


class TlsSettings(_Section):
    """How to trust the broker and be trusted by it."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None


class RabbitMQSettings(_Section):
    """The broker."""

    url: Annotated[
        tuple[Annotated[SecretStr, AfterValidator(_amqp_url)], ...],
        BeforeValidator(_one_or_many),
        Field(min_length=1),
    ] = (SecretStr("amqp://guest:guest@localhost:5672/"),)
    username: Name | None = None
    username_file: Path | None = None
    password: Secret | None = None
    password_file: Path | None = None
    heartbeat_seconds: Annotated[int, Field(ge=1, le=300)] = 10
    connect_timeout_seconds: Duration = 10
    publish_timeout_seconds: Duration = 3
    tls: TlsSettings = TlsSettings()
    topology: Literal["declare", "verify", "off"] = "declare"


class SmsApiSettings(_Section):
    """The SMS service's REST API."""

    base_url: Annotated[str, AfterValidator(_http_url), AfterValidator(_without_slash)] | None = (
        None
    )
    key: Secret | None = None
    key_file: Path | None = None
    timeout_seconds: Duration = 20
    connect_timeout_seconds: Duration = 5
    proxy: Annotated[SecretStr, AfterValidator(_proxy_url)] | None = None
    ca_file: Path | None = None
    idempotency_header: Annotated[str, AfterValidator(_header_name)] | None = "Idempotency-Key"
    message_id_pointers: Annotated[tuple[Pointer, ...], List] = (
        "/id",
        "/message_id",
        "/messages/0/id",
    )


class RateLimitSettings(_Section):
    """How fast to send; `per_sender` limits each `from` on its own."""

    per_second: Annotated[float, Field(gt=0)] | None = None
    burst: Annotated[int, Field(ge=1)] | None = None
    per_sender: Annotated[float, Field(gt=0)] | None = None
    scope: Literal["process", "cluster"] = "process"


class WorkerSettings(_Section):
    """From the queue to the API."""

    queue: QueueName = "sms.outbound"
    concurrency: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)] = 50
    max_concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] = 200
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 6
    max_uncertain_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    on_uncertain: Literal["retry", "park"] = "retry"
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


class SignatureSettings(_Section):
    """How the service signs; a preset sets every knob, and a single knob overrides it."""

    preset: Literal[
        "plain", "github", "stripe", "slack", "shopify", "standard-webhooks", "twilio"
    ] = "plain"
    header: Annotated[str, AfterValidator(_header_name)] | None = None
    algorithm: Literal["sha256", "sha1", "sha384", "sha512"] | None = None
    encoding: Literal["auto", "hex", "base64", "base64url"] | None = None
    format: Annotated[str, StringConstraints(pattern=_FORMAT)] | None = None
    signed_content: (
        Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_SIGNED)] | None
    ) = None
    timestamp_from: Name | None = None
    timestamp_unit: Literal["s", "ms"] | None = None
    tolerance_seconds: Duration | None = None
    id_header: Annotated[str, AfterValidator(_header_name)] | None = None
    secret_encoding: Literal["utf8", "base64", "hex", "whsec"] | None = None


class WebhookSettings(_Section):
    """From the service's webhooks to the exchange."""

    host: Name = "0.0.0.0"  # noqa: S104  the role exists to be reached
    port: Port = 8080
    path: Annotated[str, StringConstraints(pattern=_PATH)] = "/webhooks"
    exchange: ExchangeName = "sms.inbound"
    queue: QueueName | None = "sms.inbound"
    secrets: Annotated[tuple[Secret, ...], List, Field(min_length=1, max_length=5)] | None = None
    secret_files: Annotated[tuple[Path, ...], List, Field(min_length=1, max_length=5)] | None = None
    signature: SignatureSettings = SignatureSettings()
    event_id_pointers: Annotated[tuple[Pointer, ...], List] = (
        "/id",
        "/data/id",
        "/data/message_id",
    )
    repeat_window: Duration = 600
    event_types: Annotated[tuple[Name, ...], List, Field(max_length=20)] = ("message.received",)
    public_url: Annotated[str, AfterValidator(_http_url)] | None = None
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


class AdminSettings(_Section):
    """Probes and metrics; port 0 takes any free port and logs it."""

    host: Name = "0.0.0.0"  # noqa: S104  probes come from outside the pod
    port: Port = 9090


class LogSettings(_Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console", "auto"] = "auto"


class TracingSettings(_Section):
    """Where spans go. W3C trace headers are passed on with tracing on or off."""

    otlp_endpoint: Annotated[str, AfterValidator(_http_url)] | None = None
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
    sms_api: SmsApiSettings = SmsApiSettings()
    worker: WorkerSettings = WorkerSettings()
    webhook: WebhookSettings = WebhookSettings()
    admin: AdminSettings = AdminSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()

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


def mask_url(url: SecretStr) -> str:
    """Write a URL without its user, password, query and fragment: each may be a secret."""
    parsed = URL(url.get_secret_value())
    shown = parsed.with_user(None)
    if parsed.user is not None:
        shown = shown.with_user(_MASK)
    if parsed.password is not None:
        shown = shown.with_password(_MASK)
    rest = f"?{_MASK}" if parsed.raw_query_string else ""
    return f"{shown.with_query(None).with_fragment(None)}{rest}"


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the file, lay the environment over it, and check the whole.

    Raises ConfigError with one line for each fault. Secret files are not opened here: what a
    role needs is read when it starts, and again whenever the file changes.
    """
    values, lines = ({}, {}) if path is None else _read_yaml(path)
    unknown = {name: _unknown(name, value) for name, value in environ.items()}
    known = {name: value for name, value in environ.items() if not unknown[name]}
    faults = [fault for fault in unknown.values() if fault]
    try:
        settings = Settings.model_validate(_merge(values, _Environment(Settings, known)()))
    except ValidationError as error:
        errors = error.errors(include_input=False, include_url=False)
        faults += [_describe(one, lines) for one in errors[:MAX_FAULTS]]
        if len(errors) > MAX_FAULTS:
            faults.append(f"and {len(errors) - MAX_FAULTS} faults more")
    if faults:
        raise ConfigError(*faults)
    if settings.tracing.otlp_endpoint is not None:
        raise ConfigError(
            "tracing.otlp_endpoint: this version passes trace headers on but exports no spans; "
            "leave it null"
        )
    return settings


class _Environment(EnvSettingsSource):
    """pydantic-settings' reader of the environment, over a mapping that is handed in."""

    def __init__(self, settings: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return parse_env_vars(
            self._environ, self.case_sensitive, self.env_ignore_empty, self.env_parse_none_str
        )


def _variable(path: str) -> str:
    """Name the variable that overrides a key."""
    return ENV_PREFIX + path.upper().replace(".", "__")


def _unknown(variable: str, value: str) -> str | None:
    """Describe a variable that looks like a setting and is none."""
    name = variable.upper()
    path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
    if not name.startswith(ENV_PREFIX) or path in known_keys():
        return None
    if "." not in path:
        # Kubernetes adds such names by itself for a Service: SMS_BRIDGE_WEBHOOK_PORT=tcp://...
        is_of_kubernetes = value.startswith(("tcp://", "udp://", "sctp://"))
        meant = None if is_of_kubernetes else _flat_keys().get(name)
        return f"{variable}: is not read; did you mean {meant}?" if meant else None
    section = path.partition(".")[0]
    if section not in Settings.model_fields:
        return f"{variable}: unknown section{_nearest(section, Settings.model_fields)}"
    return _unknown_key(path.split("."), variable)


def _flat_keys() -> dict[str, str]:
    """Map each variable, written with single underscores, to how it is written."""
    return {
        _variable(path).replace("__", "_"): _variable(path) for path in known_keys() if "." in path
    }


def _unknown_key(path: Sequence[str], place: str) -> str:
    """Describe a key that there is not; `place` tells where it is when it must not be quoted."""
    *sections, key = path
    prefix = "".join(f"{section}." for section in sections)
    siblings = [k.removeprefix(prefix) for k in known_keys() if k.startswith(prefix)]
    meant = _nearest(key, siblings, prefix)
    subject = f"{prefix}{key}" if _may_be_shown(key, is_known=bool(meant)) else place
    return f"{subject}: unknown key{meant}"


def _may_be_shown(key: str, *, is_known: bool = False) -> bool:
    """Whether a key looks like the name of a setting, and not like a secret or a number.

    `{password:hunter}` is one key in YAML, because no space follows the colon.
    """
    if len(key) > MAX_SHOWN_KEY or not re.fullmatch("[A-Za-z]+(?:[_-][A-Za-z]+)*", key):
        return False
    return is_known or key.islower()


class _Loader(yaml.SafeLoader):
    """YAML without booleans, for there are none: `topology: off` is a word, and `yes` no number.

    Depth and the number of values are bounded, each alias counted as all that it stands for.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  yaml's own form
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith(":bool")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._values_of: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read one value with all that is in it; refuse what is too deep, or too much."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._values
        self._depth += 1
        if self._depth > MAX_YAML_DEPTH:
            problem = f"lies more than {MAX_YAML_DEPTH} levels deep; no setting does"
            raise _OwnFault(problem=problem, problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._values_of:
            problem = "an alias (*) stands inside of what it names; write the value out"
            raise _OwnFault(problem=problem, problem_mark=mark)
        self._values += self._values_of[node] if is_alias else 1
        if self._values > MAX_YAML_VALUES:
            problem = f"holds more than {MAX_YAML_VALUES:,} values, what aliases (*) repeat too"
            raise _OwnFault(problem=problem, problem_mark=mark)
        if not is_alias:
            self._values_of[node] = self._values - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Take each key as text; refuse one that is there twice, whose last PyYAML would take."""
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                problem = "a list or a map cannot be a key; text with a [ or { needs quotes"
                raise _OwnFault(problem=problem, problem_mark=name.start_mark)
            if name.value in seen:
                which = f"the key `{name.value}`" if _may_be_shown(name.value) else "a key"
                problem = f"{which} is there twice; keep one"
                raise _OwnFault(problem=problem, problem_mark=name.start_mark)
            seen.add(name.value)
            if not name.tag.endswith(":merge"):
                name.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


class _OwnFault(yaml.MarkedYAMLError):
    """What PyYAML would take; `problem` is our own text."""


# The line of each key, by its path.
Lines = dict[tuple[str, ...], int]


def _read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    try:
        values, lines = _load_yaml(_read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {_yaml_fault(error)}") from None
    except (yaml.YAMLError, ValueError):
        # A control character, or what looks like a date or a number and is none.
        why = "it holds an impossible character, date or number; put text in quotes"
        raise ConfigError(f"{path}: is not YAML: {why}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections such as `rabbitmq:` at the top")
    return values, lines


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        most = MAX_FILE_BYTES // 1024
        raise ConfigError(f"{path}: is larger than {most} KiB; is it the configuration?")
    return content.decode("utf-8")


def _load_yaml(text: str) -> tuple[Any, Lines]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_lines_of(node))
    finally:
        loader.dispose()


def _lines_of(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        below = (*path, str(name.value))
        yield below, name.start_mark.line + 1
        yield from _lines_of(value, below)


def _yaml_fault(error: yaml.MarkedYAMLError) -> str:
    # PyYAML's own text may quote the file, so it is only compared.
    said = error.problem or ""
    match error:
        case _OwnFault():
            return said
        case yaml.scanner.ScannerError() if "'\\t'" in said:
            return "is not YAML: a tab stands where only spaces may"
        case yaml.scanner.ScannerError() if "cannot start any token" in said:
            return "is not YAML: text that begins with @, % or ` needs quotes"
        case yaml.scanner.ScannerError() if "mapping values" in said:
            return "is not YAML: a colon too many; indent keys alike, put text with `: ` in quotes"
        case yaml.composer.ComposerError() if "another document" in said:
            return "is not YAML for one configuration: take the second `---` out"
        case yaml.composer.ComposerError():
            return "is not YAML: text that begins with * or & needs quotes"
        case yaml.constructor.ConstructorError() if "the tag" in said:
            return "is not YAML that is read here: text that begins with ! needs quotes"
        case _:
            return "is not YAML: look for a quote, a bracket or a space too few or too many"


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key) or {}
        if not isinstance(value, dict):
            merged[key] = value
        elif isinstance(below, dict):
            merged[key] = _merge(below, value)
    return merged


def _describe(error: ErrorDetails, lines: Lines) -> str:
    loc = tuple(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        line = f", line {lines[loc]}" if loc in lines else ""
        return _unknown_key(loc, (".".join(loc[:-1]) or "the top") + line)
    path = ".".join(loc)
    facts = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch":
        text = PATTERNS[facts["pattern"]]
    elif error["type"] in _TEXTS:
        text = _TEXTS[error["type"]].format(**facts)
    else:
        text = error["msg"].removeprefix("Value error, ")
    return f"{path}: {text}" if path else text


def _nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(name[:MAX_NAME_BYTES].lower(), list(names), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def known_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Yield the path of every section and key, as `worker.queue`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from known_keys(option, f"{prefix}{name}.")
