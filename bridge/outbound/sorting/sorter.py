"""Sort the main queue: move each request to the queue of its class, or to its lane.

A queue gives its messages out in their order, so that nothing in it can pass what is before it. The
sorter is always ahead of the sending: it keeps the main queue near empty, and the requests wait
behind it. It acks last, so that a crash leaves copies, never losses.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from bridge.amqp.client import Connection
from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.errors import BrokerError
from bridge.logs import Log
from bridge.outbound.consumer import Consumer, Gauges
from bridge.outbound.delivery import Delivery
from bridge.outbound.drain import finish, finish_at_once, hand_over, until_come_again
from bridge.outbound.entry import Entry
from bridge.outbound.ledger import Claim, Kept, Ledger
from bridge.outbound.metrics import WorkerMetrics
from bridge.outbound.ordering.sorter_lock import SorterLock
from bridge.outbound.ordering.turns import Turns
from bridge.outbound.peers.asking import LearnOf
from bridge.outbound.peers.exchange import Peers
from bridge.outbound.peers.repeated_copies import RepeatedCopies
from bridge.outbound.sorting.acks import Acks
from bridge.outbound.sorting.move import Move, make_properties, sorting_entry
from bridge.outbound.sorting.targets import find_target_in
from bridge.outbound.sorting.written import Written
from bridge.outbound.storing import MakeProperties, Storing

log = Log(__name__)

# How many messages are on their way at once. A worker that is killed leaves so many at most in both
# queues; more of them make it no faster.
PREFETCH: Final = 100
# How often to look whether this worker may sort, before it takes the lock.
MAY_SORT_POLL_SECONDS: Final = 0.2


class Sorter:
    """Moves what comes to the main queue, in its order, on a connection of its own.

    It sorts while `may_sort` says so; set `changed` when that may be otherwise. `queue_missing` is
    set when the queue of a class is gone. `learn_of` is called with each redelivery. With a `lock`
    it keeps the order of each key: it sorts while it has the lock, one message of a key at a time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        lock: SorterLock | None,
        publisher: Publisher,
        peers: Peers,
        repeated_copies: RepeatedCopies,
        may_sort: Callable[[], bool],
        metrics: WorkerMetrics,
    ) -> None:
        self._queue = queue = settings.worker.queue
        self._find_target = find_target_in(settings.worker)
        self._lock = lock
        self._turns = Turns()
        self._sorted = metrics.sorted
        self._may_sort = may_sort
        self._peers = peers
        self.learn_of: LearnOf = _ask_nobody
        self._publisher = publisher
        self.changed = asyncio.Event()
        # Its prefetch bounds what waits for a broker that stores nothing. The senders go on: the
        # queue of a class may be full, and takes more when they have taken from it.
        wake, note = self.changed.set, repeated_copies.note_published
        self._storing = Storing(publisher, block=wake, unblock=wake, note_repeated=note)
        self.queue_missing = self._storing.queue_missing
        self.ledger = Ledger(heartbeat_seconds=settings.rabbitmq.heartbeat_seconds)
        # Those that wait for one of their key, those whose copy is written, and those that need a
        # task.
        self._waiting: set[Move] = set()
        self._written = Written(
            publisher, keeps_priority=lock is None, on_stored=self._on_stored, on_late=self._start
        )
        self._tasks: dict[asyncio.Task[None], Move] = {}
        self._acks: Acks | None = None
        self._all_done = asyncio.Event()
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

    @property
    def is_ready(self) -> bool:
        """Whether the queue is sorted, here or by another worker, as far as that can be."""
        is_elsewhere = self._lock is not None and self._lock.is_held_elsewhere
        return self.is_sorting or is_elsewhere or self._publisher.is_blocked

    async def serve(self, connection: Connection) -> None:
        """Sort, on a channel of this connection; `Link.run` calls it."""
        if self._stopping and self._lock is not None:
            await asyncio.Event().wait()  # Others may have the lock.
        # Before anything is taken: it may have to be asked for.
        await self._peers.until_acquainted()
        if self._lock is None:
            await self.consumer.serve(connection)
        else:
            # Who has the lock and cannot sort would keep the others from it.
            while not self._may_sort():  # noqa: ASYNC110  `changed` is the consumer's
                await asyncio.sleep(MAY_SORT_POLL_SECONDS)
            await self._lock.hold(connection, self.consumer.serve)

    async def drain(self) -> bool:
        """Take nothing more, move what is taken, and see that the broker has read the acks.

        Returns False when it may not have read some. Has no deadline; cancelled, it gives back
        what is not moved.
        """
        try:
            if self._lock is not None:
                await until_come_again(self.ledger)
            self._stopping = True
            end = finish if self._lock is None else finish_at_once
            return await end(self, self.consumer, self.ledger)
        finally:
            for task in list(self._tasks):
                task.cancel()
            for move in (*self._waiting, *self._written):
                self._give_back(move)

    async def hand_over(self) -> None:
        """Have other workers move what `drain` gave back, while this one can be asked for it."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await hand_over(self.consumer, self.ledger, self._peers)

    @property
    def count(self) -> int:
        """How many are taken and not moved."""
        return len(self._waiting) + len(self._written) + len(self._tasks)

    async def all_done(self) -> None:
        """Wait until all that is taken is moved or given back."""
        while self.count:
            self._all_done.clear()
            await self._all_done.wait()

    def _prefetch(self) -> dict[str, int]:
        if self._lock is not None and (self.is_sorting or self._may_sort()):
            # Always the same: what comes back after this worker's end comes in the order of its
            # consumers, so there must be one only.
            return {self._queue: PREFETCH}
        if self._stopping:
            # What comes again is acked, if it is moved; any other is left to the next worker.
            return {self._queue: 1}
        wants_none = self._publisher.is_blocked or not self._may_sort()
        return {} if wants_none else {self._queue: PREFETCH}

    def _take(self, delivery: Delivery) -> None:
        self.redeliveries += delivery.redelivered
        if self._acks is None or self._acks.session is not delivery.session:
            self._acks = Acks(delivery.session)
        self._acks.note(delivery.tag)
        target = self._find_target(delivery)
        move = Move(delivery, sorting_entry(delivery), target)
        if target.key is not None:
            move.place = self._turns.line_up(target.key)
        if delivery.redelivered or self._stopping:
            self._start(move)
        elif move.place is not None and not move.place.is_first:
            self._waiting.add(move)
            begin = partial(asyncio.get_running_loop().call_soon, self._begin_waiting, move)
            move.place.when_first(begin)
        else:
            self._begin(move)

    # Most of them: nothing has to be waited for but the confirm, and no task is made

    def _begin(self, move: Move) -> None:
        """Claim what is new and write its copy; a task does so where it has to wait for either."""
        claim = self.ledger.claim_at_once(move.entry)
        if isinstance(claim, Claim):
            move.claim = claim
            if self._written.write(move):
                return
        self._start(move)

    def _begin_waiting(self, move: Move) -> None:
        """Begin with one whose turn it is, unless it goes back to the queue."""
        if move not in self._waiting:
            return
        if self._stopping or move.delivery.goes_back:
            self._give_back(move)
        else:
            self._waiting.remove(move)
            self._begin(move)

    def _on_stored(self, moves: list[Move]) -> None:
        self._settle(moves)
        for move in moves:
            self._end(move)

    def _settle(self, moves: list[Move]) -> None:
        """Ack what is moved."""
        acked = self._ack([move.delivery for move in moves])
        for move in moves:
            if move.claim is not None:
                self._sorted.labels(move.target.counted_as).inc()
                self.ledger.settle(move.claim, None, acked=move.delivery in acked)

    def _ack(self, deliveries: list[Delivery]) -> set[Delivery]:
        """Return those whose ack was written; the broker delivers the others again."""
        if (acks := self._acks) is None:
            return set()
        own = {one for one in deliveries if one.session is acks.session}
        return own if acks.ack(one.tag for one in own) else set()

    def _give_back(self, move: Move) -> None:
        """Let go of one that no task works on."""
        self._waiting.discard(move)
        self._written.take_out(move)
        if move.claim is not None:
            self._keep(move.delivery, move.claim)
        self._end(move)

    def _keep(self, delivery: Delivery, claim: Claim) -> None:
        if self._stopping:
            # This worker may have sent the copy, and is there no more when another one is made.
            self._storing.give_up(delivery, self._make_properties(delivery))
        self.ledger.give_back(claim, Kept(delivery.envelope, None, delivery.replacement))

    def _end(self, move: Move) -> None:
        if move.place is not None:
            self._turns.leave(move.place)
        self.consumer.let_go(move.delivery)
        if not self.count:
            self._all_done.set()

    # The others: what comes again, and what could not be stored at once

    def _start(self, move: Move) -> None:
        task = asyncio.get_running_loop().create_task(self._run_in_turn(move))
        self._tasks[task] = move
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        move = self._tasks.pop(task)
        if task.cancelled() and move.claim is not None:  # before it began
            self._keep(move.delivery, move.claim)
        self._end(move)

    async def _run_in_turn(self, move: Move) -> None:
        if move.place is None or move.claim is not None:
            await self._run(move)
            return
        place, delivery, work = move.place, move.delivery, partial(self._run, move)
        await self._turns.take_turn(place, delivery, learn=self._ask, work=lambda _: work())

    async def _run(self, move: Move) -> None:
        """Move a delivery; nothing that it raises leaves the task."""
        delivery = move.delivery
        try:
            await self._move(move)
        except (BrokerError, asyncio.CancelledError):
            # Unacked: the broker delivers it again.
            log.debug("not_sorted", message_id=delivery.envelope.key)
            if self._stopping and delivery.redelivered and self._lock is None:
                # Another one, which has to be acked, may come after this one.
                self.consumer.renew()
        except Exception:
            log.exception("internal_error", message_id=delivery.envelope.key)

    async def _move(self, move: Move) -> None:
        delivery, entry = move.delivery, move.entry
        is_begun = delivery.replacement is not None
        if move.claim is None:
            if delivery.redelivered and not delivery.is_asked_for:
                await self._ask(delivery)
            claim = await self.ledger.claim(
                entry, redelivered=delivery.redelivered, waits=delivery.waits
            )
            if not isinstance(claim, Claim):
                # It was moved already; only its ack was lost.
                self.ledger.note_repeat(entry, acked=bool(self._ack([delivery])))
                return
            move.claim = claim
            is_begun = self._recall(delivery, entry)
        try:
            await self._store(delivery, move.target.queue, is_begun=is_begun)
        except BaseException:
            self._keep(delivery, move.claim)
            raise
        self._settle([move])

    def _recall(self, delivery: Delivery, entry: Entry) -> bool:
        """Go on with what is known of a delivery that has come again, and say whether any is."""
        kept = self.ledger.recall(entry, redelivered=delivery.redelivered)
        if kept is not None:
            delivery.envelope, delivery.replacement = kept.envelope, kept.replacement
        elif delivery.redelivered:
            # Whoever had it may have stored its copy, and is not there to say so.
            delivery.envelope = delivery.envelope._replace(has_been_copied=True)
        return kept is not None

    async def _ask(self, delivery: Delivery) -> None:
        """Ask the other workers, and take others beside those that wait for their answers."""
        if self._stopping:
            return
        self._asking += 1
        try:
            is_half_asked = 2 * self._asking >= PREFETCH and self.count in {PREFETCH, 2 * PREFETCH}
            if is_half_asked and self._lock is None:
                self.consumer.renew()
            await self.learn_of(delivery, sorting_entry(delivery), ledger=self.ledger)
            delivery.is_asked_for = True
        finally:
            self._asking -= 1

    async def _store(self, delivery: Delivery, queue: str, *, is_begun: bool) -> None:
        if self._stopping and not is_begun:
            raise BrokerError("the worker stops")
        make = self._make_properties(delivery)
        await self._storing.store(delivery, queue=queue, make_properties=make)

    def _make_properties(self, delivery: Delivery) -> MakeProperties:
        return partial(make_properties, delivery, keeps_priority=self._lock is None)

    def _on_session_over(self, most_unacked: int) -> None:
        self.ledger.connection_lost(most_unacked=most_unacked)
        for task, move in list(self._tasks.items()):
            if move.delivery.may_be_given_back and move.delivery.is_stale:
                task.cancel()
        for move in [move for move in self._waiting if move.delivery.is_stale]:
            self._give_back(move)


async def _ask_nobody(delivery: Delivery, entry: Entry, *, ledger: Ledger) -> None: ...
