"""The command line: what is imported for its help, and for a role until it asks the broker."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bridge.errors import EXIT_CLEAN
from bridge.sandbox.processes import Child, guarded, wait_until

# Python tells on standard error of each module that it imports.
PROGRAM = (sys.executable, "-X", "importtime", "-m", "bridge")
IMPORTED = re.compile(r"^import time:[ \d]+\|[ \d]+\| +(\S+)$", re.MULTILINE)
GUARD_SECONDS = 60
# Each takes longer to import than all that the help needs.
SLOW = {"aio_pika", "httpx", "prometheus_client", "pydantic", "rich", "starlette", "uvloop", "yaml"}
# What commands need, or a role that is configured for it.
NOT_FOR_ROLES = {
    "bridge.admin",
    "bridge.sandbox",
    "click",
    "cryptography",
    "httpcore",
    "httpx",
    "jwt",
    "opentelemetry",
    "pygments",
    "rich",
    "starlette",
    "uvicorn",
}
# A tenth more than there are, for other versions of Python and of what is installed.
MOST_MODULES = {"--help": 172, "worker": 725, "webhook": 747}
# What a command needs comes with it.
OF_ALL_COMMANDS = {"catalogue", "options", "output"}
NOT_FOR_ONE_ROLE = {"worker": {"bridge.webhook"}, "webhook": set[str]()}
SETTINGS: dict[str, dict[str, object]] = {
    "worker": {"sms_api": {"base_url": "http://127.0.0.1:1", "key": "key"}},
    "webhook": {"webhook": {"host": "127.0.0.1", "port": 0, "secrets": ["0" * 32]}},
}


def packages_of(modules: list[str]) -> set[str]:
    """Return the packages that modules are of: the first, or of ours the first two parts."""
    return {
        ".".join(module.split(".")[: 2 if module.startswith("bridge.") else 1])
        for module in modules
    }


def commands_in(modules: list[str]) -> set[str]:
    """Return the modules of commands; Python does not tell of one that is imported by name."""
    package = "bridge.cli."
    return {name.removeprefix(package) for name in modules if name.startswith(package)}


def imported_by(role: str, folder: Path) -> list[str]:
    """Return what a role imports until a broker has refused it, and in its drain after that."""
    values = {"admin": {"host": "127.0.0.1", "port": 0}, **SETTINGS[role]}
    config = folder / "config.yaml"
    # Nobody listens on a port that is only held, and nobody else may.
    with guarded() as guard, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        rabbitmq = {"url": f"amqp://127.0.0.1:{held.getsockname()[1]}"}
        config.write_text(yaml.safe_dump({"rabbitmq": rabbitmq, **values}), encoding="utf-8")
        program = Child(
            [*PROGRAM, role, "--config", str(config)],
            guard=guard,
            log=folder / "log",
            environ=os.environ,
        )
        has_tried = wait_until(
            lambda: "broker_unavailable" in program.log.read_text(encoding="utf-8"),
            seconds=GUARD_SECONDS,
            running=lambda: program.exit_code is None,
        )
        program.end(grace_seconds=GUARD_SECONDS)
    assert (has_tried, program.exit_code) == (True, EXIT_CLEAN)
    return IMPORTED.findall(program.log.read_text(encoding="utf-8"))


def test_the_help_imports_nothing_slow() -> None:
    """What a command needs is imported when it runs, so that `--help` and completion are quick."""
    run = subprocess.run([*PROGRAM, "--help"], capture_output=True, check=True, text=True)
    modules = IMPORTED.findall(run.stderr)

    assert "typer" in packages_of(modules)
    assert SLOW & packages_of(modules) == set()
    assert commands_in(modules) == OF_ALL_COMMANDS
    assert len(modules) <= MOST_MODULES["--help"]


@pytest.mark.parametrize("role", SETTINGS)
def test_a_role_imports_what_it_needs_to_start(role: str, tmp_path: Path) -> None:
    """A role is at work soon, for it imports nothing that only commands or other set-ups need."""
    modules = imported_by(role, tmp_path)

    assert {"aiormq", "bridge.wiring", "bridge.amqp", "prometheus_client"} <= {
        *modules,
        *packages_of(modules),
    }
    assert (NOT_FOR_ROLES | NOT_FOR_ONE_ROLE[role]) & packages_of(modules) == set()
    assert commands_in(modules) == OF_ALL_COMMANDS
    assert len(modules) <= MOST_MODULES[role]
