"""A worker with the objects of `bridge.worker.worker`, without a broker."""

import asyncio
import contextlib
from typing import Any, Final

from bridge.config import WorkerSettings
from bridge.telemetry.metrics import new_registry
from bridge.worker.cluster.exchange import ACQUAINTING_SECONDS, ALONE_SECONDS
from bridge.worker.cluster.joint_pause import JointPause, PauseFollower
from bridge.worker.cluster.membership import Membership
from bridge.worker.cluster.rate_limit import ClusterRateLimit
from bridge.worker.delivery import Delivery
from bridge.worker.fates import Answer
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Dead, Retried, Sent
from bridge.worker.pipeline import post_when_allowed
from bridge.worker.request import SendRequest
from tests.breakers import Parts
from tests.deliveries import make_delivery
from tests.simulation.exchange import Exchange, Member, start
from tests.simulation.queue import Message, Queue
from tests.simulation.service import Service


class _Session:
    is_over = False
    is_closed = False
    is_leaving = False
    is_in_doubt = False

    @property
    def channel(self) -> "_Session":
        return self


_SESSION: Final = _Session()


class Worker:
    """A worker between a queue and a service. `setup` identifies its settings."""

    def __init__(
        self,
        number: int,
        settings: WorkerSettings,
        setup: str,
        *,
        exchange: Exchange,
        queue: Queue,
        service: Service,
    ) -> None:
        loop = exchange.loop
        self.number = number
        self._exchange, self._queue, self._service, self._loop = exchange, queue, service, loop
        metrics = WorkerMetrics(
            new_registry(), queue="q", retry_queues=["q.retry.5s"], dead="q.dead"
        )
        self.membership = Membership("q", is_enabled=True, metrics=metrics, clock=loop.time)
        self.membership.worker_id = f"{exchange.chance.getrandbits(64):016x}"
        self.setup = setup
        self.joint_pause = JointPause(
            self.membership,
            setup=lambda: self.setup,
            turn_seconds=settings.retry_delays[0],
            clock=loop.time,
        )
        parts = Parts(settings, metrics, cluster=self.joint_pause, clock=loop.time)
        self.breaker, self.pauses, self.rates = parts.breaker, parts.pauses, parts.rates
        self._changed = parts.changed
        self._account = parts.account(self, now=loop.time)
        self.rate_limit = ClusterRateLimit(
            "q",
            self._account,
            self.membership,
            own_consumers=lambda: (self._prefetch > 0, self.cancelled_consumers),
            clock=loop.time,
        )
        follower = PauseFollower(self.joint_pause, self.breaker, can_take=lambda: self.can_take)
        self.member = Member(exchange, self.membership, [follower, self.rate_limit], metrics)
        self.can_take = True
        self._prefetch = 0
        self._held: dict[asyncio.Task[None], Message] = {}
        # Redeliveries that wait for answers of peers: in the way, or what a consumer was given that
        # has been cancelled so that others come beside them.
        self._in_the_way: set[asyncio.Task[None]] = set()
        self._aside: list[set[asyncio.Task[None]]] = []
        self._redelivery_wait = settings.redelivery_wait
        self.tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    # Interface of the sender

    async def send(self, request: SendRequest, _delivery: Delivery) -> Answer:
        return await self._service.take(self.number, request.sender)

    # Life

    async def run(self) -> None:
        """Join the cluster, and consume until cancelled."""
        is_first = not self._exchange.members
        self.member.join()
        start(self.member.keep_publishing(), self.tasks)
        start(self.member.keep_ticking(), self.tasks)
        await asyncio.sleep(ALONE_SECONDS if is_first else ACQUAINTING_SECONDS)
        if self.rates.is_shared:
            start(self.rate_limit.follow(self._count), self.tasks)
        while True:
            self._register()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await self._changed.wait()
            self._changed.clear()

    def stop(self) -> None:
        """Drain: accept and send nothing new, return waiting messages, finish the rest."""
        self._is_stopping = True
        self.pauses.drain()
        self.breaker.leave()
        self.rate_limit.leave()
        self._register()
        for task, message in list(self._held.items()):
            task.cancel()
            self._queue.put_back(message)
        self._loop.call_later(1, self.kill)

    def kill(self) -> None:
        """End at once. The broker redelivers the unacked messages."""
        self._is_stopping = True
        self.member.fall_silent()
        self._queue.register(self, is_consumer=False)
        held = [message for task, message in self._held.items() if not task.done()]
        for task in [*self.tasks, *self._held]:
            task.cancel()
        self._held.clear()
        self._queue.redeliver(held)

    async def _count(self) -> int:
        await asyncio.sleep(0.005)
        return self._queue.consumers

    def _register(self) -> None:
        self._prefetch = 0 if self._is_stopping else self._wanted()
        self._queue.register(self, is_consumer=self._prefetch > 0)
        self.rate_limit.publish()
        self._queue.hand_out()

    def _wanted(self) -> int:
        return self._account.wanted_prefetch() if self.can_take else 0

    # Messages

    @property
    def cancelled_consumers(self) -> int:
        """Number of cancelled consumers with unacked messages."""
        return sum(bool(given & self._held.keys()) for given in self._aside)

    @property
    def has_room(self) -> bool:
        """Whether the prefetch allows another message."""
        aside = len(set().union(*self._aside)) if self._aside else 0
        return len(self._held) - aside < self._prefetch

    def take(self, message: Message) -> None:
        task = self._loop.create_task(self._process(message))
        self._held[task] = message
        task.add_done_callback(self._let_go)
        if message.redelivered:
            self._in_the_way.add(task)
            if 4 * len(self._in_the_way) >= 3 * self._prefetch:
                self._aside.append({*self._held}.difference(*self._aside))
                self._in_the_way.clear()

    def _let_go(self, task: "asyncio.Task[None]") -> None:
        self._held.pop(task, None)
        self._in_the_way.discard(task)
        for given in self._aside:
            given.discard(task)
        self._queue.hand_out()

    async def _process(self, message: Message) -> None:
        if message.redelivered:
            # The previous worker has ended, and does not answer.
            await asyncio.sleep(self._redelivery_wait)
        delivery = make_delivery(
            message.key,
            session=_SESSION,
            clock=self._loop.time,
            attempts=message.attempts,
            scheduled_at=message.scheduled_at,
            first_delivered_at=self._loop.time(),
        )
        request = SendRequest.model_construct(to=message.key, sender=message.sender, text="x")
        outcome = await post_when_allowed(self._account, self.pauses, delivery, request)
        delivery.free_slot()
        match outcome:
            case Sent():
                self._queue.sent += 1
            case Retried(delay_seconds=seconds, counted=counted):
                again = message._replace(
                    attempts=message.attempts + counted, scheduled_at=delivery.envelope.scheduled_at
                )
                self._queue.put_back(again, seconds=seconds)
            case Dead():
                self._queue.dead += 1
