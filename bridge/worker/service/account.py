"""An account at an SMS service: everything between a message that is read and its outcome.

A delivery waits for its time, for the circuit breaker, for a token of the rate limits and for a
slot, in this order; then its request is posted, and the breaker says what the answer means.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, NoReturn, get_args

from bridge.config import Settings, WorkerSettings
from bridge.errors import BrokerError
from bridge.topology.declarations import request_queues
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Answer, Fate
from bridge.worker.limits.capacity import Capacity, RequestSlot
from bridge.worker.limits.rate_limits import RateLimits
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Dead, Outcome, Policy, Retried, Sent
from bridge.worker.request import SendRequest
from bridge.worker.segments import Encoding, count_segments
from bridge.worker.service.breaker import CircuitBreaker, Cluster
from bridge.worker.service.sender import Sender, open_transport
from bridge.worker.service.shape import Shape
from bridge.worker.spans import WorkerSpans

# What another worker would send again if this one were killed before the ack.
_MAY_BE_SENT: Final = frozenset((Fate.SENT, Fate.UNCERTAIN))


class Account:
    """One account at an SMS service: posts its messages, when it may be posted to.

    `sender` posts, `breaker` and its rate limits say when, `capacity` how many at once. `changed`
    is set when more or fewer messages should be taken than before. `now` returns unix seconds.
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
        # Read for each message; an attribute of a model takes ten times as long as one of ours.
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
        """Return how many deliveries to hold now: enough to send, or to probe while it is open."""
        self.breaker.end_passed_wait()
        if self.breaker.paused:
            return self.breaker.probes_wanted
        return self.rates.most_held(self._capacity.most_held)

    @property
    def most_sendable(self) -> int:
        """How many deliveries can be held to be sent, whatever stops them now."""
        return self._capacity.most_held

    async def keep_logging(self) -> NoReturn:
        """Log the concurrency limit now and then, if it follows the service."""
        await self._capacity.keep_logging()

    def stop(self) -> None:
        """Post no more requests: what has not left goes back to the queue."""
        self._is_stopping = True
        self.breaker.leave()

    async def aclose(self) -> None:
        """Close the connections to the API."""
        await self._sender.aclose()

    async def send(self, delivery: Delivery, request: SendRequest) -> Outcome:
        """Post a delivery's request when it may go, and return what becomes of the delivery.

        A message that the service wants later, but soon, is held here and posted again. What may
        have been sent may keep its slot: call the delivery's `free_slot` after its ack.
        Raises BrokerError when the delivery goes back to the queue: its session is over, or the
        worker stops. Cancelled, it gives back what it held: its place, its token, its slot.
        """
        outcome: Outcome | None = None
        try:
            while outcome is None:
                if self._is_stopping or delivery.session.is_leaving:
                    raise BrokerError("all that waits goes back to the queue")
                outcome = await self.wait_until_allowed(delivery, request)
                if outcome is None:
                    outcome = await self.post(delivery, request)
                elif delivery.is_stale:
                    raise BrokerError("the channel is gone")
        finally:
            self.breaker.give_up_probe(delivery.envelope.key)
        return outcome

    # Before it goes

    async def wait_until_allowed(self, delivery: Delivery, request: SendRequest) -> Outcome | None:
        """Wait for everything that needs no slot, since slots may be few.

        Returns None when the message may go, and its outcome if it may not, or only later.
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
        """Wait for a moment that is near; one that is far is waited for on the ladder."""
        remaining = not_before - self._now()
        delay = self._policy.longest_within(remaining)
        if delay <= remaining or remaining > MAX_HOLD_SECONDS:
            detail = "its time has not come"
            return Retried(reason="not_before", delay_seconds=delay, detail=detail)
        if remaining > 0:
            with delivery.waits("due"):
                await asyncio.sleep(remaining)
        return None

    def _put_off_to_its_turn(self, delivery: Delivery, sender: str) -> Retried | None:
        """Have it wait on the ladder when too many of its sender are before it."""
        now, planned = self._now(), delivery.envelope.turn_at
        seconds = self.rates.seconds_on_ladder(
            sender, planned_in_seconds=None if planned is None else planned - now
        )
        if not seconds:
            if planned is not None:
                # One more try of it is given another time.
                delivery.envelope = delivery.envelope._replace(turn_at=None)
            return None
        delivery.envelope = delivery.envelope._replace(turn_at=now + seconds)
        return self._put_off(seconds)

    def _put_off(self, seconds: float) -> Retried | None:
        """Have it wait on the ladder for its turn; None when it has its turn here."""
        if not seconds:
            return None
        return Retried(
            reason="rate_limited",
            delay_seconds=self._policy.longest_within(seconds),
            detail="the rate limit asks for a longer wait than a delivery is held",
        )

    # It goes

    async def post(self, delivery: Delivery, request: SendRequest) -> Outcome | None:
        """Post with a token and a slot, and return what the answer means for the delivery.

        Returns None when the message is not settled and waits here again: the service wants it a
        little later, or the breaker opened or its time was over before it could go.
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
                        if self._capacity.until_ack and answer.fate in _MAY_BE_SENT:
                            delivery.give_slot_back = slot.keep()
            # After most slots are given back: when this opens the breaker, a message that waited
            # for the slot becomes the probe before the consumer looks whether to take one.
            outcome = breaker.record(answer, delivery, request)
        if isinstance(outcome, Sent):
            self._count_acceptance(delivery, request)
        elif not isinstance(outcome, Dead):
            # It is sent again anyway.
            delivery.free_slot()
        return outcome

    async def _wait_for_slot(self, delivery: Delivery) -> RequestSlot:
        """Wait for a slot, as a message that is about to go."""
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
            # What was sent ahead of its time is late only after that time.
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
    """Make the account that settings describe, with its connections, breaker and limits.

    `changed` is set when more or fewer deliveries should be held than before. Raises ConfigError
    when a certificate file cannot be used.
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
    """Say from when a message's age is counted, and what is wrong with its timestamp."""
    if envelope.is_ahead:
        return "counted from its first delivery: its timestamp lies in the future"
    if envelope.published_at is None:
        return "counted from its first delivery: it has no timestamp"
    if envelope.dated_at is None:
        return "counted from its timestamp, which lies more than a year back"
    return "counted from its timestamp"
