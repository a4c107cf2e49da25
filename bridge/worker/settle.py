"""Settle a delivery: publish what replaces it, have that confirmed, report it, ack.

This is the only place that acks what is sent, and nothing is ever nacked: `basic.nack` (until
RabbitMQ 4.3) and a closed channel raise a quorum queue's delivery count, and a message that is over
the limit is dropped.
"""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Final, get_args

from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.config import WorkerSettings
from bridge.errors import PublishFault
from bridge.telemetry.log_format import Facts, shown_seconds
from bridge.telemetry.logs import Log
from bridge.topology.declarations import dead_queue, request_queues, retry_queue
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.copies import copy_properties
from bridge.worker.delivery import Delivery, WaitCause
from bridge.worker.envelope import Envelope
from bridge.worker.fates import DeliveryOutcome, FinalOutcome
from bridge.worker.metrics import PROCESSED, WorkerMetrics
from bridge.worker.outcomes import (
    Dead,
    Outcome,
    Retried,
    Sent,
    attempts_after,
    name_of,
)
from bridge.worker.sent_messages import Accepted
from bridge.worker.spans import end_delivery
from bridge.worker.storing import Storing

log = Log(__name__)

# The wait that spreads retries: at most this share of their step, and no longer than a second.
JITTER_SHARE: Final = 0.2
MAX_JITTER_SECONDS: Final = 1.0
# Shorter waits are left out of the log and the metric: they made no message late.
MIN_WAITED_SECONDS: Final = 0.001


class _Counters:
    """The counters of one queue, so that none is looked up by its labels for each message."""

    def __init__(self, queue: str, metrics: WorkerMetrics) -> None:
        self.processed = {pair: metrics.processed.labels(queue, *pair) for pair in PROCESSED}
        self.durations = {
            name: metrics.processing_duration.labels(queue, name)
            for name in get_args(DeliveryOutcome)
        }
        self.stored = metrics.ladder.labels(queue, "stored")


class Settler:
    """Settles each delivery: publishes what replaces it, acks it, reports it.

    `block` is called with the queue and the fault when the broker does not store a copy, so that
    nothing more is taken or sent, `unblock` when none waits for it any more. `may_set_aside`:
    whether one more message may stay unacked because the broker refuses its copy.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        publisher: Publisher,
        block: Callable[[str, PublishFault], None],
        unblock: Callable[[], None],
        repeated_copies: RepeatedCopies,
        may_set_aside: Callable[[], bool],
        metrics: WorkerMetrics,
    ) -> None:
        self._dead_queue = dead_queue(settings.queue)
        self._storing = Storing(
            publisher,
            block=block,
            unblock=unblock,
            note_repeated=repeated_copies.note_published,
            may_set_aside=may_set_aside,
        )
        self._metrics = metrics
        self._counters = {queue: _Counters(queue, metrics) for queue in request_queues(settings)}
        self._attempts = {
            name: metrics.attempts_per_message.labels(name) for name in get_args(FinalOutcome)
        }
        self._hurried = asyncio.Event()
        self.queue_missing = self._storing.queue_missing

    async def replace(self, delivery: Delivery, outcome: Outcome) -> None:
        """Publish the copy that an outcome asks for, and return when it is confirmed.

        The delivery stays held while the broker takes nothing. Raises BrokerError when its session
        is over: then the broker delivers the message again. Raises CopyRefusedError when the broker
        refuses this copy for itself.
        """
        if isinstance(outcome, Sent):
            return
        if isinstance(outcome, Retried) and outcome.burned:
            with delivery.waits("jitter"):
                await self._spread(outcome.delay_seconds)
        with delivery.waits("publish"):
            await self._storing.store(
                delivery,
                queue=self._target(delivery, outcome),
                make_properties=partial(self._make_properties, delivery, outcome),
            )
        if isinstance(outcome, Retried):
            self._counters[delivery.queue].stored.inc()

    def hurry(self) -> None:
        """Leave out waits that only serve to spread load: the worker stops."""
        self._hurried.set()

    async def _spread(self, delay_seconds: float) -> None:
        """Let messages that failed together come back apart; a queue's TTL has no jitter.

        The wait comes before the copy, so that a worker whose requests fail slows down as well.
        """
        jitter = random.uniform(0, min(delay_seconds * JITTER_SHARE, MAX_JITTER_SECONDS))  # noqa: S311
        try:
            async with asyncio.timeout(jitter):
                await self._hurried.wait()
        except TimeoutError:
            pass

    def _make_properties(
        self, delivery: Delivery, outcome: Retried | Dead, max_bytes: int
    ) -> Properties:
        envelope = count_attempt(delivery.envelope, outcome)
        if delivery.is_stale:
            # Whoever has it now may have settled it, if this process was frozen for a while.
            envelope = envelope._replace(has_been_copied=True)
        return copy_properties(
            delivery.properties,
            envelope,
            outcome,
            queue=delivery.queue,
            max_bytes=max_bytes,
            span=() if delivery.span is None else delivery.span.headers,
        )

    def ack(self, delivery: Delivery, outcome: Outcome | None) -> bool:
        """Ack a delivery that is replaced, or sent, or (None) a repeat of one that is.

        Returns False when its session is over: the broker delivers it again, and the deduplicator
        must know it then.
        """
        self._report(delivery, outcome)
        return delivery.session.ack(delivery.tag)

    def report_try(self, delivery: Delivery, outcome: Retried) -> None:
        """Report a try of a delivery that is held until its next one."""
        self._count(delivery, name_of(outcome), outcome.reason, outcome)

    def report_given_back(self, delivery: Delivery) -> None:
        """Report a delivery that goes back to the queue, because we stop or its channel is gone."""
        self._count(delivery, "released", "shutdown", None)

    def report_refused(self, delivery: Delivery) -> None:
        """Report a delivery that stays unacked, because the broker refuses its copy."""
        self._count(delivery, "released", "copy_refused", None)

    def _target(self, delivery: Delivery, outcome: Retried | Dead) -> str:
        if isinstance(outcome, Dead):
            return self._dead_queue
        return retry_queue(delivery.queue, outcome.delay_seconds)

    def _report(self, delivery: Delivery, outcome: Outcome | None) -> None:
        if outcome is None:
            self._count(delivery, "dropped", "duplicate", None)
            return
        reason = "none" if isinstance(outcome, Sent) else outcome.reason
        name = name_of(outcome)
        attempts = self._count(delivery, name, reason, outcome)
        if not isinstance(outcome, Retried):
            self._attempts[name].observe(attempts)

    def _count(
        self, delivery: Delivery, name: DeliveryOutcome, reason: str, outcome: Outcome | None
    ) -> int:
        """Count and log an end, and return how many attempts the message has had."""
        held = delivery.held_seconds
        attempts = attempts_after(delivery.envelope.attempts, outcome)
        counters = self._counters[delivery.queue]
        counters.processed[name, reason].inc()
        counters.durations[name].observe(held, delivery.trace_id)
        failed = None if isinstance(outcome, Sent) else outcome
        facts: Facts = {
            "message_id": delivery.envelope.key,
            "outcome": name,
            "reason": None if reason == "none" else reason,
            "detail": None if failed is None else failed.detail,
            "status": None if outcome is None else outcome.status,
            "code": None if failed is None else failed.code,
            "meaning": None if failed is None else failed.meaning,
            "provider_id": _id_for_the_log(outcome),
            "attempts": attempts,
            "redelivered": delivery.redelivered or None,
            "seconds": shown_seconds(held),
            "waited_seconds": self._count_waits(delivery) if delivery.waited_seconds else None,
        }
        log.info_facts("delivery", facts)
        if delivery.span is not None:
            end_delivery(delivery.span, facts)
        return attempts

    def _count_waits(self, delivery: Delivery) -> dict[WaitCause, float] | None:
        """Count what a delivery has waited for, and return it for the log."""
        waited = {
            cause: shown_seconds(seconds)
            for cause, seconds in delivery.waited_seconds.items()
            if seconds >= MIN_WAITED_SECONDS
        }
        for cause, seconds in waited.items():
            self._metrics.wait_duration.labels(delivery.queue, cause).observe(seconds)
        return waited or None


def count_attempt(envelope: Envelope, outcome: Retried | Dead) -> Envelope:
    """Return the envelope after an attempt, as far as it counts."""
    if not outcome.burned and not outcome.uncertain:
        return envelope
    return envelope._replace(
        attempts=envelope.attempts + outcome.burned,
        uncertain_attempts=envelope.uncertain_attempts + outcome.uncertain,
    )


def accepted(envelope: Envelope, outcome: Outcome, at: float) -> Accepted | None:
    """Return what a repeat of a message that was sent is answered."""
    if not isinstance(outcome, Sent):
        return None
    return Accepted(
        attempts_after(envelope.attempts, outcome), outcome.status, outcome.provider_id, at
    )


def _id_for_the_log(outcome: Outcome | None) -> str | None:
    """Return the service's id, by which receipts are matched; one with a + may be a number."""
    found = outcome.provider_id if isinstance(outcome, Sent) else None
    return None if found is None or "+" in found else found
