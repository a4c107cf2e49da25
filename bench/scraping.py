"""A Prometheus beside each contestant that offers metrics: asks for them every second.

What a scrape costs is then in everybody's figures.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bench.errors import BenchError

EVERY_SECONDS: Final = 1.0
# Until a program that starts answers for the first time.
FIRST_EVERY_SECONDS: Final = 0.05
ANSWER_SECONDS: Final = 5.0
# As Prometheus asks.
HEADERS: Final = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.4",
    "Accept-Encoding": "gzip",
}


class Scraper:
    """Asks one port in a thread, over a connection that is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.scrapes = 0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, once the scrape that has begun is over."""
        self._stop.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_SECONDS if self.scrapes else FIRST_EVERY_SECONDS):
            try:
                self._connection.request("GET", "/metrics", headers=HEADERS)
                answer = self._connection.getresponse()
                answer.read()
            # It starts, ends, or is frozen.
            except (OSError, http.client.HTTPException):
                self._connection.close()
            else:
                self.scrapes += answer.status == http.client.OK


@contextmanager
def scraped(name: str, ports: list[int]) -> Iterator[None]:
    """Scrape these ports meanwhile; raises BenchError when one has never answered."""
    scrapers = [Scraper(port) for port in ports]
    for scraper in scrapers:
        scraper.start()
    try:
        yield
    finally:
        for scraper in scrapers:
            scraper.stop()
    if not all(scraper.scrapes for scraper in scrapers):
        raise BenchError(f"{name} offers metrics, but they could not be scraped")
