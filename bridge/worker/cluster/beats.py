"""How often a worker says that it is there, and for how long the silence of a peer is borne.

What each of N workers says, the broker hands out N times. So of many workers each says less often
that it is there, and how often: what is borne depends on that.
"""

import random
from collections.abc import Callable
from typing import Final, NamedTuple

BEAT_SECONDS: Final = 1
# What the broker may hand out a second, so that twenty workers beat each second.
MAX_BEATS_A_SECOND: Final = 400
# So that a peer that has missed two beats is not forgotten yet. Of more than ninety workers the
# broker hands out more.
MAX_BEAT_SECONDS: Final = 20


class Silence(NamedTuple):
    """How long a peer may be silent: so many of its own beats, and some seconds."""

    beats: float
    seconds: float

    def seconds_at(self, beat_seconds: float) -> float:
        """Return the time, for a peer that says so often that it is there."""
        return self.beats * beat_seconds + self.seconds


# Who was silent for longer may be gone: a beat, and some time for it to come.
HEARD: Final = Silence(1, 0.25)
# Who was silent for longer is to be replaced.
SPEAKING: Final = Silence(2, 1)
# Who was silent for longer is taken to be gone.
PRESENT: Final = Silence(2, 3)
# Who was silent for longer is forgotten.
REMEMBERED: Final = Silence(0, 60)


class Beats:
    """Counts the seconds until this worker's next beat; every so many `seconds` there is one.

    `present` returns how often each peer that is there says so, None for one that does not tell.
    """

    def __init__(self, present: Callable[[], list[float | None]]) -> None:
        self._present = present
        self._hurries: Callable[[], bool] = lambda: False
        self._left = 0
        self.seconds = BEAT_SECONDS

    def hurry_while(self, condition: Callable[[], bool]) -> None:
        """Beat each second as long as it is so."""
        self._hurries = condition

    def begin(self) -> None:
        """Begin anew: the first beat comes within a second."""
        self._left = 0
        self.seconds = BEAT_SECONDS

    def is_due(self) -> bool:
        """Count a second; return whether to beat now, and that the next comes after `seconds`."""
        seconds = self._wanted_seconds()
        self._left = min(self._left, seconds) - 1
        if self._left > 0:
            return False
        self.seconds = seconds
        # Up to a quarter earlier than is said, so that workers that started together part.
        self._left = random.randint(seconds - seconds // 4, seconds)  # noqa: S311
        return True

    def _wanted_seconds(self) -> int:
        present = self._present()
        # An earlier version takes one that is silent for five seconds to be gone.
        if self._hurries() or None in present:
            return BEAT_SECONDS
        workers = len(present) + 1
        return min(-(-workers * workers // MAX_BEATS_A_SECOND), MAX_BEAT_SECONDS)
