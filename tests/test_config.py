"""The configuration: defaults, order, refusals that help, and secrets that nothing shows."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.config import Settings, load_settings
from bridge.config.durations import format_duration, parse_duration
from bridge.config.fields import PATTERNS
from bridge.config.settings import known_keys
from bridge.errors import ConfigError
from bridge.inbound.schemes import scheme_from
from bridge.start_checks import api_key, webhook_secrets

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"
CANARY = "Canary7Secret"
PATTERN = re.compile(r'"pattern": "((?:[^"\\]|\\.)*)"')

Load = Callable[..., Settings]
Faults = Callable[..., tuple[str, ...]]

# Every key and its default, as the documents promise them.
DEFAULTS: dict[str, Any] = {
    "rabbitmq.url": ["amqp://***:***@localhost:5672/"],
    "rabbitmq.username": None,
    "rabbitmq.username_file": None,
    "rabbitmq.password": None,
    "rabbitmq.password_file": None,
    "rabbitmq.heartbeat_seconds": 10,
    "rabbitmq.connect_timeout_seconds": 10,
    "rabbitmq.publish_timeout_seconds": 3,
    "rabbitmq.tls.ca_file": None,
    "rabbitmq.tls.cert_file": None,
    "rabbitmq.tls.key_file": None,
    "rabbitmq.tls.server_name": None,
    "rabbitmq.topology": "declare",
    "sms_api.base_url": None,
    "sms_api.key": None,
    "sms_api.key_file": None,
    "sms_api.timeout_seconds": 20,
    "sms_api.connect_timeout_seconds": 5,
    "sms_api.proxy": None,
    "sms_api.ca_file": None,
    "sms_api.idempotency_header": "Idempotency-Key",
    "sms_api.message_id_pointers": ["/id", "/message_id", "/messages/0/id"],
    "worker.queue": "sms.outbound",
    "worker.concurrency": 50,
    "worker.max_concurrency": 200,
    "worker.max_attempts": 6,
    "worker.max_uncertain_attempts": 3,
    "worker.on_uncertain": "retry",
    "worker.retry_delays": [5, 30, 120, 600, 3600],
    "worker.outage_after": 10,
    "worker.max_age": None,
    "worker.default_from": None,
    "worker.max_text_length": 1600,
    "worker.extra_fields": "refuse",
    "worker.ordering": "none",
    "worker.rate_limit.per_second": None,
    "worker.rate_limit.burst": None,
    "worker.rate_limit.per_sender": None,
    "worker.rate_limit.scope": "process",
    "worker.outcome_exchange": None,
    "worker.shutdown_timeout_seconds": 25,
    "webhook.host": "0.0.0.0",
    "webhook.port": 8080,
    "webhook.path": "/webhooks",
    "webhook.exchange": "sms.inbound",
    "webhook.queue": "sms.inbound",
    "webhook.secrets": None,
    "webhook.secret_files": None,
    "webhook.signature.preset": "plain",
    "webhook.signature.header": None,
    "webhook.signature.algorithm": None,
    "webhook.signature.encoding": None,
    "webhook.signature.format": None,
    "webhook.signature.signed_content": None,
    "webhook.signature.timestamp_from": None,
    "webhook.signature.timestamp_unit": None,
    "webhook.signature.tolerance_seconds": None,
    "webhook.signature.id_header": None,
    "webhook.signature.secret_encoding": None,
    "webhook.event_id_pointers": ["/id", "/data/id", "/data/message_id"],
    "webhook.repeat_window": 600,
    "webhook.event_types": ["message.received"],
    "webhook.public_url": None,
    "webhook.max_header_bytes": 16384,
    "webhook.max_headers": 100,
    "webhook.max_body_bytes": 262144,
    "webhook.max_buffered_bytes": 67108864,
    "webhook.max_connections": 1024,
    "webhook.max_in_flight": 512,
    "webhook.response_timeout_seconds": 2.5,
    "webhook.body_timeout_seconds": 10,
    "webhook.idle_timeout_seconds": 15,
    "webhook.keep_alive_seconds": 75,
    "webhook.shutdown_timeout_seconds": 20,
    "admin.host": "0.0.0.0",
    "admin.port": 9090,
    "log.level": "info",
    "log.format": "auto",
    "tracing.otlp_endpoint": None,
    "tracing.sample_ratio": 0.1,
}


def env_name(key: str) -> str:
    """Write a key as the variable that overrides it."""
    return "SMS_BRIDGE_" + key.upper().replace(".", "__")


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Take the value of a dotted key."""
    value: Any = values
    for part in key.split("."):
        value = value[part]
    return value


def nested(key: str, value: object) -> dict[str, Any]:
    """Write a dotted key and its value as sections."""
    section, _, rest = key.partition(".")
    return {section: nested(rest, value) if rest else value}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key that holds no section."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the path of every section and key."""
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{name}.")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a file's text (or the values that it holds) and an environment."""

    def loaded(text: str | dict[str, Any] = "", **environ: str) -> Settings:
        path = tmp_path / "config.yaml"
        path.write_text(text if isinstance(text, str) else yaml.safe_dump(text), encoding="utf-8")
        return load_settings(path, environ)

    return loaded


@pytest.fixture
def faults(load: Load) -> Faults:
    """Load what must be refused and return its faults."""

    def refused(text: str | dict[str, Any] = "", **environ: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            load(text, **environ)
        return caught.value.faults

    return refused


# --- Defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "default"), DEFAULTS.items(), ids=DEFAULTS)
def test_default(key: str, default: object) -> None:
    """Each key has the default that the documents promise."""
    effective = load_settings(None, {}).masked()

    assert value_at(effective, key) == default


def test_every_key_has_a_promised_default() -> None:
    """The model has no key that the table of defaults above does not know."""
    assert set(leaves(Settings.model_validate({}).model_dump())) == set(DEFAULTS)


def test_default_broker_url() -> None:
    """Without a word the bridge talks to a broker on this computer as guest."""
    (url,) = load_settings(None, {}).rabbitmq.url

    assert url.get_secret_value() == "amqp://guest:guest@localhost:5672/"


@pytest.mark.parametrize("text", ["", "# nothing\n", "worker:\n", "---\n"])
def test_empty_file_or_section_means_defaults(load: Load, text: str) -> None:
    """A file, or a section, that says nothing leaves the defaults."""
    assert load(text) == load_settings(None, {})


@pytest.mark.parametrize("key", ["rabbitmq.tls", "worker.rate_limit", "webhook.signature"], ids=str)
def test_empty_inner_section_means_defaults(load: Load, key: str) -> None:
    """An inner section whose keys are all commented out leaves the defaults too."""
    section, name = key.split(".")

    assert load(f"{section}:\n  {name}:\n") == load_settings(None, {})


# --- The example ---------------------------------------------------------------------------------


def test_example_lists_every_key() -> None:
    """The example names every section and key of the model, and no other."""
    example = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))

    assert set(paths(example)) == set(known_keys())


@pytest.mark.parametrize("key", DEFAULTS)
def test_example_shows_the_default(key: str) -> None:
    """The example gives each key its default."""
    example = load_settings(EXAMPLE, {}).masked()

    assert value_at(example, key) == DEFAULTS[key]


def test_example_writes_durations_with_units() -> None:
    """The example shows how durations are written, not what they are in seconds."""
    example = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))

    assert example["worker"]["retry_delays"] == ["5s", "30s", "2m", "10m", "1h"]


@pytest.mark.parametrize("line", ["  base_url: null", "  key: null", "  secrets: null"])
def test_example_says_what_is_required(line: str) -> None:
    """Above a required key, which has no default, the example says so."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    above = lines[lines.index(line) - 1]

    assert above.lstrip().startswith("# Required")


# --- File, environment, secret files -------------------------------------------------------------


def test_file_overrides_default(load: Load) -> None:
    """What the file says holds."""
    assert load("worker: {queue: from.file}").worker.queue == "from.file"


def test_environment_overrides_file(load: Load) -> None:
    """What the environment says holds against the file."""
    loaded = load("worker: {queue: from.file}", SMS_BRIDGE_WORKER__QUEUE="from.environment")

    assert loaded.worker.queue == "from.environment"


def test_environment_overrides_only_what_it_names(load: Load) -> None:
    """Other keys of the same section stay as the file has them."""
    loaded = load("worker: {queue: from.file}", SMS_BRIDGE_WORKER__CONCURRENCY="7")

    assert (loaded.worker.queue, loaded.worker.concurrency) == ("from.file", 7)


def test_environment_overrides_inside_a_deeper_section(load: Load) -> None:
    """A deeper key of the environment leaves its neighbours in the file alone."""
    loaded = load(
        "worker: {rate_limit: {per_second: 5, burst: 9}}",
        SMS_BRIDGE_WORKER__RATE_LIMIT__PER_SECOND="7",
    )

    assert (loaded.worker.rate_limit.per_second, loaded.worker.rate_limit.burst) == (7, 9)


def test_environment_does_not_hide_a_section_that_is_none(faults: Faults) -> None:
    """A section of the file that is a text is a fault, whatever the environment adds to it."""
    assert faults("worker: junk", SMS_BRIDGE_WORKER__QUEUE="q")


def test_key_file_overrides_key(load: Load, tmp_path: Path) -> None:
    """The API key is the file's when there is a key file, even against the environment."""
    (tmp_path / "key").write_text("from-key-file\n", encoding="utf-8")
    loaded = load(
        {
            "sms_api": {
                "base_url": "https://api.example.com",
                "key": "from-file",
                "key_file": str(tmp_path / "key"),
            }
        },
        SMS_BRIDGE_SMS_API__KEY="from-environment",
    )

    assert api_key(loaded.sms_api).current == "from-key-file"


@pytest.mark.parametrize(("key", "setting"), [("a b", "key"), (None, "key_file")])
def test_fault_of_the_api_key_names_the_setting_that_gave_it(
    load: Load, tmp_path: Path, key: str | None, setting: str
) -> None:
    """An API key that cannot be used is told by the setting that it comes from."""
    file = None if key else str(tmp_path / "nothing")
    api = {"base_url": "https://api.example.com", "key": key, "key_file": file}

    with pytest.raises(ConfigError, match=rf"^sms_api\.{setting}: "):
        api_key(load({"sms_api": api}).sms_api)


def test_environment_key_overrides_file_key(load: Load) -> None:
    """Without a key file the environment's key holds against the file's."""
    loaded = load(
        "sms_api: {base_url: https://api.example.com, key: from-file}",
        SMS_BRIDGE_SMS_API__KEY="from-environment",
    )

    assert api_key(loaded.sms_api).current == "from-environment"


def test_secret_files_override_secrets(load: Load, tmp_path: Path) -> None:
    """The webhook secrets are the files' when there are secret files."""
    (tmp_path / "secret").write_text("from-secret-file\n", encoding="utf-8")
    loaded = load({"webhook": {"secrets": ["a"], "secret_files": [str(tmp_path / "secret")]}})
    scheme = scheme_from(loaded.webhook.signature, None)

    assert [c.current for c in webhook_secrets(loaded.webhook, scheme)] == ["from-secret-file"]


@pytest.mark.parametrize(
    "name",
    ["SMS_BRIDGE_WORKER__QUEUE", "SMS_BRIDGE_Worker__Queue", "sms_bridge_worker__queue"],
)
def test_case_of_variables_does_not_matter(load: Load, name: str) -> None:
    """A variable is known in any case, as Windows and people write it."""
    assert load("", **{name: "q"}).worker.queue == "q"


@pytest.mark.parametrize(
    "password", ['{"a": 1}', "123", "true", "[1]", '"q"', "a@b:c/d?e#f%g", "0x1F", "p w"]
)
def test_password_of_the_environment_is_taken_as_it_is(load: Load, password: str) -> None:
    """A password may hold any character; nothing in it is read as JSON or as a number."""
    loaded = load("", SMS_BRIDGE_RABBITMQ__PASSWORD=password).rabbitmq.password

    assert loaded is not None
    assert loaded.get_secret_value() == password


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("worker.retry_delays", '["1s", "2m", 7200]', [1, 120, 7200]),
        ("webhook.event_types", '["a", "b.c"]', ["a", "b.c"]),
        ("webhook.event_id_pointers", '["/x/0"]', ["/x/0"]),
        ("sms_api.message_id_pointers", "[]", []),
        ("webhook.secret_files", '["/run/a", "/run/b"]', ["/run/a", "/run/b"]),
        ("rabbitmq.url", "amqp://one/", ["amqp://one/"]),
        ("rabbitmq.url", '["amqp://one/", "amqps://two/"]', ["amqp://one/", "amqps://two/"]),
        ("worker.concurrency", "7", 7),
        ("worker.concurrency", "auto", "auto"),
        ("tracing.sample_ratio", "0.5", 0.5),
        ("worker.max_age", "30d", 2592000),
        ("rabbitmq.tls.server_name", "rabbit.example.com", "rabbit.example.com"),
        ("rabbitmq.topology", "off", "off"),
    ],
)
def test_value_of_the_environment(load: Load, key: str, text: str, value: object) -> None:
    """Lists are JSON in the environment; numbers and durations are written as in the file."""
    assert value_at(load("", **{env_name(key): text}).masked(), key) == value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("worker.rate_limit", '{"per_second": 5}', {"per_second": 5}),
        ("rabbitmq.tls", '{"server_name": "rabbit"}', {"server_name": "rabbit"}),
        ("webhook.signature", '{"preset": "github"}', {"preset": "github"}),
    ],
    ids=["rate_limit", "tls", "signature"],
)
def test_map_of_the_environment(load: Load, key: str, text: str, value: dict[str, Any]) -> None:
    """Maps are JSON in the environment, as lists are."""
    effective = value_at(load("", **{env_name(key): text}).masked(), key)

    assert {name: effective[name] for name in value} == value


@pytest.mark.parametrize("key", [key for key, default in DEFAULTS.items() if default is None])
def test_null_of_the_environment(load: Load, key: str) -> None:
    """`null` in the environment takes back what the file says."""
    values: dict[str, object] = {
        "worker.max_age": "1h",
        "webhook.public_url": "https://a.example",
        "sms_api.base_url": "https://a.example",
        "sms_api.proxy": "http://a.example",
        "webhook.secrets": ["a"],
        "webhook.secret_files": ["a"],
        "webhook.signature.algorithm": "sha1",
        "webhook.signature.encoding": "hex",
        "webhook.signature.format": "plain",
        "webhook.signature.signed_content": "{body}",
        "webhook.signature.timestamp_unit": "ms",
        "webhook.signature.tolerance_seconds": "1m",
        "webhook.signature.secret_encoding": "hex",
        "tracing.otlp_endpoint": "http://a.example",
        **{f"worker.rate_limit.{name}": 1 for name in ("per_second", "burst", "per_sender")},
    }
    loaded = load(nested(key, values.get(key, "a")), **{env_name(key): "null"})

    assert value_at(loaded.masked(), key) is None


@pytest.mark.parametrize("key", ["webhook.queue", "sms_api.idempotency_header"])
@pytest.mark.parametrize("source", ["file", "environment"])
def test_null_turns_off(load: Load, key: str, source: str) -> None:
    """What has a default and can be turned off is turned off by null, from either source."""
    in_file = nested(key, None) if source == "file" else ""
    environ = {} if source == "file" else {env_name(key): "null"}

    assert value_at(load(in_file, **environ).masked(), key) is None


@pytest.mark.parametrize("key", ["worker.queue", "worker.concurrency", "log.level", "rabbitmq.url"])
def test_null_is_refused_where_it_means_nothing(faults: Faults, key: str) -> None:
    """Null for a key that must have a value is a fault that names the key."""
    (fault,) = faults(nested(key, None))

    assert fault.startswith(f"{key}")


# --- What Kubernetes adds by itself --------------------------------------------------------------


OF_KUBERNETES = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "8080",
    "SERVICE_PORT_HTTP": "8080",
    "PORT": "tcp://10.0.0.1:8080",
    "PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "PORT_8080_TCP_PROTO": "tcp",
    "PORT_8080_TCP_PORT": "8080",
    "PORT_8080_TCP_ADDR": "10.0.0.1",
    "PORT_53_UDP": "udp://10.0.0.1:53",
    "PORT_53_UDP_ADDR": "10.0.0.1",
    "PORT_9_SCTP_PROTO": "sctp",
}


@pytest.mark.parametrize("service", ["", "WORKER_", "WEBHOOK_", "ADMIN_", "A__B_"])
@pytest.mark.parametrize(("name", "value"), OF_KUBERNETES.items(), ids=OF_KUBERNETES)
def test_variable_of_a_service_is_ignored(load: Load, service: str, name: str, value: str) -> None:
    """What Kubernetes tells of a Service called `sms-bridge`, or so at its start, is no setting."""
    assert load("", **{f"SMS_BRIDGE_{service}{name}": value}) == load_settings(None, {})


@pytest.mark.parametrize(
    "name",
    [
        "SMS_BRIDGE_CONFIG",
        "SMS_BRIDGE_REVISION",
        "SMS_BRIDGE_TEST_AMQP_URL",
        "SMS_BRIDGED__WORKER",
        "_SMS_BRIDGE_COMPLETE",
        "PATH",
    ],
)
def test_variable_that_is_no_setting_is_ignored(load: Load, name: str) -> None:
    """What names the file, the image's revision, the tests' broker, or others' things is let be."""
    assert load("", **{name: "x"}) == load_settings(None, {})


# --- Unknown names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("worker: {queu: q}", "worker.queu: unknown key; did you mean worker.queue?"),
        (
            "worker: {rate_limit: {per_secnd: 1}}",
            "worker.rate_limit.per_secnd: unknown key; did you mean worker.rate_limit.per_second?",
        ),
        (
            "rabbitmq: {tls: {cafile: x}}",
            "rabbitmq.tls.cafile: unknown key; did you mean rabbitmq.tls.ca_file?",
        ),
        ("rabitmq: {url: x}", "rabitmq: unknown key; did you mean rabbitmq?"),
        ("zzzzzz: 1", "zzzzzz: unknown key"),
    ],
    ids=["key", "deeper", "deeper-again", "section", "like-nothing"],
)
def test_unknown_key_of_the_file(faults: Faults, text: str, fault: str) -> None:
    """An unknown key is refused by its path, with the nearest known one."""
    assert faults(text) == (fault,)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("worker:\n  +4915550101234: x\n", "worker, line 2: unknown key"),
        ("worker: {4915550101234: x}", "worker, line 1: unknown key"),
        ("rabbitmq:\n  {password:canary-4f1d}\n", "rabbitmq, line 2: unknown key"),
        ("sms_api:\n  sk_live_4eC39HqLyjWDarjt: x", "sms_api, line 2: unknown key"),
        ("\nCanary4f1d: {}", "the top, line 2: unknown key"),
        ("QuxQuuxCorge: {}", "the top, line 1: unknown key"),
        ("a" * 33 + ": {}", "the top, line 1: unknown key"),
        ("worker: {Max_Attempts: 1}", "worker.Max_Attempts: unknown key; did you mean worker.max_"),
    ],
)
def test_unknown_key_that_may_be_a_secret(faults: Faults, text: str, fault: str) -> None:
    """A key that does not look like a setting's name is told by its line, and not quoted."""
    (said,) = faults(text)

    assert said.startswith(fault)
    assert "canary" not in said


def test_key_that_is_there_twice_and_may_be_a_secret(faults: Faults) -> None:
    """A key that is there twice is told by its line when it could be a secret."""
    (said,) = faults("worker: {4915550101234: x, 4915550101234: y}")

    assert said.endswith(", line 1: a key is there twice; keep one")


def test_keys_of_a_map_in_the_environment(faults: Faults) -> None:
    """The same holds for a map in the environment, which has no lines."""
    assert faults("", SMS_BRIDGE_WORKER__RATE_LIMIT='{"4915550101234": 1}') == (
        "worker.rate_limit: unknown key",
    )


def test_unknown_variable_is_named(faults: Faults) -> None:
    """The name of a variable is no secret."""
    (said,) = faults("", SMS_BRIDGE_WORKER__QUEUE2="q")

    assert said == "SMS_BRIDGE_WORKER__QUEUE2: unknown key; did you mean worker.queue?"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (
            "SMS_BRIDGE_WORKER__QUEU",
            "worker.queu: unknown key; did you mean worker.queue?",
        ),
        (
            "SMS_BRIDGE_RABBITMQ__TLS__CAFILE",
            "rabbitmq.tls.cafile: unknown key; did you mean rabbitmq.tls.ca_file?",
        ),
        (
            "SMS_BRIDGE_WORKR__QUEUE",
            "SMS_BRIDGE_WORKR__QUEUE: unknown section; did you mean worker?",
        ),
    ],
    ids=["key", "deeper", "section"],
)
def test_unknown_key_of_the_environment(faults: Faults, name: str, fault: str) -> None:
    """A misspelt variable is refused as well, not silently without effect."""
    assert faults("", **{name: "x"}) == (fault,)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SMS_BRIDGE_WORKER_CONCURRENCY", "SMS_BRIDGE_WORKER__CONCURRENCY"),
        ("SMS_BRIDGE_SMS_API_KEY_FILE", "SMS_BRIDGE_SMS_API__KEY_FILE"),
        ("SMS_BRIDGE_RABBITMQ_TLS_CA_FILE", "SMS_BRIDGE_RABBITMQ__TLS__CA_FILE"),
        ("SMS_BRIDGE_WORKER_RATE_LIMIT", "SMS_BRIDGE_WORKER__RATE_LIMIT"),
        ("SMS_BRIDGE_WEBHOOK_PORT", "SMS_BRIDGE_WEBHOOK__PORT"),
        ("sms_bridge_log_level", "SMS_BRIDGE_LOG__LEVEL"),
    ],
)
def test_variable_with_one_underscore_is_refused(faults: Faults, name: str, meant: str) -> None:
    """A setting that is written with one underscore would have no effect, so it is refused."""
    assert faults("", **{name: "8081"}) == (f"{name}: is not read; did you mean {meant}?",)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SMS_BRIDGE_CONFG", "SMS_BRIDGE_CONFIG"),
        ("sms_bridge_config", "SMS_BRIDGE_CONFIG"),
        ("SMS_BRIDGE_REVISON", "SMS_BRIDGE_REVISION"),
        ("SMS_BRIDGE_WORKR", "SMS_BRIDGE_WORKER"),
        ("SMS_BRIDGE_WORKER_CONCURENCY", "SMS_BRIDGE_WORKER__CONCURRENCY"),
        ("SMS_BRIDGE_API_KEY", "SMS_BRIDGE_SMS_API__KEY"),
        ("SMS_BRIDGE_RABBIT_URL", "SMS_BRIDGE_RABBITMQ__URL"),
        ("SMS_BRIDGE_WEBHOOK_PORTS", "SMS_BRIDGE_WEBHOOK__PORT"),
    ],
)
def test_misspelt_variable_without_a_section_is_refused(
    faults: Faults, name: str, meant: str
) -> None:
    """A variable that nobody reads is refused by its name, with the nearest one that is read."""
    assert faults("", **{name: "x"}) == (f"{name}: is not read; did you mean {meant}?",)


@pytest.mark.parametrize("name", ["SMS_BRIDGE_PORT", "SMS_BRIDGE_", "SMS_BRIDGE_XYZZY"])
def test_variable_like_nothing_is_refused(faults: Faults, name: str) -> None:
    """A variable that is like none that is read is refused with how a setting is written."""
    assert faults("", **{name: "8080"}) == (
        f"{name}: is not read; a setting is written like SMS_BRIDGE_WORKER__QUEUE",
    )


def test_unknown_key_in_small_letters_is_refused(faults: Faults) -> None:
    """A misspelt variable is refused in any case, for a right one is read in any case."""
    (fault,) = faults("", sms_bridge_worker__queu="q")

    assert fault.startswith("worker.queu: unknown key")


def test_key_below_a_plain_value_is_refused(faults: Faults) -> None:
    """A variable for a key below one that holds no keys has no effect, so it is refused."""
    assert faults("", SMS_BRIDGE_WORKER__QUEUE="q", SMS_BRIDGE_WORKER__QUEUE__NAME="q")


# --- Types and limits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("10s", 10),
        ("5m", 300),
        ("2h", 7200),
        ("30d", 2592000),
        ("1.5s", 1.5),
        (" 5m ", 300),
        ("5 m", 300),
    ],
)
def test_duration(text: str, seconds: float) -> None:
    """A duration is a number of seconds, or has a unit."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "5w", "-5s", "1h30m", "5M", "1e3", "inf", "٣s", "5s\n5s", "PT5S"]
)
def test_duration_that_is_none(text: str) -> None:
    """Anything else is refused, with an example of what is meant."""
    with pytest.raises(ValueError, match="10s, 5m, 2h, 30d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5s"), (30, "30s"), (90, "90s"), (120, "2m"), (600, "10m"), (3600, "1h"), (86400, "1d")],
)
def test_format_duration(seconds: float, text: str) -> None:
    """A duration in a queue's name has the largest unit that divides it."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("worker", "most"),
    [
        ({"concurrency": 300}, 300),
        ({"concurrency": 7, "max_concurrency": 5}, 7),
        ({"concurrency": "auto"}, 200),
        ({"concurrency": "auto", "max_concurrency": 5}, 5),
    ],
)
def test_most_in_flight(worker: dict[str, Any], most: int) -> None:
    """The maximum is for `auto` alone; a number says itself how much may be in flight."""
    assert Settings.model_validate({"worker": worker}).worker.most_in_flight == most


def test_concurrency_is_refused_in_one_line(faults: Faults) -> None:
    """A value that is neither a number nor a word that is known is told about once."""
    told = faults("worker: {concurrency: automatic}")

    assert [*told] == ["worker.concurrency: must be a whole number from 1 to 5000, or auto"]


@given(st.integers(min_value=1, max_value=10**8))
def test_format_duration_is_read_back(seconds: int) -> None:
    """What is written as a duration reads as the same duration."""
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker.concurrency", 0),
        ("worker.concurrency", "many"),
        ("worker.concurrency", 1.5),
        ("worker.concurrency", 5001),
        ("worker.max_concurrency", 0),
        ("worker.max_concurrency", "auto"),
        ("worker.max_attempts", 0),
        ("worker.max_uncertain_attempts", 0),
        ("worker.on_uncertain", "repeat"),
        ("worker.retry_delays", []),
        ("worker.retry_delays", "5s"),
        ("worker.outage_after", 0),
        ("worker.outage_after", -1),
        ("worker.max_age", float("inf")),
        ("worker.max_age", "5w"),
        ("worker.default_from", ""),
        ("worker.default_from", "x" * 33),
        ("worker.default_from", "a\nb"),
        ("worker.default_from", 5),
        ("worker.extra_fields", "ignore"),
        ("worker.ordering", "sender"),
        ("worker.rate_limit.per_second", 0),
        ("worker.rate_limit.per_second", float("nan")),
        ("worker.rate_limit.scope", "global"),
        ("worker.queue", ""),
        ("rabbitmq.url", "http://localhost/"),
        ("rabbitmq.url", []),
        ("rabbitmq.url", "amqp://"),
        ("rabbitmq.topology", "create"),
        ("sms_api.base_url", "api.example.com"),
        ("sms_api.base_url", "ftp://api.example.com"),
        ("sms_api.base_url", "https://api.example.com?a=b"),
        ("sms_api.base_url", "https://api.example.com#a"),
        ("sms_api.idempotency_header", "a b"),
        ("sms_api.idempotency_header", "a\r\nb"),
        ("sms_api.timeout_seconds", 0),
        ("webhook.port", 65536),
        ("webhook.port", -1),
        ("webhook.path", "webhooks"),
        ("webhook.path", "/a?b"),
        ("webhook.secrets", []),
        ("webhook.secrets", ["a"] * 6),
        ("webhook.secret_files", []),
        ("webhook.secret_files", ["a"] * 6),
        ("webhook.signature.preset", "unknown"),
        ("webhook.event_id_pointers", ["id"]),
        ("admin.port", 65536),
        ("log.level", "loud"),
        ("log.format", "xml"),
        ("tracing.sample_ratio", 1.1),
    ],
)
def test_value_that_is_refused(faults: Faults, key: str, value: object) -> None:
    """A value of the wrong type, or out of bounds, is one fault that names its key."""
    (fault,) = faults(nested(key, value))

    assert fault.startswith(key)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("worker", [1], "must hold keys, indented below it"),
        ("worker", "a", "must hold keys; in the environment it is JSON"),
        ("worker.queue", 5, "must be text; a number needs quotes"),
        ("worker.queue", "", "must not be empty"),
        ("worker.queue", "a" * 201, "must have at most 200 characters"),
        ("worker.default_from", "a\tb", "must not hold line breaks or control characters"),
        ("worker.retry_delays", [], "must have at least 1 in its list"),
        ("worker.retry_delays", {"a": 1}, "must be a list"),
        ("worker.retry_delays", [[5]], "must be a number"),
        ("worker.max_age", float("inf"), "must be a finite number"),
        ("worker.outage_after", 0, "must be more than 0"),
        ("worker.max_text_length", 100_000, "must be at most 65536"),
        ("webhook.secrets", ["a"] * 6, "must have at most 5 in its list"),
        ("webhook.path", "a", "must begin with / and hold no space, ?, #, %, { or }"),
        ("webhook.path", "/a%20b", "must begin with / and hold no space, ?, #, %, { or }"),
        ("webhook.event_id_pointers", ["id"], "must be a JSON pointer like /data/id"),
        ("webhook.signature.signed_content", "x", "must hold {body} or {url}"),
        ("webhook.signature.format", "x", "must be plain, kv, list, or prefix: and what stands"),
        ("webhook.port", "a", "must be a whole number"),
        ("webhook.port", None, "must be a whole number"),
        ("webhook.port", 1.5, "must be a whole number"),
        ("webhook.port", "9" * 5000, "must be a smaller number"),
        ("webhook.port", -1, "must be at least 0"),
        ("tracing.sample_ratio", "a", "must be a number"),
        ("log.level", "loud", "must be 'debug', 'info', 'warning' or 'error'"),
        ("sms_api.key_file", 5, "must be the path of a file"),
    ],
)
def test_refusal_says_what_to_write(faults: Faults, key: str, value: object, text: str) -> None:
    """A refusal says in plain words what is right, without patterns or Python's types."""
    (fault,) = faults(nested(key, value))
    path, _, told = fault.partition(": ")

    assert path.startswith(key)
    assert told.startswith(text)


def test_every_pattern_has_its_words() -> None:
    """No pattern of a setting is without the words that a fault tells in its place."""
    schema = json.dumps(Settings.model_json_schema())

    assert {json.loads(f'"{found}"') for found in PATTERN.findall(schema)} == PATTERNS.keys()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("rabbitmq.url", "must be an address like amqp://host:5672/vhost, or a list of them"),
        ("worker.queue", "must be text; a number needs quotes"),
        ("worker.concurrency", "must be a whole number from 1 to 5000, or auto"),
        ("worker.retry_delays", "must be a list"),
        ("worker.outage_after", "must be a number"),
        ("webhook.port", "must be a whole number"),
        ("log.level", "must be 'debug', 'info', 'warning' or 'error'"),
    ],
)
@pytest.mark.parametrize("source", ["file", "environment"])
def test_key_that_is_left_empty(faults: Faults, key: str, told: str, source: str) -> None:
    """A key with nothing behind it is told so, with what may stand there, and the remedy."""
    section, _, name = key.partition(".")
    in_file = f"{section}:\n  {name}:\n" if source == "file" else ""
    environ = {} if source == "file" else {env_name(key): "null"}

    assert faults(in_file, **environ) == (
        f"{key}: {told}; it has no value: write one, or leave the key out for its default",
    )


def test_nothing_in_a_list(faults: Faults) -> None:
    """An empty place in a list is told by its number; no single place has a default."""
    (fault,) = faults("rabbitmq:\n  url:\n  - amqp://one/\n  -\n")

    assert fault == (
        "rabbitmq.url.1: must be text; a number needs quotes; "
        "it has no value: write one, or take its place out of the list"
    )


@pytest.mark.parametrize("url", [5, {"a": 1}])
def test_address_that_is_none(faults: Faults, url: object) -> None:
    """What is neither an address nor a list of them is told what either looks like."""
    assert faults({"rabbitmq": {"url": url}}) == (
        "rabbitmq.url: must be an address like amqp://host:5672/vhost, or a list of them",
    )


@pytest.mark.parametrize("key", ["webhook.port", "worker.max_age", "worker.concurrency"])
def test_yes_is_no_number(faults: Faults, key: str) -> None:
    """YAML's `yes` is refused where a number is meant, and does not become 1."""
    section, name = key.split(".")

    assert faults(f"{section}:\n  {name}: yes\n")


@pytest.mark.parametrize("mode", ["declare", "verify", "off"])
def test_topology_of_the_file(load: Load, mode: str) -> None:
    """Each mode can be written in the file as it stands in the documents, also `off`."""
    assert load(f"rabbitmq:\n  topology: {mode}\n").rabbitmq.topology == mode


@pytest.mark.parametrize("delays", [["30s", "5s"], ["60s", "1m"]], ids=["order", "repeated"])
def test_retry_delays_ascend(faults: Faults, delays: list[str]) -> None:
    """The ladder must ascend, because each step is a queue of its own."""
    (fault,) = faults({"worker": {"retry_delays": delays}})

    assert "retry_delays must ascend" in fault


@pytest.mark.parametrize("key", ["worker.queue", "webhook.queue"])
def test_requests_and_events_have_a_queue_each(faults: Faults, key: str) -> None:
    """One queue for both is refused: the worker would take the events for requests."""
    other = {"worker.queue": "sms.inbound", "webhook.queue": "sms.outbound"}[key]
    (fault,) = faults(nested(key, other))

    assert fault.startswith("worker.queue: is webhook.queue too, ")


def test_a_worker_may_have_the_events_name_when_there_is_no_queue_for_events(load: Load) -> None:
    """Without a queue for events, the worker's may have any name."""
    loaded = load("worker: {queue: sms.inbound}\nwebhook: {queue: null}")

    assert loaded.worker.queue == "sms.inbound"


@pytest.mark.parametrize(
    "key", ["worker.queue", "worker.outcome_exchange", "webhook.exchange", "webhook.queue"]
)
@pytest.mark.parametrize(
    ("name", "text"),
    [("amq.sms", "must not begin with amq."), ("é" * 101, "must have at most 200 bytes")],
    ids=["reserved", "bytes"],
)
def test_name_that_rabbitmq_does_not_take(faults: Faults, key: str, name: str, text: str) -> None:
    """A name that RabbitMQ keeps for itself, or that no frame holds, is refused at the start."""
    (fault,) = faults(nested(key, name))

    assert fault.startswith(f"{key}: {text}")


@pytest.mark.parametrize("key", ["worker.outcome_exchange", "webhook.exchange"])
def test_the_topic_exchange_of_every_vhost_can_be_used(load: Load, key: str) -> None:
    """RabbitMQ's own topic exchange is there already, and can be named."""
    assert value_at(load(nested(key, "amq.topic")).masked(), key) == "amq.topic"


@pytest.mark.parametrize("delay", ["3651d", "315360000.001"])
def test_retry_delay_that_rabbitmq_does_not_take(faults: Faults, delay: str) -> None:
    """A delay over the longest time to live that RabbitMQ takes is refused at the start."""
    (fault,) = faults({"worker": {"retry_delays": ["5s", delay]}})

    assert fault.startswith("worker.retry_delays.1: must be at most 3650d")


@pytest.mark.parametrize("number", [1, 5])
def test_one_to_five_webhook_secrets(load: Load, number: int) -> None:
    """One secret is enough, and five may be tried."""
    secrets = load({"webhook": {"secrets": ["s"] * number}}).webhook.secrets

    assert secrets is not None
    assert len(secrets) == number


def test_slash_after_the_base_url_is_dropped(load: Load) -> None:
    """The path is appended to the base URL with one slash, however it is written."""
    loaded = load("sms_api: {base_url: 'https://api.example.com/base/'}")

    assert loaded.sms_api.base_url == "https://api.example.com/base"


@pytest.mark.parametrize("key", ["sms_api.base_url", "webhook.public_url", "tracing.otlp_endpoint"])
@pytest.mark.parametrize("user", [f"u:{CANARY}@", f"{CANARY}@", f":{CANARY}@", ":@"])
def test_user_in_a_url_is_refused(faults: Faults, key: str, user: str) -> None:
    """A base URL with user info would replace the API key, so it is refused."""
    (fault,) = faults(nested(key, f"https://{user}api.example.com"))

    assert "must not hold a user" in fault


def test_certificates_of_the_broker_are_always_checked(faults: Faults) -> None:
    """The URL cannot switch the check of the broker's certificate off."""
    (fault,) = faults("rabbitmq: {url: 'amqps://h/?no_verify_ssl=1'}")

    assert "rabbitmq.tls.ca_file" in fault


# --- Secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["sms_api.key", "rabbitmq.password", "webhook.secrets"])
@pytest.mark.parametrize("blank", ["", "  ", "\n"], ids=["empty", "spaces", "newline"])
@pytest.mark.parametrize("source", ["file", "environment"])
def test_empty_secret_is_refused(faults: Faults, key: str, blank: str, source: str) -> None:
    """A secret that is there but empty is a fault: anyone could know it."""
    value: object = [blank] if key == "webhook.secrets" else blank
    text = json.dumps(value) if isinstance(value, list) else blank
    (fault,) = (
        faults(nested(key, value)) if source == "file" else faults("", **{env_name(key): text})
    )

    assert fault.startswith(key)


SECRETS: dict[str, dict[str, Any]] = {
    "rabbitmq.url": {"rabbitmq": {"url": f"amqp://u:{CANARY}@h/"}},
    "rabbitmq.url list": {"rabbitmq": {"url": ["amqp://a/", f"amqp://u:{CANARY}@h/"]}},
    "rabbitmq.password": {"rabbitmq": {"password": CANARY}},
    "sms_api.key": {"sms_api": {"key": CANARY}},
    "sms_api.proxy": {"sms_api": {"proxy": f"http://u:{CANARY}@h:1"}},
    "webhook.secrets": {"webhook": {"secrets": [CANARY]}},
}
VIEWS: dict[str, Callable[[Settings], object]] = {
    "repr": repr,
    "str": str,
    "format": lambda s: f"{s} {s.rabbitmq} {s.sms_api!r} {s.webhook}",
    "model_dump": lambda s: s.model_dump(),
    "model_dump json mode": lambda s: s.model_dump(mode="json"),
    "model_dump_json": lambda s: s.model_dump_json(),
    "masked": lambda s: s.masked(),
    "masked as YAML": lambda s: yaml.safe_dump(s.masked()),
}


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("view", VIEWS)
def test_secret_is_masked(load: Load, secret: str, view: str) -> None:
    """No way to show the settings shows a secret."""
    shown = str(VIEWS[view](load(SECRETS[secret])))

    assert CANARY not in shown


@pytest.mark.parametrize("key", ["rabbitmq.url", "sms_api.proxy"])
@pytest.mark.parametrize("end", "#?/")
def test_url_with_a_raw_character_in_its_password(load: Load, key: str, end: str) -> None:
    """A password that ends the URL too early is refused with the remedy, and not shown."""
    scheme = "amqp" if key == "rabbitmq.url" else "http"
    faults = []
    for start in ("12", "pa"):
        with pytest.raises(ConfigError) as caught:
            load(nested(key, f"{scheme}://guest:{start}{end}34{CANARY}@h/"))
        faults.append(str(caught.value))

    assert all("percent-encode the user and the password (/ is %2F)" in text for text in faults)
    assert ("or give them in rabbitmq.password_file" in faults[0]) == (key == "rabbitmq.url")
    assert CANARY not in "".join(faults)


@pytest.mark.parametrize(
    ("key", "url", "shown"),
    [
        (
            "rabbitmq.url",
            f"amqps://{CANARY}:{CANARY}@rabbit.example.com:5671/v%2Fh?heartbeat={CANARY}",
            ["amqps://***:***@rabbit.example.com:5671/v%2Fh?***"],
        ),
        ("rabbitmq.url", f"amqp://{CANARY}@h", ["amqp://***@h"]),
        ("rabbitmq.url", f"amqp://h:5673/v?{CANARY}", ["amqp://h:5673/v?***"]),
        ("rabbitmq.url", "amqp://h/", ["amqp://h/"]),
        (
            "sms_api.proxy",
            f"http://{CANARY}:{CANARY}@proxy.example.com:3128/?{CANARY}=1#{CANARY}",
            "http://***:***@proxy.example.com:3128/?***",
        ),
    ],
)
def test_masked_url_says_where_alone(load: Load, key: str, url: str, shown: object) -> None:
    """What is printed tells host, port and vhost: user, password and query may be secrets."""
    assert value_at(load(nested(key, url)).masked(), key) == shown


REFUSED: dict[str, str | dict[str, Any]] = {
    "broken broker url": {"rabbitmq": {"url": f"amqp://u:{CANARY}@h:port/"}},
    "scheme of the broker": {"rabbitmq": {"url": f"http://u:{CANARY}@h/"}},
    "one of several": {"rabbitmq": {"url": ["amqp://a/", f"x://u:{CANARY}@h/"]}},
    "password as list": {"rabbitmq": {"password": [CANARY]}},
    "password as map": {"rabbitmq": {"password": {"value": CANARY}}},
    "unknown key": {"rabbitmq": {"pasword": CANARY}},
    "unknown section": {"rabitmq": {"password": CANARY}},
    "section as text": {"sms_api": CANARY},
    "section as list": {"sms_api": [CANARY]},
    "key as list": {"sms_api": {"key": [CANARY]}},
    "key in the url": {"sms_api": {"base_url": f"https://u:{CANARY}@h"}},
    "key as port": {"sms_api": {"base_url": f"https://h:{CANARY}"}},
    "key as query": {"sms_api": {"base_url": f"https://h?key={CANARY}"}},
    "proxy": {"sms_api": {"proxy": f"socks5://u:{CANARY}@h"}},
    "secrets as text": {"webhook": {"secrets": CANARY}},
    "secrets as broken JSON": {"webhook": {"secrets": f'["{CANARY}'}},
    "too many secrets": {"webhook": {"secrets": [CANARY] * 6}},
    "number for a secret's list": {"webhook": {"secrets": {"a": CANARY}}},
    "choice": {"log": {"level": CANARY}},
    "number": {"worker": {"concurrency": CANARY}},
    "duration": {"worker": {"max_age": CANARY}},
    "header": {"sms_api": {"idempotency_header": f"Bearer {CANARY}"}},
    "pointer": {"webhook": {"event_id_pointers": [CANARY]}},
    "broken YAML": f"sms_api: {{key: '{CANARY}",
    "YAML tag": f"sms_api: !!python/name:{CANARY} x",
    "YAML alias": f"sms_api: {{key: *{CANARY}}}",
    "YAML anchor": f"sms_api: {{key: &{CANARY} a, proxy: &{CANARY} b}}",
    "YAML number": f"sms_api: {{key: !!int {CANARY}}}",
    "list at the top": f"- {CANARY}",
    "text at the top": CANARY,
}


@pytest.mark.parametrize("case", REFUSED)
def test_fault_does_not_quote_a_value(faults: Faults, case: str) -> None:
    """No fault holds what was configured, because it may be a secret in the wrong place."""
    text = "\n".join(faults(REFUSED[case]))

    assert CANARY not in text


KEYS = st.sampled_from([*known_keys(), "worker.queu", "rabbitmq.tls.nothing", "nothing.at.all"])
VALUES = st.text(max_size=20) | st.sampled_from(["[", "{}", "null", "[]", '{"a": 1}', "5s", "-1"])


@settings(deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_environment_is_taken_or_told(environ: dict[str, str]) -> None:
    """Whatever the environment holds, it gives settings or faults that do not quote it."""
    told = ""
    try:
        load_settings(None, {env_name(key): value + CANARY for key, value in environ.items()})
    except ConfigError as error:
        told = str(error)

    assert CANARY not in told


# --- Faults --------------------------------------------------------------------------------------


def test_one_line_for_each_fault(faults: Faults) -> None:
    """Every fault is told at once, a line each, from both sources."""
    told = faults(
        "worker: {queu: 1, concurrency: x}\nnothing: {}\n",
        SMS_BRIDGE_WORKR__QUEUE="q",
        SMS_BRIDGE_WEBHOOK__PORT="x",
    )

    assert sorted(line.split(":")[0] for line in told) == [
        "SMS_BRIDGE_WORKR__QUEUE",
        "nothing",
        "webhook.port",
        "worker.concurrency",
        "worker.queu",
    ]


def test_faults_are_the_text(load: Load) -> None:
    """The text of the error is its faults, a line each."""
    with pytest.raises(ConfigError) as caught:
        load("worker: {queu: 1, concurrency: x}\n")

    assert str(caught.value).splitlines() == list(caught.value.faults)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker: {queue: 'a", "line 1: is not YAML: look for a quote"),
        ("worker:\n  queue: a\n bad: b\n", "line 3: is not YAML: look for a quote"),
        ("worker:\n\tqueue: a\n", "line 2: is not YAML: a tab"),
        ("worker:\n  queue: a: b\n", "line 2: is not YAML: a colon too many"),
        ("worker: {queue: @a}", "line 1: is not YAML: text that begins with @"),
        ("worker: {queue: *a}", "line 1: is not YAML: text that begins with *"),
        ("worker: {queue: !a b}", "line 1: is not YAML that is read here: text that begins with !"),
        ("worker: {queue: a,\n  queue: b}", "line 2: the key `queue` is there twice; keep one"),
        ("worker: {queue: 1}\nworker: {}", "line 2: the key `worker` is there twice; keep one"),
        ("worker:\n  {{ queue }}: a\n", "line 2: a list or a map cannot be a key"),
        ("worker: {[a]: b}", "line 1: a list or a map cannot be a key"),
        ("worker: {queue: 2026-13-45}", "is not YAML: it holds an impossible character, date"),
        ("worker: {queue: !!int a}", "is not YAML: it holds an impossible character, date"),
        ("worker: {queue: \0}", "is not YAML: it holds an impossible character"),
        ("worker: {}\n---\nworker: {}\n", "line 2: is not YAML for one configuration"),
        ("- worker", "must hold sections"),
        ("1: 2", "the top, line 1: unknown key"),
        ("just a text", "must hold sections"),
    ],
)
def test_file_that_is_no_configuration(faults: Faults, text: str, says: str) -> None:
    """A file that cannot be read as sections is one line that says where and what is wrong."""
    (fault,) = faults(text)

    assert says in fault


def _bomb(line: str, count: int) -> str:
    first = line.format(0, "1, 1").replace("*1, *1", "1")
    return first + "".join(line.format(n, f"*x{n - 1}, *x{n - 1}") for n in range(1, count))


BOMBS: dict[str, tuple[str, str]] = {
    "flow": ("worker: " + "[" * 100_000, "line 1: lies more than 20 levels deep"),
    "maps": ("{a: " * 50_000, "line 1: lies more than 20 levels deep"),
    "block": ("".join(f"{' ' * n}a:\n" for n in range(600)), "line 20: lies more than 20 levels"),
    "dashes": ("- " * 100_000 + "x", "line 1: lies more than 20 levels deep"),
    "aliases": (_bomb("x{0}: &x{0} [{1}]\n", 60), "holds more than 10,000 values"),
    "merges": (
        "x0: &x0 {a: 1}\n"
        + "".join(f"x{n}: &x{n} {{<<: [*x{n - 1}, *x{n - 1}]}}\n" for n in range(1, 60)),
        "holds more than 10,000 values",
    ),
    "in itself": ("worker: &a {queue: *a}", "line 1: an alias (*) stands inside of what it names"),
    "values": ("worker: {retry_delays: [" + "1s," * 20_000 + "]}", "holds more than 10,000 values"),
    "size": ("worker: {queue: " + "x" * 300_000 + "}", "is larger than 256 KiB"),
    "keys": ("worker:\n" + "".join(f"  k{n}: 1\n" for n in range(4000)), "worker, line 2: unknown"),
}


@pytest.mark.parametrize(("text", "says"), BOMBS.values(), ids=BOMBS)
def test_file_that_is_too_much(faults: Faults, text: str, says: str) -> None:
    """What is too deep, too large or multiplied by aliases is refused, and in no time."""
    started = time.process_time()
    found = faults(text)
    seconds = time.process_time() - started

    assert says in found[0]
    assert len(found) <= 21
    assert seconds < 5


@pytest.mark.parametrize("key", ["worker.retry_delays", "worker.rate_limit"])
def test_deep_json_of_the_environment(faults: Faults, key: str) -> None:
    """JSON that is too deep to be read is refused like any that is none."""
    (said,) = faults("", **{env_name(key): "[" * 100_000})

    assert said.startswith(f"{key}: must")


def test_aliases_are_allowed(load: Load) -> None:
    """An alias in a configuration of usual size is read as what it names."""
    loaded = load("rabbitmq: &a {username: &u team}\nworker: {default_from: *u}")

    assert (loaded.rabbitmq.username, loaded.worker.default_from) == ("team", "team")


def test_file_that_is_not_utf_8(tmp_path: Path) -> None:
    """A file in another encoding is told, not guessed."""
    path = tmp_path / "config.yaml"
    path.write_bytes("worker: {queue: é}".encode("latin-1"))

    with pytest.raises(ConfigError, match="is not UTF-8 text; save it as UTF-8"):
        load_settings(path, {})


def test_file_that_is_missing(tmp_path: Path) -> None:
    """A file that is not there is told by its name."""
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "missing.yaml", {})


def test_spans_that_would_go_nowhere_are_refused(faults: Faults) -> None:
    """An OTLP endpoint is refused while no spans are exported, not silently without effect."""
    (fault,) = faults("tracing: {otlp_endpoint: 'http://collector:4318'}")

    assert fault.startswith("tracing.otlp_endpoint")


def test_settings_do_not_change() -> None:
    """Settings are fixed once they are loaded."""
    loaded = load_settings(None, {})

    with pytest.raises(ValueError, match="frozen"):
        loaded.worker.queue = "other"  # type: ignore[misc]


def test_schema_has_every_section() -> None:
    """The settings can be given as a JSON Schema."""
    assert set(Settings.model_json_schema()["properties"]) == set(Settings.model_fields)


@pytest.mark.parametrize("name", ["q~", "q\u00e4", "q\t", "q%"])
@pytest.mark.parametrize("key", ["worker.queue", "webhook.queue", "webhook.exchange"])
def test_name_that_the_client_cannot_write_is_refused(faults: Faults, key: str, name: str) -> None:
    """A name that no frame of the client library takes is refused at the start."""
    section, _, setting = key.partition(".")
    said = faults(json.dumps({section: {setting: name}}))

    assert said == (f"{key}: must be of letters and digits of ASCII, spaces and - _ . : @ # , / +",)
