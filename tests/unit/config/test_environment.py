"""Settings of the environment, and variables that only look like one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config import load_settings
from bridge.config.settings import known_keys
from bridge.errors import ConfigError
from tests.unit.config.conftest import CANARY, Faults, Load, env_name, nested, value_at


@pytest.mark.parametrize(
    "name",
    ["SMS_BRIDGE_WORKER__QUEUE", "SMS_BRIDGE_Worker__Queue", "sms_bridge_worker__queue"],
)
def test_case_of_variables_does_not_matter(load: Load, name: str) -> None:
    """A variable is known in any case, as Windows and people write it."""
    assert load("", **{name: "q"}).worker.queue == "q"


@pytest.mark.parametrize("password", ['{"a": 1}', "123", "true", '"q"', "a@b:c/d?e#f%g p w"])
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
        ("sms_api.message_id_pointers", "[]", []),
        ("rabbitmq.url", "amqp://one/", ["amqp://one/"]),
        ("rabbitmq.url", '["amqp://one/", "amqps://two/"]', ["amqp://one/", "amqps://two/"]),
        ("worker.concurrency", "7", 7),
        ("worker.concurrency", "auto", "auto"),
        ("worker.max_age", "30d", 2592000),
        ("rabbitmq.topology", "off", "off"),
        ("rabbitmq.topology", "False", "off"),
        ("worker.coordination", "off", "off"),
        ("worker.coordination", "false", "off"),
        ("worker.coordination", "No", "off"),
        ("worker.coordination", "true", "on"),
    ],
)
def test_value_of_the_environment(load: Load, key: str, text: str, value: object) -> None:
    """Lists and maps are JSON in the environment; numbers and durations are as in the file."""
    assert value_at(load("", **{env_name(key): text}).masked(), key) == value


def test_map_of_the_environment(load: Load) -> None:
    loaded = load("", SMS_BRIDGE_RABBITMQ__TLS='{"server_name": "rabbit"}')

    assert loaded.rabbitmq.tls.server_name == "rabbit"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker.max_age", "1h"),
        ("worker.rate_limit.per_second", 1),
        ("webhook.public_url", "https://a.example"),
        ("webhook.secret_files", ["a"]),
        ("webhook.signature.algorithm", "sha1"),
        ("sms_api.account", "a"),
        ("rabbitmq.tls.ca_file", "a"),
    ],
)
def test_null_of_the_environment(load: Load, key: str, value: object) -> None:
    """`null` in the environment takes back what the file says."""
    loaded = load(nested(key, value), **{env_name(key): "null"})

    assert value_at(loaded.masked(), key) is None


@pytest.mark.parametrize("key", ["worker.retry_delays", "worker.rate_limit"])
def test_deep_json_of_the_environment(faults: Faults, key: str) -> None:
    """JSON that is too deep to be read is refused like any that is none."""
    (said,) = faults("", **{env_name(key): "[" * 100_000})

    assert said.startswith(f"{key}: must")


KEYS = st.sampled_from([*known_keys(), "worker.queu", "rabbitmq.tls.nothing", "nothing.at.all"])


VALUES = st.text(max_size=20) | st.sampled_from(["[", "{}", "null", "[]", '{"a": 1}', "5s", "-1"])


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_environment_is_taken_or_told(environ: dict[str, str]) -> None:
    """Whatever the environment holds, it gives settings or faults that do not quote it."""
    told = ""
    try:
        load_settings(None, {env_name(key): value + CANARY for key, value in environ.items()})
    except ConfigError as error:
        told = str(error)

    assert CANARY not in told


# --- Variables of others --------------------------------------------------------------------------

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
def test_variables_of_a_service_are_ignored(load: Load, service: str) -> None:
    """What Kubernetes tells of a Service called `sms-bridge`, or so at its start, is no setting."""
    environ = {f"SMS_BRIDGE_{service}{name}": value for name, value in OF_KUBERNETES.items()}

    assert load("", **environ) == load_settings(None, {})


def test_variables_that_are_no_settings_are_ignored(load: Load) -> None:
    """What names the file, the image's revision, the tests' broker, or others' things is let be."""
    names = ("CONFIG", "REVISION", "TEST_AMQP_URL")
    others = ("SMS_BRIDGED__WORKER", "_SMS_BRIDGE_COMPLETE", "PATH")

    assert load("", **dict.fromkeys((*(f"SMS_BRIDGE_{one}" for one in names), *others), "x")) == (
        load_settings(None, {})
    )


# --- Variables that nobody reads ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (
            "SMS_BRIDGE_WORKER__QUEU",
            "worker.queu: unknown key; did you mean worker.queue?",
        ),
        (
            "SMS_BRIDGE_WORKER__QUEUE2",
            "SMS_BRIDGE_WORKER__QUEUE2: unknown key; did you mean worker.queue?",
        ),
        (
            "SMS_BRIDGE_WORKER__QUEUE__NAME",
            "worker.queue.name: unknown key",
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
    ids=["key", "digit", "below-a-value", "deeper", "section"],
)
def test_unknown_key_of_the_environment(faults: Faults, name: str, fault: str) -> None:
    """A misspelt variable is refused as well, not silently without effect."""
    assert faults("", **{name: "x"}) == (fault,)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sms_bridge_log_level", "SMS_BRIDGE_LOG__LEVEL"),
        ("SMS_BRIDGE_WORKER_RATE_LIMIT", "SMS_BRIDGE_WORKER__RATE_LIMIT"),
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
    # A URL, so that none is taken for the variable of a Kubernetes Service.
    value = "tcp://192.0.2.1:8080"

    assert faults("", **{name: value}) == (f"{name}: is not read; did you mean {meant}?",)


def test_every_setting_with_one_underscore_is_told_by_itself(faults: Faults) -> None:
    """However like two settings are, the one is meant whose name lacks nothing but underscores."""
    meant = {(key := env_name(one)).replace("__", "_"): key for one in known_keys() if "." in one}

    assert {*faults("", **dict.fromkeys(meant, "x"))} == {
        f"{name}: is not read; did you mean {key}?" for name, key in meant.items()
    }


@pytest.mark.parametrize("name", ["SMS_BRIDGE_PORT", "SMS_BRIDGE_", "SMS_BRIDGE_XYZZY"])
def test_variable_like_nothing_is_refused(faults: Faults, name: str) -> None:
    """A variable that is like none that is read is refused with how a setting is written."""
    assert faults("", **{name: "8080"}) == (
        f"{name}: is not read; a setting is written like SMS_BRIDGE_WORKER__QUEUE",
    )
