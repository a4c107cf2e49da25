"""A TTL cache for 100,000 keys and more, with the newest value of each key.

The cache consists of a few dictionaries (segments), which are filled one after another and dropped
as a whole. A single dictionary that loses its oldest key for each new one would be rebuilt
repeatedly; at 100,000 keys that blocks the event loop for several milliseconds and needs twice the
memory.

Keys and values are bytes, which the garbage collector does not traverse.
"""

import itertools
import math
import struct
from collections.abc import Callable
from typing import Final

# Four full segments hold the guaranteed minimum; one more is being filled.
FULL_SEGMENTS: Final = 4

# The time of a value is packed before it. A float object per value would take a tenth more memory,
# and the garbage collector would traverse a tuple of both.
_TIME: Final = struct.Struct(">d")


class TtlCache:
    """Keeps each value for `seconds`; of more than `min_size` values the oldest may be dropped.

    Holds at most 1.5 times `min_size` values. An expired value is freed up to a quarter of
    `seconds` later, or when the next value is added after that. Times are those of `clock`.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], *, min_size: int) -> None:
        self._seconds = seconds
        self._clock = clock
        self._min_size = min_size
        # The newest segment first. It is being filled; the others are closed.
        self._segments: list[dict[bytes, bytes]] = [{}]
        self._begun_at = self._added_at = clock()
        # Time of the last value of each closed segment.
        self._closed_at: list[float] = []

    def add(self, key: bytes, value: bytes, *, age_seconds: float = 0.0) -> None:
        """Store a value that is already `age_seconds` old, and replace the key's earlier value."""
        now = self._clock()
        is_full = len(self._segments[0]) * FULL_SEGMENTS >= self._min_size
        if is_full or now - self._begun_at >= self._seconds / FULL_SEGMENTS:
            self._begin_segment(now)
        self._added_at = now
        newest = self._segments[0]
        newest.pop(key, None)  # The new value goes to the end.
        newest[key] = _TIME.pack(now - age_seconds) + value

    def get(self, key: bytes, *, within_seconds: float = math.inf) -> bytes | None:
        """Return the value of a key, if it is younger than `within_seconds`."""
        for segment in self._segments:
            if key in segment:
                packed = segment[key]
                is_known = self._age(packed) < min(within_seconds, self._seconds)
                return packed[_TIME.size :] if is_known else None
        return None

    def is_any_younger_than(self, seconds: float) -> bool:
        """Whether the value that was added last is younger than this many seconds."""
        return any(self._clock() - at < seconds for at, _ in self.latest(1))

    def latest(self, count: int) -> list[tuple[float, bytes]]:
        """Return time and key of the last `count` values added, the newest first."""
        added: list[tuple[bytes, bytes]] = []
        for segment in self._segments:
            added += itertools.islice(reversed(segment.items()), count - len(added))
        limit, time_of = self._clock() - self._seconds, _TIME.unpack_from
        return [(at, key) for key, packed in added if (at := time_of(packed)[0]) > limit]

    def _age(self, packed: bytes) -> float:
        at: float = _TIME.unpack_from(packed)[0]
        return self._clock() - at

    def _begin_segment(self, now: float) -> None:
        """Start a new segment; drop segments that are expired or beyond the minimum size."""
        self._segments.insert(0, {})
        self._closed_at.insert(0, self._added_at)
        self._begun_at = now
        while self._closed_at and (
            now - self._closed_at[-1] >= self._seconds
            or sum(map(len, self._segments[:-1])) >= self._min_size
        ):
            del self._segments[-1], self._closed_at[-1]
