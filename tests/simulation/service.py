"""The simulated SMS service, which answers after some milliseconds and records all POSTs."""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from bridge.worker.fates import Answer, judge_failure, judge_status

POST_SECONDS: Final = 0.02


class Post(NamedTuple):
    """A request: when the worker sent it, and when the service received it."""

    at: float
    arrived_at: float
    worker: int
    status: int
    sender: str


class Service:
    """The SMS service. `answer` returns the answer at a time, or None for no connection."""

    def __init__(self) -> None:
        self.answer: Callable[[int, float], tuple[int, float | None] | None] = lambda *_: (
            200,
            None,
        )
        self.posts: list[Post] = []
        # Latency of a request.
        self.way_seconds: Callable[[], float] = lambda: 0.0

    async def take(self, worker: int, sender: str) -> Answer:
        """Answer a worker's request."""
        now = asyncio.get_running_loop().time()
        said = self.answer(worker, now)
        await asyncio.sleep(POST_SECONDS)
        if said is None:
            return judge_failure("connect_failed")
        status, retry_after = said
        self.posts.append(Post(now, now + self.way_seconds(), worker, status, sender))
        return judge_status(status, retry_after_seconds=retry_after)
