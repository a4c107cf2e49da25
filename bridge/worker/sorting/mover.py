"""Move each delivery to the queue where it is to wait: claim it, write its copy, ack it last.

A crash leaves copies, never losses.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.errors import BrokerError, CopyRefusedError
from bridge.telemetry.logs import Log
from bridge.worker.cluster.asking import LearnOf
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.delivery import Delivery
from bridge.worker.entry import Entry
from bridge.worker.ledger import Claim, Kept, Ledger
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.ordering.turns import Turns
from bridge.worker.sorting.acks import Acks
from bridge.worker.sorting.move import Move, make_properties, sorting_entry
from bridge.worker.sorting.targets import find_target_in
from bridge.worker.sorting.written import Written
from bridge.worker.storing import MakeProperties, Storing

log = Log(__name__)

# How many messages are on their way at once. A worker that is killed leaves so many at most in both
# queues; more of them make it no faster.
PREFETCH: Final = 100


class Mover:
    """What is taken from the main queue and not yet moved.

    `wake` is called when more or less should be taken than before, `let_go` with each delivery that
    is moved or goes back, and `renew` when the broker should deliver on another channel.
    `queue_missing` is set when a queue to move to is gone. `learn_of` is called with each
    redelivery. With `keeps_order` one message of a key is moved at a time.
    """

    def __init__(  # noqa: PLR0913  whom it asks, and whom it tells
        self,
        settings: Settings,
        *,
        keeps_order: bool,
        publisher: Publisher,
        repeated_copies: RepeatedCopies,
        wake: Callable[[], None],
        let_go: Callable[[Delivery], None],
        renew: Callable[[], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._find_target = find_target_in(settings.worker)
        self._keeps_order = keeps_order
        self._turns = Turns()
        self._sorted = metrics.sorted
        self._let_go = let_go
        self._renew = renew
        self.learn_of: LearnOf = _ask_nobody
        # The prefetch bounds what waits for a broker that stores nothing. The senders go on: the
        # queue of a class may be full, and takes more when they have taken from it.
        note = repeated_copies.note_published
        self.ledger = Ledger(heartbeat_seconds=settings.rabbitmq.heartbeat_seconds)
        self._storing = Storing(
            publisher,
            block=lambda _queue, _fault: wake(),
            unblock=wake,
            note_repeated=note,
            may_set_aside=lambda: self.ledger.has_room_aside,
        )
        self.queue_missing = self._storing.queue_missing
        # Those that wait for one of their key, those whose copy is written, and those that need a
        # task.
        self._waiting: set[Move] = set()
        self._written = Written(
            publisher,
            keeps_priority=not keeps_order,
            on_stored=self._on_stored,
            on_late=self._start,
        )
        self._tasks: dict[asyncio.Task[None], Move] = {}
        self._acks: Acks | None = None
        self._all_done = asyncio.Event()
        self._asking = 0
        self.is_stopping = False
        # How many redelivered messages have come so far.
        self.redeliveries = 0

    @property
    def count(self) -> int:
        """How many are taken and not moved."""
        return len(self._waiting) + len(self._written) + len(self._tasks)

    async def all_done(self) -> None:
        """Wait until all that is taken is moved or given back."""
        while self.count:
            self._all_done.clear()
            await self._all_done.wait()

    def take(self, delivery: Delivery) -> None:
        """Move a delivery, sooner or later."""
        self.redeliveries += delivery.redelivered
        if self._acks is None or self._acks.session is not delivery.session:
            self._acks = Acks(delivery.session)
        self._acks.note(delivery.tag)
        target = self._find_target(delivery)
        move = Move(delivery, sorting_entry(delivery), target)
        if target.key is not None:
            move.place = self._turns.line_up(target.key)
        if delivery.redelivered or self.is_stopping:
            self._start(move)
        elif move.place is not None and not move.place.is_first:
            self._waiting.add(move)
            begin = partial(asyncio.get_running_loop().call_soon, self._begin_waiting, move)
            move.place.when_first(begin)
        else:
            self._begin(move)

    def stop(self) -> None:
        """Begin with no other copy; what comes again is acked, if it is moved."""
        self.is_stopping = True

    def give_back_all(self) -> None:
        """Let go of what is not moved."""
        for task in list(self._tasks):
            task.cancel()
        for move in (*self._waiting, *self._written):
            self._give_back(move)

    async def all_given_back(self) -> None:
        """Return when what `give_back_all` cancelled has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_session_over(self, most_unacked: int) -> None:
        """Let go of what waits and comes again; the broker has read all but so many acks."""
        self.ledger.connection_lost(most_unacked=most_unacked)
        for task, move in list(self._tasks.items()):
            if move.delivery.may_be_given_back and move.delivery.is_stale:
                task.cancel()
        for move in [move for move in self._waiting if move.delivery.is_stale]:
            self._give_back(move)

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
        if self.is_stopping or move.delivery.goes_back:
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
        if self.is_stopping:
            # This worker may have sent the copy, and is there no more when another one is made.
            self._storing.give_up(delivery, self._make_properties(delivery))
        self.ledger.give_back(claim, Kept(delivery.envelope, None, delivery.replacement))

    def _end(self, move: Move) -> None:
        if move.place is not None:
            self._turns.leave(move.place)
        self._let_go(move.delivery)
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
        except CopyRefusedError:
            if not self._keeps_order:
                # It would take a place of the prefetch for as long as the session lives.
                self._renew()
        except (BrokerError, asyncio.CancelledError):
            # Unacked: the broker delivers it again.
            log.debug("not_sorted", message_id=delivery.envelope.key)
            if self.is_stopping and delivery.redelivered and not self._keeps_order:
                # Another one, which has to be acked, may come after this one.
                self._renew()
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
        except CopyRefusedError:
            self.ledger.set_aside(move.claim, Kept(delivery.envelope, None))
            raise
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
        if self.is_stopping:
            return
        self._asking += 1
        try:
            is_half_asked = 2 * self._asking >= PREFETCH and self.count in {PREFETCH, 2 * PREFETCH}
            if is_half_asked and not self._keeps_order:
                self._renew()
            await self.learn_of(delivery, sorting_entry(delivery), ledger=self.ledger)
            delivery.is_asked_for = True
        finally:
            self._asking -= 1

    async def _store(self, delivery: Delivery, queue: str, *, is_begun: bool) -> None:
        if self.is_stopping and not is_begun:
            raise BrokerError("the worker stops")
        make = self._make_properties(delivery)
        await self._storing.store(delivery, queue=queue, make_properties=make)

    def _make_properties(self, delivery: Delivery) -> MakeProperties:
        return partial(make_properties, delivery, keeps_priority=not self._keeps_order)


async def _ask_nobody(delivery: Delivery, entry: Entry, *, ledger: Ledger) -> None: ...
