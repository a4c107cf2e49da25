"""Which broker the environment names, and whether it answers as one."""

import socket

import pytest

from bridge.sandbox import reachability
from bridge.sandbox.reachability import URL_VARIABLE, find_broker


@pytest.mark.parametrize(
    "value",
    ["", "   ", "not a url", "amqp://127.0.0.1:1/", "amqps://127.0.0.1:1/", "[", '["amqp://["]'],
)
def test_finds_no_broker(value: str) -> None:
    """A setting that is missing, broken or answered by nobody names no broker."""
    assert find_broker({URL_VARIABLE: value}) is None


def test_finds_no_broker_where_nobody_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that takes connections and is silent is no broker."""
    monkeypatch.setattr(reachability, "HANDSHAKE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert find_broker({URL_VARIABLE: f"amqp://127.0.0.1:{port}/"}) is None
