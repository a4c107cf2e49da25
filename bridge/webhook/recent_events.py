"""Recognises repeated events, so that each event is published once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from bridge.amqp.publication import Publication
from bridge.ttl_cache import TtlCache

# Guaranteed number of remembered events. They take less than 24 MiB.
LEAST_RECENT_EVENTS: Final = 100_000


class RecentEvents:
    """Lets each event through once: a repeat waits for the first publish, or finds it remembered.

    An event whose confirm is late stays in flight, because the broker may still store it. It is
    published again only if the broker refuses it or the channel ends. The publisher bounds the
    events in flight; `LEAST_RECENT_EVENTS` and the window bound the remembered ones. An event
    without a key is always let through.
    """

    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_flight: dict[bytes, asyncio.Future[bool]] = {}
        self._published = TtlCache(window_seconds, clock, min_size=LEAST_RECENT_EVENTS)

    async def once(
        self, key: bytes | None, write: Callable[[], Awaitable[Publication]], *, deadline: float
    ) -> bool:
        """Publish with `write()` unless the key was published before; return whether it was new.

        `deadline` is a time of the event loop's clock. Raises PublishError, or TimeoutError if an
        earlier publish with the key is still unconfirmed at the deadline.
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
        """Whether an event with this key is published but not confirmed."""
        return key in self._in_flight

    def is_remembered(self, key: bytes | None) -> bool:
        """Whether an event with this key was published within the window."""
        return key is not None and self._published.get(key) is not None

    def follow(self, key: bytes | None, publication: Publication) -> None:
        """Make repeats wait for this publication, and remember the key once it is confirmed.

        No event with the key may be in flight.
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
