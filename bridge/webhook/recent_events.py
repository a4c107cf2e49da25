"""Recognises repeated events, so that each is published once however often it is delivered."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from bridge.amqp.publication import Publication
from bridge.ttl_cache import Generations

# Of more events the newest are remembered; with their keys these take less than 24 MiB.
LEAST_RECENT_EVENTS: Final = 100_000


class RecentEvents:
    """Lets an event through once: repeats wait for the first, and are remembered for a while.

    An event without a confirm at its deadline stays in flight here, because the broker may still
    store it: it is published anew only when the broker has refused it or its channel has ended. The
    publisher bounds how many are in flight; `LEAST_RECENT_EVENTS` and the window bound how many are
    remembered. An event without a key is let through each time.
    """

    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_flight: dict[bytes, asyncio.Future[bool]] = {}
        self._published = Generations(window_seconds, clock, least=LEAST_RECENT_EVENTS)

    async def once(
        self, key: bytes | None, write: Callable[[], Awaitable[Publication]], *, deadline: float
    ) -> bool:
        """Publish with `write()` unless that was done for this key; return whether it was done now.

        `deadline` is a time of the event loop. Raises PublishError, or TimeoutError when an earlier
        publish with the key has no confirm by then.
        """
        if key is None:
            publication = await write()
            await publication.stored(deadline)
            return True
        while (earlier := self._in_flight.get(key)) is not None:
            async with asyncio.timeout_at(deadline):
                if await asyncio.shield(earlier):
                    return False
        if self.is_remembered(key):
            return False
        await self._first(key, write, deadline)
        return True

    def is_in_flight(self, key: bytes | None) -> bool:
        """Whether an event with this key was written, and has no confirm yet."""
        return key in self._in_flight

    def is_remembered(self, key: bytes | None) -> bool:
        """Whether an event with this key was published within the window."""
        return key is not None and self._published.get(key) is not None

    def follow(self, key: bytes | None, publication: Publication) -> None:
        """Have repeats wait for what was written, and remember it when it is stored.

        None of them may be in flight.
        """
        if key is not None:
            self._in_flight[key] = asyncio.get_running_loop().create_future()
            publication.when_known(partial(self._end, key))

    async def _first(
        self, key: bytes, write: Callable[[], Awaitable[Publication]], deadline: float
    ) -> None:
        self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            publication = await write()
        except BaseException:
            self._end(key, False)
            raise
        publication.when_known(partial(self._end, key))
        await publication.stored(deadline)

    def _end(self, key: bytes, is_stored: bool) -> None:  # noqa: FBT001  as it is told
        if is_stored:
            self._published.add(key, b"")
        self._in_flight.pop(key).set_result(is_stored)
