"""What is remembered for a while: values by key, bounded in number and in time."""

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

MAX_ENTRIES: Final = 100_000

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(slots=True, eq=False)
class _Mark(Generic[_Value]):
    """One value of a key. `later` is the next one; the oldest knows the `last` of several."""

    at: float
    value: _Value
    later: "_Mark[_Value] | None" = None
    last: "_Mark[_Value] | None" = None
    is_taken: bool = False


class Memory(Generic[_Key, _Value]):
    """Values by key, several for one key; each is forgotten after `seconds`, the oldest for room.

    There is room for `most`, or `MAX_ENTRIES`. Times are of `clock`. However many values a key has,
    no operation walks along them.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float], *, most: int | None = None
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._most = most
        self._order: deque[tuple[_Key, _Mark[_Value]]] = deque()
        self._oldest: dict[_Key, _Mark[_Value]] = {}

    def __contains__(self, key: _Key) -> bool:
        """Say whether a key has a value."""
        return self._find(key) is not None

    def __bool__(self) -> bool:
        """Say whether any key has a value."""
        self._forget(self._clock())
        return bool(self._oldest)

    def get(self, key: _Key) -> _Value | None:
        """Return the oldest value of a key."""
        mark = self._find(key)
        return None if mark is None else mark.value

    def newest(self, key: _Key, *, within_seconds: float | None = None) -> _Value | None:
        """Return the value of a key that was added last, if it is not older than that."""
        oldest = self._find(key)
        if oldest is None:
            return None
        mark = oldest.last or oldest
        is_old = within_seconds is not None and mark.at <= self._clock() - within_seconds
        return None if is_old else mark.value

    def is_any_younger_than(self, seconds: float) -> bool:
        """Say whether any value was added, and is not taken, that is known for less than that."""
        newest = next((mark for _, mark in reversed(self._order) if not mark.is_taken), None)
        return newest is not None and self._clock() - newest.at < seconds

    def latest(self, most: int) -> list[tuple[float, _Key, _Value]]:
        """Return so many of the values that were added last, the last one first, and since when."""
        self._forget(self._clock())
        marks = (
            (mark.at, key, mark.value) for key, mark in reversed(self._order) if not mark.is_taken
        )
        return list(itertools.islice(marks, most))

    def add(self, key: _Key, value: _Value, *, age_seconds: float = 0.0) -> None:
        """Remember a value, behind the others of its key; it is known for so long already."""
        now = self._clock()
        mark = _Mark(now - age_seconds, value)
        oldest = self._oldest.setdefault(key, mark)
        if oldest is not mark:
            (oldest.last or oldest).later = mark
            oldest.last = mark
        self._order.append((key, mark))
        self._forget(now)

    def take(self, key: _Key) -> tuple[_Value] | None:
        """Remove and return the oldest value of a key, in a tuple of its own."""
        mark = self._find(key)
        if mark is None:
            return None
        self._remove(key, mark)
        return (mark.value,)

    def clear(self) -> list[tuple[_Key, _Value]]:
        """Forget all, and return it, the oldest first."""
        self._forget(self._clock())
        items = [(key, mark.value) for key, mark in self._order if not mark.is_taken]
        self._order.clear()
        self._oldest.clear()
        return items

    def _find(self, key: _Key) -> _Mark[_Value] | None:
        # Most keys that are asked for are of a first delivery, and unknown: they cost a look.
        if key not in self._oldest:
            return None
        self._forget(self._clock())
        return self._oldest.get(key)

    def _remove(self, key: _Key, oldest: _Mark[_Value]) -> None:
        # It leaves its place in the order when its time is over.
        oldest.is_taken = True
        second = oldest.later
        if second is None:
            del self._oldest[key]
        else:
            second.last = None if oldest.last is second else oldest.last
            self._oldest[key] = second

    def _forget(self, now: float) -> None:
        limit = now - self._seconds
        most = MAX_ENTRIES if self._most is None else self._most
        while self._order and (self._order[0][1].at <= limit or len(self._order) > most):
            key, mark = self._order.popleft()
            if not mark.is_taken:
                self._remove(key, mark)
