"""A TTL cache of the messages that the SMS service has accepted, here and at other workers.

It recognises repeats, and answers them as the original was answered. If a message was sent again
after the deduplication window, the last acceptance counts.
"""

import math
import struct
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final, NamedTuple

from bridge.ttl_cache import TtlCache

# How long a message that was sent or replaced here is recognised by its id.
SENT_SECONDS: Final = 900.0
# At least this many of the newest entries are kept: of messages sent here, and of messages that
# other workers reported.
LEAST_OWN: Final = 100_000
LEAST_TOLD: Final = 200_000
# The ages reported for one acceptance, by several workers or repeatedly, differ by less than this.
TOLD_AGAIN_SECONDS: Final = 1.0


class Accepted(NamedTuple):
    """How a message was accepted; repeats are answered with this. `at` is in unix seconds."""

    attempts: int
    status: int
    provider_id: str | None
    at: float


_NUMBERS: Final = struct.Struct(">QHd")


def _pack(accepted: Accepted) -> bytes:
    # Half the memory of the tuple; there are up to 450,000 of them.
    numbers = _NUMBERS.pack(accepted.attempts, accepted.status, accepted.at)
    return numbers + (accepted.provider_id or "").encode()


def _unpack(packed: bytes) -> Accepted:
    attempts, status, at = _NUMBERS.unpack_from(packed)
    return Accepted(attempts, status, packed[_NUMBERS.size :].decode() or None, at)


class SentMessages:
    """Remembers acceptances by the digest of the message, limited in number and time.

    `window_seconds`: how long an equal message from the publisher is a repeat; None means
    `SENT_SECONDS`. Redeliveries are recognised for at least `SENT_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float], *, window_seconds: float | None = None) -> None:
        self._window_seconds = SENT_SECONDS if window_seconds is None else window_seconds
        own_seconds = max(SENT_SECONDS, self._window_seconds)
        self._own = TtlCache(own_seconds, clock, min_size=LEAST_OWN)
        self._told = TtlCache(self._window_seconds, clock, min_size=LEAST_TOLD)

    def __contains__(self, message: bytes) -> bool:
        """Whether a message was accepted here."""
        return self._own.get(message) is not None

    def add(self, message: bytes, accepted: Accepted) -> None:
        """Remember a message that was accepted here."""
        self._own.add(message, _pack(accepted))

    def is_any_younger_than(self, seconds: float) -> bool:
        """Whether any message was accepted here within the last `seconds`."""
        return self._own.is_any_younger_than(seconds)

    def learn(self, message: bytes, attempts: int, status: int, at: float, age: float) -> None:
        """Remember a message that another worker reports as accepted, `age` seconds ago."""
        if self._told.get(message, within_seconds=age + TOLD_AGAIN_SECONDS) is None:
            self._told.add(message, _NUMBERS.pack(attempts, status, at), age_seconds=age)

    def own(self, message: bytes) -> Accepted | None:
        """Return how a message was accepted here within the window."""
        packed = self._own.get(message, within_seconds=self._window_seconds)
        return None if packed is None else _unpack(packed)

    def find(self, message: bytes, *, redelivered: bool) -> Accepted | None:
        """Return how the original of a delivery was accepted; None if the delivery is no repeat."""
        window = math.inf if redelivered else self._window_seconds
        packed = self._own.get(message, within_seconds=window)
        if packed is None:
            packed = self._told.get(message)
        return None if packed is None else _unpack(packed)

    def latest(self, most: int) -> Iterator[tuple[bytes, Accepted]]:
        """Yield the last `most` acceptances, here and at other workers, the newest first.

        Values are looked up while iterating, which is most of the cost.
        """
        both = [*self._own.latest(most), *self._told.latest(most)]
        # By time. Both lists are sorted already, so sorting is cheap.
        both.sort(key=itemgetter(0), reverse=True)
        window = self._window_seconds
        found = (
            (message, packed)
            for _, message in both[:most]
            # A message sent here and by another worker is in both; either entry may have expired by
            # now.
            for packed in (self._own.get(message, within_seconds=window), self._told.get(message))
            if packed is not None
        )
        return ((message, _unpack(packed)) for message, packed in found)
