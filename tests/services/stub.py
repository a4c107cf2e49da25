"""A stub of a service's API, which records requests and sends given answers, over TLS on loopback.

It runs in its own threads, because most clients block while they wait.
"""

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

# Timeout for hanging requests, far above the time of healthy ones.
GUARD_SECONDS = 30.0


class Recorded(NamedTuple):
    """A recorded request, with header names in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def media_type(self) -> str:
        """Media type of the body, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip()

    @property
    def document(self) -> Any:
        """The decoded body: JSON, or a form's values by name, without duplicates."""
        if self.media_type == "application/x-www-form-urlencoded":
            pairs = parse_qsl(
                self.body.decode("ascii"), keep_blank_values=True, strict_parsing=True
            )
            assert len(pairs) == len(dict(pairs))
            return dict(pairs)
        assert self.media_type == "application/json"
        return json.loads(self.body)


class Told(NamedTuple):
    """The stub's answer to every request."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}


def in_json(status: int, document: object) -> Told:
    """Make a JSON answer."""
    return Told(status, json.dumps(document).encode())


class Stub:
    """The API's `url`, its recorded `requests`, and its answer, `told`."""

    def __init__(self, host: str, certificate: Path) -> None:
        self.host = host
        self.url = f"https://{host}"
        self.certificate = certificate
        self.requests: list[Recorded] = []
        self.told = Told(500)

    @property
    def only(self) -> Recorded:
        """The only request since the last call."""
        (request,) = self.requests
        self.requests.clear()
        return request


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = GUARD_SECONDS

        def _record(self) -> None:
            path, _, query = self.path.partition("?")
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", "0")))
            stub.requests.append(Recorded(self.command, path, query, headers, body))
            told = stub.told
            self.send_response(told.status)
            if told.body:
                self.send_header("Content-Type", told.content_type)
            for name, value in told.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(told.body)))
            # A kept-alive connection could carry data from one test to the next.
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(told.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _record  # noqa: N815  http.server's names

        def log_message(self, *args: object) -> None:
            """Write nothing to stderr."""

    return Handler


@contextmanager
def serving(certificate: Path) -> Iterator[Stub]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.daemon_threads = True
    # Each answering thread does its own handshake, so that connections do not wait for each other.
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    stub = Stub(f"127.0.0.1:{server.server_port}", certificate)
    server.RequestHandlerClass = _handler(stub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join(GUARD_SECONDS)
        server.server_close()
        assert not thread.is_alive()
