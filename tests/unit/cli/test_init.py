"""The answers that options give: each is checked, and all faults are told at once."""

from pathlib import Path

import pytest

from bridge.cli.init import Interview
from bridge.errors import ConfigError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def unasked(given: dict[str, str]) -> Interview:
    interview = Interview(given, is_asked=False)
    interview.answer_all()
    return interview


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("s3cret\n")
    return str(path)


def test_all_that_is_missing_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        unasked({"where": "kubernetes", "preset": "infobip"})
    with pytest.raises(ConfigError) as on_host:
        unasked({"preset": "twilio", "broker-user": "sms"})

    assert [fault.partition(": is missing")[0] for fault in caught.value.faults] == [
        "--image",
        "--broker",
        "--base-url",
    ]
    assert "For infobip: the account's own address" in caught.value.faults[2]
    assert [fault.partition(": ")[0] for fault in on_host.value.faults] == [
        "rabbitmq.password_file",
        "--account",
        "sms_api.key_file",
        "webhook.endpoints.0.secret_files.0",
        "--public-url",
    ]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"where": "moon"}, "--where: must be host or kubernetes"),
        ({"broker": "amqp://u:p@h/"}, "--broker: must not contain a user or a password"),
        ({"broker": "amqp://h/\x07"}, "--broker: contains a control character"),
        ({"image": "x"}, "--image: does not fit the other answers; leave it out"),
        ({"key-file": "/no/key"}, "sms_api.key_file: /no/key cannot be read"),
    ],
)
def test_a_wrong_option_is_told(secret: str, given: dict[str, str], fault: str) -> None:
    right: dict[str, str] = {
        "preset": "telnyx",
        "key-file": secret,
        "webhook-secret-file": "none",
    }
    with pytest.raises(ConfigError) as caught:
        unasked(right | given)

    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(fault)


def test_a_secret_of_webhooks_must_fit_its_scheme(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"webhook\.endpoints\.0\.secret_files\.0: "):
        unasked({"preset": "telnyx", "key-file": secret, "webhook-secret-file": secret})
