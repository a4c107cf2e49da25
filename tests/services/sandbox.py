"""The sandbox instead of a service, over TLS on loopback, for the service's client."""

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
    """Run the sandbox as a service with this key. Yields its URL and its messages."""
    app = create_app(key=key, preset=service.preset)
    config = uvicorn.Config(
        app,
        ssl_certfile=certificate,
        ssl_keyfile=certificate.with_name("key.pem"),
        log_config=None,
        ws="none",
        # A kept-alive connection of the client would block the server's end.
        headers=[("Connection", "close")],
    )
    server = uvicorn.Server(config)
    # Connections before the server's start wait in the socket's queue.
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
