"""The demo, whole: real broker, real processes, faults, and the account of every message."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.config import load_settings
from bridge.sandbox import broker
from bridge.sandbox.broker import URL_VARIABLE
from bridge.sandbox.demo.environment import (
    ROLES,
    DemoBroker,
    DemoEnvironment,
    find_broker,
    queues_of,
)
from bridge.sandbox.demo.run import addresses
from bridge.sandbox.processes import guarded

URL = "amqp://guest:guest@127.0.0.1:29000/"
NAMES = {"WORKER__QUEUE": "demo.outbound", "WEBHOOK__QUEUE": "demo.inbound"}


@pytest.mark.slow
def test_the_demo_accounts_for_every_message() -> None:
    """A short demo ends with exit code 0 and says that nothing is unaccounted for.

    Takes a whole demo: a broker, four processes and all messages.
    """
    command = [sys.executable, "-m", "bridge", "demo", "--messages", "50", "--events", "20"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Every message is accounted for, none was sent twice." in ended.stdout


@pytest.mark.parametrize("names", [{}, NAMES], ids=["private", "own-names"])
def test_the_demo_tells_how_to_check_its_queues(names: dict[str, str], tmp_path: Path) -> None:
    """The command that is printed names the broker, the queues and the retry delays of the demo."""
    place = DemoBroker({URL_VARIABLE: URL}, names)
    with guarded() as guard:
        environment = DemoEnvironment(place, tmp_path, guard, {})
        lines = addresses(environment)
        (line,) = [line for line in lines if line.endswith(" topology verify")]
    words = shlex.split(line.partition(" env ")[2])
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    meant = load_settings(None, {URL_VARIABLE: URL, **environ})
    default = load_settings(None, {})

    assert queues_of(meant, *ROLES) == queues_of(environment.settings, *ROLES)
    assert len(queues_of(meant, *ROLES)) != len(queues_of(default, *ROLES))
    assert (URL_VARIABLE in environ) == (not names)


@pytest.mark.parametrize(
    "value",
    ["", "   ", "not a url", "amqp://127.0.0.1:1/", "amqps://127.0.0.1:1/", "[", '["amqp://["]'],
)
def test_finds_no_broker(value: str) -> None:
    """A setting that is missing, broken or answered by nobody names no broker."""
    assert find_broker({URL_VARIABLE: value}) is None


def test_finds_no_broker_at_a_silent_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that accepts connections and says nothing is no broker."""
    monkeypatch.setattr(broker, "HANDSHAKE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert find_broker({URL_VARIABLE: f"amqp://127.0.0.1:{port}/"}) is None
