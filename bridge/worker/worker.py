"""Builds one worker from its parts, runs it on each connection, and drains it.

Each delivery is processed by `Pipeline` in a task of its own.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from bridge.amqp.client import Connection
from bridge.amqp.majority import MajorityWatch
from bridge.amqp.publisher import Publisher
from bridge.config import Settings
from bridge.errors import BrokerError, CopyRefusedError
from bridge.telemetry.logs import Log
from bridge.topology.declarations import dead_queue, request_queues, retry_queues
from bridge.topology.queue_sizes import QueueSizes, QueueWatch
from bridge.topology.upkeep import Upkeep
from bridge.worker.announcer import Announcer
from bridge.worker.cluster.deduplication import ClusterDeduplicator, RepeatedCopies
from bridge.worker.cluster.exchange import ClusterExchange
from bridge.worker.cluster.joint_pause import JointPause, PauseFollower
from bridge.worker.cluster.membership import Coordination, Part
from bridge.worker.cluster.questions import RedeliveryQuestions
from bridge.worker.cluster.rate_limit import ClusterRateLimit
from bridge.worker.consumer import Consumer
from bridge.worker.deduplicator import COMES_AGAIN_SECONDS, Deduplicator, identity_function
from bridge.worker.delivery import Delivery
from bridge.worker.dispatcher import Dispatcher
from bridge.worker.fates import PauseReason, ReleaseReason
from bridge.worker.identification import Identification
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.operator_pause import OperatorPause
from bridge.worker.ordering import ActiveLock, Turns
from bridge.worker.pauses import WorkerPauses
from bridge.worker.pipeline import Pipeline
from bridge.worker.service.account import Account
from bridge.worker.settle import Settler
from bridge.worker.spans import WorkerSpans

log = Log(__name__)

# Prefetch of each queue in ordered mode. It is large enough to have different keys for all slots
# even if many messages wait behind one that is retried.
MOST_HELD_IN_ORDER: Final = 3200
# During a drain: how often to check for redeliveries of settled but unacked messages, and for how
# long to consume them.
OWED_POLL_SECONDS: Final = 0.1
MAX_OWED_SECONDS: Final = 5.0
# How long other workers may take to ask about returned messages, and how often to check.
HAND_OVER_SECONDS: Final = 3.0
HAND_OVER_POLL_SECONDS: Final = 0.05


class Worker:
    """Consumes send requests from the queue and settles each of them."""

    def __init__(  # noqa: PLR0913  the parts of a worker
        self,
        settings: Settings,
        *,
        account: Account,
        pauses: WorkerPauses,
        spans: WorkerSpans | None,
        publisher: Publisher,
        upkeep: Upkeep,
        joint_pause: JointPause,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = own = settings.worker
        self._publisher = publisher
        self._upkeep = upkeep
        self._membership = membership = joint_pause.membership
        self._account = account
        self._pauses = pauses
        self._metrics = metrics
        self._deduplicator = Deduplicator(
            heartbeat_seconds=settings.rabbitmq.heartbeat_seconds, window_seconds=own.deduplicate
        )
        short_codes = settings.sms_api.request.short_codes
        identity_of = identity_function(own, short_codes=short_codes)
        repeated_copies = RepeatedCopies(membership, self._deduplicator, identity_of=identity_of)
        self._settler = Settler(
            own,
            publisher=publisher,
            pauses=pauses,
            repeated_copies=repeated_copies,
            deduplicator=self._deduplicator,
            metrics=metrics,
        )
        metrics.copies_refused.labels(own.queue).set_function(lambda: self.copies_refused)
        self.operator_pause = OperatorPause(own.queue, pauses)
        queues = request_queues(own)
        self._queue_roles = {
            **dict(zip(queues, ("main", "urgent"), strict=False)),
            dead_queue(own.queue): "dead_letter",
            **dict.fromkeys(retry_queues(own), "retry"),
        }
        self._queue_watch = QueueWatch(self._note_queue_sizes)
        is_ordered = own.ordering == "recipient"
        self._lock = (
            ActiveLock(queues, show=metrics.active.labels(own.queue).set) if is_ordered else None
        )
        self._dispatcher = Dispatcher(
            own,
            process=partial(Turns().take_turn, learn=self._learn, work=self._run)
            if is_ordered
            else self._run,
            changed=pauses.wake_up.consumer,
            metrics=metrics,
        )
        self.consumer = Consumer(
            own,
            owner=self,
            dispatcher=self._dispatcher,
            lock=self._lock,
            changed=pauses.wake_up.consumer,
            metrics=metrics,
        )
        self._questions = RedeliveryQuestions(
            membership,
            self._deduplicator,
            self.consumer,
            account,
            most_seconds=own.redelivery_wait,
            delays_seconds=own.retry_delays,
            metrics=metrics,
        )
        self._rate_limit = ClusterRateLimit(
            own.queue,
            account,
            membership,
            own_consumers=lambda: (
                self.consumer.is_registered,
                self._dispatcher.cancelled_consumers,
            ),
        )
        parts: list[Part] = [
            PauseFollower(joint_pause, account.breaker, can_take=lambda: self.consumer.can_consume),
            self._rate_limit,
            self._questions,
            repeated_copies,
        ]
        self._cluster_deduplicator = None
        if own.deduplicate is not None and membership.is_enabled:
            self._cluster_deduplicator = ClusterDeduplicator(membership, self._deduplicator.sent)
            parts.append(self._cluster_deduplicator)
        self._majority = MajorityWatch(
            settings.rabbitmq, f"{membership.exchange}.{membership.worker_id}.probe"
        )
        self.exchange = ClusterExchange(Coordination(membership, parts, metrics=metrics))
        self._identification = Identification(
            deduplicator=self._deduplicator,
            questions=self._questions,
            repeated_copies=repeated_copies,
            cluster=self._cluster_deduplicator,
            account=account,
            identity_of=identity_of,
        )
        self._pipeline = Pipeline(
            own,
            identification=self._identification,
            account=account,
            pauses=pauses,
            settler=self._settler,
            announcer=Announcer(publisher, outcome_exchange=own.outcome_exchange),
            spans=spans,
            short_codes=short_codes,
        )

    @property
    def is_standby(self) -> bool | None:
        """Whether another worker is the active one; None if the worker is not in ordered mode."""
        return None if self._lock is None else self._lock.is_standby

    @property
    def pause_reason(self) -> PauseReason | None:
        """Why the worker sends no messages: its own pause, else its account's; None if it does."""
        return self._pauses.reason or self._account.pause_reason

    @property
    def copies_refused(self) -> int:
        """Number of messages that stay unacked because the broker refuses their copies."""
        return self._deduplicator.set_aside_count

    async def serve(self, connection: Connection) -> None:
        """Declare the topology, then consume until the connection ends; `Link.run` calls this."""
        await self._upkeep.ensure(connection)
        # Before consuming: the pause that this process remembers may be older than a broker
        # restart.
        await self.operator_pause.look(connection)
        # Last, so that workers that are already running have had time to report to this one.
        await self._membership.until_acquainted()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.operator_pause.watch(connection))
                group.create_task(self._queue_watch.watch(connection, self._queue_roles))
                group.create_task(self._account.keep_logging())
                for missing in (self._settler.queue_missing, self._publisher.exchange_missing):
                    group.create_task(self._upkeep.mend(connection, missing))
                if self._account.rates.is_shared and self._lock is None:
                    group.create_task(self._rate_limit.watch(connection))
                group.create_task(self._majority.watch(connection))
                await self.consumer.serve(connection)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def drain(self, timeout_seconds: float) -> bool:
        """Stop consuming, finish the requests in flight, and return the rest to the queue.

        Returns False if deliveries had to be cancelled after `timeout_seconds`, or if the broker
        may not have read all acks.
        """
        self._pauses.drain()
        self._identification.stop()
        self._account.breaker.leave()
        self._rate_limit.leave()
        self._settler.hurry()
        self._dispatcher.cancel(lambda delivery: delivery.may_be_given_back)
        is_finished = False
        end_at = time.monotonic() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                is_finished = await self._finish()
        except TimeoutError:
            queue, fault = self._pauses.report.unstored or (None, None)
            log.warning("drain_timed_out", queue=queue, fault=fault)
        await self._dispatcher.cut_off()
        await self._membership.until_joined(most_seconds=end_at - time.monotonic())
        self._questions.give_up_copies()
        await self._hand_over()
        if self._cluster_deduplicator is not None:
            self._cluster_deduplicator.report()
        await self._membership.leave()
        if not is_finished and self._deduplicator.expects_redeliveries:
            log.warning("acks_in_doubt")
        return is_finished

    async def _finish(self) -> bool:
        """Stop consuming, settle all deliveries, and wait until the broker has read the acks.

        A message that is settled or decided but not acked is redelivered, and only this process
        knows that it must not be sent again: such redeliveries are consumed and acked. All other
        deliveries are left to the next worker. Returns False if the broker may not have read all
        acks.
        """
        await self._settle_all()
        has_come = await self._take_redeliveries()
        await self._settle_all()
        return has_come

    async def _settle_all(self) -> None:
        await self.consumer.stop()
        await self._dispatcher.all_done()
        await self.consumer.flush()

    async def _take_redeliveries(self) -> bool:
        """Return True if all expected redeliveries are acked or none arrives; False if some remain.

        A message that another worker has received never arrives here. The wait therefore ends when
        a connected broker delivers nothing for a while. While the broker is away, the wait
        continues.
        """
        dispatcher = self._dispatcher
        quiet_seconds = consuming_seconds = 0.0
        # A delivery whose copy is not confirmed yet may be redelivered once more.
        while self._deduplicator.expects_redeliveries or dispatcher.count:
            if quiet_seconds >= COMES_AGAIN_SECONDS:
                log.info("not_redelivered")
                return True
            if consuming_seconds >= MAX_OWED_SECONDS:
                return False
            self.consumer.resume()
            began, taken = time.monotonic(), dispatcher.redeliveries
            await asyncio.sleep(OWED_POLL_SECONDS)
            if self.consumer.is_served:
                seconds = time.monotonic() - began
                consuming_seconds += seconds
                is_quiet = dispatcher.redeliveries == taken and not dispatcher.count
                quiet_seconds = quiet_seconds + seconds if is_quiet else 0.0
        return True

    async def _hand_over(self) -> None:
        """Return released messages to the other workers while this process can answer questions.

        Once this process has ended, no worker knows the idempotency key with which a message was
        sent, or the outcome decided for it.
        """
        membership = self._membership
        for _ in range(round(HAND_OVER_SECONDS / HAND_OVER_POLL_SECONDS)):
            has_released = self._deduplicator.has_released
            if not (has_released and membership.is_up and membership.count):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_SECONDS):
                    await self.consumer.end()
            await asyncio.sleep(HAND_OVER_POLL_SECONDS)

    async def aclose(self) -> None:
        await self._account.aclose()

    # Called by the consumer

    def prefetch_of_each(self) -> dict[str, int]:
        """Return the wanted prefetch of each queue, the urgent queue first.

        The urgent queue is consumed first: if the broker refuses it, the main queue has not
        delivered anything yet that would be returned and count towards its delivery limit.
        """
        queues = list(reversed(request_queues(self._settings)))
        if self._lock is not None:
            # The prefetch stays the same while the breaker is open; only an operator's pause sets
            # it to 0.
            self._account.breaker.end_passed_wait()
            may_take = self._upkeep.is_usable and not self._pauses.by_operator
            return dict.fromkeys(queues, MOST_HELD_IN_ORDER if may_take else 0)
        each = dict.fromkeys(queues, self._prefetch())
        is_sending = not self._pauses.is_draining and self._account.pause_reason is None
        if self._settings.urgent_queue is not None and is_sending:
            # Several slots may become free at once. While urgent messages occupy all of them, as
            # many more are prefetched, so that no ordinary message takes a free slot.
            each[self._settings.urgent_queue] *= 2
        return each

    def _prefetch(self) -> int:
        if self._pauses.is_draining:
            # During a drain, redeliveries of settled messages are acked; all other deliveries are
            # left to the next worker.
            return 1
        if self._pauses.is_on or not self._upkeep.is_usable:
            return 0
        return self._account.wanted_prefetch()

    def consumer_registered(self) -> None:
        """Note that the broker has registered this process as a consumer."""
        self._deduplicator.consuming_again()
        if self._lock is not None:
            # Only the active worker sends.
            self._account.rates.divide_by(1)
        self._rate_limit.publish()
        # Redeliveries may arrive before the broker's answer to `basic.consume` is read.
        self._questions.make_room()

    def session_over(self, most_unacked: int) -> None:
        """Release waiting deliveries: they are redelivered, and must not remain the probe."""
        self._deduplicator.session_lost(most_unacked=most_unacked)
        self._dispatcher.cancel(
            lambda delivery: (
                (delivery.may_be_given_back or delivery.awaits_original) and delivery.is_stale
            )
        )

    def _note_queue_sizes(self, found: Mapping[str, QueueSizes]) -> None:
        metrics, roles = self._metrics, self._queue_roles
        for name, sizes in found.items():
            metrics.queue_ready.labels(name, roles[name]).set(sizes.ready)
            if roles[name] in {"main", "urgent"}:
                metrics.queue_consumers.labels(name).set(sizes.consumers)
        if found.keys() == roles.keys():
            metrics.queue_stats_timestamp.set(time.time())

    # The task of a delivery

    async def _learn(self, delivery: Delivery) -> None:
        # A bug occurs again when the delivery is identified, which makes it a dead letter.
        with contextlib.suppress(Exception):
            await self._identification.learn(delivery)

    async def _run(self, delivery: Delivery) -> None:
        """Process a delivery; no exception leaves the task."""
        try:
            await self._pipeline.process(delivery)
        except CopyRefusedError:
            self._settler.report_released(delivery, "copy_refused")
            # It would occupy the prefetch for the rest of the session.
            self.consumer.renew()
        except (BrokerError, asyncio.CancelledError):
            # It stays unacked; the broker redelivers it, at the latest when the channel closes.
            reason: ReleaseReason = "connection_lost" if delivery.is_stale else "stopped"
            self._settler.report_released(delivery, reason)
            if self._pauses.is_draining and delivery.redelivered:
                # The prefetch is 1 during a drain. The queue delivers redeliveries first, and a
                # redelivery that has to be acked may be behind this one.
                self.consumer.renew()
        except Exception:
            # A bug while the copy is published. The decided outcome is remembered: when the message
            # is redelivered, at the latest after this session, the copy is published.
            log.exception("internal_error", message_id=delivery.envelope.key)
            delivery.free_slot()
            self._settler.report_released(delivery, "internal_error")
