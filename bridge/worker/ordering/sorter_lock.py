"""See that one worker at a time moves requests from the main queue to the lanes.

The lock is an exclusive queue on the connection that takes from the main queue. RabbitMQ writes an
error into its log for each try of another: so none is made while a peer says that it has the lock.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.amqp.client import ChannelLockedResource, Connection
from bridge.deadline import Deadline
from bridge.telemetry.logs import Log
from bridge.topology.declarations import sorter_queue
from bridge.topology.queue_sizes import read_queue
from bridge.worker.ordering.share import LaneShare

log = Log(__name__)

LOOK_SECONDS: Final = 0.2
# After a try that another connection was before; it has told its peers by then.
TRY_AGAIN_SECONDS: Final = 1.0
# The lock may be free just before what its last owner held is back in the main queue; then that
# still counts a consumer. One that stays is somebody else's, or a worker without lanes.
MOST_OTHERS_SECONDS: Final = 10.0
OTHERS_REMEDY: Final = (
    "what it takes keeps no order: stop the workers without worker.lanes, or whatever else "
    "consumes the queue"
)


class SorterLock:
    """The lock of one worker; `share` tells its peers, and knows who of them has it."""

    def __init__(self, queue: str, share: LaneShare) -> None:
        self._queue = queue
        self._share = share
        self._is_held = False

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether another worker has it, as far as is known."""
        return not self._is_held and self._share.is_sorted_elsewhere

    async def hold(
        self, connection: Connection, serve: Callable[[Connection], Awaitable[None]]
    ) -> None:
        """Wait for the lock, then serve the connection, which has it as long as it lasts."""
        while not await self._try(connection):  # noqa: ASYNC110  the broker tells nobody
            await asyncio.sleep(TRY_AGAIN_SECONDS)
        self._is_held = True
        self._share.note_sorting(sorts=True)
        try:
            await self._until_alone(connection)
            await serve(connection)
        finally:
            self._is_held = False
            self._share.note_sorting(sorts=False)

    async def _try(self, connection: Connection) -> bool:
        await self._share.until_nobody_sorts()
        try:
            async with Deadline(RPC_TIMEOUT_SECONDS):
                channel = await open_channel(connection)
                await channel.queue_declare(
                    sorter_queue(self._queue),
                    exclusive=True,
                    arguments={"x-queue-type": "classic"},
                )
                await close_channel(channel)
        except ChannelLockedResource:
            return False
        return True

    async def _until_alone(self, connection: Connection) -> None:
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + MOST_OTHERS_SECONDS
        while (sizes := await read_queue(connection, self._queue)) and sizes.consumers:
            if clock() >= give_up_at:
                log.warning("others_take", queue=self._queue, remedy=OTHERS_REMEDY)
                return
            await asyncio.sleep(LOOK_SECONDS)
