"""What make would run on a fresh machine, by `make --dry-run`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _syncs(target: str, clone: Path) -> list[str]:
    """Return the options of each `uv sync` that make would run."""
    printed = subprocess.run(
        ["make", "--dry-run", target], cwd=clone, check=True, capture_output=True, text=True
    )
    return re.findall(r"uv sync (.+)", printed.stdout)


@pytest.fixture(autouse=True)
def no_make_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of a make that runs these tests, such as COMPILED=1."""
    for name in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "COMPILED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Copy the files that decide about the environment into a fresh folder."""
    for name in ("Makefile", "pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


TESTS = "tests/unit/amqp/test_wire.py"
RUNNING = "--locked --no-dev --extra sandbox --inexact"
TESTING = "--locked --all-extras"


@pytest.mark.parametrize(
    ("target", "syncs"),
    [
        ("env", [RUNNING]),
        ("demo", [RUNNING]),
        ("test", [RUNNING, TESTING]),
        ("check", [RUNNING, TESTING]),
        ("upgrade-check", [RUNNING, TESTING]),
        ("bench-guard", [RUNNING, TESTING, f"{TESTING} --all-groups"]),
    ],
)
def test_each_target_installs_what_it_needs(clone: Path, target: str, syncs: list[str]) -> None:
    assert _syncs(target, clone) == syncs


@pytest.mark.parametrize("target", ["env", "demo", "test"])
def test_nothing_that_is_there_is_installed_again(clone: Path, target: str) -> None:
    """A target does not remove packages that another target has installed."""
    (clone / ".venv").mkdir()
    for stamp in (".synced", ".synced-for-tests", ".synced-for-bench"):
        (clone / ".venv" / stamp).touch()

    assert _syncs(target, clone) == []


def test_an_upgrade_is_tried_beside_the_environment(clone: Path) -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "upgrade-check", f"TESTS={TESTS}"],
        cwd=clone,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = printed.splitlines()
    own = [line for line in lines if "uv pip install" in line or TESTS in line]

    assert len(own) == 3
    assert all(".upgrade" in line and ".venv" not in line for line in own)
    assert "uv lock" not in printed
