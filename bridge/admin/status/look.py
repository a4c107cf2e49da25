"""One look at everything: the broker and all roles at the same time, put together to a status."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from bridge.admin.admin_port import AdminPort
from bridge.admin.pausing import Paused, find_pause
from bridge.admin.status.processes import ProcessReader, Reading
from bridge.admin.status.report import (
    BrokerReport,
    DeadLettersReport,
    LadderReport,
    OperatorPauseReport,
    ProcessReport,
    QueueReport,
    RatesReport,
    Status,
    WorkerReport,
)
from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.log_format import utc_text
from bridge.topology.declarations import dead_queue, request_queues, retry_queue
from bridge.topology.queue_sizes import QueueSizes, try_to_read_queue

# For each URL of the broker: somebody looks at a screen.
CONNECT_SECONDS: Final = 3.0
# For all that is asked then.
ANSWER_SECONDS: Final = 5.0


class Looker:
    """Looks as often as it is asked, each time within a deadline, and changes nothing.

    `ports` are the admin ports of all roles; a name stands for all its addresses.
    """

    def __init__(self, settings: Settings, ports: Sequence[AdminPort]) -> None:
        self._queue = settings.worker.queue
        self._queues = list(_queues_of(settings))
        self._broker = BrokerReader(settings, [queue.name for queue in self._queues])
        self._processes = ProcessReader(ports, queue=self._queue)

    async def look(self) -> Status:
        """Find everything out; raise BridgeError only when the ports are too many."""
        answer, processes = await asyncio.gather(self._ask_broker(), self._processes.read())
        readings = [
            one
            for one in self._processes.readings.values()
            if one.health.worker is not None and one.health.worker.queue == self._queue
        ]
        return put_together(self._queues, processes, readings, answer)

    async def _ask_broker(self) -> "BrokerReading | str":
        try:
            return await self._broker.read()
        except BrokerError as error:
            return str(error)

    async def aclose(self) -> None:
        """Close the connections to the broker."""
        await self._broker.aclose()


def _queues_of(settings: Settings) -> Iterator[QueueReport]:
    queue = settings.worker.queue
    for name in request_queues(settings.worker):
        yield QueueReport(name=name, role="requests")
    for name in request_queues(settings.worker):
        for delay in settings.worker.retry_delays:
            yield QueueReport(name=retry_queue(name, delay), role="retry", delay_seconds=delay)
    yield QueueReport(name=dead_queue(queue), role="dead_letters")
    if settings.webhook.queue is not None:
        yield QueueReport(name=settings.webhook.queue, role="events")


class BrokerReading(NamedTuple):
    """The broker's answers; None means that a queue, or the pause, could not be read.

    `refused` are the queues on which the user has no permission.
    """

    sizes: Mapping[str, QueueSizes | None]
    refused: Sequence[str]
    stores: bool
    is_paused: bool | None
    paused: Paused | None


class BrokerReader:
    """Reads as often as it is asked, on connections that stay open, and changes nothing.

    An operator's pause is looked up as by the workers, with a publish that comes back. An alarm of
    the broker may block that, so it has a connection of its own.
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
            # The connection may have ended since the last reading, which shows only now.
            if not _is_lost(self._asking):
                raise BrokerError(
                    "it answers nothing about the queues; look at its log and its nodes"
                )
        is_paused, paused = await self._find_pause(self._asking, self._publishing)
        # An alarm of the broker shows only now, after something was published.
        stores = not self._publishing.wire.is_blocked
        return BrokerReading(
            sizes, sorted(refused), stores=stores, is_paused=is_paused, paused=paused
        )

    async def _find_pause(
        self, asking: Connection, publishing: Connection
    ) -> tuple[bool | None, Paused | None]:
        try:
            paused = await find_pause(asking, self._queue, publishing=publishing)
        except BrokerError:
            return None, None
        return paused is not None, paused

    async def _connected(self, connection: Connection | None, name: str) -> Connection:
        if connection is not None:
            if not _is_lost(connection):
                return connection
            await close_quietly(connection)
        return await open_first_connection(self._rabbitmq, name=name)

    async def aclose(self) -> None:
        """Close the connections; the next reading opens new ones."""
        connections, self._asking, self._publishing = (self._asking, self._publishing), None, None
        for connection in connections:
            if connection is not None:
                await close_quietly(connection)


def _is_lost(connection: Connection) -> bool:
    transport = connection.transport
    return transport is None or transport.connection.is_closed


def put_together(
    queues: Sequence[QueueReport],
    processes: Sequence[ProcessReport],
    readings: Sequence[Reading],
    broker: BrokerReading | str,
) -> Status:
    """Make the status of all answers; in place of the broker's there may be a fault.

    `readings` are those of the workers of the queue.
    """
    workers = [one.worker for one in processes if one.worker is not None]
    # If the broker is silent, the last reading of a worker has to do.
    newest = max(readings, key=lambda one: one.queues_at, default=None)
    queues_at = None
    if not isinstance(broker, str):
        queues, queues_at = [_as_broker_says(one, broker) for one in queues], time.time()
    elif newest is not None and newest.queues_at:
        queues, queues_at = [_as_worker_saw(one, newest) for one in queues], newest.queues_at
    is_paused, pause = _find_operators_pause(broker, workers, readings)
    ages = [one.oldest_seconds for one in workers if one.oldest_seconds is not None]
    waiting = [queue.ready for queue in queues if queue.role == "dead_letters"]
    return Status(
        at=utc_text(time.time()),
        broker=BrokerReport(fault=broker, stores=None)
        if isinstance(broker, str)
        else BrokerReport(fault=None, stores=broker.stores, refused=broker.refused),
        queues=queues,
        queues_from=None
        if queues_at is None
        else ("workers" if isinstance(broker, str) else "broker"),
        queues_at=None if queues_at is None else utc_text(queues_at),
        is_paused_by_operator=is_paused,
        paused_by_operator=pause,
        oldest_seconds=max(ages, default=None),
        rates=_sum_rates([one.rates for one in workers if one.rates is not None]),
        dead_letters=DeadLettersReport(
            waiting=next(iter(waiting), None),
            by_reason=dict(sum((Counter(one.dead) for one in workers), Counter())),
        ),
        ladder=_sum_ladder(workers),
        processes=processes,
    )


def _as_broker_says(queue: QueueReport, broker: BrokerReading) -> QueueReport:
    sizes = broker.sizes[queue.name]
    if sizes is None or not sizes.exists:
        return queue.model_copy(update={"exists": None if sizes is None else False})
    counts = {"exists": True, "ready": sizes.ready, "consumers": sizes.consumers}
    return queue.model_copy(update=counts)


def _as_worker_saw(queue: QueueReport, reading: Reading) -> QueueReport:
    ready, consumers = reading.ready(queue.name), reading.consumers(queue.name)
    return queue.model_copy(update={"ready": ready, "consumers": consumers})


def _find_operators_pause(
    broker: BrokerReading | str, workers: Sequence[WorkerReport], readings: Sequence[Reading]
) -> tuple[bool | None, OperatorPauseReport | None]:
    """Say whether there is one; if the broker does not tell, a worker that obeys one does."""
    if not isinstance(broker, str) and broker.is_paused is not None:
        is_paused, note = broker.is_paused, None if broker.paused is None else broker.paused.note
    elif any(pause.reason == "operator" for one in workers for pause in one.pauses):
        facts = [one.health.worker for one in readings if one.health.worker is not None]
        notes = [one.paused_by_operator for one in facts if one.paused_by_operator is not None]
        is_paused, note = True, next(iter(notes), None)
    else:
        return None, None
    if note is None:
        return is_paused, None
    return is_paused, OperatorPauseReport(since=note.since_text, reason=note.reason)


def _sum_ladder(workers: Sequence[WorkerReport]) -> LadderReport | None:
    if not workers:
        return None
    stored, returned = sum(one.stored for one in workers), sum(one.returned for one in workers)
    # A worker that has ended may have stored the retry copy that another worker received.
    return LadderReport(stored=stored, returned=returned, not_back=max(0, stored - returned))


def _sum_rates(rates: Sequence[RatesReport]) -> RatesReport | None:
    if not rates:
        return None
    return RatesReport(
        sent_per_second=round(sum(one.sent_per_second for one in rates), 2),
        retried_per_second=round(sum(one.retried_per_second for one in rates), 2),
        dead_per_second=round(sum(one.dead_per_second for one in rates), 2),
    )
