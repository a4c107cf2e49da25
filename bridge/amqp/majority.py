"""Leaves a RabbitMQ node that is cut off from the other nodes of its cluster."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

from pydantic import SecretStr

from bridge.amqp.channels import close_channel, describe_end, heed_cancellation, open_channel
from bridge.amqp.client import ChannelAccessRefused, ChannelPreconditionFailed, Connection
from bridge.amqp.connecting import close_quietly, host_of, open_connection, version_of
from bridge.amqp.link import leave_after_seconds
from bridge.config import RabbitMQSettings
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log

log = Log(__name__)

# From this version on, RabbitMQ always keeps its metadata in Khepri. With Mnesia, a node that is
# cut off closes its connections (`pause_minority`), and no queue is declared while another hangs.
_WITH_KHEPRI: Final = (4, 3)
_CLASSIC: Final[dict[str, Any]] = {"x-queue-type": "classic"}
# How long the patience with the next nodes lasts, and its limit.
PATIENT_SECONDS: Final = 60.0
MAX_PATIENCE_SECONDS: Final = 80.0
# RabbitMQ itself gives up after 30 s, and closes the connection.
MAX_PROBE_SECONDS: Final = 20.0


class Patience:
    """For how long a node may answer nothing before the next one is tried.

    Doubles each time a node is left, because the next one may be just as slow: a slow disk, or a
    cluster whose metadata has no leader at the moment. An answer that takes longer would never
    arrive. After `PATIENT_SECONDS` without leaving a node, it is the initial one again.
    """

    def __init__(self, seconds: float) -> None:
        self._initial = self._doubled = seconds
        self._until = 0.0

    @property
    def seconds(self) -> float:
        return self._doubled if time.monotonic() < self._until else self._initial

    def note_left(self) -> None:
        seconds = self.seconds
        self._doubled = max(seconds, min(2 * seconds, MAX_PATIENCE_SECONDS))
        self._until = time.monotonic() + self._doubled + PATIENT_SECONDS


class MajorityWatch:
    """Notices that a worker's node is cut off from its cluster, while another node is not.

    Such a node keeps its connections and answers passive declares, but delivers nothing (seen with
    4.3.6). It cannot declare a queue, which takes a majority of the nodes. At regular intervals,
    half of the patience, an exclusive queue whose name begins with `prefix` is declared and
    deleted.
    """

    def __init__(self, settings: RabbitMQSettings, prefix: str) -> None:
        self._settings = settings
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._patience = Patience(leave_after_seconds(settings))

    @property
    def _seconds(self) -> float:
        return min(self._patience.seconds / 2, MAX_PROBE_SECONDS)

    async def watch(self, consuming: Connection) -> None:
        """Raise BrokerError once this connection's node declares no queue, but another one does.

        Returns if there is no other URL, if RabbitMQ refuses the queue, or if its version is older
        than 4.3.
        """
        host = host_of(SecretStr(str(consuming.url)))
        here = [url for url in self._settings.url if host_of(url) == host]
        others = [url for url in self._settings.url if host_of(url) != host]
        if not here or not others or version_of(consuming) < _WITH_KHEPRI:
            return
        while True:
            try:
                await self._until_unanswered(here[0])
            except TimeoutError:
                # All nodes may wait for a new leader of the metadata. Then none is better.
                if await self._is_answered_by_any(others):
                    self._patience.note_left()
                    raise BrokerError(
                        "this node cannot declare a queue, but another node can"
                    ) from None
            except (ChannelAccessRefused, ChannelPreconditionFailed):
                # A permission is missing, or the virtual host has as many queues as it may have.
                # RabbitMQ logs an error for each attempt.
                log.debug("majority_not_watched", queue=self._prefix)
                return
            except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                heed_cancellation()
                log.debug("majority_watch_ended", why=describe_end(error))
                await asyncio.sleep(self._seconds)

    async def _until_unanswered(self, url: SecretStr) -> NoReturn:
        """Declare the queue again and again; raise TimeoutError when there is no answer in time.

        On a connection of its own, because RabbitMQ closes it when a declare has taken 30 s.
        """
        async with self._connection_to(url) as connection:
            while True:
                await asyncio.sleep(self._seconds)
                async with Deadline(self._seconds):
                    await self._declare(connection)

    async def _is_answered_by_any(self, urls: Sequence[SecretStr]) -> bool:
        for url in urls:
            try:
                async with Deadline(self._seconds), self._connection_to(url) as connection:
                    await self._declare(connection)
            except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                heed_cancellation()
                log.debug("majority_not_seen", host=host_of(url), why=describe_end(error))
            else:
                return True
        return False

    @asynccontextmanager
    async def _connection_to(self, url: SecretStr) -> AsyncIterator[Connection]:
        connection = await open_connection(self._settings, url, name="worker watch")
        try:
            yield connection
        finally:
            await close_quietly(connection)

    async def _declare(self, connection: Connection) -> None:
        # Each queue has its own name. The last queue stays locked if its node was cut off before
        # the delete.
        queue = f"{self._prefix}.{next(self._numbers)}"
        channel = await open_channel(connection)
        await channel.queue_declare(queue, exclusive=True, arguments=_CLASSIC)
        await channel.queue_delete(queue)
        await close_channel(channel)
