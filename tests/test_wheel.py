"""The wheel of `make wheel` works without the checkout, and contains its data files."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.config.presets import PRESETS
from bridge.sandbox.processes import Child, Guard, free_ports, guarded, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
UV = shutil.which("uv") or shutil.which(ROOT / ".uv" / "bin" / "uv")
QUICK_START = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
SECONDS = 60
# Variables that make sets, or that configure the bridge.
NOT_PASSED_ON = re.compile(r"HATCH_|PYTHON|SMS_BRIDGE_|UV_PROJECT|VIRTUAL_ENV")
ENVIRON = {name: value for name, value in os.environ.items() if not NOT_PASSED_ON.match(name)}
LOAD_PRESETS = """
from bridge.config.presets import PRESETS, preset_settings
for preset in PRESETS:
    if preset_settings(preset)["path"]:
        print(preset)
"""
BODY = '{"to": "+447700900123", "from": "Acme", "text": "Hi"}'


def _run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def uv() -> str:
    if UV is None:
        pytest.skip("neither on PATH nor in .uv/bin, where `make env` puts it")
    return UV


@pytest.fixture(scope="module")
def wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel") / "dist"
    _run(uv, "build", "--wheel", "--out-dir", folder, folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def program(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into its own environment, as pipx does."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    _run(uv, "venv", "--python", sys.executable, environment, folder=wheel.parent)
    python = environment / "bin" / "python"
    _run(uv, "pip", "install", "--python", python, f"{wheel}[sandbox]", folder=wheel.parent)
    return environment / "bin" / "sms-bridge"


@pytest.fixture
def guard() -> Iterator[Guard]:
    with guarded() as guard:
        yield guard


def test_the_quick_start_names_the_wheel(wheel: Path) -> None:
    named = set(re.findall(r"dist/([\w.-]+\.whl)", QUICK_START))

    assert named == {wheel.name}


def test_uvx_runs_the_wheel_as_the_quick_start_shows(uv: str, wheel: Path) -> None:
    (command,) = re.findall(r"^uvx (.*)$", QUICK_START, re.MULTILINE)
    shown = _run(uv, "tool", "run", *shlex.split(command), folder=wheel.parent.parent)

    assert shown == f"sms-bridge {wheel.name.split('-')[1]}\n"


def test_the_presets_are_inside(program: Path, tmp_path: Path) -> None:
    settings = "sms_api: {preset: twilio, account: AC0, key: a-key}\n"
    (tmp_path / "config.yaml").write_text(settings, encoding="utf-8")
    checked = ("check", "--config", "config.yaml")
    _run(program, *checked, "--role", "worker", "--quiet", folder=tmp_path)
    rendered = _run(program, *checked, "--render", BODY, folder=tmp_path)
    python = program.with_name("python")
    loaded = _run(python, "-I", "-c", LOAD_PRESETS, folder=tmp_path)

    assert "POST https://api.twilio.com/" in rendered
    assert set(loaded.split()) == set(PRESETS)


def test_the_templates_of_init_are_inside(program: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key", encoding="utf-8")
    words = ["--yes", "--preset", "telnyx", "--key-file", "key", "--webhook-secret-file", "none"]
    _run(program, "init", *words, folder=tmp_path)

    assert "preset: telnyx" in (tmp_path / "config.yaml").read_text(encoding="utf-8")


def test_the_page_of_the_sandbox_is_inside(program: Path, guard: Guard, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [str(program), "sandbox", "--port", str(port)]
    child = Child(command, guard=guard, log=tmp_path / "log", environ=ENVIRON)
    url = f"http://127.0.0.1:{port}/"
    try:
        assert wait_until(lambda: url[:-1] in child.tail(), seconds=SECONDS), child.tail()
        page = _fetch(url)
        parts = set(re.findall(r"(?:src|href)=\"(?!data:|#)/?([^\"]+)\"", page))
        assert len(parts) >= 3
        assert all(_fetch(f"{url}{part}") for part in parts)
    finally:
        child.end(grace_seconds=SECONDS)


def _fetch(url: str) -> str:
    request = urllib.request.Request(url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return str(response.read().decode())
