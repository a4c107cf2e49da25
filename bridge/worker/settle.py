"""Settle a delivery: publish its replacement, wait for the confirm, log the outcome, ack.

No other module acks a message that was sent, and the worker never nacks: a closed channel, a
lost connection and, up to RabbitMQ 4.2, a nack count towards the delivery limit of a quorum queue,
which drops a message above it.
"""

import asyncio
import random
from typing import Final, get_args

from bridge.amqp.properties import Properties
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.config import WorkerSettings
from bridge.deadline import wait_at_most
from bridge.errors import BrokerError, CopyRefusedError, PublishError, Refusal
from bridge.telemetry.log_format import Facts, shown_seconds
from bridge.telemetry.logs import Log
from bridge.topology.declarations import dead_queue, request_queues, retry_queue
from bridge.worker.cluster.deduplication import RepeatedCopies
from bridge.worker.copies import copy_properties
from bridge.worker.deduplicator import MAX_SET_ASIDE, Deduplicator
from bridge.worker.delivery import Delivery, WaitCause
from bridge.worker.envelope import POSSIBLE_DUPLICATE, Envelope
from bridge.worker.fates import DeliveryOutcome, FinalOutcome, ReleaseReason
from bridge.worker.metrics import PROCESSED, WorkerMetrics
from bridge.worker.outcomes import (
    Dead,
    Outcome,
    Retried,
    Sent,
    attempts_after,
    name_of,
)
from bridge.worker.pauses import WorkerPauses
from bridge.worker.spans import end_delivery

log = Log(__name__)

# Upper bound of the random wait that spreads retries: a share of their delay, at most 1 second.
JITTER_SHARE: Final = 0.2
MAX_JITTER_SECONDS: Final = 1.0
# Shorter waits are left out of the log and the metric, because they delay no message noticeably.
MIN_WAITED_SECONDS: Final = 0.001
# Wait before a copy is published again: doubled each time, up to the maximum.
FIRST_WAIT_SECONDS: Final = 0.5
MAX_WAIT_SECONDS: Final = 5.0
# A broker that accepts messages confirms within this time; after it the confirm is lost.
MAX_UNCONFIRMED_SECONDS: Final = 300.0
# If the broker closes the connection this often for a copy that is published alone, it refuses that
# copy.
MAX_CONNECTIONS_ENDED: Final = 3


class _OutcomeCounters:
    """Metrics of one queue, resolved once instead of for each message."""

    def __init__(self, queue: str, metrics: WorkerMetrics) -> None:
        self.processed = {pair: metrics.processed.labels(queue, *pair) for pair in PROCESSED}
        self.durations = {
            name: metrics.processing_duration.labels(queue, name)
            for name in get_args(DeliveryOutcome)
        }
        self.stored = metrics.retry_copies.labels(queue, "stored")


class Settler:
    """Settles each delivery: publishes its replacement, acks it, logs and counts its outcome.

    `queue_missing` is set when the queue for a copy does not exist. If the broker closes the
    channel, any copy in flight may be the cause. Each is therefore published again on a channel of
    its own, where the broker's answer can only concern that copy. Large copies, and copies as large
    as a refused one, use a channel of their own from the start.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        publisher: Publisher,
        pauses: WorkerPauses,
        repeated_copies: RepeatedCopies,
        deduplicator: Deduplicator,
        metrics: WorkerMetrics,
    ) -> None:
        self._dead_queue = dead_queue(settings.queue)
        self._publisher = publisher
        self._pauses = pauses
        self._repeated_copies = repeated_copies
        self._deduplicator = deduplicator
        self._metrics = metrics
        self._counters = {
            queue: _OutcomeCounters(queue, metrics) for queue in request_queues(settings)
        }
        self._attempts = {
            name: metrics.attempts_per_message.labels(name) for name in get_args(FinalOutcome)
        }
        self._hurried = asyncio.Event()
        self._unstored: set[Delivery] = set()
        self.queue_missing = asyncio.Event()

    async def replace(self, delivery: Delivery, outcome: Retried | Dead) -> None:
        """Publish the copy that an outcome requires, and return when it is confirmed.

        Retries for as long as the broker does not store it. Raises BrokerError if the session is
        over, so that the broker redelivers the message, and CopyRefusedError if the broker refuses
        this copy.
        """
        if isinstance(outcome, Retried) and outcome.counted:
            with delivery.waits("jitter"):
                await self._spread(outcome.delay_seconds)
        with delivery.waits("publish"):
            await self._store(delivery, outcome)
        if isinstance(outcome, Retried):
            self._counters[delivery.queue].stored.inc()

    def hurry(self) -> None:
        """Skip waits that only spread load: the worker is stopping."""
        self._hurried.set()

    async def _spread(self, delay_seconds: float) -> None:
        """Wait for a random time, so that messages that failed together do not return together.

        A retry queue's TTL has no jitter. The wait comes before publishing, so that it also slows
        down a worker whose requests fail.
        """
        jitter = random.uniform(0, min(delay_seconds * JITTER_SHARE, MAX_JITTER_SECONDS))  # noqa: S311
        await wait_at_most(jitter, self._hurried)

    async def _store(self, delivery: Delivery, outcome: Retried | Dead) -> None:
        """Publish a delivery's copy until the broker has confirmed it.

        While a confirm may still arrive, the copy is not published again: the broker would store
        both.
        """
        wait, clock = FIRST_WAIT_SECONDS, asyncio.get_running_loop().time
        give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
        tries = _Tries(
            delivery,
            outcome,
            queue=self._target(delivery, outcome),
            refusals_before=self._publisher.refusals,
            is_alone=self._publisher.goes_alone(delivery.body),
        )
        try:
            while (error := await self._try(tries)) is not None:
                if error.refusal is None:
                    self._note_unstored(tries, error)
                elif tries.note_refusal(error.refusal):
                    self._set_aside(tries, error.refusal)
                    self._note_unstored(tries, error)
                if delivery.is_stale:
                    raise BrokerError("the channel is gone")
                if self._publisher.is_blocked:
                    # The broker has not read the written frames yet.
                    give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
                elif clock() >= give_up_at:
                    give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
                    # The copy may be that of an earlier delivery of the message, which another
                    # worker has now.
                    self._publisher.abandon(delivery.envelope.id_of_copies)
                    _forget_copy(delivery)
                    continue
                if delivery.replacement is None:
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, MAX_WAIT_SECONDS)
                tries.is_alone = tries.is_alone or self._publisher.refusals != tries.refusals_before
        finally:
            if delivery in self._unstored:
                self._unstored.remove(delivery)
                if not self._unstored:
                    self._pauses.unblock()

    def _target(self, delivery: Delivery, outcome: Retried | Dead) -> str:
        if isinstance(outcome, Dead):
            return self._dead_queue
        return retry_queue(delivery.queue, outcome.delay_seconds)

    def _note_unstored(self, tries: "_Tries", error: PublishError) -> None:
        log.warning("publish_failed", queue=tries.queue, fault=error.fault, why=str(error))
        if error.fault == "returned":
            self.queue_missing.set()
        self._unstored.add(tries.delivery)
        self._pauses.block(tries.queue, error.fault)

    def _set_aside(self, tries: "_Tries", refusal: Refusal) -> None:
        """Raise CopyRefusedError, unless too many messages stay unacked already."""
        is_one_too_many = self._deduplicator.set_aside_count >= MAX_SET_ASIDE
        log.error(
            "copy_refused",
            cause=None,
            message_id=tries.delivery.envelope.key,
            queue=tries.queue,
            bytes=len(tries.delivery.body),
            why=refusal.why,
            remedy="the message stays unacked; raise max_message_size and restart the broker, or "
            "stop the worker and take the message out of its queue",
            holds_up_others=is_one_too_many or None,
        )
        if not is_one_too_many:
            raise CopyRefusedError(refusal.why)

    async def _try(self, tries: "_Tries") -> PublishError | None:
        """Publish the copy, unless its confirm may still arrive, and wait for the confirm."""
        delivery, alone = tries.delivery, tries.is_alone
        try:
            async with self._publisher.deadline_for(delivery.body, alone=alone) as deadline:
                if delivery.replacement is None:
                    delivery.replacement = await self._write(tries, deadline)
                await delivery.replacement.stored(deadline)
        except PublishError as error:
            if delivery.replacement is not None and delivery.replacement.is_refused:
                _forget_copy(delivery)
            return error
        return None

    async def _write(self, tries: "_Tries", deadline: float) -> Publication:
        delivery, queue = tries.delivery, tries.queue
        # Built for each try: the frame size limit may differ after a reconnect.
        properties = self._make_properties(delivery, tries.outcome)
        written: Publication
        if tries.is_alone:
            written = await self._publisher.write_alone(
                delivery.body, routing_key=queue, properties=properties, deadline=deadline
            )
        else:
            written = await self._publisher.write(
                delivery.body,
                exchange="",
                routing_key=queue,
                properties=properties,
                deadline=deadline,
            )
        if POSSIBLE_DUPLICATE in (properties.headers or {}):
            self._repeated_copies.note_published(properties, delivery.body)
        return written

    def _make_properties(self, delivery: Delivery, outcome: Retried | Dead) -> Properties:
        envelope = count_attempt(delivery.envelope, outcome)
        if delivery.is_stale:
            # If this process was frozen for a while, another worker may have settled the message.
            envelope = envelope._replace(has_been_copied=True)
        return copy_properties(
            delivery.properties,
            envelope,
            outcome,
            queue=delivery.queue,
            max_bytes=self._publisher.max_properties_bytes,
            span=() if delivery.span is None else delivery.span.headers,
        )

    # The end of a delivery

    def ack(self, delivery: Delivery, outcome: Outcome | None) -> bool:
        """Ack a delivery that was sent or replaced, or is a repeat (None).

        Returns False if its session is over, or if a bug prevented the ack. The broker then
        redelivers the message, and the deduplicator must recognise it.
        """
        acked = False
        try:
            acked = delivery.session.ack(delivery.tag)
            self._report(delivery, outcome)
        except Exception:  # also a bug in the report: it must not make a settled message unsettled
            log.exception("internal_error", message_id=delivery.envelope.key)
        return acked

    def report_retried(self, delivery: Delivery, outcome: Retried) -> None:
        """Log and count a retry of a delivery that waits here for it."""
        self._count(delivery, name_of(outcome), outcome.reason, outcome)

    def report_released(self, delivery: Delivery, reason: ReleaseReason) -> None:
        """Log and count a delivery that is left to the broker unacked."""
        self._count(delivery, "released", reason, None)

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
        """Count and log the end of a delivery; return the number of attempts of the message."""
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
        """Record the waits of a delivery in the metric, and return them for the log."""
        waited = {
            cause: shown_seconds(seconds)
            for cause, seconds in delivery.waited_seconds.items()
            if seconds >= MIN_WAITED_SECONDS
        }
        for cause, seconds in waited.items():
            self._metrics.wait_duration.labels(delivery.queue, cause).observe(seconds)
        return waited or None


class _Tries:
    """The tries to publish one copy.

    `refusals_before`: how often the broker had closed the publishing channel before the first try.
    """

    def __init__(
        self,
        delivery: Delivery,
        outcome: Retried | Dead,
        *,
        queue: str,
        refusals_before: int,
        is_alone: bool,
    ) -> None:
        self.delivery = delivery
        self.outcome = outcome
        self.queue = queue
        self.refusals_before = refusals_before
        self.is_alone = is_alone
        self._connections_ended = 0

    def note_refusal(self, refusal: Refusal) -> bool:
        """Count a refusal; return whether all together prove that the copy is the cause."""
        self._connections_ended += 1
        return refusal.is_certain or self._connections_ended >= MAX_CONNECTIONS_ENDED


def _forget_copy(delivery: Delivery) -> None:
    """Discard a copy, so that it is published again; note if the broker may have stored it."""
    if delivery.replacement is not None:
        if delivery.replacement.may_be_stored:
            delivery.envelope = delivery.envelope._replace(has_been_copied=True)
        delivery.replacement.abandon()
    delivery.replacement = None


def count_attempt(envelope: Envelope, outcome: Retried | Dead) -> Envelope:
    """Return the envelope with this attempt added, if it counts."""
    if not outcome.counted and not outcome.uncertain:
        return envelope
    return envelope._replace(
        attempts=envelope.attempts + outcome.counted,
        uncertain_attempts=envelope.uncertain_attempts + outcome.uncertain,
    )


def _id_for_the_log(outcome: Outcome | None) -> str | None:
    """Return the service's message id, to match receipts; not if a + suggests a number."""
    found = outcome.provider_id if isinstance(outcome, Sent) else None
    return None if found is None or "+" in found else found
