"""The catalogue of commands: all are in it, and each is found."""

from importlib import import_module
from pkgutil import iter_modules

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_group
from typer.testing import CliRunner

import bridge.cli
from bridge.__main__ import app
from bridge.cli.catalogue import ENTRIES, Catalogue


@pytest.mark.parametrize("name", ENTRIES)
def test_each_command_explains_itself(name: str) -> None:
    """Each command, also within a group, shows its usage and examples."""
    command = Catalogue()[name]
    parts = sorted(command.commands) if isinstance(command, TyperGroup) else [""]

    assert command.name == name
    for part in parts:
        usage, _, examples = ask_for_help(*name.split(), *part.split()).partition("Examples:")
        assert usage.startswith(f"Usage: sms-bridge {name} {part}".rstrip() + " ")
        assert f"  sms-bridge {name} {part}".rstrip() in examples


def test_no_command_is_missing() -> None:
    found = typer.Typer()
    for module in iter_modules(bridge.cli.__path__, "bridge.cli."):
        if (own := getattr(import_module(module.name), "app", None)) is not None:
            found.add_typer(own)

    assert get_group(found).commands.keys() == ENTRIES.keys()


def ask_for_help(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], prog_name="sms-bridge")
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_a_line_for_each_command() -> None:
    lines = ask_for_help().splitlines()

    assert lines[lines.index("Commands:") + 1 :] == [
        f"  {name:8}  {entry.summary}" for name, entry in ENTRIES.items()
    ]
