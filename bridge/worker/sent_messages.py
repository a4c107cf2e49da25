"""Which messages were accepted lately, here and by peers, and how: what makes another one a repeat.

Of a message that was sent again after the window the last acceptance counts.
"""

import math
import struct
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final, NamedTuple

from bridge.ttl_cache import TtlCache

# How long a message that was sent here, or replaced by a copy, is known by its id.
SENT_SECONDS: Final = 900.0
# Of more, the newest are known: of what was sent here, and of what peers have sent.
LEAST_OWN: Final = 100_000
LEAST_TOLD: Final = 200_000
# By so much the ages may differ that are told of one acceptance, by several or again.
TOLD_AGAIN_SECONDS: Final = 1.0


class Accepted(NamedTuple):
    """How a message was accepted: what a repeat of it is answered. `at` is in unix seconds."""

    attempts: int
    status: int
    provider_id: str | None
    at: float


_NUMBERS: Final = struct.Struct(">QHd")


def _pack(accepted: Accepted) -> bytes:
    # There are many, and this is half of what the tuple takes.
    numbers = _NUMBERS.pack(accepted.attempts, accepted.status, accepted.at)
    return numbers + (accepted.provider_id or "").encode()


def _unpack(packed: bytes) -> Accepted:
    attempts, status, at = _NUMBERS.unpack_from(packed)
    return Accepted(attempts, status, packed[_NUMBERS.size :].decode() or None, at)


class SentMessages:
    """Remembers acceptances by the digest of the message; bounded in entries and in time.

    `window_seconds`: for how long one that was published again is a repeat; None is
    `SENT_SECONDS`. What the broker delivers again is known for `SENT_SECONDS` in any case.
    """

    def __init__(self, clock: Callable[[], float], *, window_seconds: float | None = None) -> None:
        self._window_seconds = SENT_SECONDS if window_seconds is None else window_seconds
        own_seconds = max(SENT_SECONDS, self._window_seconds)
        self._own = TtlCache(own_seconds, clock, min_size=LEAST_OWN)
        self._told = TtlCache(self._window_seconds, clock, min_size=LEAST_TOLD)

    def __contains__(self, message: bytes) -> bool:
        """Say whether a message was accepted here."""
        return self._own.get(message) is not None

    def add(self, message: bytes, accepted: Accepted) -> None:
        """Remember what was accepted here."""
        self._own.add(message, _pack(accepted))

    def is_any_younger_than(self, seconds: float) -> bool:
        """Say whether anything was accepted here so lately."""
        return self._own.is_any_younger_than(seconds)

    def learn(self, message: bytes, attempts: int, status: int, at: float, age: float) -> None:
        """Remember what a peer says was accepted there: at which moment, so many seconds ago."""
        if self._told.get(message, within_seconds=age + TOLD_AGAIN_SECONDS) is None:
            self._told.add(message, _NUMBERS.pack(attempts, status, at), age_seconds=age)

    def own(self, message: bytes) -> Accepted | None:
        """Return how a message was accepted here within the window."""
        packed = self._own.get(message, within_seconds=self._window_seconds)
        return None if packed is None else _unpack(packed)

    def find(self, message: bytes, *, redelivered: bool) -> Accepted | None:
        """Return how the first was accepted of which another delivery is a repeat."""
        window = math.inf if redelivered else self._window_seconds
        packed = self._own.get(message, within_seconds=window)
        if packed is None:
            packed = self._told.get(message)
        return None if packed is None else _unpack(packed)

    def latest(self, most: int) -> Iterator[tuple[bytes, Accepted]]:
        """Return the last that were accepted, here and by peers, the newest first.

        They are looked up as they are taken, which is most of what they cost.
        """
        both = [*self._own.latest(most), *self._told.latest(most)]
        # By the moment. What is in order already, as most of it is, costs little.
        both.sort(key=itemgetter(0), reverse=True)
        window = self._window_seconds
        found = (
            (message, packed)
            for _, message in both[:most]
            # Sent here and by a peer, each has its own moment; some are forgotten by then.
            for packed in (self._own.get(message, within_seconds=window), self._told.get(message))
            if packed is not None
        )
        return ((message, _unpack(packed)) for message, packed in found)
