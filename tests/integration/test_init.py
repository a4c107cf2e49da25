"""`sms-bridge init`, typed into a terminal as by a person, and run by a script."""

from pathlib import Path

import pytest
from yarl import URL

from bridge.config import load_settings
from tests.integration.conftest import PROGRAM, Canaries, make_environ, run_program
from tests.terminal import typing

KEY = Canaries.key


@pytest.fixture
def environ() -> dict[str, str]:
    return make_environ({}) | {"COLUMNS": "200"}


def test_a_person_is_led_to_a_configuration(
    tmp_path: Path, environ: dict[str, str], amqp_url: str
) -> None:
    url = URL(amqp_url)
    # Nobody calls the service itself from a test.
    nowhere = environ | {"SMS_BRIDGE_SMS_API__BASE_URL": "http://127.0.0.1:9"}
    with typing([*PROGRAM, "init"], folder=tmp_path, environ=nowhere) as person:
        person.type("host or kubernetes [host]: ", "kubernets\n")
        person.wait_for("must be host or kubernetes")
        person.type("host or kubernetes [host]: ", "\n")
        person.type("Address [amqp://localhost:5672/]: ", f"{url}\n")
        person.wait_for("must not contain a user or a password")
        person.type("Address [amqp://localhost:5672/]: ", f"{url.with_user(None)}\n")
        person.type("User: ", f"{url.user}\n")
        person.type("File with the password", "\n")
        person.type("(not shown): ", f"{url.password}\n")
        person.wait_for("3/5  The SMS service")
        person.type("Service [generic]: ", "twilio\n")
        person.wait_for("For twilio: the Account SID, which begins with AC.")
        person.type("Account: ", "AC1\n")
        person.type("File with the key", "\n")
        person.type("(not shown): ", f"{KEY}\n")
        person.type("File with the secret", "\n")
        person.type("Address: ", "https://sms.example.com/webhooks/twilio\n")
        person.type("Nothing is sent. [Y/n]: ", "\n")
        code = person.exit_code()
    settings = load_settings(tmp_path / "config.yaml", {})

    assert code == 1
    assert "ok    broker" in person.shown
    assert "Correct what failed, then: sms-bridge check --config" in person.shown
    assert KEY not in person.shown
    assert settings.sms_api.key_file == tmp_path / "sms-api-key"
    assert settings.webhook.endpoints[0].secret_files == (tmp_path / "sms-api-key",)
    assert (tmp_path / "sms-api-key").read_text() == f"{KEY}\n"
    assert (tmp_path / "sms-api-key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "rabbitmq-password").stat().st_mode & 0o777 == 0o600
    assert KEY not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("how", ["ctrl-c", "end of input"])
def test_whoever_ends_it_finds_everything_as_it_was(
    tmp_path: Path, environ: dict[str, str], how: str
) -> None:
    with typing([*PROGRAM, "init"], folder=tmp_path, environ=environ) as person:
        person.type("host or kubernetes", "\n")
        person.type("Address", "\n")
        person.type("User", "\n")
        person.type("Service [generic]: ", "telnyx\n")
        person.type("File with the key", "\n")
        person.type("(not shown): ", f"{KEY}\n")
        person.wait_for("File with the secret")
        key = {"ctrl-c": "\x03", "end of input": "\x04"}[how]
        code = person.insist(lambda: person.press(key))

    assert code == 1
    assert person.shown.endswith("Cancelled; nothing was written.\n")
    assert "Traceback" not in person.shown
    assert list(tmp_path.iterdir()) == []


async def test_a_script_gives_options(tmp_path: Path) -> None:
    key, output = tmp_path / "key", tmp_path / "config.yaml"
    key.write_text(KEY)
    options = ("init", f"--output={output}", f"--key-file={key}", "--webhook-secret-file=none")
    missing = await run_program(*options)
    left = output.exists()
    done = await run_program(*options, "--preset=telnyx")
    text = output.read_text()
    checked = await run_program("check", f"--config={output}")
    again = await run_program(*options, "--preset=sinch", "--account=a")
    kept = output.read_text()
    output.chmod(0o600)
    forced = await run_program(*options, "--preset=sinch", "--account=a", "--force")

    assert (missing.returncode, missing.stdout, left) == (2, b"", False)
    assert missing.stderr.startswith(b"sms-bridge: --base-url: is missing. ")
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"next: sms-bridge check --config {output} --online" in done.stdout.decode()
    assert checked.returncode == 0
    assert b"# worker: ready to start" in checked.stdout
    assert (again.returncode, kept) == (2, text)
    assert b"exists and is left as it is; --force" in again.stderr
    assert forced.returncode == 0
    assert "preset: sinch" in output.read_text()
    assert output.stat().st_mode & 0o777 == 0o600


async def test_a_script_may_have_it_tried(tmp_path: Path, amqp_url: str) -> None:
    key, password = tmp_path / "key", tmp_path / "password"
    key.write_text(KEY)
    url = URL(amqp_url)
    password.write_text(url.password or "guest")
    done = await run_program(
        *("init", "--yes", "--check", f"--output={tmp_path / 'config.yaml'}"),
        *(f"--broker={url.with_user(None)}", f"--broker-user={url.user}"),
        *(f"--broker-password-file={password}", "--base-url=http://127.0.0.1:9"),
        *(f"--key-file={key}", "--webhook-secret-file=none"),
    )

    assert done.returncode == 1
    assert b"ok    broker" in done.stdout
    assert b"fail  sms api" in done.stdout.lower()
    assert b"Correct what failed, then: sms-bridge check --config" in done.stdout
    assert (tmp_path / "config.yaml").is_file()
