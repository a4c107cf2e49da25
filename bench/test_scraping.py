"""The Prometheus beside each contestant."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.errors import BenchError
from bench.scraping import scraped
from bridge.sandbox.processes import free_ports

DEADLINE_SECONDS = 30


class _Metrics(BaseHTTPRequestHandler):
    asked = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.send_response(200 if self.path == "/metrics" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """Serve empty metrics."""
    _Metrics.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_what_offers_metrics_is_asked_for_them(port: int) -> None:
    """A scrape reaches the port while the block runs."""
    with scraped("a program", [port]):
        assert _Metrics.asked.wait(DEADLINE_SECONDS)


def test_no_figures_without_the_metrics_that_are_offered(port: int) -> None:
    """When one of several ports never answers, there is no result."""
    silent = free_ports(1)[0]

    with (
        pytest.raises(BenchError, match="a program offers metrics"),
        scraped("a program", [port, silent]),
    ):
        assert _Metrics.asked.wait(DEADLINE_SECONDS)


def test_nobody_is_asked_without_metrics() -> None:
    """A program that offers none runs as it is."""
    with scraped("a program", []):
        pass
