"""docs/providers/your-own-service.md, followed by the letter."""

import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.testing import CliRunner

from bridge.__main__ import app
from bridge.config.presets import lay_over
from tests.providers.pages import FOLDER, settings_of, yaml_blocks

PAGE: Final = (FOLDER / "your-own-service.md").read_text(encoding="utf-8")
# A command, and what the page says that it prints.
_SHOWN: Final = re.compile(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def config(steps: int | None = None) -> str:
    """Write config.yaml as it is after so many steps, or after all."""
    laid: dict[str, Any] = {}
    for block in yaml_blocks(PAGE)[:steps]:
        laid = lay_over(laid, yaml.safe_load(block))
    return yaml.safe_dump(laid, sort_keys=False)


@pytest.mark.parametrize("steps", range(1, len(yaml_blocks(PAGE)) + 1))
def test_each_step_can_be_loaded(steps: int, tmp_path: Path) -> None:
    """Nobody is led over a configuration that does not load, and each step adds something."""
    before = settings_of(config(steps - 1), tmp_path)

    assert settings_of(config(steps), tmp_path).masked() != before.masked()


@pytest.mark.parametrize(("command", "output"), _SHOWN.findall(PAGE))
def test_commands_print_what_the_page_shows(command: str, output: str, tmp_path: Path) -> None:
    """With the configuration of the page each command prints what stands below it."""
    settings_of(config(), tmp_path)
    program, *words = shlex.split(command.replace("\\\n", ""))
    environment = {"SMS_BRIDGE_CONFIG": str(tmp_path / "config.yaml")}
    done = CliRunner().invoke(app, words, env=environment)

    assert program == "sms-bridge"
    assert (done.exit_code, done.output.rstrip()) == (0, output.rstrip())


def test_the_page_shows_commands() -> None:
    """The page shows commands at all, so that the test above looks at something."""
    assert len(_SHOWN.findall(PAGE)) >= 1
