"""Replaces every service by a stub, and blocks all other connections."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificate
from tests.services.stub import Stub, Told, serving


@pytest.fixture(scope="session")
def running_stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    certificate: Path = make_certificate(tmp_path_factory.mktemp("services"))
    with serving(certificate) as stub:
        yield stub


@pytest.fixture(autouse=True)
def stub(running_stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Provide an empty stub, which HTTP clients trust. No name is resolved."""
    running_stub.requests.clear()
    running_stub.told = Told(500)
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(running_stub.certificate))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    look_up = socket.getaddrinfo

    def on_loopback(host: Any, *args: Any, **options: Any) -> Any:
        if host not in {"127.0.0.1", b"127.0.0.1"}:
            raise AssertionError(f"a client wants to reach {host!r}")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", on_loopback)
    return running_stub
