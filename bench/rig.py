"""The environment of every scene: a private RabbitMQ, a certificate, and the started programs."""

import http.client
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

from bench.api import Api, Certificate, running_api
from bench.lineup import Contestant, Task, environ_for
from bench.queues import Queues
from bench.rounds import BenchError
from bench.usage import Usage, family, read_usage
from bridge.sandbox.broker import Broker, private_broker
from bridge.sandbox.processes import Child, Guard, free_ports, guarded

GRACE_SECONDS: Final = 10
SETTLE_SECONDS: Final = 10
# An idle process uses less CPU time than this.
QUIET_CPU_SECONDS: Final = 0.03
QUIET_SECONDS: Final = 0.3
# Scrape interval. A contestant's figures include the cost of its scrapes.
EVERY_SECONDS: Final = 1.0
# Timeout for the first answer of a program.
FIRST_EVERY_SECONDS: Final = 0.05
ANSWER_SECONDS: Final = 5.0
# As Prometheus sends it.
HEADERS: Final = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.4",
    "Accept-Encoding": "gzip",
}


class Rig:
    """A broker for many runs. Everything else is new in each run."""

    def __init__(self, broker: Broker, folder: Path, guard: Guard) -> None:
        self.broker = broker
        self.queues = Queues(broker.url)
        self.certificate = Certificate(folder)
        self._folder = folder
        self._guard = guard
        self._runs = count(1)

    def folder(self, name: str) -> Path:
        """Return the path of a new folder."""
        return self._folder / f"{next(self._runs):03d}-{name.replace(' ', '-')}"

    def broker_usage(self) -> Usage:
        """Read the broker's CPU time and memory."""
        return read_usage([self.broker.pid])

    @contextmanager
    def api(self) -> Iterator[Api]:
        """Run a new API."""
        with running_api(self.folder("api"), self._guard, self.certificate) as api:
            yield api

    @contextmanager
    def running(
        self, contestant: Contestant, task: Task, *, times: int = 1, is_scraped: bool = True
    ) -> Iterator["Program"]:
        """Run copies of a program, with output in a file, and scrape their metrics."""
        folder = self.folder(contestant.name)
        folder.mkdir()
        ports = free_ports(times)
        children = [
            Child(
                contestant.command,
                guard=self._guard,
                log=folder / f"{number}.log",
                environ={**environ_for(task, port), **contestant.environ},
            )
            for number, port in enumerate(ports)
        ]
        try:
            with scraped(contestant.name, ports if contestant.has_metrics and is_scraped else []):
                yield Program(contestant.name, children)
        finally:
            for child in children:
                child.ask_to_end()
            for child in children:
                child.end(grace_seconds=GRACE_SECONDS)


class Program:
    """The processes of a contestant in a run."""

    def __init__(self, name: str, children: list[Child]) -> None:
        self.name = name
        self._children = children

    @property
    def pid(self) -> int:
        """Id of the first process."""
        return self._children[0].pid

    def family(self) -> list[int]:
        """Return the processes and their descendants."""
        return [pid for child in self._children for pid in family(child.pid)]

    def usage(self) -> Usage:
        """Read the usage of all processes. Raise BenchError if one has ended."""
        for child in self._children:
            if child.exit_code is not None:
                raise BenchError(f"{self.name} ended ({child.exit_code}):\n{child.tail()}")
        return read_usage(child.pid for child in self._children)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the processes during the block. Their connections stay open."""
        for child in self._children:
            child.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for child in self._children:
                child.signal(signal.SIGCONT)

    def settle(self) -> None:
        """Wait until the program is idle, after its last acks."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before = self.usage().cpu_seconds
        while time.monotonic() < deadline:
            time.sleep(QUIET_SECONDS)
            now = self.usage().cpu_seconds
            if now - before < QUIET_CPU_SECONDS:
                return
            before = now


class Scraper:
    """Scrapes a port in a thread, over a kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.scrapes = 0

    def start(self) -> None:
        """Start scraping."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current scrape."""
        self._stop.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_SECONDS if self.scrapes else FIRST_EVERY_SECONDS):
            try:
                self._connection.request("GET", "/metrics", headers=HEADERS)
                answer = self._connection.getresponse()
                answer.read()
            # The program is starting, ending or frozen.
            except (OSError, http.client.HTTPException):
                self._connection.close()
            else:
                self.scrapes += answer.status == http.client.OK


@contextmanager
def scraped(name: str, ports: list[int]) -> Iterator[None]:
    """Scrape these ports during the block. Raise BenchError if one never answered."""
    scrapers = [Scraper(port) for port in ports]
    for scraper in scrapers:
        scraper.start()
    try:
        yield
    finally:
        for scraper in scrapers:
            scraper.stop()
    if not all(scraper.scrapes for scraper in scrapers):
        raise BenchError(f"{name} has metrics, but they could not be scraped")


@contextmanager
def rigged(*, configuration: Sequence[str] = ()) -> Iterator[Rig]:
    """Provide a rig, and remove it afterwards. `configuration` is the broker's."""
    with (
        tempfile.TemporaryDirectory(prefix="sms-bridge-bench-") as folder,
        private_broker(configuration=configuration) as broker,
        guarded() as guard,
    ):
        yield Rig(broker, Path(folder), guard)
