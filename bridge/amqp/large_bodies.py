"""The deadlines of publishes: large bodies go one at a time, and have more time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from bridge.amqp.wire import LARGE_BODY_BYTES, Body

# A large body gets this much more time for each of its bytes: one second for 1 MiB.
SECONDS_PER_BYTE: Final = 1 / (1024 * 1024)


class LargeBodies:
    """Lets one large body through at a time, because unread bytes take up memory."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def deadline_for(self, body: Body, seconds: float) -> AsyncIterator[float]:
        """Give the publish of a body its deadline, a time of the event loop.

        It begins when it is the body's turn; one of more than 1 MiB has a second more for each.
        """
        loop = asyncio.get_running_loop()
        if len(body) <= LARGE_BODY_BYTES:
            yield loop.time() + seconds
            return
        async with self._turn:
            yield loop.time() + seconds + len(body) * SECONDS_PER_BYTE
