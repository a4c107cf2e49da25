"""Who is connected to a listener, what their requests take up, and who has to go for others.

Places and memory are bounded, and strangers may ask for any number of both. Whoever has sent a
whole request is answered; of all others the one that has waited longest goes first.
"""

import asyncio
from typing import Generic, Literal, Protocol, TypeVar

from bridge.http_server.limits import Limits

# Why a connection had to go: no place for a newcomer, or no room in memory.
Eviction = Literal["connections", "memory"]


class Occupant(Protocol):
    """A connection, as far as it takes up something."""

    # What its requests take up.
    held_bytes: int
    # When it came into the line in which it stands, a time of the event loop.
    since: float

    def evict(self, cause: Eviction) -> None:
        """Make room at once."""


OccupantT = TypeVar("OccupantT", bound=Occupant)


class Occupancy(Generic[OccupantT]):
    """The connections of one listener, and the requests that it is answering.

    Each connection tells it of every change: that it comes and goes, in which line it waits, what
    its requests take up.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.connections: set[OccupantT] = set()
        # Those that may have to go, each in one of these lines, the one that came into it first in
        # front: nothing of a request has come; the same, but the client has been answered with
        # success before; a request has begun and is not complete. One whose request is complete is
        # in none.
        self.silent: dict[OccupantT, None] = {}
        self.trusted: dict[OccupantT, None] = {}
        self.receiving: dict[OccupantT, None] = {}
        # Each answers one request.
        self.tasks: set[asyncio.Task[None]] = set()
        self.held_bytes = 0
        # Whether each response is the last of its connection.
        self.is_draining = False
        self._is_closed = False
        # Set when the last connection and the last task are gone after `close`.
        self.is_over = asyncio.Event()

    def drain(self) -> None:
        """Let nobody stay for another request; newcomers may still come for one."""
        self.is_draining = True

    def close(self) -> None:
        """Note that no newcomer can come any more."""
        self._is_closed = True
        self.check_end()

    def admit(self, newcomer: OccupantT) -> bool:
        """Give a newcomer a place; when there is none, the one that waited longest has to go.

        Returns False when nobody can be sent away, because all are being answered.
        """
        if len(self.connections) >= self._limits.max_connections:
            longest = self._find_longest()
            if longest is None:
                return False
            longest.evict("connections")
        self.connections.add(newcomer)
        return True

    def _find_longest(self) -> OccupantT | None:
        """Find who has waited longest; strangers must not drive out trusted clients."""
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

        When it is too much, those that began first have to go, unless they are complete: whoever
        has sent a whole request is answered.
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
        if self._is_closed and not self.connections and not self.tasks:
            self.is_over.set()
