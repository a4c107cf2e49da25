"""What is remembered for a while: values by key, bounded in number and in time.

A search for garbage visits every object that may be part of a cycle, tuples too, and the event loop
stands still for it: a tenth of a second where several 100,000 values are remembered, each in an
object of its own. Here none is made for a value. What is many has keys and values that are bytes,
texts or numbers, which no search visits.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar, cast

MAX_ENTRIES: Final = 100_000

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
# In the place of a value that was taken.
_TAKEN: Final = object()


class ExpiringMap(Generic[_Key, _Value]):
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
        # Each value has a place in the three, the oldest first, until its time is over. Places are
        # numbered; `_first` is the number of the first one.
        self._keys: deque[_Key] = deque()
        self._times: deque[float] = deque()
        self._values: deque[_Value | object] = deque()
        self._first = 0
        # The places of a key whose values were not taken; hardly any has several.
        self._places: dict[_Key, int | deque[int]] = {}

    def __contains__(self, key: _Key) -> bool:
        """Say whether a key has a value."""
        return self._find(key) is not None

    def __bool__(self) -> bool:
        """Say whether any key has a value."""
        self._forget(self._clock())
        return bool(self._places)

    def get(self, key: _Key) -> _Value | None:
        """Return the oldest value of a key."""
        found = self._find(key)
        if found is None:
            return None
        return self._value(found[0] if isinstance(found, deque) else found)

    def latest(self, most: int) -> list[tuple[float, _Key, _Value]]:
        """Return so many of the values that were added last, the last one first, and since when."""
        self._forget(self._clock())
        places = zip(
            reversed(self._times), reversed(self._keys), reversed(self._values), strict=True
        )
        # No generator takes part: compiled, one is several times slower than a loop.
        left: list[tuple[float, _Key, _Value | object]] = []
        for place in places:
            if len(left) == most:
                break
            if place[2] is not _TAKEN:
                left.append(place)
        return cast("list[tuple[float, _Key, _Value]]", left)

    def add(self, key: _Key, value: _Value) -> None:
        """Remember a value, behind the others of its key."""
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
        self._forget(now)

    def take(self, key: _Key) -> tuple[_Value] | None:
        """Remove and return the oldest value of a key, in a tuple of its own."""
        if self._find(key) is None:
            return None
        place = self._leave(key)
        value = self._value(place)
        self._values[place - self._first] = _TAKEN
        return (value,)

    def clear(self) -> list[tuple[_Key, _Value]]:
        """Forget all, and return it, the oldest first."""
        self._forget(self._clock())
        places = zip(self._keys, self._values, strict=True)
        items = [place for place in places if place[1] is not _TAKEN]
        for all_of_them in (self._keys, self._times, self._values, self._places):
            all_of_them.clear()
        return cast("list[tuple[_Key, _Value]]", items)

    def _find(self, key: _Key) -> int | deque[int] | None:
        # Most keys that are asked for are of a first delivery, and unknown: they cost a look.
        if key not in self._places:
            return None
        self._forget(self._clock())
        return self._places.get(key)

    def _value(self, place: int) -> _Value:
        return cast("_Value", self._values[place - self._first])

    def _leave(self, key: _Key) -> int:
        """Forget, and return, the oldest place of a key."""
        places = self._places[key]
        if not isinstance(places, deque):
            del self._places[key]
            return places
        place = places.popleft()
        if len(places) == 1:
            self._places[key] = places[0]
        return place

    def _forget(self, now: float) -> None:
        limit = now - self._seconds
        most = MAX_ENTRIES if self._most is None else self._most
        times = self._times
        while times and (times[0] <= limit or len(times) > most):
            times.popleft()
            key = self._keys.popleft()
            if self._values.popleft() is not _TAKEN:
                self._leave(key)
            self._first += 1
