"""Workers of one queue on a clock that leaps: all but queue, exchange and service is the real code.

Simulated are the queue with its retry ladder, the exchange on which the workers speak, and the SMS
service, which answers after some milliseconds and remembers when what was posted.
"""

import asyncio
import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple, cast

from bridge.config import RateLimitSettings, WorkerSettings
from bridge.metrics import new_registry
from bridge.outbound.delivery import Delivery
from bridge.outbound.dispatch import Dispatcher
from bridge.outbound.fates import Answer, judge_failure, judge_status
from bridge.outbound.limits.capacity import Capacity
from bridge.outbound.metrics import WorkerMetrics
from bridge.outbound.outcomes import Dead, Policy, Retried, Sent
from bridge.outbound.pausing.pace import Pace
from bridge.outbound.peers.exchange import ACQUAINTING_SECONDS, ALONE_SECONDS, Peers
from bridge.outbound.peers.joint_pause import JointPause
from bridge.outbound.peers.sharing import Sharing
from bridge.outbound.posting.sender import Sender
from bridge.outbound.request import SendRequest
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery
from tests.simulation.exchange import Exchange, SimulatedPeers, start

POST_SECONDS: Final = 0.02
SETUP: Final = "00" * 8


class Post(NamedTuple):
    """One request: when it left, and when the service saw it come in."""

    at: float
    arrived_at: float
    worker: int
    status: int
    sender: str


class Message(NamedTuple):
    """One message, and what its copies say of it."""

    key: str
    sender: str
    attempts: int = 0
    turn_at: float | None = None
    redelivered: bool = False


class Service:
    """The SMS service; `answer` says what a worker hears at a moment, None for no connection."""

    def __init__(self) -> None:
        self.answer: Callable[[int, float], tuple[int, float | None] | None] = lambda *_: (
            200,
            None,
        )
        self.posts: list[Post] = []
        # How long a request is on its way.
        self.way_seconds: Callable[[], float] = lambda: 0.0

    async def take(self, worker: int, sender: str) -> Answer:
        """Answer a request of a worker."""
        now = asyncio.get_running_loop().time()
        said = self.answer(worker, now)
        await asyncio.sleep(POST_SECONDS)
        if said is None:
            return judge_failure("connect_failed")
        status, retry_after = said
        self.posts.append(Post(now, now + self.way_seconds(), worker, status, sender))
        return judge_status(status, retry_after_seconds=retry_after)


class Queue:
    """A quorum queue that gives each consumer as many messages as its prefetch, in turn.

    It goes on counting a consumer that is cancelled while what it was given is not acked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[Message] = deque()
        self._consumers: deque[Worker] = deque()
        self._serials = itertools.count(1)
        self.dead = 0

    @property
    def ready(self) -> int:
        """How many messages wait."""
        return len(self._ready)

    @property
    def consumers(self) -> int:
        """How many consumers it counts."""
        return len(self._consumers) + sum(one.cancelled_consumers for one in self._consumers)

    def publish(self, number: int, sender: str = "A") -> None:
        """Put messages into the queue."""
        self._ready.extend(Message(f"m{next(self._serials)}", sender) for _ in range(number))
        self.hand_out()

    def put_back(self, message: Message, *, seconds: float = 0) -> None:
        """Have a message come again after some time."""
        if seconds:
            self._loop.call_later(seconds, self.put_back, message)
        else:
            self._ready.append(message)
            self.hand_out()

    def redeliver(self, messages: Iterable[Message]) -> None:
        """Give others what a worker held that is gone."""
        self._ready.extendleft(message._replace(redelivered=True) for message in messages)
        self.hand_out()

    def register(self, worker: "Worker", *, is_consumer: bool) -> None:
        """Make a worker a consumer, or none."""
        if is_consumer and worker not in self._consumers:
            self._consumers.append(worker)
        elif not is_consumer and worker in self._consumers:
            self._consumers.remove(worker)

    def hand_out(self) -> None:
        """Give what waits to those who have room."""
        idle = 0
        while self._ready and idle < len(self._consumers):
            worker = self._consumers[0]
            self._consumers.rotate(-1)
            if worker.has_room:
                worker.take(self._ready.popleft())
                idle = 0
            else:
                idle += 1


class Worker:
    """One worker: what `bridge.outbound.worker` does with the same objects, without a broker."""

    def __init__(
        self, world: "World", number: int, settings: WorkerSettings, setup: str = SETUP
    ) -> None:
        loop = world.loop
        self.number = number
        self._world = world
        metrics = WorkerMetrics(
            new_registry(), queue="q", retry_queues=["q.retry.5s"], dead="q.dead"
        )
        self.pace = Pace(
            settings.rate_limit,
            policy=Policy.of(settings),
            outage_after_seconds=settings.outage_after,
            metrics=metrics,
            clock=loop.time,
        )
        self.peers = SimulatedPeers(world.exchange)
        peers = cast("Peers", self.peers)
        self.setup = setup
        self.joint_pause = JointPause(
            self.pace,
            peers,
            setup=lambda: self.setup,
            can_take=lambda: self.can_take,
            turn_seconds=settings.retry_delays[0],
            clock=loop.time,
        )
        self.sharing = Sharing(
            "q",
            self.pace,
            peers,
            is_registered=lambda: self._prefetch > 0,
            cancelled_consumers=lambda: self.cancelled_consumers,
            clock=loop.time,
        )
        self._capacity = Capacity(settings, changed=self.pace.changed, clock=loop.time)
        self._dispatcher = Dispatcher(
            settings,
            sender=cast("Sender", self),
            pace=self.pace,
            capacity=self._capacity,
            metrics=metrics,
            now=loop.time,
            clock=loop.time,
        )
        self.can_take = True
        self._prefetch = 0
        self._held: dict[asyncio.Task[None], Message] = {}
        # Redeliveries that wait for answers of peers: in the way, or what a consumer was given that
        # has been cancelled so that others come beside them.
        self._in_the_way: set[asyncio.Task[None]] = set()
        self._aside: list[set[asyncio.Task[None]]] = []
        self._redelivery_wait = settings.redelivery_wait
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    # What the dispatcher sees of the sender

    async def send(self, request: SendRequest, _delivery: Delivery) -> Answer:
        """POST a request."""
        return await self._world.service.take(self.number, request.sender)

    # Life

    async def run(self) -> None:
        """Join, and consume until cancelled."""
        is_first = not self._world.exchange.members
        self.peers.join()
        start(self.peers.keep_beating(), self._tasks)
        await asyncio.sleep(ALONE_SECONDS if is_first else ACQUAINTING_SECONDS)
        if self.pace.rates.is_shared:
            start(self.sharing.follow(self._count), self._tasks)
        while True:
            self._register()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await self.pace.changed.wait()
            self.pace.changed.clear()

    def stop(self) -> None:
        """Drain: take and send nothing new, give back what waits, let the rest end."""
        self._is_stopping = True
        self.joint_pause.leave()
        self.sharing.leave()
        self._dispatcher.stop()
        self._register()
        for task, message in list(self._held.items()):
            task.cancel()
            self._world.queue.put_back(message)
        self._world.loop.call_later(1, self.kill)

    def kill(self) -> None:
        """End at once; the broker gives what it held to others."""
        self._is_stopping = True
        self.peers.leave()
        self._world.queue.register(self, is_consumer=False)
        held = [message for task, message in self._held.items() if not task.done()]
        for task in [*self._tasks, *self._held]:
            task.cancel()
        self._held.clear()
        self._world.queue.redeliver(held)

    async def _count(self) -> int:
        await asyncio.sleep(0.005)
        return self._world.queue.consumers

    def _register(self) -> None:
        self._prefetch = 0 if self._is_stopping else self._wanted()
        self._world.queue.register(self, is_consumer=self._prefetch > 0)
        self.sharing.tell()
        self._world.queue.hand_out()

    def _wanted(self) -> int:
        if not self.can_take:
            return 0
        self.pace.reopen()
        if self.pace.paused:
            return self.pace.probes_wanted
        return self.pace.rates.most_held(self._capacity.most_held)

    # Messages

    @property
    def cancelled_consumers(self) -> int:
        """How many consumers of it have been cancelled and have something to ack."""
        return sum(bool(given & self._held.keys()) for given in self._aside)

    @property
    def has_room(self) -> bool:
        """Whether the prefetch is not used up."""
        return len(self._held) - len(set().union(*self._aside)) < self._prefetch

    def take(self, message: Message) -> None:
        """Process a message."""
        task = self._world.loop.create_task(self._process(message))
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
        self._world.queue.hand_out()

    async def _process(self, message: Message) -> None:
        if message.redelivered:
            # The worker that had it is gone, and its answer does not come.
            await asyncio.sleep(self._redelivery_wait)
        delivery = make_delivery(
            message.key,
            session=_SESSION,
            clock=self._world.loop.time,
            attempts=message.attempts,
            turn_at=message.turn_at,
            first_delivered_at=self._world.loop.time(),
        )
        request = SendRequest.model_construct(to=message.key, sender=message.sender, text="x")
        outcome = await self._dispatcher.outcome_of(delivery, request)
        match outcome:
            case Sent():
                self._world.sent += 1
            case Retried(delay_seconds=seconds, burned=burned):
                again = message._replace(
                    attempts=message.attempts + burned, turn_at=delivery.envelope.turn_at
                )
                self._world.queue.put_back(again, seconds=seconds)
            case Dead():
                self._world.queue.dead += 1


class _Session:
    is_over = False
    is_leaving = False
    is_closed = False

    @property
    def channel(self) -> "_Session":
        return self


_SESSION: Final = _Session()


class World(LeapingWorld):
    """A queue, a service, and workers that come and go; times are since the begin.

    On a busy machine timers and requests are `late_seconds` late, on average.
    """

    def __init__(
        self,
        *,
        seed: int = 1,
        limit: dict[str, Any] | None = None,
        late_seconds: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.began = self.loop.time()
        self.exchange = Exchange(self.loop, seed=seed)
        self.queue = Queue(self.loop)
        self.service = Service()
        if late_seconds:
            chance = random.Random(seed)
            self.loop.late_seconds = lambda: chance.expovariate(1 / late_seconds)
            self.service.way_seconds = lambda: chance.expovariate(1 / late_seconds)
        self.settings = WorkerSettings(
            queue="q", rate_limit=RateLimitSettings(**(limit or {})), **settings
        )
        self.workers: list[Worker] = []
        self.sent = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count()

    @property
    def now(self) -> float:
        """The time."""
        return self.loop.time() - self.began

    def start(self, number: int = 1, *, setup: str = SETUP) -> "list[Worker]":
        """Start workers; the loop has to run."""
        fresh = [Worker(self, next(self._numbers), self.settings, setup) for _ in range(number)]
        for worker in fresh:
            start(worker.run(), worker._tasks)
        self.workers += fresh
        return fresh

    def scale(self, number: int, *, kill: bool = False) -> None:
        """Have so many workers run."""
        while len(self.workers) > number:
            worker = self.workers.pop()
            worker.kill() if kill else worker.stop()
        self.start(number - len(self.workers))

    def play(self, story: Coroutine[Any, Any, None]) -> None:
        """Play a story, then end all workers."""

        async def whole() -> None:
            await story
            for worker in self.workers:
                worker.kill()
            await asyncio.sleep(0)

        self.run(whole())

    def posts(self, status: int | None = None) -> list[float]:
        """Return when requests came in, those that were answered so."""
        return sorted(
            post.at - self.began
            for post in self.service.posts
            if status is None or post.status == status
        )
