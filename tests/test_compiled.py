"""What `pyproject.toml` lists to be compiled: in the image, and with COMPILED=1 in the tests."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bridge

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOK = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
MODULES: list[str] = HOOK["include"]
IS_COMPILED = "SMS_BRIDGE_TEST_COMPILED" in os.environ


def test_the_list_has_modules_only() -> None:
    """Each is there, once, in order: the plugin passes over what it does not find."""
    assert sorted(set(MODULES)) == MODULES
    assert [path for path in MODULES if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("path", MODULES)
def test_the_tests_run_on_what_they_should(path: str) -> None:
    """With COMPILED=1 each module of the list is compiled, and without it none is."""
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
    """A process that is started runs on the same as the tests, and says so."""
    done = subprocess.run([*command, "--version"], capture_output=True, check=True, text=True)

    assert done.stdout == f"sms-bridge {bridge.__version__}{' (compiled)' * IS_COMPILED}\n"


def test_their_tests_run_compiled_too() -> None:
    """`make test-compiled`, which CI runs, takes the folder of each, or its file."""
    make = ["make", "--dry-run", "test-compiled"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    places = [path.split("/")[1] for path in MODULES]
    tests = {f"tests/test_{at}" if at.endswith(".py") else f"tests/{at}" for at in places}

    (line,) = (line for line in printed.splitlines() if "TESTS=" in line)
    assert set(line.split('"')[1].split()) == tests | {"tests/test_compiled.py"}


def test_compiled_is_what_is_checked() -> None:
    """The image compiles with what is locked, and others with the same range of versions."""
    assert HOOK["dependencies"] == [
        need for need in PROJECT["dependency-groups"]["compile"] if not need.startswith("hatchling")
    ]
    assert PROJECT["build-system"]["requires"] == [
        need for need in PROJECT["dependency-groups"]["compile"] if need.startswith("hatchling")
    ]


def test_pure_python_is_the_default() -> None:
    """Who installs without asking for it needs no compiler."""
    assert HOOK["enable-by-default"] is False
