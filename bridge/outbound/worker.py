"""From the queue to the SMS API: claim, dispatch, replace, ack, settle, announce.

`Worker._process` is the whole way, one stage after the other. Each delivery runs in a task of ours.
"""

import asyncio
import contextlib
import time

from bridge.amqp.client import Connection
from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.errors import BrokerError, InvalidMessageError
from bridge.logs import Log
from bridge.outbound.acceptances import Accepted
from bridge.outbound.announcer import Announcer
from bridge.outbound.consumer import Consumer, Gauges
from bridge.outbound.delivery import Delivery, Session
from bridge.outbound.dispatch import Dispatcher
from bridge.outbound.drain import finish, hand_over
from bridge.outbound.entry import Entry, entry_of, entry_of_text
from bridge.outbound.envelope import read_envelope
from bridge.outbound.held import HeldDeliveries
from bridge.outbound.ledger import Claim, Kept, Ledger, Repeat
from bridge.outbound.limits.capacity import Capacity
from bridge.outbound.metrics import WorkerMetrics
from bridge.outbound.outcomes import Dead, Outcome, Retried
from bridge.outbound.own_queues import OwnQueues
from bridge.outbound.pausing.operator_pause import OperatorPause
from bridge.outbound.pausing.pace import Pace
from bridge.outbound.peers.answering import Answerer
from bridge.outbound.peers.asking import Asker
from bridge.outbound.peers.deduplication import Deduplication
from bridge.outbound.peers.exchange import Peers
from bridge.outbound.peers.sharing import Sharing
from bridge.outbound.posting.sender import Sender
from bridge.outbound.request import parse_request
from bridge.outbound.settle import Settler, accepted
from bridge.outbound.sorting.classes import is_urgent
from bridge.outbound.sorting.sorter import make_sorter
from bridge.topology.upkeep import Upkeep

log = Log(__name__)


class Worker:
    """Takes send requests from the queue and settles each of them."""

    def __init__(
        self,
        settings: Settings,
        *,
        sender: Sender,
        pace: Pace,
        publisher: Publisher,
        upkeep: Upkeep,
        peers: Peers,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = own = settings.worker
        # Read for each message; an attribute of a model takes ten times as long as one of ours.
        self._queue = own.queue
        self._upkeep = upkeep
        upkeep.changed = self._on_upkeep
        self._peers = peers
        self._sender = sender
        self._pace = pace
        self._spans = sender.spans
        self._settler = Settler(
            own,
            publisher=publisher,
            block=pace.block,
            unblock=pace.unblock,
            metrics=metrics,
        )
        self._announcer = Announcer(publisher, outcome_exchange=own.outcome_exchange)
        self._ledger = Ledger(
            heartbeat_seconds=settings.rabbitmq.heartbeat_seconds, window_seconds=own.deduplicate
        )
        self._is_known_by_text = own.deduplicate_by == "text"
        is_deduplicating = own.deduplicate is not None and peers.is_enabled
        self._deduplication = Deduplication(peers, self._ledger.sent) if is_deduplicating else None
        self._capacity = Capacity(own, changed=pace.changed)
        self._dispatcher = Dispatcher(
            own, sender=sender, pace=pace, capacity=self._capacity, metrics=metrics
        )
        self._queues = OwnQueues(own, metrics)
        self.sorter = make_sorter(
            settings, publisher=publisher, peers=peers, upkeep=upkeep, metrics=metrics
        )
        self.operator_pause = OperatorPause(own.queue, pace)
        self._held = HeldDeliveries(own.queue, process=self._run, metrics=metrics)
        self._stopping = False
        self.consumer = Consumer(
            own.queue,
            prefetch=self._prefetch_of_each,
            changed=pace.changed,
            on_delivery=self._held.take,
            on_registered=self._on_registered,
            on_session_over=self._on_session_over,
            gauges=Gauges(metrics.consumer_up.labels(own.queue).set, metrics.poison_suspected.set),
        )
        self._held.let_go = self.consumer.let_go
        self._asker = self._make_asker(metrics)
        self._sharing = Sharing(
            self._queues.taken[0], pace, peers, is_registered=lambda: self.consumer.is_registered
        )
        limit = metrics.concurrency_limit.labels(own.queue)
        limit.set_function(lambda: self._capacity.limit)

    def _make_asker(self, metrics: WorkerMetrics) -> Asker:
        """Have the peers' questions answered, and make what asks them."""
        asker = Asker(
            self._peers,
            self._ledger,
            most_seconds=self._settings.redelivery_wait,
            delays_seconds=self._settings.retry_delays,
            on_change=self._make_room,
            metrics=metrics,
        )
        consumers, ledgers = [self.consumer], [self._ledger]
        if self.sorter is not None:
            consumers.append(self.sorter.consumer)
            ledgers.append(self.sorter.ledger)
            self.sorter.learn_of = asker.learn_of

        async def prove() -> None:
            await asyncio.gather(*(consumer.prove() for consumer in consumers))

        Answerer(self._peers, *ledgers, is_asking=asker.is_asking, prove_session=prove)
        return asker

    # The straight line

    async def _process(self, delivery: Delivery) -> None:
        if self._spans is not None:
            self._spans.begin(delivery)
        entry = self._entry_of(delivery)
        claim = await self._claim(delivery, entry)
        if not isinstance(claim, Claim):
            await self._end_repeat(delivery, entry, claim)
            return
        outcome: Outcome | None = None
        try:
            outcome = self._recall(delivery, entry) or await self._dispatch(delivery)
            await self._settler.replace(delivery, outcome)
        except BaseException:
            kept = Kept(delivery.envelope, outcome, delivery.replacement)
            self._ledger.give_back(claim, kept)
            self._report_end(entry, None)
            raise
        acked = self._settler.ack(delivery, outcome)
        at = time.time()
        acceptance = accepted(delivery.envelope, outcome, at)
        self._ledger.settle(claim, acceptance, acked=acked)
        self._report_end(entry, acceptance)
        await self._announcer.announce(
            delivery.properties, delivery.envelope, outcome, at, trace=delivery.trace
        )

    def _entry_of(self, delivery: Delivery) -> Entry:
        if self._is_known_by_text:
            with contextlib.suppress(Exception):  # it is found out again when it is dispatched
                request = parse_request(delivery.body, self._settings)
                return entry_of_text(delivery.envelope, request)
        return entry_of(delivery.envelope, delivery.body)

    async def _claim(self, delivery: Delivery, entry: Entry) -> Claim | Repeat | None:
        """Take a delivery to work on, unless it is a repeat, or may be one (None)."""
        if delivery.redelivered and not self._stopping:
            await self._asker.learn_of(delivery, entry)
        deduplication = self._deduplication
        if deduplication is not None and not self._stopping:
            is_free = await deduplication.until_ended_elsewhere(
                delivery, entry, may_wait=lambda: self._may_wait_for_first
            )
            if not is_free:
                return None
        claim = await self._ledger.claim(
            entry,
            redelivered=delivery.redelivered,
            waits=delivery.waits,
            may_wait=self._may_wait_for_first,
        )
        if deduplication is not None and isinstance(claim, Claim):
            deduplication.take(entry)
        return claim

    def _report_end(self, entry: Entry, acceptance: Accepted | None) -> None:
        if self._deduplication is not None:
            self._deduplication.end(entry, acceptance)

    @property
    def _may_wait_for_first(self) -> bool:
        """Whether a repeat may be held until the first message with its id is settled.

        A drain goes on with it: what is given back here does not come again while the channel
        lives, and the next worker would send it again. In a pause few are held, and a probe for
        up to a minute: who waited for that would take the place of one that may end the pause.
        """
        return self._stopping or self._pace.paused is None

    def _recall(self, delivery: Delivery, entry: Entry) -> Outcome | None:
        kept = self._ledger.recall(entry, redelivered=delivery.redelivered)
        return self._go_on_with(delivery, kept)

    def _go_on_with(self, delivery: Delivery, kept: Kept | None) -> Outcome | None:
        """Go on with what is known of a delivery that went back to the queue unsettled."""
        if kept is None:
            return None
        delivery.envelope, delivery.replacement = kept.envelope, kept.replacement
        return kept.outcome

    async def _dispatch(self, delivery: Delivery) -> Outcome:
        """Read a message and have it sent; whatever is wrong with it becomes an outcome."""
        try:
            delivery.envelope = read_envelope(delivery.properties, delivery.envelope)
            if self.sorter is not None:
                delivery.is_urgent = is_urgent(delivery.properties)
            request = parse_request(delivery.body, self._settings)
            return await self._dispatcher.outcome_of(delivery, request)
        except InvalidMessageError as error:
            return Dead(reason="invalid", detail=str(error))
        except BrokerError:
            raise
        except Exception as error:  # a bug of ours must not hold the message for ever
            log.exception("internal_error", message_id=delivery.envelope.key)
            name = type(error).__name__
            return Dead(reason="internal_error", detail=f"a bug in the bridge: {name}")

    async def _end_repeat(self, delivery: Delivery, entry: Entry, repeat: Repeat | None) -> None:
        """Ack a repeat of what is settled, or (None) put it off until the first is settled."""
        if repeat is None:
            await self._put_off_repeat(delivery, entry)
            return
        acked = self._settler.ack(delivery, None)
        self._ledger.note_repeat(entry, acked=acked)
        await self._announcer.answer_repeat(
            delivery.properties, delivery.envelope, repeat.first, trace=delivery.trace
        )

    async def _put_off_repeat(self, delivery: Delivery, entry: Entry) -> None:
        kept = self._ledger.recall_repeat(entry, redelivered=delivery.redelivered)
        outcome = self._go_on_with(delivery, kept) or self._outcome_of_repeat(delivery)
        try:
            await self._settler.replace(delivery, outcome)
        except BaseException:
            kept = Kept(delivery.envelope, outcome, delivery.replacement)
            self._ledger.give_back_repeat(entry, kept)
            raise
        self._settler.ack(delivery, outcome)

    def _outcome_of_repeat(self, delivery: Delivery) -> Outcome:
        try:
            delivery.envelope = read_envelope(delivery.properties, delivery.envelope)
        except InvalidMessageError as error:
            return Dead(reason="invalid", detail=str(error))
        return Retried(
            reason="paused",
            delay_seconds=self._settings.retry_delays[0],
            detail="the first message with its id is still being worked on",
        )

    # Taking and giving back

    async def serve(self, connection: Connection) -> None:
        """Declare the topology and consume on this connection; `Link.run` calls it."""
        await self._upkeep.ensure(connection)
        # Before anything is taken: what is known may be from before a restart of the broker.
        await self.operator_pause.look(connection)
        await self._peers.until_acquainted()
        await self._queues.look_behind(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.operator_pause.watch(connection))
                group.create_task(self._queues.watch(connection))
                group.create_task(self._capacity.keep_logging())
                missing = self._settler.queue_missing
                group.create_task(self._upkeep.mend(connection, missing))
                if self.sorter is not None:
                    # RabbitMQ may not say that the queue is another one than that consumed so far.
                    missing, mended = self.sorter.queue_missing, self.consumer.renew
                    group.create_task(self._upkeep.mend(connection, missing, mended=mended))
                if self._pace.rates.is_shared:
                    group.create_task(self._sharing.watch(connection))
                await self.consumer.serve(connection)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def drain(self, timeout_seconds: float) -> bool:
        """Take nothing more, finish what is being sent, give the rest back.

        Returns False when deliveries had to be cut off after `timeout_seconds`, or when the
        broker may not have read the acks of some.
        """
        self._stopping = True
        self._pace.others.leave()
        self._sharing.leave()
        self._dispatcher.stop()
        self._settler.hurry()
        self._held.cancel(lambda delivery: delivery.may_be_given_back)
        is_finished = False
        try:
            async with asyncio.timeout(timeout_seconds):
                is_finished = await self._finish()
        except TimeoutError:
            log.warning("drain_timed_out")
        await self._held.cut_off()
        await hand_over(self.consumer, self._ledger, self._peers)
        if self._deduplication is not None:
            self._deduplication.report()
        await self._peers.leave()
        if not is_finished and self._ledger.expects_redeliveries:
            log.warning("acks_in_doubt")
        return is_finished

    async def _finish(self) -> bool:
        """Finish the sending and the sorting; the caller sets the deadline."""
        sending = finish(self._held, self.consumer, self._ledger)
        if self.sorter is None:
            return await sending
        return all(await asyncio.gather(sending, self.sorter.drain()))

    async def aclose(self) -> None:
        """Close the connections to the API."""
        await self._sender.aclose()

    def _prefetch_of_each(self) -> dict[str, int]:
        prefetch = self._prefetch()
        each = dict.fromkeys(self._queues.taken, prefetch)
        if self.sorter is not None and not self._stopping and self._pace.paused is None:
            # While all slots have urgent ones, others wait beside those that are not urgent.
            each[self._queues.taken[0]] = 2 * prefetch
        return each

    def _prefetch(self) -> int:
        if self._stopping:
            # In a drain, a delivery that is a repeat is acked, and any other is left to the next
            # worker.
            return 1
        if self._pace.broker_blocked or not self._upkeep.is_usable:
            return 0
        self._pace.reopen()
        if self._pace.paused:
            return self._pace.probes_wanted
        return self._pace.rates.most_held(self._capacity.most_held)

    def _make_room(self) -> None:
        """Take others beside those that wait for peers, when these leave few places."""
        if self._asker.leaves_few(self.consumer.prefetch, self._capacity.most_held):
            self._asker.put_aside()
            self.consumer.renew()

    def _on_upkeep(self) -> None:
        self._pace.changed.set()
        if self.sorter is not None:
            self.sorter.changed.set()

    def _on_registered(self) -> None:
        self._ledger.consuming_again()
        # Redeliveries may have come before the broker's answer to the consume was read.
        self._make_room()

    def _on_session_over(self, session: Session) -> None:
        """Let go of what waits: it comes again, and a probe must not keep its place meanwhile."""
        self._ledger.connection_lost(most_unacked=session.most_unacked)
        self._held.cancel(
            lambda delivery: (
                (delivery.may_be_given_back or delivery.awaits_first) and delivery.is_stale
            )
        )

    async def _run(self, delivery: Delivery) -> None:
        """Process a delivery; nothing that it raises leaves the task."""
        try:
            await self._process(delivery)
        except (BrokerError, asyncio.CancelledError):
            # Unacked: the broker delivers it again, at the latest when the channel closes.
            self._settler.report_given_back(delivery)
            if self._stopping and delivery.redelivered:
                # Redeliveries come first: another one, which has to be acked, may come after this
                # one.
                self.consumer.renew()
        except Exception:
            log.exception("internal_error", message_id=delivery.envelope.key)
            self._settler.report_given_back(delivery)
