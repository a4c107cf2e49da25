"""Describes the machine and all relevant versions."""

import os
import platform
import re
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench.api import find_nginx
from bench.lineup import COMPILED, FOLDER, GO, REDPANDA
from bridge.sandbox.broker import Broker

PACKAGES: Final = (
    *("aio-pika", "aiormq", "httpx", "aiohttp", "uvloop", "pydantic", "tenacity"),
    *("faststream", "fastapi", "starlette", "uvicorn", "granian", "prometheus-client"),
)
COMMAND_SECONDS: Final = 30


def describe(broker: Broker) -> dict[str, str]:
    """Return names and versions in display order."""
    return dict(_facts(broker))


def _facts(broker: Broker) -> Iterator[tuple[str, str]]:
    yield "date", time.strftime("%Y-%m-%d", time.gmtime())
    yield "commit", _commit()
    yield "processor", f"{_processor()}, {os.cpu_count()} cores"
    load, _, _ = os.getloadavg()
    yield "load before the first run", f"{load:.1f}"
    yield "kernel", platform.release()
    yield "Python", platform.python_version()
    yield "RabbitMQ", broker.ctl("version").strip()
    yield "nginx", _run(find_nginx(), "-v").rpartition("/")[2]
    for package in PACKAGES:
        yield package, version(package)
    if COMPILED.exists():
        yield "mypyc", version("mypy")
        yield "C compiler", _c_compiler()
    if REDPANDA.exists():
        yield "Redpanda Connect", _module_version("redpanda_connect", "connect/v4")
    if GO.exists():
        yield "Go", _run("go", "version", str(GO / "worker")).rpartition(" go")[2]
        yield "amqp091-go", _module_version("go", "amqp091-go")


def _c_compiler() -> str:
    """Return the version line of the C compiler that a build uses."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return _run(shlex.split(command)[0], "--version").partition("\n")[0]


def _module_version(contestant: str, module: str) -> str:
    text = (FOLDER / contestant / "go.mod").read_text(encoding="ascii")
    found = re.search(rf"{module} v(\S+)", text)
    return found[1] if found else "unknown"


def _commit() -> str:
    name = _run("git", "-C", str(FOLDER), "describe", "--always")
    # Ignore documents, which benchmarks write.
    changes = _run("git", "-C", str(FOLDER), "status", "--porcelain", "--", ":/", ":/!docs")
    return f"{name}-dirty" if changes else name


def _processor() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def _run(*command: str) -> str:
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    return result.stdout.strip() if result.returncode == 0 else "unknown"
