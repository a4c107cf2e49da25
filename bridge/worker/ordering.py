"""Keep the order of each recipient's messages (`worker.ordering: recipient`).

One worker of the queue is active (`ActiveLock`), and processes one message per ordering key at a
time (`Turns`).
"""

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    describe_end,
    heed_cancellation,
    open_channel,
)
from bridge.amqp.client import (
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelPreconditionFailed,
    Connection,
)
from bridge.deadline import Deadline
from bridge.telemetry.logs import Log
from bridge.topology.declarations import active_queue
from bridge.topology.queue_sizes import read_queue
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import ORDERING_KEY

log = Log(__name__)

# A standby looks at the queue at random intervals within these bounds.
LOOK_SECONDS: Final = (0.4, 0.8)
# It tries the lock at this interval even if the queue has a consumer: that may be another program.
TRY_ANYWAY_SECONDS: Final = 15.0
# How often the lock is declared while the broker refuses it, and how often that is logged.
REFUSED_SECONDS: Final = 5.0
LOG_AGAIN_SECONDS: Final = 60.0
# The lock may be free shortly before the broker has requeued the last owner's messages. A consumer
# that stays longer belongs to another program, or to a worker without ordering.
MOST_OTHERS_SECONDS: Final = 5.0
OTHERS_LOOK_SECONDS: Final = 0.1
OTHERS_REMEDY: Final = (
    "messages of another consumer lose their order: stop every other consumer of the queue, and "
    "set worker.ordering: recipient for every worker"
)

Work = Callable[[Delivery], Awaitable[None]]


class Turns:
    """A FIFO of deliveries for each ordering key; bounded, because the prefetch is."""

    def __init__(self) -> None:
        # Each place is a future that completes when it is the first of its queue.
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def take_turn(self, delivery: Delivery, *, learn: Work, work: Work) -> None:
        """Process a delivery when the earlier ones of its key are settled or returned.

        Must be called in the order of the deliveries. `learn` runs at once, so that redeliveries do
        not wait for each other's answers. If it is cancelled before its turn, the delivery returns
        to the queue.
        """
        # The order is kept within each queue.
        key = f"{delivery.queue} {ordering_key(delivery)}"
        place = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(key, deque())
        line.append(place)
        _call_first(line)
        try:
            if delivery.redelivered:
                await learn(delivery)
            if not place.done():
                with delivery.waits("order"):
                    await place
            if not delivery.goes_back:
                await work(delivery)
        except asyncio.CancelledError:
            log.debug("not_begun", message_id=delivery.envelope.key)
        finally:
            line.remove(place)
            if line:
                _call_first(line)
            else:
                del self._lines[key]


def _call_first(line: deque[asyncio.Future[None]]) -> None:
    # A completed place already has its turn, or is about to be removed after a cancellation.
    if not line[0].done():
        line[0].set_result(None)


def ordering_key(delivery: Delivery) -> str:
    """Return the key that the publisher set, else the recipient's number; never raises.

    A message that cannot be parsed has an empty key, and is found invalid when it is sent.
    """
    named = (delivery.properties.headers or {}).get(ORDERING_KEY)
    if isinstance(named, bytes | bytearray):
        named = bytes(named).decode("utf-8", "replace")
    if isinstance(named, str) and named:
        return named
    try:
        recipient = json.loads(delivery.body)["to"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return recipient if isinstance(recipient, str) else ""


class ActiveLock:
    """One worker's view of the lock: an exclusive queue on the connection that consumes `queues`.

    The broker deletes an exclusive queue when its connection ends, so a crash does not leave the
    lock behind. The lock works with queues of any type, including existing ones. RabbitMQ logs an
    error for each refused declaration. Therefore, while the request queue has a consumer, a standby
    only reads the number of consumers, which logs nothing.

    `show` is called with 1 when this worker becomes active, else with 0.
    """

    def __init__(self, queues: Sequence[str], *, show: Callable[[float], None]) -> None:
        self.queues = queues
        self._name = active_queue(queues[0])
        self._show = show
        self._logged_at = -LOG_AGAIN_SECONDS
        # `is_held`: this worker is active. `is_standby`: it waits because another worker is.
        self.is_held = False
        self.is_standby = False

    @asynccontextmanager
    async def held_on(self, connection: Connection) -> AsyncIterator[None]:
        """Wait until this worker is the active one; it stays active until the block ends.

        If the block ends without an error the lock is freed at once, else when the connection ends.
        """
        try:
            await self._acquire(connection)
            self._mark(is_held=True)
            yield
            await self._release(connection)
        finally:
            self._mark(is_held=False)

    async def _acquire(self, connection: Connection) -> None:
        while not await self._try(connection):
            heed_cancellation()
        self.is_standby = False
        await self._until_alone(connection)

    async def _try(self, connection: Connection) -> bool:
        """Try to take the lock; if that fails, wait for a while and return False."""
        try:
            async with Deadline(RPC_TIMEOUT_SECONDS):
                channel = await open_channel(connection)
                # Explicit, because the virtual host may have another default queue type.
                classic: dict[str, Any] = {"x-queue-type": "classic"}
                await channel.queue_declare(self._name, exclusive=True, arguments=classic)
                await close_channel(channel)
        except ChannelLockedResource as error:
            # The broker does not describe an exclusive queue of another connection.
            sizes = await read_queue(connection, self._name)
            if sizes is None:
                self._stand_by()
                await self._until_free(connection)
            elif sizes.exists:
                await self._tell_fault(error)
            return False
        except (ChannelAccessRefused, ChannelPreconditionFailed) as error:
            await self._tell_fault(error)
            return False
        return True

    async def _release(self, connection: Connection) -> None:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            await channel.queue_delete(self._name)
            await close_channel(channel)

    def _stand_by(self) -> None:
        if not self.is_standby:
            self.is_standby = True
            log.info("standing_by", queue=self.queues[0])

    async def _until_free(self, connection: Connection) -> None:
        """Return when the queue has lost its consumer, or when it is time to try anyway."""
        clock = asyncio.get_running_loop().time
        try_anyway_at = clock() + TRY_ANYWAY_SECONDS
        while clock() < try_anyway_at:
            await asyncio.sleep(random.uniform(*LOOK_SECONDS))  # noqa: S311  jitter, no secret
            sizes = await read_queue(connection, self.queues[0])
            if sizes is None or not sizes.consumers:
                return

    async def _until_alone(self, connection: Connection) -> None:
        """Return when nothing else consumes the queues, or after a time limit."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + MOST_OTHERS_SECONDS
        for queue in self.queues:
            while (sizes := await read_queue(connection, queue)) and sizes.consumers:
                if clock() >= give_up_at:
                    log.warning("foreign_consumers", queue=queue, remedy=OTHERS_REMEDY)
                    break
                await asyncio.sleep(OTHERS_LOOK_SECONDS)

    def _mark(self, *, is_held: bool) -> None:
        if is_held is not self.is_held:
            log.info("active" if is_held else "no_longer_active", queue=self.queues[0])
        self.is_held = is_held
        self.is_standby = False
        self._show(1 if is_held else 0)

    async def _tell_fault(self, error: Exception) -> None:
        """Log once a minute why no worker can be active, and wait before the next try."""
        self.is_standby = False
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_AGAIN_SECONDS:
            self._logged_at = now
            self._log_fault(error)
        await asyncio.sleep(REFUSED_SECONDS)

    def _log_fault(self, error: Exception) -> None:
        if isinstance(error, ChannelAccessRefused):
            remedy = (
                f"let the user configure {self._name} with rabbitmqctl set_permissions, or set "
                "worker.ordering to none"
            )
        else:
            remedy = f"delete the queue {self._name}, which another connection declared"
        log.warning("order_not_kept", queue=self.queues[0], why=describe_end(error), remedy=remedy)
