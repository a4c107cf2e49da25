"""Takes deliveries from the queue and gives back what it cannot finish, until it is drained.

`line` is the way of each delivery, which runs in a task of ours.
"""

import asyncio
import time
from functools import partial

from bridge.amqp.client import Connection
from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.errors import BrokerError, CopyRefusedError
from bridge.telemetry.logs import Log
from bridge.topology.declarations import request_queues
from bridge.topology.upkeep import Upkeep
from bridge.worker.announcer import Announcer
from bridge.worker.cluster.answering import Answerer
from bridge.worker.cluster.asking import Asker
from bridge.worker.cluster.deduplication import ClusterDeduplicator
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.cluster.sharing import Sharing
from bridge.worker.consumer import Consumer, Gauges
from bridge.worker.deduplicator import Deduplicator
from bridge.worker.delivery import Delivery
from bridge.worker.drain import finish, hand_over
from bridge.worker.held import HeldDeliveries
from bridge.worker.identification import Identification
from bridge.worker.line import Line
from bridge.worker.message_identity import identity_function
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.operator_pause import OperatorPause
from bridge.worker.ordering.active_lock import ActiveLock
from bridge.worker.ordering.keys import ordering_key
from bridge.worker.ordering.ordered_consumer import OrderedConsumer
from bridge.worker.ordering.turns import Turns
from bridge.worker.own_queues import OwnQueues
from bridge.worker.service.account import Account
from bridge.worker.settle import Settler
from bridge.worker.spans import WorkerSpans

log = Log(__name__)


class Worker:
    """Takes send requests from the queue and settles each of them."""

    def __init__(
        self,
        settings: Settings,
        *,
        account: Account,
        spans: WorkerSpans | None,
        publisher: Publisher,
        upkeep: Upkeep,
        peers: Peers,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = own = settings.worker
        self._publisher = publisher
        self._upkeep = upkeep
        self._peers = peers
        self._account = account
        self._breaker = breaker = account.breaker
        self._deduplicator = Deduplicator(
            heartbeat_seconds=settings.rabbitmq.heartbeat_seconds, window_seconds=own.deduplicate
        )
        self._identity_of = identity_function(own, short_codes=settings.sms_api.request.short_codes)
        self._repeated_copies = RepeatedCopies(
            peers, self._deduplicator, identity_of=self._identity_of
        )
        self._settler = Settler(
            own,
            publisher=publisher,
            block=breaker.block,
            unblock=breaker.unblock,
            repeated_copies=self._repeated_copies,
            may_set_aside=lambda: self._deduplicator.has_room_aside,
            metrics=metrics,
        )
        metrics.copies_refused.labels(own.queue).set_function(lambda: self.copies_refused)
        self._queues = OwnQueues(own, metrics)
        self.operator_pause = OperatorPause(own.queue, breaker)
        is_ordered = own.ordering == "recipient"
        self._lock = (
            ActiveLock(request_queues(own), show=metrics.active.labels(own.queue).set)
            if is_ordered
            else None
        )
        process = partial(self._run_in_turn, Turns()) if is_ordered else self._run
        self._held = HeldDeliveries(own, process=process, metrics=metrics)
        self.consumer = self._make_consumer(metrics)
        self._held.let_go = self.consumer.let_go
        self._asker, self._answerer = self._make_asker(metrics)
        is_deduplicating = own.deduplicate is not None and peers.is_enabled
        self._deduplication = (
            ClusterDeduplicator(peers, self._deduplicator.sent) if is_deduplicating else None
        )
        self._identification = self._make_identification()
        self._line = Line(
            own,
            identification=self._identification,
            account=account,
            settler=self._settler,
            announcer=Announcer(publisher, outcome_exchange=own.outcome_exchange),
            spans=spans,
            short_codes=settings.sms_api.request.short_codes,
        )
        self._sharing = self._make_sharing()

    def _make_sharing(self) -> Sharing:
        return Sharing(
            self._settings.queue,
            self._breaker,
            self._peers,
            is_registered=lambda: self.consumer.is_registered,
            cancelled_consumers=lambda: self._held.cancelled_consumers,
        )

    def _make_consumer(self, metrics: WorkerMetrics) -> Consumer | OrderedConsumer:
        queue = self._settings.queue
        up = {one: metrics.consumer_up.labels(one).set for one in request_queues(self._settings)}
        gauges = Gauges(up, metrics.poison_suspected.set)
        if self._lock is not None:
            return OrderedConsumer(
                self._lock,
                urgent_queue=self._settings.urgent_queue,
                held=self._held,
                may_take=self._may_take,
                changed=self._account.changed,
                on_registered=self._on_registered,
                on_session_over=self._on_session_over,
                gauges=gauges,
            )
        consumer = Consumer(
            queue,
            urgent_queue=self._settings.urgent_queue,
            prefetch=self._prefetch_of_each,
            changed=self._account.changed,
            on_delivery=self._held.take,
            on_registered=self._on_registered,
            on_session_over=self._on_session_over,
            gauges=gauges,
        )
        consumer.on_cancelled = self._held.note_cancel
        return consumer

    def _make_asker(self, metrics: WorkerMetrics) -> tuple[Asker, Answerer]:
        """Make what asks the peers, and what answers them."""
        asker = Asker(
            self._peers,
            self._deduplicator,
            most_seconds=self._settings.redelivery_wait,
            delays_seconds=self._settings.retry_delays,
            on_change=self._make_room,
            metrics=metrics,
        )
        answerer = Answerer(
            self._peers,
            self._deduplicator,
            is_asking=asker.is_asking,
            prove_session=self.consumer.prove,
        )
        return asker, answerer

    def _make_identification(self) -> Identification:
        return Identification(
            deduplicator=self._deduplicator,
            asker=self._asker,
            repeated_copies=self._repeated_copies,
            cluster=self._deduplication,
            breaker=self._breaker,
            identity_of=self._identity_of,
        )

    @property
    def is_standby(self) -> bool | None:
        """Whether another worker is the active one; None where all are."""
        return None if self._lock is None else self._lock.is_standby

    @property
    def copies_refused(self) -> int:
        """How many messages stay unacked, because the broker refuses their copies."""
        return self._deduplicator.set_aside_count

    async def serve(self, connection: Connection) -> None:
        """Declare the topology and consume on this connection; `Link.run` calls it."""
        await self._upkeep.ensure(connection)
        # Before anything is taken: what is known may be from before a restart of the broker.
        await self.operator_pause.look(connection)
        # Last, for those that are there have had time to say so meanwhile.
        await self._peers.until_acquainted()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.operator_pause.watch(connection))
                group.create_task(self._queues.watch(connection))
                group.create_task(self._account.keep_logging())
                for missing in (self._settler.queue_missing, self._publisher.exchange_missing):
                    group.create_task(self._upkeep.mend(connection, missing))
                if self._account.rates.is_shared and self._lock is None:
                    group.create_task(self._sharing.watch(connection))
                await self.consumer.serve(connection)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def drain(self, timeout_seconds: float) -> bool:
        """Take nothing more, finish what is being sent, give the rest back.

        Returns False when deliveries had to be cut off after `timeout_seconds`, or when the
        broker may not have read the acks of some.
        """
        self._identification.is_stopping = True
        self._account.stop()
        self._sharing.leave()
        self._settler.hurry()
        self._held.cancel(lambda delivery: delivery.may_be_given_back)
        is_finished = False
        end_at = time.monotonic() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                is_finished = await finish(self._held, self.consumer, self._deduplicator)
        except TimeoutError:
            queue, fault = self._breaker.report.unstored or (None, None)
            log.warning("drain_timed_out", queue=queue, fault=fault)
        await self._held.cut_off()
        await self._peers.until_joined(most_seconds=end_at - time.monotonic())
        self._answerer.gives_up_copies = True
        await hand_over(self.consumer, self._deduplicator, self._peers)
        if self._deduplication is not None:
            self._deduplication.report()
        await self._peers.leave()
        if not is_finished and self._deduplicator.expects_redeliveries:
            log.warning("acks_in_doubt")
        return is_finished

    async def aclose(self) -> None:
        """Close the connections to the API."""
        await self._account.aclose()

    def _prefetch_of_each(self) -> dict[str, int]:
        prefetch, urgent_queue = self._prefetch(), self._settings.urgent_queue
        each: dict[str, int] = {}
        if urgent_queue is not None:
            # Consumed first: where that is refused, the main queue has delivered nothing that would
            # come back and count towards its delivery limit.
            # Several slots may become free at once: while urgent messages have all of them, as many
            # more wait here, so that no ordinary ones take their place.
            is_sending = not self._identification.is_stopping and self._breaker.paused is None
            each[urgent_queue] = 2 * prefetch if is_sending else prefetch
        each[self._settings.queue] = prefetch
        return each

    def _prefetch(self) -> int:
        if self._identification.is_stopping:
            # In a drain, a delivery that is a repeat is acked, and any other is left to the next
            # worker.
            return 1
        if self._breaker.is_broker_blocked or not self._upkeep.is_usable:
            return 0
        return self._account.most_held()

    def _may_take(self) -> bool:
        """Whether to take messages in their order: in a pause too, but not in an operator's."""
        self._breaker.end_passed_wait()
        return self._upkeep.is_usable and not self._breaker.is_paused_by_operator

    def _make_room(self) -> None:
        """Take others beside those that wait for peers, when these leave few places."""
        if self._asker.leaves_few(self.consumer.prefetch, self._account.most_sendable):
            self._asker.put_aside()
            self.consumer.renew()

    def _on_registered(self) -> None:
        self._deduplicator.consuming_again()
        if self._lock is not None:
            # No other worker sends now.
            self._account.rates.divide_by(1)
        self._sharing.tell()
        # Redeliveries may have come before the broker's answer to the consume was read.
        self._make_room()

    def _on_session_over(self, most_unacked: int) -> None:
        """Let go of what waits: it comes again, and a probe must not keep its place meanwhile."""
        self._deduplicator.connection_lost(most_unacked=most_unacked)
        self._held.cancel(
            lambda delivery: (
                (delivery.may_be_given_back or delivery.awaits_first) and delivery.is_stale
            )
        )

    async def _run_in_turn(self, turns: Turns, delivery: Delivery) -> None:
        # Order holds within each queue.
        key = f"{delivery.queue} {ordering_key(delivery.properties, delivery.body)}"
        place = turns.line_up(key)
        try:
            await turns.take_turn(place, delivery, learn=self._identification.learn, work=self._run)
        finally:
            turns.leave(place)

    async def _run(self, delivery: Delivery) -> None:
        """Process a delivery; nothing that it raises leaves the task."""
        try:
            await self._line.process(delivery)
        except CopyRefusedError:
            self._settler.report_refused(delivery)
            # It would take a place of the prefetch for as long as the session lives.
            self.consumer.renew()
        except (BrokerError, asyncio.CancelledError):
            # Unacked: the broker delivers it again, at the latest when the channel closes.
            self._settler.report_given_back(delivery)
            if self._identification.is_stopping and delivery.redelivered:
                # Redeliveries come first: another one, which has to be acked, may come after this
                # one.
                self.consumer.renew()
        except Exception:
            log.exception("internal_error", message_id=delivery.envelope.key)
            delivery.free_slot()
            self._settler.report_given_back(delivery)
