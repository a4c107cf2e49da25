"""Runs real worker code of one queue in simulated time.

The queue, the workers' exchange and the SMS service are simulated.
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
    """A queue, a service and a variable number of workers. Times are relative to the start.

    Timers and requests are `late_seconds` late on average.
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
        # Random decisions of the workers.
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
        """Number of sent messages."""
        return self.queue.sent

    @property
    def now(self) -> float:
        return self.loop.time() - self.began

    def start(self, number: int = 1, *, setup: str = SETUP) -> list[Worker]:
        """Start workers. The loop must be running."""
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
        """Scale to a number of workers."""
        while len(self.workers) > number:
            worker = self.workers.pop()
            worker.kill() if kill else worker.stop()
        self.start(number - len(self.workers))

    def play(self, story: Coroutine[Any, Any, None]) -> None:
        """Run a scenario, then end all workers."""

        async def whole() -> None:
            await story
            for worker in self.workers:
                worker.kill()
            await asyncio.sleep(0)

        self.run(whole())

    def posts(self, status: int | None = None) -> list[float]:
        """Return the times of requests with this answer."""
        return sorted(
            post.at - self.began
            for post in self.service.posts
            if status is None or post.status == status
        )
