"""Keeps a connection to RabbitMQ open, and reconnects when it ends.

A `Link` connects, passes the connection to its user, watches it, and reconnects from scratch when
anything on it ends. Nothing is restored in place: a restored channel can stay dead on a healthy
connection (aio-pika, `RobustChannel`), a new connection cannot.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from pydantic import SecretStr

from bridge.amqp.channels import describe_end
from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, host_of, open_connection, open_quickest
from bridge.amqp.wire import Wire
from bridge.config import RabbitMQSettings
from bridge.errors import BrokerError, ConnectError
from bridge.telemetry.logs import Log
from bridge.telemetry.metrics import BridgeMetrics

log = Log(__name__)

Serve = Callable[[Connection], Awaitable[object]]

# Bounds of the random wait before a reconnect, see `Link.run`. After a broker restart, workers
# wait for each other (`worker.redelivery_wait`), so none may reconnect late.
MIN_BACKOFF_SECONDS: Final = 0.5
MAX_BACKOFF_SECONDS: Final = 5.0
# A shorter session counts as a failed connection, and the back-off keeps growing.
USEFUL_SECONDS: Final = 1.0
# The broker sends a heartbeat if it has sent nothing else for half of `heartbeat_seconds`, and
# considers a peer unreachable after two missed heartbeats (RabbitMQ docs, "Detecting Dead TCP
# Connections with Heartbeats and TCP Keepalives"). We give up after two whole intervals, because a
# needless reconnect costs a busy broker a login; aiormq alone would wait for three intervals and
# three seconds. On a cluster, giving up sooner does not help: until the other nodes have declared a
# silent node down, a request that involves it may hang for longer (seen with 3.10.8).
SILENT_HEARTBEATS: Final = 2
SILENCE_LOOK_SECONDS: Final = 0.5


def leave_after_seconds(settings: RabbitMQSettings) -> float:
    """Return for how long a node may answer nothing before another URL is tried.

    Infinite if there is only one URL.
    """
    several = len(settings.url) > 1
    return SILENT_HEARTBEATS * settings.heartbeat_seconds if several else math.inf


class Link:
    """One named connection, reopened for as long as the process runs."""

    def __init__(self, name: str, settings: RabbitMQSettings, metrics: BridgeMetrics) -> None:
        self.name = name
        self._settings = settings
        self._metrics = metrics
        # Index of the URL to try first: the one after the URL of the last connection.
        self._next = 0
        # The last logged fault by host; the key "" is for sessions that ended at once.
        self._told: dict[str, str] = {}
        self._connection: Connection | None = None

    @property
    def is_up(self) -> bool:
        return self._connection is not None and self._connection.connected.is_set()

    @property
    def is_blocked(self) -> bool:
        """Whether a resource alarm of the broker blocks publishing on this connection."""
        return self._connection is not None and self._connection.wire.is_blocked

    async def run(self, serve: Serve) -> NoReturn:
        """Connect and `serve` for ever. `serve` returns or raises when the connection is unusable.

        Waits a random time before each reconnect, at most half the time since the connection was
        lost. That bound is at least 0.5 s and at most 5 s. A restarted broker is reached quickly,
        and clients do not all reconnect at once.
        """
        down_since = time.monotonic()
        while True:
            try:
                await self._session(serve)
            except ConnectError:
                pass  # `_open` has logged the fault of each broker
            except BrokerError as error:
                self._log_fault("", str(error))
            else:
                down_since = time.monotonic()
                self._told.clear()
            await asyncio.sleep(_backoff(time.monotonic() - down_since))

    def _log_fault(self, host: str, why: str) -> None:
        # Only a change is a warning, so that a long outage does not fill the log.
        if why == self._told.get(host):
            log.debug("broker_unavailable", link=self.name, why=why)
        else:
            log.warning("broker_unavailable", link=self.name, why=why)
        self._told[host] = why

    async def _session(self, serve: Serve) -> None:
        """Serve one connection until it ends; raise BrokerError if it ended too soon."""
        connection = await self._connect()
        started = time.monotonic()
        self._connection = connection
        try:
            await _serve_until_closed(
                connection, serve, SILENT_HEARTBEATS * self._settings.heartbeat_seconds
            )
        except Exception as error:  # whatever the client library raises, the link goes on
            self._metrics.connections.labels("closed_by_broker").inc()
            if time.monotonic() - started < USEFUL_SECONDS:
                raise BrokerError(describe_end(error)) from error
            log.warning("broker_lost", link=self.name, why=describe_end(error))
        finally:
            self._connection = None
            await close_quietly(connection)

    async def _connect(self) -> Connection:
        urls = self._settings.url
        first = self._next % len(urls)
        url, connection = await open_quickest((*urls[first:], *urls[:first]), self._open)
        self._next = urls.index(url) + 1
        self._metrics.connections.labels("opened").inc()
        connection.wire.on_blocked(self._log_blocked)
        log.info("broker_connected", link=self.name, host=host_of(url))
        return connection

    async def _open(self, url: SecretStr) -> Connection:
        try:
            return await open_connection(self._settings, url, name=self.name)
        except ConnectError as error:
            self._metrics.connections.labels(error.fault).inc()
            # Logged for each broker, even if another one answers.
            self._log_fault(host_of(url), str(error))
            raise

    def _log_blocked(self, reason: str | None) -> None:
        if reason is None:
            log.info("broker_unblocked", link=self.name)
            return
        remedy = "the broker accepts no messages; run rabbitmq-diagnostics check_alarms"
        log.warning("broker_blocked", link=self.name, why=f"{reason}; {remedy}")


async def _serve_until_closed(
    connection: Connection, serve: Serve, longest_silence_seconds: float
) -> None:
    transport = connection.transport
    if transport is None:
        raise BrokerError("the connection closed at once")
    closing = transport.connection.closing
    serving = asyncio.ensure_future(serve(connection))
    silence = asyncio.create_task(_until_silent(connection.wire, longest_silence_seconds))
    try:
        await asyncio.wait({closing, serving, silence}, return_when=asyncio.FIRST_COMPLETED)
        if silence.done():
            # A regular close would wait for an answer.
            connection.wire.abort()
            raise BrokerError("the broker sent nothing for too long")
        # Closing a channel cancels the tasks that wait on it. That must not be mistaken for a
        # cancellation of this task.
        if serving.done() and not serving.cancelled():
            serving.result()
        raise BrokerError(describe_end(_reason(closing)))
    finally:
        for task in (serving, silence):
            task.cancel()
        await asyncio.gather(serving, silence, return_exceptions=True)
        closing.cancel()


async def _until_silent(wire: Wire, longest_seconds: float) -> None:
    """Return when the broker has sent nothing for longer than this."""
    times = 0
    # Check twice: after a stall of this process, or just after reading was resumed, only the second
    # check sees the bytes that arrived meanwhile.
    while times < 2:  # noqa: PLR2004
        await asyncio.sleep(SILENCE_LOOK_SECONDS)
        times = times + 1 if wire.silent_seconds > longest_seconds else 0


def _reason(closing: "asyncio.Future[object]") -> BaseException:
    if not closing.done():
        return BrokerError("the channel ended")
    if closing.cancelled():
        return BrokerError("the connection was closed")
    return closing.exception() or BrokerError("the connection was closed")


def _backoff(down_seconds: float) -> float:
    longest = min(max(down_seconds / 2, MIN_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
    return random.uniform(0, longest)  # noqa: S311  jitter, no secret
