"""A simulated fanout exchange, which delays and loses messages."""

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from bridge.errors import BrokerError
from bridge.worker.cluster.exchange import JOIN_AGAIN_SECONDS
from bridge.worker.cluster.membership import TICK_SECONDS, Coordination, Membership, Part
from bridge.worker.cluster.messages import Message, read_message
from bridge.worker.metrics import WorkerMetrics

LATENCY_SECONDS: Final = 0.002


class _Wire:
    is_blocked = False


class Exchange:
    """Delivers the messages of each worker to all others, after up to twice the latency."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        seed: int = 1,
        latency_seconds: float = LATENCY_SECONDS,
        spread: tuple[float, float] = (0.5, 2),
    ) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.members: list[Member] = []
        self.carried = 0
        self._latency_seconds = latency_seconds
        self._spread = spread
        # Messages of one worker stay in order.
        self._under_way: dict[str, deque[tuple[bytes, str | None]]] = defaultdict(deque)
        # Decides which messages are lost, by sender and message.
        self.loses: Callable[[str, Message], bool] = lambda _sender, _message: False
        self.published: list[tuple[str, Message]] = []

    def carry(self, body: bytes, queue: str | None) -> None:
        """Deliver a message to all workers, including the sender, or to one worker's queue."""
        read = read_message(body)
        assert read is not None
        self.published.append(read)
        del self.published[:-100_000]
        if self.loses(*read):
            return
        self.carried += len(self.members) if queue is None else 1
        self._under_way[read[0]].append((body, queue))
        seconds = self._latency_seconds * self.chance.uniform(*self._spread)
        self.loop.call_later(seconds, self._hand_out, read[0])

    def _hand_out(self, sender: str) -> None:
        body, queue = self._under_way[sender].popleft()
        for member in self.members:
            if queue in {None, member.queue}:
                member.cluster.receive(body)


class Member:
    """A worker's connection to the simulated exchange, instead of `ClusterExchange`."""

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        parts: Sequence[Part],
        metrics: WorkerMetrics,
    ) -> None:
        self.membership = membership
        self.cluster = Coordination(membership, parts, metrics=metrics)
        self._exchange = exchange

    @property
    def queue(self) -> str:
        """Name of the worker's queue."""
        return self.membership.queue_name(self.membership.worker_id, self.membership.joins)

    def join(self) -> None:
        """Start to receive and publish."""
        self._exchange.members.append(self)
        self.membership.joins += 1
        self.cluster.join(_Wire())

    def fall_silent(self) -> None:
        """Stop receiving and publishing, like a killed worker."""
        self.membership.lose()
        if self in self._exchange.members:
            self._exchange.members.remove(self)

    async def keep_publishing(self) -> None:
        """Publish without delay until cancelled."""
        while True:
            while (unpublished := self.membership.next_unpublished()) is not None:
                self._exchange.carry(*unpublished)
            await self.membership.until_unpublished(3600)

    async def keep_ticking(self) -> None:
        """Tick every second until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS * self._exchange.chance.uniform(0.99, 1.05))
            if not self.membership.is_up:
                continue
            try:
                self.cluster.tick()
            except BrokerError:
                # Like a worker that has lost too many messages in a row.
                self.fall_silent()
                await asyncio.sleep(JOIN_AGAIN_SECONDS)
                self.join()


def start(coroutine: Coroutine[Any, Any, Any], tasks: "set[asyncio.Task[Any]]") -> None:
    """Run a coroutine in a task, and keep a reference."""
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
