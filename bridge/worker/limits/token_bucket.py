"""Token buckets: a rate with a burst, and the rate that doubles each second after an outage."""

from collections.abc import Callable
from typing import Final

# After an outage: the rate at first, and for how long it doubles every second.
SLOW_START_PER_SECOND: Final = 10.0
SLOW_START_SECONDS: Final = 10.0


class TokenBucket:
    """Lets `per_second` through on average and `burst` at once."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._at = clock()

    def take(self) -> float:
        """Take a token, on credit if need be, and return how many seconds to wait for it."""
        self._fill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self.per_second)

    def seconds_until(self, number: int) -> float:
        """Return how many seconds it takes until there are so many tokens."""
        self._fill()
        return max(0.0, (number - self._tokens) / self.per_second)

    def give_back(self) -> None:
        """Undo a `take` that is not used."""
        self._tokens += 1

    def fill_from(self, moment: float) -> None:
        """Keep no more tokens than have been added since a moment."""
        self._fill()
        self._tokens = min(self._tokens, (self._clock() - moment) * self.per_second)

    def resize(self, per_second: float, burst: float) -> None:
        """Change the rate; what has been used stays used."""
        self._fill()
        self.per_second = per_second
        self._burst = burst
        self._tokens = min(self._tokens, burst)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now


class SlowStart(TokenBucket):
    """Lets a few through a second, and twice as many each second later.

    They are shared by so many `workers`, which begin together.
    """

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self._first_per_second = SLOW_START_PER_SECOND / workers
        super().__init__(self._first_per_second, 1, clock)
        self._began_at = clock()

    @property
    def is_over(self) -> bool:
        """Whether it limits nothing any more."""
        return self._clock() - self._began_at > SLOW_START_SECONDS

    def _fill(self) -> None:
        seconds = min(self._clock() - self._began_at, SLOW_START_SECONDS)
        self.per_second = self._first_per_second * 2.0**seconds
        super()._fill()
