"""The recipe of the image: small, locked, not root, and no shell needed to run it."""

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.__main__ import app as cli
from bridge.config import Settings, known_keys
from tests.image.dockerfile import PROJECT, build_context, read_dockerfile

STAGES = read_dockerfile()
BUILD = next(stage for stage in STAGES if stage.name == "build")
FINAL = STAGES[-1]
LABEL_PREFIX = "org.opencontainers.image."


def test_what_is_built_with_stays_behind() -> None:
    """The final stage takes one folder from the build, and installs nothing."""
    assert list(FINAL.files) == [("build", ["/opt/app"], "/opt/app")]
    assert all(stage.texts("ADD") == [] for stage in STAGES)
    assert not any("install" in text for text in FINAL.texts("RUN"))


def test_nothing_is_compiled_at_the_start() -> None:
    """All modules are compiled at the build, Python's own too, and no change of times undoes it."""
    (compiling,) = FINAL.texts("RUN")

    assert BUILD.environment["UV_COMPILE_BYTECODE"] == "1"
    assert BUILD.environment["PYC_INVALIDATION_MODE"] == "UNCHECKED_HASH"
    # Forced: what compiles has been compiled itself before, the usual way.
    assert "compileall -f" in compiling
    assert "--invalidation-mode unchecked-hash" in compiling


def test_the_build_takes_the_locked_versions() -> None:
    """Dependencies come first, by the lock file, without those of the tests."""
    first, last = BUILD.texts("RUN")
    copied = [sources for origin, sources, _ in BUILD.files if origin is None]

    assert "uv sync --locked --no-dev --no-install-project" in first
    assert "uv sync --locked --no-dev --no-editable" in last
    assert copied[0] == ["pyproject.toml", "uv.lock"]
    assert BUILD.environment["UV_PROJECT_ENVIRONMENT"] == "/opt/app"


def test_the_build_sees_only_what_it_copies() -> None:
    """The context is a list of what may enter, so that no secret enters by accident."""
    copied = {s for origin, sources, _ in BUILD.files if origin is None for s in sources}

    assert set(build_context()) == copied
    assert (PROJECT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_the_bases_can_be_pinned_by_digest() -> None:
    """Both bases are named by an argument, which a release gives with its digest."""
    assert {stage.base for stage in STAGES} == {
        "ghcr.io/astral-sh/uv:${UV_TAG}",
        "python:${PYTHON_TAG}",
    }


DIGEST = "@sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        ((), True),
        (("RELEASE=1",), False),
        (("RELEASE=1", f"PYTHON_TAG=3.13-slim-trixie{DIGEST}"), False),
        (
            (
                "RELEASE=1",
                f"PYTHON_TAG=3.13-slim-trixie{DIGEST}",
                f"UV_TAG=0.13.8{DIGEST}",
                "SOURCE_URL=https://git.example.com/sms-bridge",
            ),
            True,
        ),
    ],
    ids=["no release", "tags", "one digest", "both digests"],
)
def test_a_release_is_built_from_pinned_bases(
    arguments: tuple[str, ...], *, built: bool, tmp_path: Path
) -> None:
    """`make image RELEASE=1` builds only with both digests, and hands the arguments over."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/called"\n')
    docker.chmod(0o755)
    done = subprocess.run(
        ["make", "image", *arguments],
        check=False,
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MAKEFLAGS": ""},
    )

    assert (done.returncode == 0) == built, done.stderr
    assert (tmp_path / "called").exists() == built
    if built:
        called = (tmp_path / "called").read_text()
        for name in re.findall(r"^ARG (\w+)", (PROJECT / "Dockerfile").read_text(), re.MULTILINE):
            empty = not arguments and name in {"BASE_DIGEST", "SOURCE_URL"}
            assert re.search(rf"--build-arg {name}={'' if empty else '[^ ]+'}( |$)", called)
        assert arguments == () or called.count(DIGEST) == 2
        assert arguments == () or f"--build-arg BASE_DIGEST={DIGEST.removeprefix('@')} " in called


def test_the_user_is_a_number() -> None:
    """Kubernetes can tell that the user is not root, and it is the chart's."""
    chart = yaml.safe_load((PROJECT / "helm" / "sms-bridge" / "values.yaml").read_text())
    pod = chart["podSecurityContext"]

    assert FINAL.texts("USER") == [f"{pod['runAsUser']}:{pod['runAsGroup']}"] == ["10001:10001"]


def test_the_bridge_is_process_one() -> None:
    """Entry point and command are in exec form: the bridge gets the signals itself."""
    assert FINAL.command("ENTRYPOINT") == ["sms-bridge"]
    assert FINAL.command("CMD")[0] in {
        command.name or command.callback.__name__
        for command in cli.registered_commands
        if command.callback
    }
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
    """The check runs in the image's Python, asks /livez, and fails with anything but 200."""
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
