"""`sms-bridge init`: what it asks, how it checks an answer, what it writes."""

from pathlib import Path

import pytest

from bridge.admin.wizard import (
    Answers,
    check_answer,
    questions,
    secrets_to_make,
    split_image,
    write_document,
    write_files,
)
from bridge.config import Settings, load_settings
from bridge.config.presets import PRESETS, Preset, needed_settings, webhook_secret
from bridge.errors import BridgeError, ConfigError
from bridge.start_checks import check_roles

# Of RFC 8032, 7.1, test 1: what any other service takes as a secret, too.
PUBLIC_KEY = "11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="


NEED_ADDRESS = {"twilio", "telnyx", "messagebird", "plivo"}
UNSIGNED = {"vonage-sms", "infobip", "httpsms"}


def answers(preset: Preset, folder: Path, **other: str) -> Answers:
    files = {"key": "Canary7Key", "webhook": PUBLIC_KEY, "password": "Canary7Password"}
    for name, text in files.items():
        (folder / name).write_text(text)
    known = {
        "where": "host",
        "broker": "amqp://rabbitmq.example.com/sms",
        "broker-user": "yes",
        "broker-password-file": str(folder / "password"),
        "preset": preset,
        "base-url": "https://api.example.com",
        "account": "0123",
        "username": "me #1 {you}",
        "key-file": str(folder / "key"),
        "webhook-secret-file": str(folder / "webhook"),
        "public-url": "https://sms.example.com/webhooks",
    }
    given: Answers = {}
    for question in questions(given):
        given[question.name] = other.get(question.name, known[question.name])
        check_answer(question.name, given, {})
    return given


def ask(preset: Preset) -> dict[str, tuple[str, str | None]]:
    given: Answers = {"where": "host", "broker": "amqp://h/", "preset": preset, "key-file": "/k"}
    return {one.name: (one.explanation, one.default) for one in questions(given)}


def written(given: Answers, folder: Path) -> tuple[str, Settings]:
    path = folder / "config.yaml"
    path.write_text(write_document(given))
    return path.read_text(), load_settings(path, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_both_roles_could_start_with_it(tmp_path: Path, preset: Preset) -> None:
    text, settings = written(answers(preset, tmp_path), tmp_path)
    (endpoint,) = settings.webhook.all_endpoints

    assert check_roles(settings, ["worker", "webhook"]) == {"worker": None, "webhook": None}
    assert settings.sms_api.preset == endpoint.preset == preset
    assert settings.sms_api.missing == []
    assert settings.rabbitmq.username == "yes"
    assert endpoint.path == ("/webhooks" if preset == "generic" else f"/webhooks/{preset}")
    assert endpoint.secret_files == (tmp_path / "webhook",)
    assert (endpoint.public_url is not None) == (preset in NEED_ADDRESS)
    assert settings.sms_api.account in {"0123", None}
    assert settings.sms_api.auth.username in {"me #1 {you}", None}
    assert f"# Contains {webhook_secret(preset)}." in text
    assert "Canary7" not in text
    assert PUBLIC_KEY not in text


def test_the_worker_could_start_alone(tmp_path: Path) -> None:
    alone = answers("twilio", tmp_path, **{"webhook-secret-file": "none"})
    text, settings = written(alone, tmp_path)
    missing = check_roles(settings, ["worker", "webhook"])

    assert missing["worker"] is None
    assert missing["webhook"] is not None
    assert "webhook:" not in text


def test_what_a_proxy_signs_is_said(tmp_path: Path) -> None:
    for preset in PRESETS:
        text, settings = written(answers(preset, tmp_path), tmp_path)
        is_by_proxy = "# How your proxy signs the webhooks that it has checked.\n" in text
        assert is_by_proxy == (preset in UNSIGNED)
        if is_by_proxy:
            assert settings.webhook.endpoints[0].signature.preset == "plain"


def test_paths_and_names_of_any_kind_stay_what_they_are(tmp_path: Path) -> None:
    odd = tmp_path / "a b: #c, [d] 'e' ü"
    odd.mkdir()
    _, settings = written(answers("plivo", odd, account="1e3", **{"broker-user": "null"}), odd)

    assert settings.sms_api.key_file == odd / "key"
    assert settings.sms_api.account == "1e3"
    assert settings.rabbitmq.username == "null"


@pytest.mark.parametrize("preset", PRESETS)
def test_the_questions_use_the_words_of_the_service(preset: Preset) -> None:
    asked = ask(preset)
    told = " ".join(explanation for explanation, _ in asked.values())

    for words in needed_settings(preset).values():
        assert f"For {preset}: {words}." in told
    assert webhook_secret(preset) in asked["webhook-secret-file"][0]
    assert ("public-url" in asked) == (preset in NEED_ADDRESS and preset not in UNSIGNED)


def test_services_without_a_signature_default_to_no_webhooks() -> None:
    defaults = {preset: ask(preset)["webhook-secret-file"][1] for preset in PRESETS}

    assert {preset for preset in PRESETS if defaults[preset] == "none"} == UNSIGNED
    assert {preset for preset in PRESETS if defaults[preset] == "/k"} == {"twilio", "plivo"}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("image", "Sms Bridge", "must look like registry.example.com/sms-bridge"),
        ("broker", "amqp://localhost:5672/", "in a pod this is the pod itself"),
        ("broker", "amqp://[::1]:5672/", "in a pod this is the pod itself"),
        ("broker-secret-name", "My_Secret", "must be the name of a Secret"),
        ("key-secret-name", "sk_live_1234", "never give the secret itself here"),
        ("webhook-secret-name", "name/a key", "never give the secret itself here"),
    ],
)
def test_a_wrong_answer_is_refused(name: str, value: str, why: str) -> None:
    right = {
        "image": "registry.example.com:5000/team/sms-bridge@sha256:" + "a" * 64,
        "broker": "amqps://rabbitmq.messaging.svc/sms",
        "broker-secret-name": "sms-api",
        "key-secret-name": "sms.api/API_KEY",
        "webhook-secret-name": "none",
    }
    check_answer(name, {"where": "kubernetes", name: right[name]}, {})
    with pytest.raises(ConfigError, match=why) as caught:
        check_answer(name, {"where": "kubernetes", name: value}, {})

    assert str(caught.value).startswith(f"--{name}: ")
    assert value not in str(caught.value)


def test_a_secret_is_checked_before_its_file_is_written() -> None:
    given = {"where": "host", "broker": "amqp://h/", "preset": "telnyx", "key-file": "/new/key"}

    check_answer("key-file", given, {Path("/new/key"): "good-key"})
    with pytest.raises(ConfigError, match="must be visible ASCII") as caught:
        check_answer("key-file", given, {Path("/new/key"): "two words"})
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("team/sms-bridge:1", ("", "team/sms-bridge", "1", "")),
        ("localhost/a:1", ("localhost", "a", "1", "")),
        ("r:5000/a/b", ("r:5000", "a/b", "", "")),
        ("r.example/a:1@sha256:ab", ("r.example", "a", "1", "sha256:ab")),
    ],
)
def test_an_image_is_split(image: str, parts: tuple[str, str, str, str]) -> None:
    assert tuple(split_image(image).values()) == parts


def test_a_secret_is_made_once_with_all_its_keys() -> None:
    one = {
        "broker-secret-name": "rabbitmq",
        "key-secret-name": "twilio/auth-token",
        "webhook-secret-name": "twilio/auth-token",
    }
    both = one | {"webhook-secret-name": "twilio/other"}

    assert secrets_to_make(one) == {"rabbitmq": ["username", "password"], "twilio": ["auth-token"]}
    assert secrets_to_make(both)["twilio"] == ["auth-token", "other"]
    assert secrets_to_make(one | {"webhook-secret-name": "none"}) == secrets_to_make(one)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_each_file_has_its_mode(tmp_path: Path) -> None:
    write_files({tmp_path / "key": "k"}, tmp_path / "config.yaml", "c\n", replaces=False)

    assert contents(tmp_path) == {"key": "k\n", "config.yaml": "c\n"}
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("replaces", [True, False])
def test_a_file_that_exists_stops_all(tmp_path: Path, *, replaces: bool) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    (tmp_path / "key").write_text("mine")
    secrets = {tmp_path / "other": "k"} | ({tmp_path / "key": "k"} if replaces else {})

    with pytest.raises(ConfigError, match="exists and is left as it is; --force"):
        write_files(secrets, tmp_path / "config.yaml", "c", replaces=replaces)

    assert contents(tmp_path) == {"config.yaml": "mine", "key": "mine"}


def test_a_configuration_is_replaced_after_an_init_that_was_killed(tmp_path: Path) -> None:
    """What a killed `init --force` left of the new configuration does not stop the next one."""
    (tmp_path / "config.yaml").write_text("old")
    (tmp_path / "config.yaml").chmod(0o600)
    (tmp_path / ".config.yaml.new").write_text("half")
    write_files({}, tmp_path / "config.yaml", "new", replaces=True)

    assert contents(tmp_path) == {"config.yaml": "new"}
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no folder" / "config.yaml"

    with pytest.raises(BridgeError, match=r"config\.yaml: cannot be written: No such file"):
        write_files({tmp_path / "key": "k"}, missing, "c", replaces=False)

    assert contents(tmp_path) == {}


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_self: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_files({tmp_path / "key": "k"}, tmp_path / "config.yaml", "c", replaces=True)

    assert contents(tmp_path) == {}
