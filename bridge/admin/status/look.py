"""One look at everything: the broker and all roles at the same time, put together to a status."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from bridge.admin.admin_port import AdminPort
from bridge.admin.status.broker import BrokerReader, BrokerReading
from bridge.admin.status.processes import ProcessReader
from bridge.admin.status.reading import Reading
from bridge.admin.status.report import (
    Broker,
    DeadLetters,
    Ladder,
    OperatorPause,
    Process,
    Queue,
    Rates,
    Status,
    Worker,
)
from bridge.config import Settings
from bridge.errors import BrokerError
from bridge.telemetry.log_format import utc_text
from bridge.topology.declarations import dead_queue, retry_queue
from bridge.topology.paused_queue import Note


class Looker:
    """Looks as often as it is asked, each time within a deadline; nothing is changed by it.

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

    async def _ask_broker(self) -> BrokerReading | str:
        try:
            return await self._broker.read()
        except BrokerError as error:
            return str(error)

    async def aclose(self) -> None:
        """Close the connections to the broker."""
        await self._broker.aclose()


def _queues_of(settings: Settings) -> Iterator[Queue]:
    queue = settings.worker.queue
    yield Queue(name=queue, role="requests")
    for delay in settings.worker.retry_delays:
        yield Queue(name=retry_queue(queue, delay), role="retry", delay_seconds=delay)
    yield Queue(name=dead_queue(queue), role="dead_letters")
    if settings.webhook.queue is not None:
        yield Queue(name=settings.webhook.queue, role="events")


def put_together(
    queues: Sequence[Queue],
    processes: Sequence[Process],
    readings: Sequence[Reading],
    broker: BrokerReading | str,
) -> Status:
    """Make the status of what all of them say; instead of the broker's there may be a fault.

    `readings` are those of the workers of the queue.
    """
    workers = [one.worker for one in processes if one.worker is not None]
    shown = _shown_queues(queues, readings, broker)
    is_paused, note = _find_operators_pause(broker, workers, readings)
    waiting = [queue.ready for queue in shown.queues if queue.role == "dead_letters"]
    return Status(
        at=utc_text(time.time()),
        broker=Broker(
            fault=broker if isinstance(broker, str) else None,
            stores=None if isinstance(broker, str) else broker.stores,
            refused=() if isinstance(broker, str) else broker.refused,
        ),
        queues=shown.queues,
        queues_from=shown.source,
        queues_at=shown.at,
        is_paused_by_operator=is_paused,
        paused_by_operator=note,
        oldest_seconds=max(
            (one.oldest_seconds for one in workers if one.oldest_seconds is not None), default=None
        ),
        rates=_sum_rates([one.rates for one in workers if one.rates is not None]),
        dead_letters=DeadLetters(
            waiting=next(iter(waiting), None),
            by_reason=dict(sum((Counter(one.dead) for one in workers), Counter())),
        ),
        ladder=_sum_ladder(workers),
        processes=processes,
    )


class _Shown(NamedTuple):
    queues: Sequence[Queue]
    source: Literal["broker", "workers"] | None = None
    at: str | None = None


def _shown_queues(
    queues: Sequence[Queue], readings: Sequence[Reading], broker: BrokerReading | str
) -> _Shown:
    """Fill in what the broker says; where it is silent, what a worker saw last."""
    if not isinstance(broker, str):
        return _Shown(
            [_as_broker_says(one, broker) for one in queues], "broker", utc_text(time.time())
        )
    newest = max(readings, key=lambda one: one.queues_at, default=None)
    if newest is None or not newest.queues_at:
        return _Shown(queues)
    as_seen = [
        replace(one, ready=newest.ready(one.name), consumers=newest.consumers(one.name))
        for one in queues
    ]
    return _Shown(as_seen, "workers", utc_text(newest.queues_at))


def _as_broker_says(queue: Queue, broker: BrokerReading) -> Queue:
    sizes = broker.sizes[queue.name]
    if sizes is None or not sizes.exists:
        return replace(queue, exists=None if sizes is None else False)
    return replace(queue, exists=True, ready=sizes.ready, consumers=sizes.consumers)


def _find_operators_pause(
    broker: BrokerReading | str, workers: Sequence[Worker], readings: Sequence[Reading]
) -> tuple[bool | None, OperatorPause | None]:
    """Say whether there is one; where the broker does not tell, a worker that heeds one does."""
    if not isinstance(broker, str) and broker.is_paused is not None:
        note = None if broker.paused is None else broker.paused.note
        return broker.is_paused, _shown_note(note)
    if not any(pause.reason == "operator" for one in workers for pause in one.pauses):
        return None, None
    facts = [one.health.worker for one in readings if one.health.worker is not None]
    notes = [one.paused_by_operator for one in facts if one.paused_by_operator is not None]
    return True, _shown_note(next(iter(notes), None))


def _shown_note(note: Note | None) -> OperatorPause | None:
    return None if note is None else OperatorPause(since=note.since_text, reason=note.reason)


def _sum_ladder(workers: Sequence[Worker]) -> Ladder | None:
    if not workers:
        return None
    stored, returned = sum(one.stored for one in workers), sum(one.returned for one in workers)
    # One that has ended may have stored what came back to another.
    return Ladder(stored=stored, returned=returned, not_back=max(0, stored - returned))


def _sum_rates(rates: Sequence[Rates]) -> Rates | None:
    if not rates:
        return None
    return Rates(
        sent_per_second=round(sum(one.sent_per_second for one in rates), 2),
        retried_per_second=round(sum(one.retried_per_second for one in rates), 2),
        dead_per_second=round(sum(one.dead_per_second for one in rates), 2),
    )
