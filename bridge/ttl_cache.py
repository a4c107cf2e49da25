"""Two caches with a time limit, for 100,000 entries and more.

`TtlCache` has the newest value of each key, `ExpiringMap` all values of a key in their order. The
garbage collector traverses every object that may be part of a cycle, including tuples, and blocks
the event loop meanwhile: for 0.1 seconds at several 100,000 values if each has an object of its
own. Neither class creates an object per value, so with bytes, strings or numbers as keys and values
there is nothing to traverse.
"""

import itertools
import math
import struct
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar, cast

# Four full segments hold the guaranteed minimum; one more is being filled.
FULL_SEGMENTS: Final = 4

# The time of a value is packed before it. A float object per value would take a tenth more memory,
# and the garbage collector would traverse a tuple of both.
_TIME: Final = struct.Struct(">d")

MAX_ENTRIES: Final = 100_000

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
# Marks the place of a value that was taken.
_TAKEN: Final = object()


class TtlCache:
    """Keeps each value for `seconds`; of more than `min_size` values the oldest may be dropped.

    Consists of a few dictionaries (segments), which are filled one after another and dropped as a
    whole. A single dictionary that loses its oldest key for each new one would be rebuilt
    repeatedly; at 100,000 keys that blocks the event loop for several milliseconds and needs twice
    the memory.

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


class ExpiringMap(Generic[_Key, _Value]):
    """Keeps each value for `seconds`, and at most `most` (or `MAX_ENTRIES`) values, the newest.

    A key may have several values. Times are those of `clock`. No operation on a key takes time
    proportional to the number of its values.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float], *, most: int | None = None
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._most = most
        # Each value has an entry in all three deques, the oldest first, until it expires. Entries
        # are numbered; `_first` is the number of the oldest one.
        self._keys: deque[_Key] = deque()
        self._times: deque[float] = deque()
        self._values: deque[_Value | object] = deque()
        self._first = 0
        # The numbers of each key's values; a deque if there are several, which is rare.
        self._places: dict[_Key, int | deque[int]] = {}

    def __contains__(self, key: _Key) -> bool:
        return self._find(key) is not None

    def live_keys(self) -> list[_Key]:
        """Return all keys that have a value."""
        self._expire(self._clock())
        return list(self._places)

    def get(self, key: _Key) -> _Value | None:
        """Return the oldest value of a key."""
        found = self._find(key)
        if found is None:
            return None
        return self._value(found[0] if isinstance(found, deque) else found)

    def latest(self, most: int) -> list[tuple[float, _Key, _Value]]:
        """Return the last `most` values added, the newest first, with their times."""
        self._expire(self._clock())
        places = zip(
            reversed(self._times), reversed(self._keys), reversed(self._values), strict=True
        )
        # A loop, because a compiled generator is several times slower.
        left: list[tuple[float, _Key, _Value | object]] = []
        for place in places:
            if len(left) == most:
                break
            if place[2] is not _TAKEN:
                left.append(place)
        return cast("list[tuple[float, _Key, _Value]]", left)

    def add(self, key: _Key, value: _Value) -> None:
        """Add a value after the others of its key."""
        now = self._clock()
        place = self._first + len(self._keys)
        others = self._places.get(key)
        if others is None:
            self._places[key] = place
        elif isinstance(others, deque):
            others.append(place)
        else:
            self._places[key] = deque((others, place))
        self._keys.append(key)
        self._times.append(now)
        self._values.append(value)
        self._expire(now)

    def take(self, key: _Key) -> tuple[_Value] | None:
        """Remove the oldest value of a key and return it in a tuple, because it may be None."""
        if self._find(key) is None:
            return None
        place = self._remove_first(key)
        value = self._value(place)
        self._values[place - self._first] = _TAKEN
        return (value,)

    def clear(self) -> list[tuple[_Key, _Value]]:
        """Remove and return all values, the oldest first."""
        self._expire(self._clock())
        places = zip(self._keys, self._values, strict=True)
        items = [place for place in places if place[1] is not _TAKEN]
        for part in (self._keys, self._times, self._values, self._places):
            part.clear()
        return cast("list[tuple[_Key, _Value]]", items)

    def _find(self, key: _Key) -> int | deque[int] | None:
        # Most keys belong to first deliveries and are unknown: they cost a single lookup.
        if key not in self._places:
            return None
        self._expire(self._clock())
        return self._places.get(key)

    def _value(self, place: int) -> _Value:
        return cast("_Value", self._values[place - self._first])

    def _remove_first(self, key: _Key) -> int:
        """Remove and return the number of a key's oldest value."""
        places = self._places[key]
        if not isinstance(places, deque):
            del self._places[key]
            return places
        place = places.popleft()
        if len(places) == 1:
            self._places[key] = places[0]
        return place

    def _expire(self, now: float) -> None:
        limit = now - self._seconds
        most = MAX_ENTRIES if self._most is None else self._most
        times = self._times
        while times and (times[0] <= limit or len(times) > most):
            times.popleft()
            key = self._keys.popleft()
            if self._values.popleft() is not _TAKEN:
                self._remove_first(key)
            self._first += 1
