"""Measures the CPU time of single parts of the bridge and of their alternatives.

    python -m bench.parts log-line|post|counting|parsing|wires

Each part runs several times in its own process, and prints the minimum, which is the least
disturbed, in microseconds as JSON. `log-line` and `post` are scenes of the benchmark.
"""

import asyncio
import json
import logging
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, Final, TextIO

import h11
import httpx
import prometheus_client
import uvloop
from pamqp.header import ContentHeader
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from bench.lineup import OURS
from bench.rig import Rig
from bench.rounds import Options, Row, Tell
from bridge.amqp.channels import open_channel
from bridge.amqp.client import Connection, DeliveredMessage
from bridge.amqp.connecting import close_quietly, open_connection
from bridge.amqp.frames import CONTENT_HEADER_START, Body, content_header
from bridge.amqp.properties import ClientProperties, Properties, as_facts, read_properties
from bridge.config import RabbitMQSettings
from bridge.http.listener_state import Limits
from bridge.http.parser import RequestParser
from bridge.sandbox.broker import private_broker
from bridge.telemetry.counters import CounterChild, HistogramChild
from bridge.telemetry.log_setup import LineWriter, configure_logging
from bridge.telemetry.logs import Log
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.worker.service.httpx_transport import HttpxTransport
from bridge.worker.service.transport import ApiTransport, Header, Reply, Transport

Figures = dict[str, float]

PART_SECONDS: Final = 120
RUNS: Final = 8


def log_line(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Log deliveries, with the bridge's logging and with the standard library."""
    lines = rig.folder("lines")
    return _as_rows([_run("log-line", str(lines)) for _ in range(options.rounds)], tell)


def post(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Post to the instant API, over the bridge's transport and httpx's."""
    with rig.api() as api:
        url = f"{api.url('http')}/v1/messages"
        return _as_rows([_run("post", url) for _ in range(options.rounds)], tell)


def _run(part: str, argument: str) -> Figures:
    command = [sys.executable, "-m", "bench.parts", part, argument]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=PART_SECONDS, check=True)
    figures: Figures = json.loads(ended.stdout)
    return figures


def _as_rows(runs: list[Figures], tell: Tell) -> list[Row]:
    rows = [
        {"name": name, "runs": len(runs), "microseconds": median(run[name] for run in runs)}
        for name in runs[0]
    ]
    for row in rows:
        tell(f"{row['name']}: {row['microseconds']:.1f} us")
    return rows


def _least(work: Callable[[], object], *, times: int) -> float:
    """Return the CPU time per item of `work`, in microseconds."""
    seconds = []
    for _ in range(RUNS):
        begun = time.process_time()
        work()
        seconds.append(time.process_time() - begun)
    return min(seconds) / times * 1e6


def _repeated(work: Callable[[], object], *, times: int) -> float:
    def repeat() -> None:
        for _ in range(times):
            work()

    return _least(repeat, times=times)


# The log line of a delivery

# At most the size of the writer thread's queue, because dropped lines cost less.
LINES: Final = 5_000
# Wait for the writer thread.
WRITE_SECONDS: Final = 0.1


class _JsonFormatter(logging.Formatter):
    """JSON with the standard library."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **record.__dict__["facts"],
        }
        return json.dumps(line)


def _facts(number: int) -> dict[str, Any]:
    return {
        "message_id": f"id-{number:08d}",
        "outcome": "sent",
        "detail": "accepted",
        "status": 202,
        "attempts": 1,
        "seconds": round(number / 7, 4),
    }


def _standard_log(stream: TextIO) -> Callable[[int], None]:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter())
    log = logging.getLogger("standard")
    log.propagate = False
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lambda number: log.info("delivery", extra={"facts": _facts(number)})


def _our_log(stream: TextIO) -> Callable[[int], None]:
    metrics = BridgeMetrics(
        new_registry(), component="worker", version="", revision="", exchanges=()
    )
    writer = LineWriter(stream, dropped=metrics.log_lines_dropped.inc)
    configure_logging(
        "info",
        "json",
        stream=writer,
        count=lambda level: metrics.log_records.labels(level).inc(),
        finish=writer.finish,
    )
    log = Log("bridge.worker.settle")
    return lambda number: log.info("delivery", **_facts(number), reason=None, redelivered=None)


def measure_log_line(path: str) -> Figures:
    """Measure a line written to a file, including the writer thread."""

    def write(log: Callable[[int], None]) -> None:
        for number in range(LINES):
            log(number)
        time.sleep(WRITE_SECONDS)

    with open(path, "w", encoding="utf-8") as stream:  # noqa: PTH123  the writer wants a stream
        logs = {OURS: _our_log(stream), "`logging` and `json`": _standard_log(stream)}
        return {
            name: _least(lambda log=log: write(log), times=LINES)  # type: ignore[misc]
            for name, log in logs.items()
        }


# A POST

POSTS: Final = 400
AT_ONCE: Final = 10
TIMEOUT_SECONDS: Final = 20.0
HEADERS: Final[Sequence[Header]] = (
    (b"Content-Type", b"application/json"),
    (b"Authorization", b"Bearer a-key"),
    (b"Idempotency-Key", b"id-00000001"),
)
MESSAGE: Final = b'{"to":"+15550100","from":"Acme","text":"Your code is 123456."}'


class _KeptConnections:
    """httpx's transport with its connection pool."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._timeouts = httpx.Timeout(TIMEOUT_SECONDS).as_dict()

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """Send a request, and read the whole answer."""
        request = httpx.Request(
            "POST",
            url,
            headers=[*common, *headers],
            content=body,
            extensions={"timeout": self._timeouts},
        )
        response = await self._transport.handle_async_request(request)
        return Reply(response.status_code, response.headers.raw, await response.aread())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


async def _post_all(transport: ApiTransport, url: str) -> float:
    left = iter(range(POSTS))

    async def go_on() -> None:
        for _ in left:
            reply = await transport.post(url, HEADERS, MESSAGE)
            assert reply.status == 202

    begun = time.process_time()
    await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
    return (time.process_time() - begun) / POSTS * 1e6


async def measure_post(url: str) -> Figures:
    """Measure a POST over each transport, in turn."""
    tls = ssl.create_default_context()
    transports: dict[str, ApiTransport] = {
        OURS: Transport(
            timeout_seconds=TIMEOUT_SECONDS,
            connect_timeout_seconds=TIMEOUT_SECONDS,
            tls=tls,
            max_connections=AT_ONCE,
        ),
        "httpx, connections kept": _KeptConnections(),
        "httpx, a connection for each request": HttpxTransport(
            timeout_seconds=TIMEOUT_SECONDS, connect_timeout_seconds=TIMEOUT_SECONDS, tls=tls
        ),
    }
    runs = [
        {name: await _post_all(one, url) for name, one in transports.items()} for _ in range(RUNS)
    ]
    for transport in transports.values():
        await transport.aclose()
    return {name: min(run[name] for run in runs) for name in transports}


# Counting

COUNTS: Final = 100_000
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SECONDS: Final = 0.07


def measure_counting() -> Figures:
    """Measure an increment and an observed duration of cached children."""
    registry = CollectorRegistry()
    counter = prometheus_client.Counter("theirs", "Counted.", ["label"], registry=registry)
    histogram = prometheus_client.Histogram(
        "theirs_seconds", "Noted.", ["label"], buckets=BUCKETS, registry=registry
    )
    theirs, their_seconds = counter.labels("a"), histogram.labels("a")
    ours, our_seconds = CounterChild(), HistogramChild(BUCKETS)
    parts: dict[str, Callable[[], object]] = {
        "sms-bridge, count": ours.inc,
        "sms-bridge, note a duration": lambda: our_seconds.observe(SECONDS),
        "prometheus-client, count": theirs.inc,
        "prometheus-client, note a duration": lambda: their_seconds.observe(SECONDS),
    }
    return {name: _repeated(work, times=COUNTS) for name, work in parts.items()}


# Reading a webhook off the stream

REQUESTS: Final = 5_000
LIMITS: Final = Limits(
    max_connections=1,
    max_header_bytes=16384,
    max_headers=100,
    max_body_bytes=262_144,
    max_buffered_bytes=1_000_000,
    idle_timeout_seconds=1,
    body_timeout_seconds=1,
    keep_alive_seconds=1,
)
EVENT: Final = b'{"type": "message.received", "data": {"from": "+12025550101", "text": "yes"}}'
WEBHOOK: Final = b"\r\n".join(
    (
        b"POST /webhooks HTTP/1.1",
        b"Host: bridge.example",
        b"User-Agent: service",
        b"Content-Type: application/json",
        b"X-Service-Signature: " + b"a" * 64,
        b"Content-Length: %d" % len(EVENT),
        b"",
        EVENT,
    )
)


def measure_parsing() -> Figures:
    """Measure the bridge's parser and h11, which needs a new connection per unanswered request."""
    parser = RequestParser(LIMITS)

    def ours() -> bytes:
        parser.feed(memoryview(WEBHOOK))
        return bytes(parser.requests.popleft().body)

    def theirs() -> bytes:
        connection, body = h11.Connection(h11.SERVER), b""
        connection.receive_data(WEBHOOK)
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                body += event.data
        return body

    assert ours() == theirs() == EVENT
    return {
        "sms-bridge": _repeated(ours, times=REQUESTS),
        "h11": _repeated(theirs, times=REQUESTS),
    }


# A message on each wire

MESSAGES: Final = 5_000
# The concurrency of a worker.
PREFETCH: Final = 200
QUEUE: Final = "wires"
WIRE_RUNS: Final = 3
PROPERTIES: Final = Properties(
    content_type="application/json",
    delivery_mode=2,
    message_id="0f9f3c1e",
    headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    settings = RabbitMQSettings.model_validate({"url": url})
    connection = await open_connection(settings, SecretStr(url), name="bench")
    try:
        yield connection
    finally:
        await close_quietly(connection)


async def _publish(connection: Connection) -> None:
    channel = await open_channel(connection, confirms=True)
    await channel.queue_declare(QUEUE)
    with connection.wire.publishing(channel) as publishing:
        for _ in range(0, MESSAGES, PREFETCH):
            confirms = [
                publishing.publish(MESSAGE, exchange="", routing_key=QUEUE, properties=PROPERTIES)
                for _ in range(PREFETCH)
            ]
            assert set(await asyncio.gather(*confirms)) == {"confirmed"}
    await channel.close()


async def _take(connection: Connection) -> None:
    channel = await open_channel(connection)
    left, done = MESSAGES, asyncio.Event()

    def take(tag: int, _redelivered: bool, _properties: Properties, _body: Body) -> None:  # noqa: FBT001
        nonlocal left
        left -= 1
        connection.wire.ack(channel, tag)
        if not left:
            done.set()

    with connection.wire.deliveries(channel, take) as callback:
        await channel.basic_qos(prefetch_count=PREFETCH)
        await channel.basic_consume(QUEUE, callback)
        await done.wait()
        await connection.wire.acks_read(channel)
    await channel.close()


async def _publish_plain(connection: Connection) -> None:
    channel = await open_channel(connection, confirms=True)
    await channel.queue_declare(QUEUE)
    properties = ClientProperties(
        content_type=PROPERTIES.content_type,
        delivery_mode=PROPERTIES.delivery_mode,
        message_id=PROPERTIES.message_id,
        headers=PROPERTIES.headers,
    )
    for _ in range(0, MESSAGES, PREFETCH):
        publishes = [
            channel.basic_publish(MESSAGE, routing_key=QUEUE, mandatory=True, properties=properties)
            for _ in range(PREFETCH)
        ]
        await asyncio.gather(*publishes)
    await channel.close()


async def _take_plain(connection: Connection) -> None:
    channel = await open_channel(connection)
    left, done = MESSAGES, asyncio.Event()

    async def take(message: DeliveredMessage) -> None:
        nonlocal left
        left -= 1
        await channel.basic_ack(message.delivery_tag or 0, wait=False)
        if not left:
            done.set()

    await channel.basic_qos(prefetch_count=PREFETCH)
    await channel.basic_consume(QUEUE, take)
    await done.wait()
    await channel.basic_qos(prefetch_count=1)  # The broker answers after it has read the acks.
    await channel.close()


WIRES: Final = {
    "ours, publish": _publish,
    "ours, take": _take,
    "aiormq, publish": _publish_plain,
    "aiormq, take": _take_plain,
}


async def _time(work: Callable[[Connection], Awaitable[None]], url: str) -> float:
    async with asyncio.timeout(PART_SECONDS), _connected(url) as connection:
        begun = time.process_time()
        await work(connection)
        return (time.process_time() - begun) / MESSAGES * 1e6


async def measure_wires() -> Figures:
    """Measure the bridge's wire and aiormq's documented methods.

    Publish with confirms to a classic queue, consume and ack, and read the properties of a message.
    """
    least: Figures = {}
    with private_broker() as broker:
        for _ in range(WIRE_RUNS):
            for name, work in WIRES.items():
                taken = await _time(work, broker.url)
                least[name] = min(least.get(name, taken), taken)
    header = content_header(len(MESSAGE), PROPERTIES, max_payload_bytes=4096)
    payload = header[CONTENT_HEADER_START.size :]

    def theirs() -> Any:
        found = ContentHeader()
        found.unmarshal(header)
        return found.properties

    assert dict(theirs()) == as_facts(read_properties(payload))
    least["ours, read properties"] = _repeated(lambda: read_properties(payload), times=MESSAGES)
    least["pamqp, read properties"] = _repeated(theirs, times=MESSAGES)
    return least


PARTS: Final[dict[str, Callable[..., Any]]] = {
    "log-line": measure_log_line,
    "post": measure_post,
    "counting": measure_counting,
    "parsing": measure_parsing,
    "wires": measure_wires,
}


def main() -> None:
    """Measure the part on the command line, and print its figures."""
    figures = PARTS[sys.argv[1]](*sys.argv[2:])
    if asyncio.iscoroutine(figures):
        figures = uvloop.run(figures)
    json.dump({name: round(value, 3) for name, value in figures.items()}, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
