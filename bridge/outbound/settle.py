"""Settle a delivery: publish what replaces it, have that confirmed, report it, ack.

This is the only place that acks, and nothing is ever nacked: `basic.nack` and a closed channel
raise a quorum queue's delivery count, and a message that is over the limit is dropped.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from bridge.amqp.publisher import Publication, Publisher
from bridge.config import WorkerSettings
from bridge.errors import BrokerError, PublishError
from bridge.logs import Log
from bridge.outbound.delivery import Delivery, WaitCause
from bridge.outbound.envelope import Envelope, copy_properties
from bridge.outbound.ledger import Accepted
from bridge.outbound.metrics import WorkerMetrics
from bridge.outbound.outcomes import Dead, Outcome, Retried, Sent
from bridge.outcome_event import OutcomeEvent, outcome_properties
from bridge.topology.declarations import dead_queue, retry_queue

log = Log(__name__)

# Between two tries of a copy that the broker does not take: doubled each time, up to the second.
FIRST_WAIT_SECONDS: Final = 0.5
MAX_WAIT_SECONDS: Final = 5.0
# A broker that accepts messages will not confirm later than this: the confirm is lost.
MAX_UNCONFIRMED_SECONDS: Final = 300.0
# The wait that spreads retries: at most this share of their step, and no longer than a second.
JITTER_SHARE: Final = 0.2
MAX_JITTER_SECONDS: Final = 1.0
# Shorter waits are left out of the log and the metric: they made no message late.
MIN_WAITED_SECONDS: Final = 0.001


class Settler:
    """Settles each delivery: publishes what replaces it, acks it, reports it.

    `block` is called when the broker does not store a copy, so that nothing more is taken or sent,
    `unblock` when none waits for it any more.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        publisher: Publisher,
        block: Callable[[], None],
        unblock: Callable[[], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._queue = settings.queue
        self._outcome_exchange = settings.outcome_exchange
        self._publisher = publisher
        self._block = block
        self._unblock = unblock
        self._metrics = metrics
        self._waiting: set[object] = set()
        self._hurried = asyncio.Event()
        self.queue_missing = asyncio.Event()

    async def replace(self, delivery: Delivery, outcome: Outcome) -> None:
        """Publish the copy that an outcome asks for, and return when it is confirmed.

        The delivery stays held while the broker takes nothing. A copy that may yet be confirmed is
        waited for, and not published anew: the broker would store both, and two workers would
        send both. Raises BrokerError when the delivery's session is over: then the broker delivers
        the message again.
        """
        if isinstance(outcome, Sent):
            return
        if isinstance(outcome, Retried) and outcome.burned:
            with delivery.waits("jitter"):
                await self._spread(outcome.delay_seconds)
        with delivery.waits("publish"):
            await self._publish_until_confirmed(delivery, outcome)

    async def _publish_until_confirmed(self, delivery: Delivery, outcome: Retried | Dead) -> None:
        wait, clock = FIRST_WAIT_SECONDS, asyncio.get_running_loop().time
        give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
        with self._held_up() as note_held_up:
            while (error := await self._try_to_publish(delivery, outcome)) is not None:
                note_held_up(error)
                if delivery.is_stale:
                    raise BrokerError("the channel is gone")
                if self._publisher.is_blocked:
                    # What is written has not been read yet.
                    give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
                elif clock() >= give_up_at:
                    give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
                    # Its own copy, or one of an earlier delivery that another worker has now.
                    self._publisher.abandon(delivery.envelope.id_of_copies)
                    delivery.replacement = None
                    continue
                if delivery.replacement is None:
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, MAX_WAIT_SECONDS)

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

    async def _try_to_publish(
        self, delivery: Delivery, outcome: Retried | Dead
    ) -> PublishError | None:
        """Publish the copy, unless there is one that may yet be confirmed, and wait for that."""
        try:
            async with self._publisher.deadline_for(delivery.body) as deadline:
                if delivery.replacement is None:
                    delivery.replacement = await self._write_copy(delivery, outcome, deadline)
                await delivery.replacement.stored(deadline)
        except PublishError as error:
            if delivery.replacement is not None and delivery.replacement.is_refused:
                delivery.replacement = None
            return error
        return None

    async def _write_copy(
        self, delivery: Delivery, outcome: Retried | Dead, deadline: float
    ) -> Publication:
        copy = copy_properties(
            delivery.properties,
            count_attempt(delivery.envelope, outcome),
            outcome,
            # Another broker may take less in a frame.
            max_bytes=self._publisher.max_properties_bytes,
        )
        return await self._publisher.write(
            delivery.body,
            exchange="",
            routing_key=self._target(outcome),
            properties=copy,
            deadline=deadline,
        )

    async def announce(self, delivery: Delivery, outcome: Outcome, at: float) -> None:
        """Publish the outcome event to whoever asked, once; a failure is only logged.

        `at` is when it came about, in unix seconds.
        """
        if isinstance(outcome, Retried):
            return
        targets = [("", delivery.properties.reply_to)]
        if self._outcome_exchange is not None:
            targets.append((self._outcome_exchange, _name(outcome)))
        for exchange, routing_key in targets:
            if routing_key:
                event = outcome_event(delivery.envelope, outcome, at)
                await self._announce_to(delivery, event, exchange, routing_key)

    async def answer_repeat(self, delivery: Delivery, first: Accepted | None) -> None:
        """Publish to whoever asked what became of the first message with this id."""
        if first is None or not delivery.properties.reply_to:
            return
        envelope = delivery.envelope._replace(attempts=first.attempts - 1)
        event = outcome_event(envelope, Sent(first.status, first.provider_id), first.at)
        event = event._replace(is_duplicate=True)
        await self._announce_to(delivery, event, "", delivery.properties.reply_to)

    def ack(self, delivery: Delivery, outcome: Outcome | None) -> bool:
        """Ack a delivery that is replaced, or sent, or (None) a repeat of one that is.

        Returns False when its session is over: the broker delivers it again, and the ledger
        must know it then.
        """
        self._report(delivery, outcome)
        return delivery.session.ack(delivery.tag)

    def report_given_back(self, delivery: Delivery) -> None:
        """Report a delivery that goes back to the queue, because we stop or its channel is gone."""
        self._count(delivery, "released", "shutdown", None)

    def _target(self, outcome: Retried | Dead) -> str:
        if isinstance(outcome, Dead):
            return dead_queue(self._queue)
        return retry_queue(self._queue, outcome.delay_seconds)

    async def _announce_to(
        self, delivery: Delivery, event: OutcomeEvent, exchange: str, routing_key: str
    ) -> None:
        properties = outcome_properties(delivery.envelope.trace, delivery.properties.correlation_id)
        try:
            await self._publisher.publish(
                event.body(),
                exchange=exchange,
                routing_key=routing_key,
                properties=properties,
            )
        except PublishError as error:
            target = exchange or "reply_to"
            log.warning("outcome_not_published", target=target, fault=error.fault, why=error.why)

    @contextmanager
    def _held_up(self) -> Iterator[Callable[[PublishError], None]]:
        """Keep the worker from taking and sending while any delivery cannot be settled."""
        waiting = object()

        def note(error: PublishError) -> None:
            log.warning("not_stored", fault=error.fault, why=str(error))
            if error.fault == "returned":
                self.queue_missing.set()
            self._waiting.add(waiting)
            self._block()

        try:
            yield note
        finally:
            self._waiting.discard(waiting)
            if not self._waiting:
                self._unblock()

    def _report(self, delivery: Delivery, outcome: Outcome | None) -> None:
        if outcome is None:
            self._count(delivery, "dropped", "duplicate", None)
            return
        reason = "none" if isinstance(outcome, Sent) else outcome.reason
        self._count(delivery, _name(outcome), reason, outcome)
        if not isinstance(outcome, Retried):
            attempts = _attempts(delivery.envelope, outcome)
            self._metrics.attempts_per_message.labels(_name(outcome)).observe(attempts)

    def _count(self, delivery: Delivery, name: str, reason: str, outcome: Outcome | None) -> None:
        held = delivery.held_seconds
        self._metrics.processed.labels(self._queue, name, reason).inc()
        self._metrics.processing_duration.labels(self._queue, name).observe(held)
        log.info(
            "delivery",
            message_id=delivery.envelope.key,
            outcome=name,
            reason=None if reason == "none" else reason,
            detail=getattr(outcome, "detail", None),
            status=None if outcome is None else outcome.status,
            code=getattr(outcome, "code", None),
            provider_id=_id_for_the_log(outcome),
            attempts=_attempts(delivery.envelope, outcome),
            redelivered=delivery.redelivered or None,
            seconds=round(held, 4),
            waited_seconds=self._count_waits(delivery) if delivery.waited_seconds else None,
        )

    def _count_waits(self, delivery: Delivery) -> dict[WaitCause, float] | None:
        """Count what a delivery has waited for, and return it for the log."""
        waited = {
            cause: round(seconds, 4)
            for cause, seconds in delivery.waited_seconds.items()
            if seconds >= MIN_WAITED_SECONDS
        }
        for cause, seconds in waited.items():
            self._metrics.wait_duration.labels(self._queue, cause).observe(seconds)
        return waited or None


def count_attempt(envelope: Envelope, outcome: Retried | Dead) -> Envelope:
    """Return the envelope after an attempt, as far as it counts."""
    if not outcome.burned and not outcome.uncertain:
        return envelope
    return envelope._replace(
        attempts=envelope.attempts + outcome.burned,
        uncertain_attempts=envelope.uncertain_attempts + outcome.uncertain,
    )


def outcome_event(envelope: Envelope, outcome: Sent | Dead, at: float) -> OutcomeEvent:
    """Say what became of a message, in the form that everybody is told."""
    event = OutcomeEvent(
        outcome=_name(outcome),
        at=at,
        message_id=envelope.message_id or envelope.key,
        attempts=_attempts(envelope, outcome),
        status=outcome.status,
    )
    if isinstance(outcome, Dead):
        return event._replace(reason=outcome.reason, code=outcome.code)
    return event._replace(provider_id=outcome.provider_id)


def accepted(envelope: Envelope, outcome: Outcome, at: float) -> Accepted | None:
    """Return what a repeat of a message that was sent is answered."""
    if not isinstance(outcome, Sent):
        return None
    return Accepted(_attempts(envelope, outcome), outcome.status, outcome.provider_id, at)


def _id_for_the_log(outcome: Outcome | None) -> str | None:
    """Return the service's id, by which receipts are matched; one with a + may be a number."""
    found = outcome.provider_id if isinstance(outcome, Sent) else None
    return None if found is None or "+" in found else found


def _name(outcome: Outcome) -> Literal["sent", "retried", "dead"]:
    match outcome:
        case Sent():
            return "sent"
        case Retried():
            return "retried"
        case Dead():
            return "dead"


def _attempts(envelope: Envelope, outcome: Outcome | None) -> int:
    if outcome is None:
        return envelope.attempts
    return envelope.attempts + (isinstance(outcome, Sent) or outcome.burned)
