"""The sandbox in a service's place, over TLS on loopback, for the service's own client."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from bridge.sandbox.api import create_app
from bridge.sandbox.store import SandboxStore
from tests.services.comparison import SECRET, Service
from tests.services.stub import GUARD_SECONDS, Stub


@contextmanager
def played(
    service: Service, certificate: Path, *, key: str = SECRET
) -> Iterator[tuple[Stub, SandboxStore]]:
    """Have the sandbox play a service that knows this key; where it is, and what it took."""
    app = create_app(key=key, preset=service.preset)
    config = uvicorn.Config(
        app,
        ssl_certfile=certificate,
        ssl_keyfile=certificate.with_name("key.pem"),
        log_config=None,
        ws="none",
        # A client that keeps its connection would keep the server from ending.
        headers=[("Connection", "close")],
    )
    server = uvicorn.Server(config)
    # Whoever connects before the server is up waits in the socket's queue.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Stub(host, certificate), app.state.store
        finally:
            server.should_exit = True
            thread.join(GUARD_SECONDS)
            assert not thread.is_alive()
