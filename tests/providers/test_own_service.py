"""The pages for services without a preset, followed by the letter."""

import hmac
import re
import shlex
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.testing import CliRunner

from bridge.__main__ import app
from bridge.config.presets import lay_over
from bridge.webhook.event import name_event
from bridge.webhook.signatures.schemes import scheme_from
from bridge.webhook.signatures.verify import verify
from tests.providers.pages import FOLDER, settings_of, yaml_blocks

PAGE: Final = (FOLDER / "your-own-service.md").read_text(encoding="utf-8")
PLAIN_TEXT: Final = (FOLDER / "plain-text.md").read_text(encoding="utf-8")
# A command, and what the page says that it prints.
_SHOWN: Final = re.compile(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def config(page: str = PAGE, steps: int | None = None) -> str:
    laid: dict[str, Any] = {}
    for block in yaml_blocks(page)[:steps]:
        laid = lay_over(laid, yaml.safe_load(block))
    return yaml.safe_dump(laid, sort_keys=False)


@pytest.mark.parametrize("steps", range(1, len(yaml_blocks(PAGE)) + 1))
def test_each_step_can_be_loaded(steps: int, tmp_path: Path) -> None:
    before = settings_of(config(steps=steps - 1), tmp_path)

    assert settings_of(config(steps=steps), tmp_path).masked() != before.masked()


@pytest.mark.parametrize(
    ("page", "command", "output"),
    [(page, *shown) for page in (PAGE, PLAIN_TEXT) for shown in _SHOWN.findall(page)],
)
def test_commands_print_what_the_page_shows(
    page: str, command: str, output: str, tmp_path: Path
) -> None:
    settings_of(config(page), tmp_path)
    program, *words = shlex.split(command.replace("\\\n", ""))
    environment = {"SMS_BRIDGE_CONFIG": str(tmp_path / "config.yaml")}
    done = CliRunner().invoke(app, words, env=environment)

    assert program == "sms-bridge"
    assert (done.exit_code, done.output.rstrip()) == (0, output.rstrip())


def test_a_webhook_that_is_signed_as_the_page_says_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (body,) = re.findall(r"^```json\n(.*)\n```$", PAGE, re.MULTILINE)
    (command,) = re.findall(r"^sms-bridge sign .*$", PAGE, re.MULTILINE)
    settings = settings_of(config(), tmp_path)
    (endpoint,) = settings.webhook.all_endpoints
    scheme = scheme_from(endpoint.signature, endpoint.public_url)
    (tmp_path / "status.json").write_text(body, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    environment = {"SMS_BRIDGE_CONFIG": str(tmp_path / "config.yaml")}
    done = CliRunner().invoke(app, shlex.split(command)[1:], env=environment)
    words = shlex.split(done.output)
    pairs = (after.split(": ", 1) for before, after in pairwise(words) if before == "-H")
    headers = [(name.lower().encode(), value.encode()) for name, value in pairs]
    signed = dict(headers)[b"x-heron-time"].decode() + "." + body
    by_hand = hmac.new(b"a-secret", signed.encode(), "sha256").hexdigest()
    verified = verify(scheme, [b"a-secret"], headers, body.encode(), now=time.time())
    event = name_event(body.encode(), "application/json", verified, endpoint)
    (receipt,) = event.receipts

    assert endpoint.path in words[words.index("POST") + 1]
    assert dict(headers)[b"x-heron-signature"].decode() == f"sha256={by_hand}"
    assert (event.routing_key, event.event_id) == ("status", "E-1001")
    for fact in (
        f"the routing key `{event.routing_key}`",
        f"`sms-bridge-delivery: {receipt.delivery}`",
        f"`sms-bridge-provider-id: {receipt.provider_id}`",
        f"`sms-bridge-message-id: {receipt.message_id}`",
    ):
        assert fact in PAGE


@pytest.mark.parametrize("page", [PAGE, PLAIN_TEXT])
def test_the_page_shows_commands(page: str) -> None:
    assert len(_SHOWN.findall(page)) >= 1
