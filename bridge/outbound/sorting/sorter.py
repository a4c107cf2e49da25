"""Sort the main queue: move each request to the queue of its class.

A queue gives its messages out in their order, so that nothing in it can pass what is before it. The
sorter is always ahead of the sending: it keeps the main queue near empty, and the requests wait
behind it. It acks last, so that a crash leaves copies, never losses.
"""

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from bridge.amqp.client import Connection
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.errors import BrokerError
from bridge.logs import Log
from bridge.outbound.consumer import Consumer, Gauges
from bridge.outbound.copies import sorted_properties
from bridge.outbound.delivery import Delivery, Session
from bridge.outbound.drain import finish
from bridge.outbound.entry import Entry, entry_of
from bridge.outbound.ledger import Claim, Kept, Ledger
from bridge.outbound.metrics import MessageClass, WorkerMetrics
from bridge.outbound.peers.exchange import Peers
from bridge.outbound.sorting.classes import is_urgent
from bridge.outbound.storing import Storing
from bridge.topology.declarations import normal_queue, urgent_queue
from bridge.topology.upkeep import Upkeep

log = Log(__name__)

# How many messages are on their way at once. A worker that is killed leaves so many at most in both
# queues; more of them make it no faster.
PREFETCH: Final = 100


class LearnOf(Protocol):
    """Has a ledger learn what other workers know of a redelivery."""

    async def __call__(self, delivery: Delivery, entry: Entry, *, ledger: Ledger) -> None:
        """Return when it has, or it is time."""


class Sorter:
    """Moves what comes to the main queue, in its order, on a connection of its own.

    It sorts while `may_sort` says so; set `changed` when that may be otherwise. `queue_missing` is
    set when the queue of a class is gone. `learn_of` is called with each redelivery.
    """

    def __init__(
        self,
        queue: str,
        *,
        publisher: Publisher,
        peers: Peers,
        heartbeat_seconds: float,
        may_sort: Callable[[], bool],
        metrics: WorkerMetrics,
    ) -> None:
        self._queue = queue
        self._targets: dict[MessageClass, str] = {
            "urgent": urgent_queue(queue),
            "normal": normal_queue(queue),
        }
        self._sorted = {one: metrics.sorted.labels(one) for one in self._targets}
        self._may_sort = may_sort
        self._peers = peers
        self.learn_of: LearnOf = _ask_nobody
        self._publisher = publisher
        self.changed = asyncio.Event()
        # Its prefetch bounds what waits for a broker that stores nothing. The senders go on: the
        # queue of a class may be full, and takes more when they have taken from it.
        self._storing = Storing(publisher, block=self.changed.set, unblock=self.changed.set)
        self.queue_missing = self._storing.queue_missing
        self.ledger = Ledger(heartbeat_seconds=heartbeat_seconds)
        self._moves: dict[asyncio.Task[None], Delivery] = {}
        self._asking = 0
        self._stopping = False
        # How many redelivered messages have come so far.
        self.redeliveries = 0
        self.consumer = Consumer(
            queue,
            prefetch=self._prefetch,
            changed=self.changed,
            on_delivery=self._take,
            on_registered=self.ledger.consuming_again,
            on_session_over=self._on_session_over,
            gauges=Gauges(metrics.sorter_up.set, metrics.poison_suspected.set),
        )

    @property
    def is_sorting(self) -> bool:
        """Whether the broker gives it what comes to the queue."""
        return self.consumer.is_registered

    async def serve(self, connection: Connection) -> None:
        """Sort, on a channel of this connection; `Link.run` calls it."""
        # Before anything is taken: it may have to be asked for.
        await self._peers.until_acquainted()
        await self.consumer.serve(connection)

    async def drain(self) -> bool:
        """Take nothing more, move what is taken, and see that the broker has read the acks.

        Returns False when it may not have read some. Has no deadline; cancelled, it gives back
        what is not moved.
        """
        self._stopping = True
        try:
            return await finish(self, self.consumer, self.ledger)
        finally:
            for move in list(self._moves):
                move.cancel()

    @property
    def count(self) -> int:
        """How many are taken and not moved."""
        return len(self._moves)

    async def all_done(self) -> None:
        """Wait until all that is taken now is moved or given back."""
        if self._moves:
            await asyncio.wait(self._moves)

    def _prefetch(self) -> dict[str, int]:
        if self._stopping:
            # What comes again is acked, if it is moved; any other is left to the next worker.
            return {self._queue: 1}
        wants_none = self._publisher.is_blocked or not self._may_sort()
        return {} if wants_none else {self._queue: PREFETCH}

    def _take(self, delivery: Delivery) -> None:
        self.redeliveries += delivery.redelivered
        task = asyncio.get_running_loop().create_task(self._run(delivery))
        self._moves[task] = delivery
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.consumer.let_go(self._moves.pop(task))

    async def _run(self, delivery: Delivery) -> None:
        """Move a delivery; nothing that it raises leaves the task."""
        try:
            await self._move(delivery)
        except (BrokerError, asyncio.CancelledError):
            # Unacked: the broker delivers it again.
            log.debug("not_sorted", message_id=delivery.envelope.key)
            if self._stopping and delivery.redelivered:
                # Another one, which has to be acked, may come after this one.
                self.consumer.renew()
        except Exception:
            log.exception("internal_error", message_id=delivery.envelope.key)

    async def _move(self, delivery: Delivery) -> None:
        entry = _entry_of(delivery)
        if delivery.redelivered and not self._stopping:
            await self._ask(delivery, entry)
        claim = await self.ledger.claim(
            entry, redelivered=delivery.redelivered, waits=delivery.waits
        )
        if not isinstance(claim, Claim):
            # It was moved already; only its ack was lost.
            self.ledger.note_repeat(entry, acked=delivery.session.ack(delivery.tag))
            return
        kept = self.ledger.recall(entry, redelivered=delivery.redelivered)
        if kept is not None:
            delivery.envelope, delivery.replacement = kept.envelope, kept.replacement
        elif delivery.redelivered:
            # Whoever had it may have stored its copy, and is not there to say so.
            delivery.envelope = delivery.envelope._replace(has_been_copied=True)
        to: MessageClass = "urgent" if is_urgent(delivery.properties) else "normal"
        try:
            await self._store(delivery, self._targets[to], is_begun=kept is not None)
        except BaseException:
            self.ledger.give_back(claim, Kept(delivery.envelope, None, delivery.replacement))
            raise
        self._sorted[to].inc()
        self.ledger.settle(claim, None, acked=delivery.session.ack(delivery.tag))

    async def _ask(self, delivery: Delivery, entry: Entry) -> None:
        """Ask the other workers, and take others beside those that wait for their answers."""
        self._asking += 1
        try:
            if 2 * self._asking >= PREFETCH and self.count in {PREFETCH, 2 * PREFETCH}:
                self.consumer.renew()
            await self.learn_of(delivery, entry, ledger=self.ledger)
        finally:
            self._asking -= 1

    async def _store(self, delivery: Delivery, queue: str, *, is_begun: bool) -> None:
        if self._stopping and not is_begun:
            raise BrokerError("the worker stops")
        await self._storing.store(
            delivery, queue=queue, make_properties=partial(_make_properties, delivery)
        )

    def _on_session_over(self, session: Session) -> None:
        self.ledger.connection_lost(most_unacked=session.most_unacked)
        for move, delivery in list(self._moves.items()):
            if delivery.may_be_given_back and delivery.is_stale:
                move.cancel()


def make_sorter(
    settings: Settings,
    *,
    publisher: Publisher,
    peers: Peers,
    upkeep: Upkeep,
    metrics: WorkerMetrics,
) -> Sorter | None:
    """Make what `worker.priorities` asks for."""
    if settings.worker.priorities == "off":
        return None
    return Sorter(
        settings.worker.queue,
        publisher=publisher,
        peers=peers,
        heartbeat_seconds=settings.rabbitmq.heartbeat_seconds,
        may_sort=lambda: upkeep.is_usable,
        metrics=metrics,
    )


async def _ask_nobody(delivery: Delivery, entry: Entry, *, ledger: Ledger) -> None: ...


def _entry_of(delivery: Delivery) -> Entry:
    """Make the ledger's entry: by the copy's number alone it never takes one for a repeat.

    Somebody may move a message back to the main queue, and a copy has the number that it had.
    """
    entry = entry_of(delivery.envelope, delivery.body)
    # Nor is it an entry of what is sent: workers ask each other for both.
    which = b"sorted %d" % entry.copies
    digest = hashlib.blake2b(entry.message + which, digest_size=len(entry.message)).digest()
    return entry._replace(message=digest, copies=0)


def _make_properties(delivery: Delivery, max_bytes: int) -> Properties:
    envelope = delivery.envelope
    if delivery.is_stale:
        # Whoever has it now may have moved it, if this process was frozen for a while.
        envelope = envelope._replace(has_been_copied=True)
    return sorted_properties(delivery.properties, envelope, max_bytes=max_bytes)
