"""Which connections a listener has, how much memory they use, and which one is evicted for others.

Connections and memory are bounded, but strangers may ask for any amount of both. A connection that
has sent a whole request is always answered; of all others, the one that has waited longest is
evicted first.
"""

import asyncio
from typing import Generic, Protocol, TypeVar

from bridge.http.messages import Response
from bridge.http.service import Eviction, Limits


class Occupant(Protocol):
    """What the occupancy needs to know of a connection."""

    # The memory of its unanswered requests.
    held_bytes: int
    # When it joined its line, a time of the event loop.
    since: float

    def evict(self, cause: Eviction) -> None:
        """Close at once to make room."""


OccupantT = TypeVar("OccupantT", bound=Occupant)


class Occupancy(Generic[OccupantT]):
    """The connections of one listener, and the requests that it is answering.

    Each connection reports every change: that it opens or closes, in which line it waits, how much
    memory its requests use.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.connections: set[OccupantT] = set()
        # The connections that may be evicted, each in one of three lines, the first to join it in
        # front. `silent`: nothing of a request has arrived. `trusted`: the same, but an earlier
        # request was answered with success. `receiving`: a request has begun and is not complete. A
        # connection whose request is complete is in none.
        self.silent: dict[OccupantT, None] = {}
        self.trusted: dict[OccupantT, None] = {}
        self.receiving: dict[OccupantT, None] = {}
        # The answers that are to come.
        self.answers: set[asyncio.Future[Response]] = set()
        self.held_bytes = 0
        # Whether each response is the last of its connection.
        self.is_draining = False
        self._is_closed = False
        # Set when the last connection is gone, and the last answer has come, after `close`.
        self.is_over = asyncio.Event()

    def drain(self) -> None:
        """Close each connection after its next response; new ones are still accepted."""
        self.is_draining = True

    def close(self) -> None:
        """Note that no new connection can come any more."""
        self._is_closed = True
        self.check_end()

    def admit(self, newcomer: OccupantT) -> bool:
        """Give a new connection a place; when there is none, evict the one that has waited longest.

        Returns False when none can be evicted, because all are being answered.
        """
        if len(self.connections) >= self._limits.max_connections:
            longest = self._find_longest()
            if longest is None:
                return False
            longest.evict("connections")
        self.connections.add(newcomer)
        return True

    def _find_longest(self) -> OccupantT | None:
        """Find the connection that has waited longest; strangers must not evict trusted clients."""
        first = [next(iter(line)) for line in (self.silent, self.receiving) if line]
        if first:
            return min(first, key=lambda connection: connection.since)
        return next(iter(self.trusted), None)

    def forget(self, connection: OccupantT) -> None:
        """Note that a connection is gone."""
        self.connections.discard(connection)
        self.check_end()

    def count(self, change_bytes: int) -> None:
        """Note that requests take up more memory, or less when `change_bytes` is negative.

        Above the limit, incomplete requests are evicted, the first to begin first; a connection
        that has sent a whole request is always answered.
        """
        self.held_bytes += change_bytes
        while change_bytes > 0 and self.held_bytes > self._limits.max_buffered_bytes:
            first = next((each for each in self.receiving if each.held_bytes), None)
            if first is None:
                break
            first.evict("memory")

    def is_crowded_for(self, connection: OccupantT) -> bool:
        """Whether the requests of others that are being answered take up all the memory."""
        others_bytes = self.held_bytes - connection.held_bytes
        return others_bytes >= self._limits.max_buffered_bytes

    def check_end(self) -> None:
        """Set `is_over` when nothing is left to do."""
        if self._is_closed and not self.connections and not self.answers:
            self.is_over.set()
