"""Faults that prevent the start of a role, reported before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from bridge.amqp.connecting import open_connection
from bridge.config import Role, Settings, SmsApiSettings
from bridge.config.presets import PRESETS, Preset, needed_settings
from bridge.errors import BrokerError, ConfigError
from bridge.start_checks import check_roles, check_start
from bridge.webhook.endpoint import endpoints_from
from tests.certificates import make_certificate

BOTH: tuple[Role, ...] = ("worker", "webhook")
GOOD: dict[str, dict[str, Any]] = {
    "sms_api": {"base_url": "https://api.example.com", "key": "k"},
    "webhook": {"secrets": ["s"]},
}


def _settings(changes: dict[str, dict[str, Any]]) -> Settings:
    names = {*GOOD, *changes}
    return Settings.model_validate(
        {name: GOOD.get(name, {}) | changes.get(name, {}) for name in names}
    )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate with its `key.pem`, and `text.pem`, which is not a certificate."""
    made = make_certificate(tmp_path_factory.mktemp("tls"))
    made.with_name("text.pem").write_text("no certificate", encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("rabbitmq", {"username_file": "nope"}, "rabbitmq.username_file: .*/nope cannot be read"),
        ("rabbitmq.tls", {"ca_file": "nope"}, "rabbitmq.tls.ca_file: .*/nope cannot be read"),
        ("rabbitmq.tls", {"ca_file": "text.pem"}, "rabbitmq.tls.ca_file: .* no certificates"),
        ("rabbitmq.tls", {"key_file": "nope"}, "rabbitmq.tls.key_file: .*/nope cannot be read"),
        ("rabbitmq.tls", {"cert_file": "nope"}, "rabbitmq.tls.cert_file: .*/nope cannot be read"),
        (
            "rabbitmq.tls",
            {"cert_file": "cert.pem", "key_file": "text.pem"},
            "rabbitmq.tls.cert_file: .* PEM files that belong together",
        ),
        ("sms_api", {"key_file": "nope"}, "sms_api.key_file: .*/nope cannot be read"),
        ("sms_api", {"ca_file": "nope"}, "sms_api.ca_file: .*/nope cannot be read: No such file"),
        ("sms_api", {"ca_file": "text.pem"}, "sms_api.ca_file: .*holds no certificates"),
        ("webhook", {"secret_files": ["nope"]}, "webhook.secret_files.0: .*/nope cannot be read"),
        ("webhook", {"signature": {"secret_encoding": "hex"}}, "webhook.secrets.0: "),
        ("webhook", {"signature": {"timestamp_from": "t"}}, "webhook.signature.signed_content: "),
    ],
    ids=str,
)
def test_an_unusable_value_prevents_the_start(
    certificate: Path, section: str, changes: dict[str, Any], told: str
) -> None:
    """The fault of an unusable file or value names its setting, before the role starts."""
    folder = certificate.parent
    placed = {
        key: str(folder / value)
        if key.endswith("_file")
        else [str(folder / name) for name in value]
        if key.endswith("_files")
        else value
        for key, value in changes.items()
    }
    name, _, inner = section.partition(".")
    settings = _settings({name: {inner: placed} if inner else placed})

    with pytest.raises(ConfigError, match=f"^{told}"):
        check_start(settings, BOTH)
    with pytest.raises(ConfigError, match=f"^{told}"):
        check_roles(settings, BOTH)


def test_good_files_let_the_roles_start(certificate: Path) -> None:
    """With usable files, every role may start."""
    tls = {
        "ca_file": certificate,
        "cert_file": certificate,
        "key_file": certificate.with_name("key.pem"),
    }
    settings = _settings({"rabbitmq": {"tls": tls}, "sms_api": {"ca_file": certificate}})

    assert check_roles(settings, BOTH) == {"worker": None, "webhook": None}


def test_every_fault_is_reported(tmp_path: Path) -> None:
    nope = tmp_path / "nope"
    settings = _settings(
        {
            "rabbitmq": {"password_file": nope, "tls": {"ca_file": nope}},
            "sms_api": {"key_file": nope, "ca_file": nope},
            "webhook": {"secret_files": [nope], "port": 9090},
        }
    )

    with pytest.raises(ConfigError) as caught:
        check_start(settings, BOTH)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "rabbitmq.password_file",
        "rabbitmq.tls.ca_file",
        "sms_api.key_file",
        "sms_api.ca_file",
        "webhook.secret_files.0",
        "admin.port",
    ]


@pytest.mark.parametrize("role", BOTH)
def test_spans_need_the_extra(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, a role with a collector does not start and names what to install."""
    settings = _settings({"tracing": {"otlp_endpoint": "http://collector:4318"}})
    check_start(settings, [role])
    monkeypatch.setattr("bridge.start_checks.is_exporter_installed", lambda: False)
    check_start(_settings({}), [role])

    with pytest.raises(ConfigError) as caught:
        check_start(settings, [role])
    (fault,) = caught.value.faults
    assert fault.startswith("tracing.otlp_endpoint: ")
    assert "sms-bridge[tracing]" in fault


def test_a_role_needs_only_its_own_files(tmp_path: Path) -> None:
    """Files that only the other role reads do not prevent the start."""
    nope = tmp_path / "nope"
    settings = _settings(
        {"sms_api": {"key_file": nope, "ca_file": nope}, "webhook": {"secret_files": [nope]}}
    )
    with_secret = _settings({"sms_api": {"key_file": nope, "ca_file": nope}})
    with_key = _settings({"webhook": {"secret_files": [nope], "port": 9090}})

    assert check_roles(with_secret, ["webhook"]) == {"webhook": None}
    assert check_roles(with_key, ["worker"]) == {"worker": None}
    with pytest.raises(ConfigError):
        check_roles(settings, ["worker"])


@pytest.mark.parametrize(
    ("webhook", "admin", "is_refused"),
    [
        (("0.0.0.0", 8080), ("0.0.0.0", 8080), True),
        (("0.0.0.0", 8080), ("127.0.0.1", 8080), True),
        (("::1", 8080), ("::", 8080), True),
        (("127.0.0.1", 8080), ("127.0.0.2", 8080), False),
        (("0.0.0.0", 8080), ("::", 8080), True),
        (("0.0.0.0", 8080), ("::1", 8080), False),
        (("0.0.0.0", 0), ("0.0.0.0", 0), False),
    ],
    ids=str,
)
def test_two_ports_of_one_address_differ(
    webhook: tuple[str, int], admin: tuple[str, int], *, is_refused: bool
) -> None:
    """The same port for both listeners is refused if the system would refuse it; 0 is any port."""
    changes = {"webhook": webhook, "admin": admin}
    settings = _settings({name: {"host": h, "port": p} for name, (h, p) in changes.items()})

    if is_refused:
        with pytest.raises(ConfigError, match=r"^admin\.port: must differ from webhook\.port; "):
            check_start(settings, BOTH)
    else:
        check_start(settings, BOTH)


def test_an_unconfigured_role_is_named() -> None:
    """A role without settings is returned with its first missing setting; the others start."""
    settings = Settings.model_validate({"webhook": {"secrets": ["s"]}})

    assert check_roles(settings, BOTH) == {
        "worker": "sms_api.base_url: is missing; the worker needs it",
        "webhook": None,
    }


@pytest.mark.parametrize(
    ("api", "told"),
    [
        (
            {"preset": "infobip"},
            ["base_url: is missing; it is the account's own", "key: is missing; it is the API key"],
        ),
        (
            {"preset": "android-sms-gateway", "key": "k"},
            ["auth.username: is missing; it is the user name that the app shows"],
        ),
        ({"base_url": "http://a"}, ["key: is missing; set sms_api.key or sms_api.key_file"]),
        (
            {"base_url": "http://a", "key": "k", "auth": {"scheme": "basic"}},
            ["auth.username: is missing; set it, or sms_api.account"],
        ),
        ({"preset": "twilio", "account": "AC1", "key": "k"}, []),
    ],
)
def test_all_missing_settings_of_a_service_are_reported(
    api: dict[str, Any], told: list[str]
) -> None:
    settings = Settings.model_validate({"sms_api": api})
    if not told:
        assert check_roles(settings, ["worker"]) == {"worker": None}
        return
    with pytest.raises(ConfigError) as caught:
        check_roles(settings, ["worker"])

    assert [
        fault.startswith(f"sms_api.{says}")
        for fault, says in zip(caught.value.faults, told, strict=True)
    ] == [True] * len(told)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_what_they_need(preset: Preset) -> None:
    """The worker starts with exactly the settings that a preset requires."""
    needs = needed_settings(preset)
    given = {key: "https://a.example" if key == "base_url" else "a" for key in needs}
    if preset == "generic":
        given = {"base_url": "https://a.example", "key": "k"}

    def start(api: dict[str, str]) -> list[str]:
        nested = {key: value for key, value in api.items() if "." not in key}
        user = {"auth": {"username": api["auth.username"]}} if "auth.username" in api else {}
        return SmsApiSettings.model_validate({"preset": preset, **nested, **user}).missing

    assert start(given) == []
    for key in given:
        (fault,) = start({name: value for name, value in given.items() if name != key})
        assert fault.startswith(f"sms_api.{key}: is missing; {'it is ' if key in needs else ''}")


@pytest.mark.parametrize("key", ["webhook", "webhook.endpoints.0"])
def test_an_unusable_secret_is_named_by_its_setting(tmp_path: Path, key: str) -> None:
    """Of several secret files, the fault names the one in the wrong encoding."""
    files = [tmp_path / "current", tmp_path / "previous"]
    for file, secret in zip(files, ("00ff", "no hex"), strict=True):
        file.write_text(secret, encoding="utf-8")
    endpoint = {"path": "/a", "secret_files": files, "signature": {"secret_encoding": "hex"}}
    webhook = endpoint if key == "webhook" else {"endpoints": [endpoint]}
    settings = Settings.model_validate({"webhook": webhook})

    with pytest.raises(ConfigError) as caught:
        endpoints_from(settings.webhook)
    assert str(caught.value).startswith(f"{key}.secret_files.1: the secret is empty or not hex; ")


def test_every_unusable_endpoint_is_reported() -> None:
    """Each endpoint without secrets or with a contradictory scheme is named by its key."""
    endpoints = [
        {"path": "/a"},
        {"path": "/b", "secrets": ["s"]},
        {"path": "/c", "secrets": ["s"], "signature": {"preset": "twilio"}},
        {"path": "/d", "secrets": ["s"], "signature": {"secret_encoding": "hex"}},
    ]
    settings = _settings({"webhook": {"endpoints": endpoints}})

    with pytest.raises(ConfigError) as caught:
        check_start(settings, ["webhook"])
    assert [fault.partition(";")[0] for fault in caught.value.faults] == [
        "webhook.endpoints.0.secrets: is missing",
        "webhook.endpoints.2.public_url: is missing, but the service signs {url}",
        "webhook.endpoints.3.secrets.0: the secret is empty or not hex",
    ]


async def test_a_certificate_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    """After the start, a missing file is a fault of the connection, which is retried."""
    tls = {"ca_file": tmp_path / "nope"}
    settings = Settings.model_validate({"rabbitmq": {"url": "amqps://localhost:9/", "tls": tls}})
    (url,) = settings.rabbitmq.url

    with pytest.raises(BrokerError, match=r"^rabbitmq\.tls"):
        await open_connection(settings.rabbitmq, url, name="test")
