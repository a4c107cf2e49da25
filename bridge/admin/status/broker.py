"""What the broker tells: how many messages wait where, who takes them, and an operator's pause."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from bridge.admin.pausing import Paused, find_pause
from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.topology.queue_sizes import QueueSizes, try_to_read_queue

# For each URL of the broker: somebody looks at a screen.
CONNECT_SECONDS: Final = 3.0
# For all that is asked then.
ANSWER_SECONDS: Final = 5.0


class BrokerReading(NamedTuple):
    """What was read; None stands for a queue, or a pause, of which nothing could be read.

    `refused` are the queues on which the user has no permission.
    """

    sizes: Mapping[str, QueueSizes | None]
    refused: Sequence[str]
    stores: bool
    is_paused: bool | None
    paused: Paused | None


class BrokerReader:
    """Reads as often as it is asked, on connections that stay; nothing is changed by it.

    Whether there is an operator's pause is asked as workers do, by a publish that comes back, which
    an alarm of the broker may hold up: hence a connection of its own.
    """

    def __init__(self, settings: Settings, queues: Sequence[str]) -> None:
        shorter = min(CONNECT_SECONDS, settings.rabbitmq.connect_timeout_seconds)
        self._rabbitmq = settings.rabbitmq.model_copy(update={"connect_timeout_seconds": shorter})
        self._seconds = shorter * len(settings.rabbitmq.url) + ANSWER_SECONDS
        self._queue = settings.worker.queue
        self._queues = queues
        self._asking: Connection | None = None
        self._publishing: Connection | None = None

    async def read(self) -> BrokerReading:
        """Read it all; raise BrokerError, within a deadline, when the broker does not answer."""
        try:
            async with Deadline(self._seconds):
                return await self._read()
        except TimeoutError:
            await self.aclose()
            raise BrokerError(f"no answer within {self._seconds:g} s") from None
        except BrokerError:
            await self.aclose()
            raise

    async def _read(self) -> BrokerReading:
        while True:
            self._asking = await self._connected(self._asking, "status")
            self._publishing = await self._connected(self._publishing, "status publish")
            refused = set[str]()
            sizes = {
                name: await try_to_read_queue(self._asking, name, refused=refused)
                for name in self._queues
            }
            if refused or any(sizes.values()):
                break
            # It may have ended since the last reading, which shows only now.
            if not _is_lost(self._asking):
                raise BrokerError(
                    "it answers nothing about the queues; look at its log and its nodes"
                )
        is_paused, paused = await self._find_pause(self._asking, self._publishing)
        return BrokerReading(
            sizes,
            refused=sorted(refused),
            stores=not self._publishing.wire.is_blocked,
            is_paused=is_paused,
            paused=paused,
        )

    async def _connected(self, connection: Connection | None, name: str) -> Connection:
        if connection is not None:
            if not _is_lost(connection):
                return connection
            await close_quietly(connection)
        return await open_first_connection(self._rabbitmq, name=name)

    async def _find_pause(
        self, asking: Connection, publishing: Connection
    ) -> tuple[bool | None, Paused | None]:
        try:
            paused = await find_pause(asking, self._queue, publishing=publishing)
        except BrokerError:
            return None, None
        return paused is not None, paused

    async def aclose(self) -> None:
        """Close the connections; the next reading opens new ones."""
        connections, self._asking, self._publishing = (self._asking, self._publishing), None, None
        for connection in connections:
            if connection is not None:
                await close_quietly(connection)


def _is_lost(connection: Connection) -> bool:
    transport = connection.transport
    return transport is None or transport.connection.is_closed
