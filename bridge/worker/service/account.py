"""One account at an SMS service: everything that belongs to it, and the posting of a message.

The pipeline calls `wait_until_allowed`, then `post`, and finally `release`. `wait_until_allowed`
(step 6 of docs/architecture.md) waits until the message is due, then for the circuit breaker.
`post` (steps 7 and 8) waits for a token of the rate limits, then for a slot. After the answer, the
classifier decides whom it concerns, and the breaker decides the outcome.

A worker has one account. An account has no part in the worker's own state except its pauses and
metrics; `CONTRIBUTING.md` lists the parts of a worker that assume a single account.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn, get_args

from bridge.config import Settings, WorkerSettings
from bridge.errors import BrokerError
from bridge.topology.declarations import request_queues
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery
from bridge.worker.envelope import Envelope
from bridge.worker.fates import PauseReason
from bridge.worker.limits.capacity import Capacity, RequestSlot
from bridge.worker.limits.rate_limits import RateLimits
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Dead, Outcome, Policy, Retried, Sent
from bridge.worker.pauses import WorkerPauses
from bridge.worker.request import Encoding, SendRequest, count_segments
from bridge.worker.service.breaker import CircuitBreaker, Cluster
from bridge.worker.service.sender import Sender, open_transport
from bridge.worker.service.shape import Shape
from bridge.worker.spans import WorkerSpans


class Account:
    """One account at an SMS service: posts messages when that is allowed.

    `sender` posts; `breaker` and its rate limits decide when, `capacity` how many at once. `now`
    returns unix seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        sender: Sender,
        breaker: CircuitBreaker,
        capacity: Capacity,
        pauses: WorkerPauses,
        metrics: WorkerMetrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        # Copied, because reading a pydantic attribute takes ten times as long and happens per
        # message.
        self._max_age_seconds = settings.max_age
        self._policy = Policy.of(settings)
        self._sender = sender
        self.breaker = breaker
        self._classifier = breaker.classifier
        self.rates = breaker.rates
        self._capacity = capacity
        self._pauses = pauses
        self._segments = {one: metrics.segments.labels(one) for one in get_args(Encoding)}
        self._acceptance_latency = {
            queue: metrics.acceptance_latency.labels(queue) for queue in request_queues(settings)
        }
        self._told_to_wait = metrics.throttled.labels("retry_after")
        self._now = now
        self._last_sent_at = 0.0
        metrics.outage_suspected.set_function(lambda: float(breaker.is_outage_suspected))
        metrics.last_sent.labels(settings.queue).set_function(lambda: self._last_sent_at)
        metrics.concurrency_limit.labels(settings.queue).set_function(lambda: capacity.limit)

    @property
    def pause_reason(self) -> PauseReason | None:
        """Why the account sends nothing but a probe; None if its breaker is closed."""
        return self.breaker.pause_reason

    def wanted_prefetch(self) -> int:
        """Return the current prefetch: enough to send, or for a probe while the breaker is open.

        Closes the breaker first if it only waited and the wait has passed.
        """
        self.breaker.end_passed_wait()
        if self.breaker.trip is not None:
            return self.breaker.probes_wanted
        return self.rates.prefetch(self._capacity.prefetch)

    @property
    def sending_prefetch(self) -> int:
        """Prefetch that sending needs, even if sending is stopped now."""
        return self._capacity.prefetch

    async def keep_logging(self) -> NoReturn:
        """Log the concurrency limit from time to time if it is adaptive."""
        await self._capacity.keep_logging()

    async def aclose(self) -> None:
        await self._sender.aclose()

    # Before a request is sent

    async def wait_until_allowed(self, delivery: Delivery, request: SendRequest) -> Outcome | None:
        """Wait until the message is due and the breaker admits it, without a token or a slot.

        Returns None if it may be posted, else its outcome: it has expired, or its wait is so long,
        also that for a token, that it goes to a retry queue.
        """
        if (expired := self._expired(delivery)) is not None:
            return expired
        not_before = delivery.envelope.not_before
        if not_before is not None and (early := await self._wait_until_due(delivery, not_before)):
            return early
        if not self.breaker.admits_all:
            put_off = await self._wait_for_breaker(delivery, request)
            if put_off is not None:
                return put_off
        if delivery.is_urgent:
            return self._put_off(self.rates.urgent_retry_queue_seconds(request.sender))
        return self._put_off_to_its_turn(delivery, request.sender)

    def _expired(self, delivery: Delivery) -> Dead | None:
        now, envelope, max_age = self._now(), delivery.envelope, self._max_age_seconds
        if envelope.expires_at is not None and now >= envelope.expires_at:
            return Dead(reason="expired", detail="its own expiry has passed")
        if max_age is not None and now - envelope.age_starts_at >= max_age:
            return Dead(reason="expired", detail=f"older than worker.max_age, {_age_of(envelope)}")
        return None

    async def _wait_until_due(self, delivery: Delivery, not_before: float) -> Retried | None:
        """Wait here for a `not_before` time that is near, on a retry queue for a later one."""
        remaining = not_before - self._now()
        delay = self._policy.longest_within(remaining)
        if delay <= remaining or remaining > MAX_HOLD_SECONDS:
            detail = "not due yet"
            return Retried(reason="not_before", delay_seconds=delay, detail=detail)
        if remaining > 0:
            with delivery.waits("due"):
                await asyncio.sleep(remaining)
        return None

    async def _wait_for_breaker(self, delivery: Delivery, request: SendRequest) -> Retried | None:
        """Wait until the breaker admits the message; return a retry if it leaves instead."""
        while (verdict := self.breaker.admit(delivery, request)) is not None:
            if isinstance(verdict, Retried):
                return verdict
            began = delivery.clock()
            with delivery.waits(verdict.cause):
                await self._pauses.wake_up.wait(verdict.seconds)
            if verdict.cause == "retry_after":
                self._told_to_wait.inc(delivery.clock() - began)
            if self._pauses.is_on:
                put_off = await self._pauses.wait(delivery)
                if put_off is not None:
                    return put_off
        return None

    def _put_off_to_its_turn(self, delivery: Delivery, sender: str) -> Retried | None:
        """Send the delivery to a retry queue if too many messages of its sender precede it."""
        now, planned = self._now(), delivery.envelope.scheduled_at
        seconds = self.rates.plan_turn(
            sender, planned_in_seconds=None if planned is None else planned - now
        )
        if not seconds:
            if planned is not None:
                # Its next attempt, if any, is assigned a new time.
                delivery.envelope = delivery.envelope._replace(scheduled_at=None)
            return None
        delivery.envelope = delivery.envelope._replace(scheduled_at=now + seconds)
        return self._put_off(seconds)

    def _put_off(self, seconds: float) -> Retried | None:
        """Send the delivery to a retry queue for `seconds`; return None if that is zero."""
        if not seconds:
            return None
        return Retried(
            reason="rate_limited",
            delay_seconds=self._policy.longest_within(seconds),
            detail="the rate limit requires a longer wait in a retry queue",
        )

    # Sending

    async def post(self, delivery: Delivery, request: SendRequest) -> Outcome | None:
        """Post with a token and a slot, and return the outcome of the delivery.

        Returns None if the message is not settled and has to wait again: the service wants a short
        wait, the message was no longer allowed when it had its slot, or the broker had to prove
        first that it has not delivered the message to another worker meanwhile. If the message may
        have been sent, the delivery may keep its slot: call its `free_slot` after the ack. If
        cancelled, it releases its token and its slot.
        """
        key, breaker = delivery.envelope.key, self.breaker
        async with self.rates.token(
            request.sender, delivery.waits, is_urgent=delivery.is_urgent
        ) as token:
            with self._capacity.take_free_slot() or await self._wait_for_slot(delivery) as slot:
                if self._pauses.is_on or not breaker.admits(key):
                    return None
                if self._expired(delivery) is not None:
                    return None
                if delivery.is_stale:
                    raise BrokerError("the channel is gone")
                if delivery.session.is_in_doubt:
                    await delivery.session.until_heard_from(changed=self._pauses.wake_up.consumer)
                    return None
                token.spend()
                number = self._classifier.begin(key)
                slot.begin()
                slot.answer = answer = self._classifier.classify(
                    await self._sender.send(request, delivery),
                    key,
                    request.to,
                    request.sender,
                    request_number=number,
                    is_known=delivery.envelope.put_off_for == "singled_out",
                    trip=breaker.trip,
                )
                if self._capacity.until_ack and answer.may_have_been_sent:
                    delivery.give_slot_back = slot.keep()
            # After the slot is freed, unless it is kept until the ack. If this answer opens the
            # breaker, a message that waited for the slot becomes the probe before the consumer
            # fetches another one.
            outcome = breaker.record(answer, delivery, request)
        if isinstance(outcome, Sent):
            self._count_acceptance(delivery, request)
        elif not isinstance(outcome, Dead):
            # The message is sent again in any case, so its slot protects nothing.
            delivery.free_slot()
        return outcome

    def release(self, delivery: Delivery) -> None:
        """Note that a delivery leaves: it has an outcome, or returns to the queue."""
        key = delivery.envelope.key
        self.breaker.give_up_probe(key)
        if self._classifier.others:
            self._classifier.others.discard(key)

    async def _wait_for_slot(self, delivery: Delivery) -> RequestSlot:
        self._classifier.expect(delivery.envelope.key)
        return await self._capacity.slot(delivery.waits, is_urgent=delivery.is_urgent)

    def _count_acceptance(self, delivery: Delivery, request: SendRequest) -> None:
        encoding, count = count_segments(request.text)
        self._segments[encoding].inc(count)
        self._last_sent_at = now = self._now()
        published = delivery.envelope.dated_at
        if published is not None:
            # A message published before its `not_before` time is late only after that time.
            due = max(published, delivery.envelope.not_before or 0)
            age = max(0.0, now - due)
            self._acceptance_latency[delivery.queue].observe(age, delivery.trace_id)


def open_account(
    settings: Settings,
    shape: Shape,
    *,
    cluster: Cluster,
    pauses: WorkerPauses,
    spans: WorkerSpans | None,
    metrics: WorkerMetrics,
) -> Account:
    """Create the account that the settings describe, with its connections, breaker and limits.

    Raises ConfigError if a certificate file cannot be used.
    """
    own, wake_up = settings.worker, pauses.wake_up
    rates = RateLimits(
        own.rate_limit,
        most_wait_seconds=own.retry_delays[0],
        changed=wake_up.consumer,
        metrics=metrics,
    )
    breaker = CircuitBreaker(
        own, rates=rates, cluster=cluster, report=pauses.report, wake_up=wake_up
    )
    sender = Sender(
        shape,
        transport=open_transport(settings.sms_api, max_connections=own.most_in_flight),
        metrics=metrics,
        is_held=lambda: pauses.by_operator,
        spans=spans,
    )
    return Account(
        own,
        sender=sender,
        breaker=breaker,
        capacity=Capacity(own, changed=wake_up.consumer),
        pauses=pauses,
        metrics=metrics,
    )


def _age_of(envelope: Envelope) -> str:
    """Describe from when a message's age is counted, and what is wrong with its timestamp."""
    if envelope.is_ahead:
        return "counted from its first delivery: its timestamp lies in the future"
    if envelope.published_at is None:
        return "counted from its first delivery: it has no timestamp"
    if envelope.dated_at is None:
        return "counted from its timestamp, which lies more than a year back"
    return "counted from its timestamp"
