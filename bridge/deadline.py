"""Waits with a limit: for an event, and for libraries that swallow a cancellation.

`asyncio.timeout` cancels only once. `asyncio.wait_for` of Python 3.11 drops a cancellation that
arrives together with its result, and aiormq replaces one by the error of a channel that ends at
the same moment. The rest of the block would then run without a limit.
"""

import asyncio
from types import TracebackType
from typing import Final, Self

# Gives a cancelled block time to clean up before it is cancelled again.
CANCEL_AGAIN_SECONDS: Final = 1.0


async def wait_at_most(seconds: float | None, event: asyncio.Event) -> bool:
    """Wait for an event, or for `seconds`; return False if the time has passed."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Deadline:
    """Ends its block with TimeoutError after `seconds`: `async with Deadline(3.0): ...`.

    Cancels the block again every second until it ends. A block that ends by itself keeps its
    result or error. If the block swallowed a cancellation from outside, it is raised at the end.
    """

    __slots__ = ("_before", "_cancels", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._cancels = 0
        self._before = 0
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task")
        self._task, self._before = task, task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self._cancel)
        return self

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancels += 1
            self._task.cancel()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CANCEL_AGAIN_SECONDS, self._cancel)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if task is None or self._timer is None:
            return
        self._timer.cancel()
        for _ in range(self._cancels):
            task.uncancel()
        if task.cancelling() > self._before:
            if error is None or isinstance(error, Exception):
                raise asyncio.CancelledError from error
        elif self._cancels and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error
