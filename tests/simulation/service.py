"""The SMS service: it answers after some milliseconds, and remembers when what was posted."""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from bridge.worker.fates import Answer, judge_failure, judge_status

POST_SECONDS: Final = 0.02


class Post(NamedTuple):
    """One request: when it left, and when the service saw it come in."""

    at: float
    arrived_at: float
    worker: int
    status: int
    sender: str


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
