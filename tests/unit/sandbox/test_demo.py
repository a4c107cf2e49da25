"""The demo, whole: real broker, real processes, faults, and the account of every message."""

import socket
import subprocess
import sys

import pytest

from bridge.sandbox import broker
from bridge.sandbox.broker import URL_VARIABLE
from bridge.sandbox.demo.environment import find_broker


@pytest.mark.slow
def test_the_demo_accounts_for_every_message() -> None:
    """A short demo ends with exit code 0 and says that nothing is unaccounted for.

    Takes a whole demo: a broker, four processes and all messages.
    """
    command = [sys.executable, "-m", "bridge", "demo", "--messages", "50", "--events", "20"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Every message is accounted for, none was sent twice." in ended.stdout


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
