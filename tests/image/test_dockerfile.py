"""The recipe of the image: small, locked, not root, and no shell needed to run it."""

import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from typer.core import TyperGroup
from typer.main import get_command

from bridge.__main__ import app as cli
from bridge.config import Settings
from bridge.config.settings import known_keys
from tests.image.dockerfile import PROJECT, build_context, read_dockerfile

STAGES = read_dockerfile()
RECIPE = (PROJECT / "Dockerfile").read_text()
BUILD = next(stage for stage in STAGES if stage.name == "build")
FINAL = STAGES[-1]
LABEL_PREFIX = "org.opencontainers.image."


def test_what_is_built_with_stays_behind() -> None:
    assert list(FINAL.files) == [("build", ["/opt/app"], "/opt/app")]
    assert all(stage.texts("ADD") == [] for stage in STAGES)
    assert not any("install" in text for text in FINAL.texts("RUN"))


def test_the_build_takes_the_locked_versions() -> None:
    first, last = BUILD.texts("RUN")
    copied = [sources for origin, sources, _ in BUILD.files if origin is None]

    assert "uv sync --locked --no-dev --all-extras --group compile --no-install-project" in first
    # Which takes the group out again.
    assert "uv sync --locked --no-dev --all-extras --no-editable --no-build-isolation" in last
    assert "HATCH_BUILD_HOOKS_ENABLE=1 " in last
    assert copied[0] == ["pyproject.toml", "uv.lock"]
    assert BUILD.environment["UV_PROJECT_ENVIRONMENT"] == "/opt/app"


def test_the_build_sees_only_what_it_copies() -> None:
    """The context is a list of what may enter, so that no secret enters by accident."""
    copied = {s for origin, sources, _ in BUILD.files if origin is None for s in sources}

    assert set(build_context()) == copied
    assert (PROJECT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_what_is_compiled_fits_the_final_stage() -> None:
    """It is built with the Python and on the system that it runs on, which has no compiler."""
    python, compiler = re.findall(r"^ARG (?:PYTHON|COMPILER)_TAG=(.+)$", RECIPE, re.MULTILINE)

    assert python == compiler.replace("-", "-slim-")


def test_the_release_page_names_the_bases() -> None:
    """Who releases asks for the digests of the tags that the recipe has."""
    page = (PROJECT / "CONTRIBUTING.md").read_text()
    python, compiler, uv = re.findall(r"^ARG \w+_TAG=(.+)$", RECIPE, re.MULTILINE)

    assert page.count(python) == page.count(compiler) == page.count(uv) == 2
    assert f"python:{python} " in page
    assert f"python:{compiler}\n" in page
    assert f"ghcr.io/astral-sh/uv:{uv}\n" in page


def locked_for_the_image(machine: str, python: str) -> dict[str, list[str]]:
    lock = tomllib.loads((PROJECT / "uv.lock").read_text())["package"]
    packages = {package["name"]: package for package in lock}
    place = {
        "implementation_name": "cpython",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    found: dict[str, list[str]] = {}
    # A package that is asked for with extras needs what they need, too.
    ours = tuple(packages["sms-bridge"]["optional-dependencies"])
    waiting: list[tuple[str, tuple[str, ...]]] = [("sms-bridge", ours)]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        package = packages[name]
        found[name] = [wheel["url"].rpartition("/")[2] for wheel in package.get("wheels", [])]
        needed = [*package.get("dependencies", [])]
        for extra in extras:
            needed += package.get("optional-dependencies", {}).get(extra, [])
        needed += package.get("dev-dependencies", {}).get("compile", [])
        for need in needed:
            item = (need["name"], tuple(need.get("extra", ())))
            wanted = "marker" not in need or Marker(need["marker"]).evaluate(place)
            if wanted and item not in seen:
                seen.add(item)
                waiting.append(item)
    del found["sms-bridge"]
    return found


@pytest.mark.parametrize(("platform", "machine"), [("amd64", "x86_64"), ("arm64", "aarch64")])
def test_no_dependency_needs_a_compiler(platform: str, machine: str) -> None:
    makefile = (PROJECT / "Makefile").read_text()
    (platforms,) = re.findall(r"^PLATFORMS := (.+)$", makefile, re.MULTILINE)
    (python,) = re.findall(r"^ARG PYTHON_TAG=(\d+\.\d+)-slim-trixie$", RECIPE, re.MULTILINE)
    version = tuple(int(number) for number in python.split("."))
    # The C library of trixie is 2.41; what is built for an older one runs there.
    systems = [f"manylinux_2_{minor}_{machine}" for minor in range(41, 4, -1)]
    tags = {*cpython_tags(version, platforms=systems), *compatible_tags(version, "cp", systems)}
    locked = locked_for_the_image(machine, python)

    assert sorted(platforms.split(",")) == ["linux/amd64", "linux/arm64"]
    assert f"linux/{platform}" in platforms
    assert {"pydantic-core", "uvloop", "pyyaml", "uvicorn", "mypy"} <= locked.keys()
    assert "pytest" not in locked
    assert [
        name
        for name, wheels in locked.items()
        if not any(tags & parse_wheel_filename(wheel)[3] for wheel in wheels)
    ] == []


def test_the_user_is_a_number() -> None:
    chart = yaml.safe_load((PROJECT / "helm" / "sms-bridge" / "values.yaml").read_text())
    pod = chart["podSecurityContext"]

    assert FINAL.texts("USER") == [f"{pod['runAsUser']}:{pod['runAsGroup']}"] == ["10001:10001"]


def test_the_bridge_is_process_one() -> None:
    """Entry point and command are in exec form: the bridge gets the signals itself."""
    program = get_command(cli)

    assert isinstance(program, TyperGroup)
    assert FINAL.command("ENTRYPOINT") == ["sms-bridge"]
    assert FINAL.command("CMD")[0] in program.commands
    assert FINAL.texts("STOPSIGNAL") == ["SIGTERM"]


def test_the_ports_are_the_apps() -> None:
    """The ports that are exposed are those that the app takes when nothing else is set."""
    settings = Settings()

    assert FINAL.texts("EXPOSE") == [f"{settings.webhook.port} {settings.admin.port}"]


def test_the_labels_say_what_it_is() -> None:
    """The image bears the version of the project, and where the build got it from."""
    words = [word for text in FINAL.texts("LABEL") for word in re.findall(r'(\S+)="([^"]*)"', text)]
    labels = {name.removeprefix(LABEL_PREFIX): value for name, value in words}
    project = (PROJECT / "pyproject.toml").read_text()

    assert labels.keys() == {
        *("title", "description", "version", "revision", "created", "licenses", "vendor"),
        *("source", "url", "documentation", "base.name", "base.digest"),
    }
    assert labels["vendor"] in (PROJECT / "LICENSE").read_text()
    assert labels["version"] == "${VERSION}"
    assert labels["revision"] == FINAL.environment["SMS_BRIDGE_REVISION"] == "${REVISION}"
    assert f'version = "{FINAL.texts("ARG")[1].removeprefix("VERSION=")}"' in project


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_whether_it_lives(status: int, code: int) -> None:
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    program, *arguments = FINAL.command("HEALTHCHECK")
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request).start()
        done = subprocess.run(
            [sys.executable, *arguments],
            check=False,
            capture_output=True,
            timeout=60,
            env={"SMS_BRIDGE_ADMIN__PORT": str(server.server_port)},
        )

    assert program == "python"
    assert "admin.port" in known_keys()
    assert asked == ["/livez"]
    assert done.returncode == code
