"""Workers of one queue that come and go, on a clock that leaps: their code is the real one.

Simulated are the queue, the exchange on which they speak, and the SMS service.
"""

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any, Final

from bridge.config import RateLimitSettings, WorkerSettings
from tests.clock import LeapingWorld
from tests.simulation.exchange import Exchange, start
from tests.simulation.queue import Queue
from tests.simulation.service import Service
from tests.simulation.worker import Worker

SETUP: Final = "00" * 8


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
        # What the workers themselves leave to chance.
        random.seed(seed)
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
        self._numbers = itertools.count()

    @property
    def sent(self) -> int:
        """How many messages have been sent."""
        return self.queue.sent

    @property
    def now(self) -> float:
        return self.loop.time() - self.began

    def start(self, number: int = 1, *, setup: str = SETUP) -> list[Worker]:
        """Start workers; the loop has to run."""
        fresh = [
            Worker(
                next(self._numbers),
                self.settings,
                setup,
                exchange=self.exchange,
                queue=self.queue,
                service=self.service,
            )
            for _ in range(number)
        ]
        for worker in fresh:
            start(worker.run(), worker.tasks)
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
