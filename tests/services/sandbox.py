"""The sandbox in a service's place, over TLS on loopback, for the service's own client."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from bridge.sandbox.api import create_app
from bridge.sandbox.store import SandboxStore
from tests.services.comparison import MESSAGES, SECRET, Message, Service
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


def assert_sandbox_takes_what_the_client_sends(service: Service, certificate: Path) -> None:
    """Fail unless each message is taken as it is, and the client is given the id of each."""
    with played(service, certificate) as (place, memory):
        for number, message in enumerate(MESSAGES.values()):
            # A key that is odd or long the client refuses by itself.
            provider_id = service.send(place, message._replace(key=f"order-{number}"))
            taken = memory.messages[-1]

            assert (taken.id, taken.to, taken.text) == (provider_id, message.to, message.text)
            if "from" in service.settings(place).request.placeholders:
                assert (taken.sender or "").removeprefix("+") == message.sender_digits
        assert len(memory.messages) == len(MESSAGES)


def assert_sandbox_refuses_the_client(
    service: Service, certificate: Path, code: str | None
) -> None:
    """Fail unless a client with another key than the service's reads this code, and no id."""
    with played(service, certificate, key="another-key") as (place, memory):
        with pytest.raises(Exception) as raised:  # noqa: PT011  clients raise what they like
            service.send(place, Message())

        assert service.code_of(raised.value) == code
        assert [attempt.status is not None for attempt in memory.requests] == [True]
        assert not memory.messages
