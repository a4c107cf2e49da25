"""The modules in `pyproject.toml` are compiled in the image, and in tests with COMPILED=1."""

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOK = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
MODULES: list[str] = HOOK["include"]
IS_COMPILED = "SMS_BRIDGE_TEST_COMPILED" in os.environ


def test_the_list_has_modules_only() -> None:
    """Each module exists, once and in order, because the plugin ignores missing ones."""
    assert sorted(set(MODULES)) == MODULES
    assert [path for path in MODULES if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("path", MODULES)
def test_the_tests_run_on_what_they_should(path: str) -> None:
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))

    assert module.__file__ is not None
    assert Path(module.__file__).suffix == (".so" if IS_COMPILED else ".py")


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "bridge"],
        [str(Path(sys.executable).with_name("sms-bridge"))],
    ],
    ids=["module", "script"],
)
def test_the_version_says_which_it_is(command: list[str]) -> None:
    """A new process runs compiled modules if the tests do, and `--version` says so."""
    done = subprocess.run([*command, "--version"], capture_output=True, check=True, text=True)

    assert done.stdout == f"sms-bridge {bridge.__version__}{' (compiled)' * IS_COMPILED}\n"


def test_their_tests_run_compiled_too() -> None:
    """`make test-compiled` runs the folder or file of tests of each module."""
    make = ["make", "--dry-run", "test-compiled"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    places = [path.split("/")[1] for path in MODULES]
    tests = {f"tests/unit/test_{at}" if at.endswith(".py") else f"tests/unit/{at}" for at in places}

    (line,) = (line for line in printed.splitlines() if "TESTS=" in line)
    assert set(line.split('"')[1].split()) == tests | {"tests/test_compiled.py"}


def test_compiled_is_what_is_checked() -> None:
    """The image compiles with locked versions, and other builds with the same range."""
    assert HOOK["dependencies"] == [
        need for need in PROJECT["dependency-groups"]["compile"] if not need.startswith("hatchling")
    ]
    assert PROJECT["build-system"]["requires"] == [
        need for need in PROJECT["dependency-groups"]["compile"] if need.startswith("hatchling")
    ]


def test_pure_python_is_the_default() -> None:
    """Installation needs no compiler by default."""
    assert HOOK["enable-by-default"] is False


# Leaving these blocks does not wait.
EXITS_AT_ONCE = {"asyncio.timeout", "self.rates.token", "self._publisher.deadline_for"}


def handlers_in(function: ast.AST) -> Iterator[ast.AST]:
    """Find code that runs while an error is handled."""
    for node in ast.walk(function):
        if isinstance(node, ast.Try):
            yield from (part for handler in node.handlers for part in handler.body)
            yield from node.finalbody
        elif isinstance(node, ast.AsyncWith):
            yield from (
                ast.Await(one.context_expr, lineno=node.lineno)
                for one in node.items
                if not isinstance(one.context_expr, ast.Call)
                or ast.unparse(one.context_expr.func) not in EXITS_AT_ONCE
            )


@pytest.mark.parametrize("path", MODULES)
def test_nothing_is_awaited_where_an_error_is_handled(path: str) -> None:
    """In compiled code, every other task would see the error during such an await.

    If two handlers wait at the same time, mypyc restores each other's error, which then stays for
    ever. Later errors would get a wrong cause.
    """
    waits = (ast.Await, ast.AsyncWith, ast.AsyncFor, ast.Yield, ast.YieldFrom)
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [
        f"{path}:{node.lineno}"
        for part in handlers_in(tree)
        for node in ast.walk(part)
        if isinstance(node, waits)
    ]

    assert found == []
