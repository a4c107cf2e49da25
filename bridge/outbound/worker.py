"""From the queue to the SMS API: consume, parse, pace, send, settle.

`Worker._process` is the whole line. Each delivery runs in a task of ours.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.amqp.publisher import Publisher
from bridge.config import RabbitMQSettings, WorkerSettings
from bridge.errors import BrokerError, InvalidMessageError
from bridge.logs import Log
from bridge.outbound.adaptive_limit import AdaptiveLimit
from bridge.outbound.capacity import Slots
from bridge.outbound.consumer import Consumer
from bridge.outbound.delivery import Delivery, Session
from bridge.outbound.envelope import read_envelope
from bridge.outbound.fates import (
    Answer,
    Dead,
    Fate,
    Outcome,
    Policy,
    Retried,
    Sent,
    decide,
    put_off,
)
from bridge.outbound.lanes import Lanes
from bridge.outbound.ledger import COMES_AGAIN_SECONDS, Entry, Kept, Ledger, Repeat, entry_of
from bridge.outbound.metrics import WorkerMetrics
from bridge.outbound.pace import Pace
from bridge.outbound.rates import MAX_HOLD_SECONDS, SHARE_SECONDS
from bridge.outbound.request import SendRequest, parse_request
from bridge.outbound.sender import Sender
from bridge.outbound.settle import Settler, accepted
from bridge.segments import count_segments
from bridge.topology.declarations import dead_queue, retry_queue
from bridge.topology.queue_sizes import QueueSizes, try_to_read_queue, watch_queues
from bridge.topology.upkeep import Upkeep

log = Log(__name__)

OWED_POLL_SECONDS: Final = 0.1
MAX_OWED_SECONDS: Final = 5.0
# A limit that follows the API is logged when it is higher or lower by so much.
TOLD_FACTOR: Final = 2


class Worker:
    """Takes send requests from the queue and settles each of them."""

    def __init__(
        self,
        settings: WorkerSettings,
        rabbitmq: RabbitMQSettings,
        *,
        sender: Sender,
        pace: Pace,
        publisher: Publisher,
        upkeep: Upkeep,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = settings
        # Read for each message; an attribute of a model takes ten times as long as one of ours.
        self._queue = settings.queue
        self._ordering = settings.ordering
        self._max_age = settings.max_age
        self._upkeep = upkeep
        upkeep.changed = pace.changed.set
        self._policy = Policy(
            max_attempts=settings.max_attempts,
            max_uncertain_attempts=settings.max_uncertain_attempts,
            retry_delays_seconds=settings.retry_delays,
        )
        self._sender = sender
        self._pace = pace
        self._metrics = metrics
        self._settler = Settler(
            settings,
            publisher=publisher,
            block=pace.block,
            unblock=pace.unblock,
            metrics=metrics,
        )
        self._ledger = Ledger(heartbeat_seconds=rabbitmq.heartbeat_seconds)
        # After a pause a new consumer brings deliveries while older ones are still being sent.
        self._limit = (
            AdaptiveLimit(settings.max_concurrency) if settings.concurrency == "auto" else None
        )
        self._slots = Slots(self._limit.limit if self._limit else settings.most_in_flight)
        self._told_limit = self._slots.limit
        self._most_held = self._count_most_held()
        self._lanes = Lanes(self._policy)
        self._roles = {
            settings.queue: "main",
            dead_queue(settings.queue): "dead_letter",
            **{retry_queue(settings.queue, d): "retry" for d in settings.retry_delays},
        }
        self._tasks: dict[asyncio.Task[None], Delivery] = {}
        self._stopping = False
        self._registered = asyncio.Event()
        self._redeliveries = 0
        self._last_delivery_at = self._last_sent_at = 0.0
        self.consumer = Consumer(
            settings.queue,
            prefetch=self._prefetch,
            changed=pace.changed,
            take=self._take,
            registered=self._on_registered,
            lost=self._on_session_over,
            metrics=metrics,
        )
        limit = metrics.concurrency_limit.labels(settings.queue)
        limit.set_function(lambda: self._slots.limit)
        metrics.in_progress.labels(settings.queue).set_function(lambda: len(self._tasks))
        metrics.oldest_held.labels(settings.queue).set_function(self._oldest_held)
        metrics.last_delivery.labels(settings.queue).set_function(lambda: self._last_delivery_at)
        metrics.last_sent.labels(settings.queue).set_function(lambda: self._last_sent_at)

    # The straight line

    async def _process(self, delivery: Delivery) -> None:
        entry = entry_of(delivery.envelope, delivery.body)
        # A drain goes on with it: what is given back here does not come again while the channel
        # lives, and the next worker would send it again. In a pause few are held, and a probe for
        # up to a minute: who waited for that would take the place of one that may end the pause.
        claim = await self._ledger.claim(
            entry,
            redelivered=delivery.redelivered,
            waits=delivery.waits,
            may_wait=self._stopping or self._pace.paused is None,
        )
        if claim is None:
            await self._put_off_repeat(delivery)
            return
        if isinstance(claim, Repeat):
            acked = self._settler.ack(delivery, None)
            self._ledger.note_repeat(entry, acked=acked)
            await self._settler.answer_repeat(delivery, claim.first)
            return
        outcome: Outcome | None = None
        try:
            outcome = self._recall(delivery, entry) or await self._work(delivery)
            await self._settler.replace(delivery, outcome)
        except BaseException:
            kept = Kept(delivery.envelope, outcome, delivery.replacement)
            self._ledger.give_back(claim, kept)
            raise
        acked = self._settler.ack(delivery, outcome)
        at = time.time()
        self._ledger.settle(claim, accepted(delivery.envelope, outcome, at), acked=acked)
        await self._settler.announce(delivery, outcome, at)

    async def _put_off_repeat(self, delivery: Delivery) -> None:
        """Have a repeat wait on the ladder, for what becomes of the first with its id."""
        outcome: Outcome
        try:
            delivery.envelope = read_envelope(delivery.properties, delivery.envelope)
            outcome = Retried(
                reason="paused",
                delay_seconds=self._policy.retry_delays_seconds[0],
                detail="the first message with its id is held in a pause",
            )
        except InvalidMessageError as error:
            outcome = Dead(reason="invalid", detail=str(error))
        await self._settler.replace(delivery, outcome)
        self._settler.ack(delivery, outcome)

    def _recall(self, delivery: Delivery, entry: Entry) -> Outcome | None:
        """Go on with what is known of a delivery that went back to the queue unsettled."""
        kept = self._ledger.recall(entry, redelivered=delivery.redelivered)
        if kept is None:
            return None
        delivery.envelope, delivery.replacement = kept.envelope, kept.replacement
        return kept.outcome

    async def _work(self, delivery: Delivery) -> Outcome:
        """Parse, pace and send; whatever is wrong with the message becomes an outcome."""
        try:
            delivery.envelope = read_envelope(delivery.properties, delivery.envelope)
            request = parse_request(delivery.body, self._settings)
            if self._ordering == "recipient":
                return await self._send_in_order(delivery, request)
            return await self._send(delivery, request)
        except InvalidMessageError as error:
            return Dead(reason="invalid", detail=str(error))
        except BrokerError:
            raise
        except Exception as error:  # a bug of ours must not hold the message for ever
            log.exception("internal_error", message_id=delivery.envelope.key)
            name = type(error).__name__
            return Dead(reason="internal_error", detail=f"a bug in the bridge: {name}")
        finally:
            self._pace.release_probe(delivery.envelope.key)

    async def _send_in_order(self, delivery: Delivery, request: SendRequest) -> Outcome:
        key = delivery.envelope.ordering_key or request.to
        # As for repeats: who waits takes the place of one that may end a pause.
        waits = self._pace.paused is None
        async with self._lanes.turn(key, delivery, waits=waits) as turn:
            if turn.behind_seconds is None:
                outcome = await self._send(delivery, request)
            else:
                detail = "an earlier message of its ordering key is not settled"
                outcome = Retried(
                    reason="ordering", delay_seconds=turn.behind_seconds, detail=detail
                )
            if isinstance(outcome, Retried) and outcome.reason != "not_before":
                turn.stay_ahead(outcome.delay_seconds)
            return outcome

    async def _send(self, delivery: Delivery, request: SendRequest) -> Outcome:
        """Post until there is an outcome; only a slow-down, or being the probe, repeats it here."""
        while True:
            if (ended := await self._wait_for_turn(delivery, request)) is not None:
                return ended
            try:
                if delivery.is_stale:
                    raise BrokerError("the channel is gone")
                began = self._pace.begin(delivery.envelope.key)
                answer = await self._post(request, delivery)
            finally:
                self._slots.give_back()
            key = delivery.envelope.key
            answer = self._pace.note(answer, key=key, recipient=request.to, began=began)
            if (outcome := self._judge(delivery, answer)) is not None:
                self._count_acceptance(delivery, request, outcome)
                return outcome

    async def _wait_for_turn(self, delivery: Delivery, request: SendRequest) -> Outcome | None:
        """Wait until it may go, and have a slot then; return an outcome when it must not, or later.

        Whatever else it waits for, it takes up no slot meanwhile: there may be few.
        """
        if self._stopping:
            raise BrokerError("the worker stops")
        with delivery.waits("rate"):
            ended, has_slot = None, False
            while ended is None and not has_slot:
                ended = await self._wait_until_due(delivery)
                ended = ended or await self._wait_for_pause(delivery, request)
                ended = ended or self._put_off_to_turn(delivery, request.sender)
                if ended is None:
                    async with self._pace.rates.turn(request.sender) as turn:
                        turn.is_used = has_slot = await self._take_slot(delivery)
        if ended is not None and delivery.is_stale:
            raise BrokerError("the channel is gone")
        return ended

    async def _wait_for_pause(self, delivery: Delivery, request: SendRequest) -> Retried | None:
        if not self._pace.is_wary:
            return None
        envelope = delivery.envelope
        with delivery.waits("probe"):
            away_seconds = await self._pace.admit(
                envelope.key,
                request.to,
                has_failed=envelope.attempts > 0 or envelope.uncertain_attempts > 0,
                is_last_try=self._policy.is_last_try(
                    attempts=envelope.attempts, uncertain_attempts=envelope.uncertain_attempts
                ),
            )
        if away_seconds is None:
            return None
        detail = f"the worker is paused: {self._pace.paused or 'it looks like an outage'}"
        return put_off(_waiting(detail, away_seconds), self._policy)

    def _put_off_to_turn(self, delivery: Delivery, sender: str) -> Retried | None:
        """Have it wait on the ladder when too many of its sender are before it."""
        now, planned = time.time(), delivery.envelope.turn_at
        seconds = self._pace.rates.seconds_on_ladder(
            sender, planned_in_seconds=None if planned is None else planned - now
        )
        if not seconds:
            if planned is not None:
                # One more try of it is given another time.
                delivery.envelope = delivery.envelope._replace(turn_at=None)
            return None
        delivery.envelope = delivery.envelope._replace(turn_at=now + seconds)
        return Retried(
            reason="rate_limited",
            delay_seconds=self._policy.longest_within(seconds),
            detail="the rate limit asks for a longer wait than a delivery is held",
        )

    async def _take_slot(self, delivery: Delivery) -> bool:
        """Take a slot, or return False when a pause has begun or its time is over meanwhile."""
        while True:
            if not self._pace.is_open:
                with delivery.waits("pace"):
                    await self._pace.until_open()
            with delivery.waits("slot"):
                await self._slots.acquire()
            may_go = self._pace.paused is None or self._pace.is_probe(delivery.envelope.key)
            may_go = may_go and self._expired(delivery) is None
            if may_go and self._pace.is_open:
                return True
            self._slots.give_back()
            if not may_go:
                return False

    async def _post(self, request: SendRequest, delivery: Delivery) -> Answer:
        limit = self._limit
        if limit is None:
            return await self._sender.send(request, delivery)
        began, answer = limit.begin(), None
        try:
            answer = await self._sender.send(request, delivery)
        finally:
            limit.end(began, answer)
            if limit.limit != self._slots.limit:
                self._follow(limit.limit)
        return answer

    # What an answer means for this delivery

    def _judge(self, delivery: Delivery, answer: Answer) -> Outcome | None:
        """Return the outcome, or None when this delivery is to try again from here."""
        pace, key, paused = self._pace, delivery.envelope.key, self._pace.paused
        if answer.fate is Fate.SLOW_DOWN:
            return put_off(answer, self._policy) if paused else self._hold(delivery, answer)
        if answer.fate in {Fate.SETUP, Fate.AMBIGUOUS}:
            if pace.keep_probe(key):
                return self._hold(delivery, answer)
            return put_off(answer, self._policy, times=pace.put_off_times(key))
        outcome = self._decide(delivery, answer)
        if paused is None or not answer.counts_as_outage or pace.is_probe(key):
            return outcome
        # It burns no attempt in a pause, but one that may have been sent counts as such.
        is_last = isinstance(outcome, Dead) and outcome.uncertain
        return outcome if is_last else put_off(answer, self._policy)

    def _hold(self, delivery: Delivery, answer: Answer) -> Retried | None:
        """Try again from here, unless the delivery has been held for long."""
        held_too_long = delivery.held_seconds > MAX_HOLD_SECONDS
        return put_off(answer, self._policy) if held_too_long else None

    def _decide(self, delivery: Delivery, answer: Answer) -> Outcome:
        envelope = delivery.envelope
        return decide(
            answer,
            self._policy,
            attempts=envelope.attempts,
            uncertain_attempts=envelope.uncertain_attempts,
            park=(envelope.on_uncertain or self._settings.on_uncertain) == "park",
        )

    def _count_acceptance(self, delivery: Delivery, request: SendRequest, outcome: Outcome) -> None:
        if not isinstance(outcome, Sent):
            return
        encoding, count = count_segments(request.text)
        self._metrics.segments.labels(encoding).inc(count)
        self._last_sent_at = now = time.time()
        if delivery.envelope.published_at is not None:
            # What was sent ahead of its time is late only after that time.
            due = max(delivery.envelope.published_at, delivery.envelope.not_before or 0)
            age = max(0.0, now - due)
            self._metrics.acceptance_latency.labels(self._queue).observe(age)

    # When a message may go

    async def _wait_until_due(self, delivery: Delivery) -> Outcome | None:
        """Wait for a moment that is near; one that is far is waited for on the ladder."""
        if (expired := self._expired(delivery)) is not None:
            return expired
        not_before = delivery.envelope.not_before
        if not_before is None:
            return None
        remaining = not_before - time.time()
        delay = self._policy.longest_within(remaining)
        if delay <= remaining or remaining > MAX_HOLD_SECONDS:
            detail = "its time has not come"
            return Retried(reason="not_before", delay_seconds=delay, detail=detail)
        if remaining > 0:
            with delivery.waits("due"):
                await asyncio.sleep(remaining)
        return None

    def _expired(self, delivery: Delivery) -> Dead | None:
        now, envelope, max_age = time.time(), delivery.envelope, self._max_age
        if envelope.expires_at is not None and now >= envelope.expires_at:
            return Dead(reason="expired", detail="its own expiry has passed")
        if max_age is not None and now - envelope.age_starts_at >= max_age:
            return Dead(reason="expired", detail="older than worker.max_age")
        return None

    # Taking and giving back

    async def serve(self, connection: Connection) -> None:
        """Declare the topology and consume on this connection; `Link.run` calls it."""
        await self._upkeep.settle(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch_queues(connection, self._roles, self._note_sizes))
                missing = self._settler.queue_missing
                group.create_task(self._upkeep.mend(connection, missing))
                if self._pace.rates.is_shared:
                    group.create_task(self._share_limits(connection))
                await self.consumer.serve(connection)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _share_limits(self, connection: Connection) -> None:
        """Count the queue's workers every second, from when this one has become one of them."""
        while True:
            await self._registered.wait()
            sizes = await try_to_read_queue(connection, self._queue)
            heed_cancellation()
            if sizes is not None and self.consumer.is_registered:
                self._pace.share_with(sizes.consumers)
            await asyncio.sleep(SHARE_SECONDS)

    async def drain(self, timeout_seconds: float) -> bool:
        """Take nothing more, finish what is being sent, give the rest back.

        Returns False when deliveries had to be cut off after `timeout_seconds`, or when the
        broker may not have read the acks of some.
        """
        self._stopping = True
        self._settler.hurry()
        for task, delivery in list(self._tasks.items()):
            if delivery.may_be_given_back:
                task.cancel()
        is_finished = False
        try:
            async with asyncio.timeout(timeout_seconds):
                is_finished = await self._finish()
        except TimeoutError:
            log.warning("drain_timed_out")
        cut_off = list(self._tasks)
        for task in cut_off:
            task.cancel()
        await asyncio.gather(*cut_off, return_exceptions=True)
        if not is_finished and self._ledger.expects_redeliveries:
            log.warning("acks_in_doubt")
        return is_finished

    async def _finish(self) -> bool:
        """Take nothing more and settle what is held; then see that the broker has read the acks.

        What is done but not acked comes again, and only this process knows it: it is taken once
        more. Everything else that is delivered then is left to the next worker.
        """
        await self._settle_what_is_held()
        has_come = await self._take_what_comes_again()
        await self._settle_what_is_held()
        return has_come

    async def _settle_what_is_held(self) -> None:
        await self.consumer.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.consumer.flush()

    async def _take_what_comes_again(self) -> bool:
        """Return True when that is acked, or none of it comes; False when it still does at the end.

        What another worker has taken never comes here, so that silence of a broker that is there
        ends the wait. A broker that is away is waited for.
        """
        quiet = consuming = 0.0
        while self._ledger.expects_redeliveries:
            if quiet >= COMES_AGAIN_SECONDS:
                log.info("not_redelivered")
                return True
            if consuming >= MAX_OWED_SECONDS:
                return False
            self.consumer.resume()
            began, taken = time.monotonic(), self._redeliveries
            await asyncio.sleep(OWED_POLL_SECONDS)
            if self.consumer.is_registered:
                seconds = time.monotonic() - began
                consuming += seconds
                quiet = quiet + seconds if self._redeliveries == taken else 0.0
        return True

    async def aclose(self) -> None:
        """Close the connections to the API."""
        await self._sender.aclose()

    def _prefetch(self) -> int:
        if self._stopping:
            # What comes now is acked when it is a repeat, and left to the next worker otherwise.
            return 1
        if self._pace.broker_blocked or not self._upkeep.is_settled:
            return 0
        self._pace.reopen()
        if self._pace.paused:
            return self._pace.probes_wanted
        return self._pace.rates.most_held(self._most_held)

    def _count_most_held(self) -> int:
        if self._limit is None or self._ordering == "recipient":
            # In order, deliveries wait for each other, and no other worker for what is held here.
            return self._settings.most_in_flight
        return self._limit.most_held()

    def _follow(self, limit: int) -> None:
        """Have so many requests in flight from now on; those that are stay so."""
        self._slots.resize(limit)
        if (held := self._count_most_held()) != self._most_held:
            self._most_held = held
            self._pace.changed.set()

    def _on_registered(self) -> None:
        self._ledger.consuming_again()
        self._registered.set()

    def _on_session_over(self, session: Session) -> None:
        """Let go of what waits: it comes again, and a probe must not keep its place meanwhile."""
        self._ledger.connection_lost(most_unacked=session.most_unacked)
        for task, delivery in list(self._tasks.items()):
            if (delivery.may_be_given_back or delivery.awaits_first) and delivery.is_stale:
                task.cancel()

    def _take(self, delivery: Delivery) -> None:
        self._count_received(delivery)
        task = asyncio.get_running_loop().create_task(self._run(delivery))
        self._tasks[task] = delivery
        task.add_done_callback(self._let_go)

    def _let_go(self, task: asyncio.Task[None]) -> None:
        self.consumer.let_go(self._tasks.pop(task))

    async def _run(self, delivery: Delivery) -> None:
        """Process a delivery; nothing that it raises leaves the task."""
        try:
            await self._process(delivery)
        except (BrokerError, asyncio.CancelledError):
            # Unacked: the broker delivers it again, at the latest when the channel closes.
            self._settler.report_given_back(delivery)
            if self._stopping and delivery.redelivered:
                # Something that is to be acked may come behind it. Behind a new one nothing does.
                self.consumer.renew()
        except Exception:
            log.exception("internal_error", message_id=delivery.envelope.key)
            self._settler.report_given_back(delivery)

    def _count_received(self, delivery: Delivery) -> None:
        now = time.time()
        self._metrics.received.labels(
            self._queue, "true" if delivery.redelivered else "false"
        ).inc()
        self._last_delivery_at = now
        self._redeliveries += delivery.redelivered
        if delivery.redelivered or delivery.envelope.copies:
            return
        if delivery.envelope.published_at is None:
            self._metrics.without_timestamp.labels(self._queue).inc()
        else:
            age = max(0.0, now - delivery.envelope.published_at)
            self._metrics.queue_age.labels(self._queue).observe(age)

    def _oldest_held(self) -> float:
        envelopes = [delivery.envelope for delivery in self._tasks.values()]
        due = (max(e.age_starts_at, e.not_before or 0) for e in envelopes)
        return min(due, default=0.0)

    def _note_sizes(self, found: Mapping[str, QueueSizes]) -> None:
        for name, sizes in found.items():
            self._metrics.queue_ready.labels(name, self._roles[name]).set(sizes.ready)
        if (main := found.get(self._queue)) is not None:
            self._metrics.queue_consumers.labels(self._queue).set(main.consumers)
        if len(found) == len(self._roles):
            self._metrics.queue_stats_timestamp.set(time.time())
        self._tell_limit()

    def _tell_limit(self) -> None:
        """Log the limit now and then: it moves all the time, and the metric shows each move."""
        low, high = sorted((self._slots.limit, self._told_limit))
        if high >= low * TOLD_FACTOR:
            self._told_limit = limit = self._slots.limit
            log.info("concurrency_changed", queue=self._queue, limit=limit)


def _waiting(detail: str, away_seconds: float) -> Answer:
    """Make the answer of an attempt that was not made; it burns nothing."""
    return Answer(
        fate=Fate.SETUP, result="rejected", detail=detail, retry_after_seconds=away_seconds
    )
