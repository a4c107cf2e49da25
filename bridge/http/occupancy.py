"""Tracks the connections of a listener and their memory, and evicts some if there are too many.

Connections and memory are limited, but untrusted clients may ask for any amount of both. A
connection that has sent a complete request is always answered; of the others, the one that has
waited longest is evicted first.
"""

import asyncio
from typing import Generic, Protocol, TypeVar

from bridge.http.listener_state import Eviction, Limits
from bridge.http.messages import Response


class Occupant(Protocol):
    """A connection, as far as the occupancy needs to know it."""

    # The memory of its unanswered requests.
    held_bytes: int
    # Event loop time when it joined its eviction queue.
    since: float

    def evict(self, cause: Eviction) -> None:
        """Close at once to make room."""


OccupantT = TypeVar("OccupantT", bound=Occupant)


class Occupancy(Generic[OccupantT]):
    """The connections of one listener, and the requests that it is answering.

    Each connection reports every change: when it opens or closes, which eviction queue it is in,
    how much memory its requests use.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.connections: set[OccupantT] = set()
        # The connections that may be evicted, in three queues with the oldest first. `silent`: no
        # part of a request has arrived. `trusted`: the same, but an earlier request was answered
        # with success. `receiving`: a request has begun and is not complete. A connection whose
        # request is complete is in no queue.
        self.silent: dict[OccupantT, None] = {}
        self.trusted: dict[OccupantT, None] = {}
        self.receiving: dict[OccupantT, None] = {}
        # Pending answers.
        self.answers: set[asyncio.Future[Response]] = set()
        self.held_bytes = 0
        # While draining, each response is the last of its connection.
        self.is_draining = False
        self._is_closed = False
        # Set after `close`, once the last connection has ended and the last answer is complete.
        self.is_over = asyncio.Event()

    def drain(self) -> None:
        """Close each connection after its next response; new ones are still accepted."""
        self.is_draining = True

    def close(self) -> None:
        """Note that no new connection can arrive."""
        self._is_closed = True
        self.end_if_empty()

    def admit(self, newcomer: OccupantT) -> bool:
        """Admit a new connection; at the limit, evict the connection that has waited longest.

        Returns False if none can be evicted, because all are being answered.
        """
        if len(self.connections) >= self._limits.max_connections:
            longest = self._find_longest()
            if longest is None:
                return False
            longest.evict("connections")
        self.connections.add(newcomer)
        return True

    def _find_longest(self) -> OccupantT | None:
        """Return the connection that has waited longest; trusted clients are evicted last."""
        first = [next(iter(line)) for line in (self.silent, self.receiving) if line]
        if first:
            return min(first, key=lambda connection: connection.since)
        return next(iter(self.trusted), None)

    def forget(self, connection: OccupantT) -> None:
        self.connections.discard(connection)
        self.end_if_empty()

    def count(self, change_bytes: int) -> None:
        """Note that requests use more memory, or less if `change_bytes` is negative.

        Above the limit, connections with incomplete requests are evicted, the oldest first; a
        connection that has sent a complete request is always answered.
        """
        self.held_bytes += change_bytes
        while change_bytes > 0 and self.held_bytes > self._limits.max_buffered_bytes:
            first = next((each for each in self.receiving if each.held_bytes), None)
            if first is None:
                break
            first.evict("memory")

    def is_crowded_for(self, connection: OccupantT) -> bool:
        """Whether the requests of other connections use up all the memory."""
        others_bytes = self.held_bytes - connection.held_bytes
        return others_bytes >= self._limits.max_buffered_bytes

    def end_if_empty(self) -> None:
        """Set `is_over` if no connection and no answer is left after `close`."""
        if self._is_closed and not self.connections and not self.answers:
            self.is_over.set()
