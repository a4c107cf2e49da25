"""The catalogue of commands: all are in it, and each is found."""

from importlib import import_module
from pkgutil import iter_modules

import pytest
import typer
from typer.main import get_group
from typer.testing import CliRunner

import bridge.cli
from bridge.__main__ import app
from bridge.cli.catalogue import ENTRIES, Catalogue


@pytest.mark.parametrize("name", ENTRIES)
def test_each_command_is_found(name: str) -> None:
    assert Catalogue()[name].name == name


def test_no_command_is_missing() -> None:
    found = typer.Typer()
    for module in iter_modules(bridge.cli.__path__, "bridge.cli."):
        if (own := getattr(import_module(module.name), "app", None)) is not None:
            found.add_typer(own)

    assert get_group(found).commands.keys() == ENTRIES.keys()


def test_a_line_for_each_command() -> None:
    lines = CliRunner().invoke(app, ["--help"]).stdout.splitlines()

    assert lines[lines.index("Commands:") + 1 :] == [
        f"  {name:8}  {entry.summary}" for name, entry in ENTRIES.items()
    ]
