"""The newest value of each key, of so many keys that it matters how they are kept.

They are in a few dictionaries, each filled after the other and dropped as a whole. A single one
whose oldest goes for each new one is made anew again and again: of 100,000 that takes the event
loop several milliseconds, and the memory of two.
"""

import itertools
import math
import struct
from collections.abc import Callable
from typing import Final

# So many full ones hold the fewest values that are remembered; one more is being filled.
FULL: Final = 4

# Since when a value is known stands before it: an object for each time would be a tenth more, and
# a tuple of both be visited by each search for garbage.
_SINCE: Final = struct.Struct(">d")


class Generations:
    """Values by key, both bytes, for `seconds`; of more than `least` the oldest may be forgotten.

    There are half more than `least` at most. What is over is let go a quarter of its time later,
    when another one is added. Times are of `clock`.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], *, least: int) -> None:
        self._seconds = seconds
        self._clock = clock
        self._least = least
        # The newest first. It is being filled; the others have ended.
        self._all: list[dict[bytes, bytes]] = [{}]
        self._begun_at = self._added_at = clock()
        # When the last value was added to each of the others.
        self._ended_at: list[float] = []

    def add(self, key: bytes, value: bytes, *, age_seconds: float = 0.0) -> None:
        """Remember a value instead of the key's last one; it is known for so long already."""
        now = self._clock()
        is_full = len(self._all[0]) * FULL >= self._least
        if is_full or now - self._begun_at >= self._seconds / FULL:
            self._begin(now)
        self._added_at = now
        filling = self._all[0]
        filling.pop(key, None)  # the new value is behind all others
        filling[key] = _SINCE.pack(now - age_seconds) + value

    def get(self, key: bytes, *, within_seconds: float = math.inf) -> bytes | None:
        """Return the value of a key, if it is known for less than that."""
        for values in self._all:
            if key in values:
                found = values[key]
                is_known = self._age(found) < min(within_seconds, self._seconds)
                return found[_SINCE.size :] if is_known else None
        return None

    def is_any_younger_than(self, seconds: float) -> bool:
        """Say whether the value that was added last is known for less than that."""
        return any(self._clock() - since < seconds for since, _ in self.latest(1))

    def latest(self, most: int) -> list[tuple[float, bytes]]:
        """Return so many keys that were added last, the last one first, each since it is known."""
        added: list[tuple[bytes, bytes]] = []
        for values in self._all:
            added += itertools.islice(reversed(values.items()), most - len(added))
        limit, since = self._clock() - self._seconds, _SINCE.unpack_from
        return [(at, key) for key, found in added if (at := since(found)[0]) > limit]

    def _age(self, found: bytes) -> float:
        since: float = _SINCE.unpack_from(found)[0]
        return self._clock() - since

    def _begin(self, now: float) -> None:
        """Begin another one, and drop those that are not needed beside the newer ones."""
        self._all.insert(0, {})
        self._ended_at.insert(0, self._added_at)
        self._begun_at = now
        while self._ended_at and (
            now - self._ended_at[-1] >= self._seconds
            or sum(map(len, self._all[:-1])) >= self._least
        ):
            del self._all[-1], self._ended_at[-1]
