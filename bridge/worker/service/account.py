"""One account at an SMS service: takes a parsed message and returns its outcome.

A delivery waits until it is due, then for the circuit breaker, for a token of the rate limits and
for a slot, in this order. Then its request is posted, and the breaker interprets the answer.
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
from bridge.worker.fates import Answer
from bridge.worker.limits.capacity import Capacity, RequestSlot
from bridge.worker.limits.rate_limits import RateLimits
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Dead, Outcome, Policy, Retried, Sent
from bridge.worker.request import Encoding, SendRequest, count_segments
from bridge.worker.service.breaker import CircuitBreaker, Cluster
from bridge.worker.service.sender import Sender, open_transport
from bridge.worker.service.shape import Shape
from bridge.worker.spans import WorkerSpans


class Account:
    """One account at an SMS service: posts messages when that is allowed.

    `sender` posts; `breaker` and its rate limits decide when, `capacity` how many at once.
    `changed` is set when the prefetch should change. `now` returns unix seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        sender: Sender,
        breaker: CircuitBreaker,
        capacity: Capacity,
        metrics: WorkerMetrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        # Copied, because reading a pydantic attribute takes ten times as long and happens per
        # message.
        self._max_age_seconds = settings.max_age
        self._policy = Policy.of(settings)
        self._sender = sender
        self.breaker = breaker
        self.rates = breaker.rates
        self.changed = breaker.changed
        self._capacity = capacity
        self._segments = {one: metrics.segments.labels(one) for one in get_args(Encoding)}
        self._acceptance_latency = {
            queue: metrics.acceptance_latency.labels(queue) for queue in request_queues(settings)
        }
        self._now = now
        self._is_stopping = False
        self._last_sent_at = 0.0
        metrics.last_sent.labels(settings.queue).set_function(lambda: self._last_sent_at)
        metrics.concurrency_limit.labels(settings.queue).set_function(lambda: capacity.limit)

    def most_held(self) -> int:
        """Return the current prefetch: enough to send, or for a probe while the breaker is open."""
        self.breaker.end_passed_wait()
        if self.breaker.paused:
            return self.breaker.probes_wanted
        return self.rates.most_held(self._capacity.most_held)

    @property
    def most_sendable(self) -> int:
        """Prefetch that sending needs, even if sending is stopped now."""
        return self._capacity.most_held

    async def keep_logging(self) -> NoReturn:
        """Log the concurrency limit from time to time if it is adaptive."""
        await self._capacity.keep_logging()

    def stop(self) -> None:
        """Post no more requests: messages that are not in flight return to the queue."""
        self._is_stopping = True
        self.breaker.leave()

    async def aclose(self) -> None:
        """Close the connections to the API."""
        await self._sender.aclose()

    async def send(self, delivery: Delivery, request: SendRequest) -> Outcome:
        """Post a delivery's request when that is allowed, and return the outcome.

        A message for which the service wants a short wait stays here and is posted again. If the
        message may have been sent, the delivery may keep its slot: call its `free_slot` after the
        ack. Raises BrokerError if the delivery returns to the queue because its session is over or
        the worker stops. If cancelled, it releases its probe, its token and its slot.
        """
        outcome: Outcome | None = None
        try:
            while outcome is None:
                if self._is_stopping or delivery.session.is_leaving:
                    raise BrokerError("waiting deliveries go back to the queue")
                outcome = await self.wait_until_allowed(delivery, request)
                if outcome is None:
                    outcome = await self.post(delivery, request)
                elif delivery.is_stale:
                    raise BrokerError("the channel is gone")
        finally:
            self.breaker.give_up_probe(delivery.envelope.key)
        return outcome

    # Before a request is sent

    async def wait_until_allowed(self, delivery: Delivery, request: SendRequest) -> Outcome | None:
        """Wait for everything that needs no slot, because slots may be scarce.

        Returns None if the message may be sent now, else its outcome.
        """
        if (expired := self._expired(delivery)) is not None:
            return expired
        not_before = delivery.envelope.not_before
        if not_before is not None and (early := await self._wait_until_due(delivery, not_before)):
            return early
        if not self.breaker.is_closed:
            put_off = await self.breaker.wait_until_allowed(delivery, request)
            if put_off is not None:
                return put_off
        if delivery.is_urgent:
            return self._put_off(self.rates.urgent_seconds_on_ladder(request.sender))
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

    def _put_off_to_its_turn(self, delivery: Delivery, sender: str) -> Retried | None:
        """Send the delivery to a retry queue if too many messages of its sender precede it."""
        now, planned = self._now(), delivery.envelope.turn_at
        seconds = self.rates.seconds_on_ladder(
            sender, planned_in_seconds=None if planned is None else planned - now
        )
        if not seconds:
            if planned is not None:
                # Its next attempt, if any, is assigned a new time.
                delivery.envelope = delivery.envelope._replace(turn_at=None)
            return None
        delivery.envelope = delivery.envelope._replace(turn_at=now + seconds)
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
        wait, or the breaker opened or the message expired before it could be sent, or the broker
        had to prove first that it has not delivered the message to another worker meanwhile.
        """
        key, breaker = delivery.envelope.key, self.breaker
        async with self.rates.token(
            request.sender, delivery.waits, is_urgent=delivery.is_urgent
        ) as token:
            answer: Answer | None = None
            while answer is None:
                if not breaker.may_go_now:
                    with delivery.waits("pace"):
                        await breaker.wait_for_retry_after(key)
                with self._capacity.free_slot() or await self._wait_for_slot(delivery) as slot:
                    if not breaker.may_post(key) or self._expired(delivery) is not None:
                        return None
                    if breaker.may_go_now:  # No wait began while this message waited for its slot.
                        if delivery.is_stale:
                            raise BrokerError("the channel is gone")
                        if delivery.session.is_in_doubt:
                            await delivery.session.until_heard_from(changed=self.changed)
                            return None
                        token.spend()
                        request_number = breaker.begin(key)
                        slot.begin()
                        try:
                            answer = await self._sender.send(request, delivery)
                        finally:
                            breaker.end(request_number)
                        slot.answer = answer = breaker.classify(
                            answer, delivery, request, request_number=request_number
                        )
                        if self._capacity.until_ack and answer.may_be_sent:
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

    async def _wait_for_slot(self, delivery: Delivery) -> RequestSlot:
        """Wait for a slot; meanwhile the message counts as about to be sent."""
        is_other = self.breaker.line_up(delivery.envelope.key)
        try:
            return await self._capacity.slot(delivery.waits, is_urgent=delivery.is_urgent)
        finally:
            self.breaker.leave_line(is_other=is_other)

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
    changed: asyncio.Event,
    spans: WorkerSpans | None,
    metrics: WorkerMetrics,
) -> Account:
    """Create the account that the settings describe, with its connections, breaker and limits.

    `changed` is set when the prefetch should change. Raises ConfigError if a certificate file
    cannot be used.
    """
    own, policy = settings.worker, Policy.of(settings.worker)
    rates = RateLimits(
        own.rate_limit,
        most_wait_seconds=policy.retry_delays_seconds[0],
        changed=changed,
        metrics=metrics,
    )
    breaker = CircuitBreaker(
        policy,
        outage_after_seconds=own.outage_after,
        rates=rates,
        cluster=cluster,
        metrics=metrics,
    )
    sender = Sender(
        shape,
        transport=open_transport(settings.sms_api, max_connections=own.most_in_flight),
        metrics=metrics,
        is_held=lambda: breaker.is_paused_by_operator,
        spans=spans,
    )
    capacity = Capacity(own, changed=changed)
    return Account(own, sender=sender, breaker=breaker, capacity=capacity, metrics=metrics)


def _age_of(envelope: Envelope) -> str:
    """Describe from when a message's age is counted, and what is wrong with its timestamp."""
    if envelope.is_ahead:
        return "counted from its first delivery: its timestamp lies in the future"
    if envelope.published_at is None:
        return "counted from its first delivery: it has no timestamp"
    if envelope.dated_at is None:
        return "counted from its timestamp, which lies more than a year back"
    return "counted from its timestamp"
