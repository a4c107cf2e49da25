"""The workers that share a worker's pauses, as its pace sees them."""

from typing import Protocol

from bridge.worker.fates import PauseReason


class Others(Protocol):
    """They are told what this worker finds out; `Alone` where there are none."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def is_probing(self) -> bool:
        """Whether one of them probes, so that this worker does not."""

    def note_pause(self) -> None:
        """Note that this worker has found a reason to pause."""

    def note_failure(self) -> None:
        """Note that this worker's probe has not ended the pause."""

    def note_slow_down(self) -> None:
        """Note that the service has asked this worker for a wait."""

    def note_end(self, reason: PauseReason) -> None:
        """Note that this worker has found its pause to be over."""

    def leave(self) -> None:
        """Note that this worker takes nothing more."""


class Alone:
    """Nobody: this worker decides for itself."""

    count = 0
    is_probing = False

    def note_pause(self) -> None:
        """Tell nobody."""

    def note_failure(self) -> None:
        """Tell nobody."""

    def note_slow_down(self) -> None:
        """Tell nobody."""

    def note_end(self, reason: PauseReason) -> None:
        """Tell nobody."""

    def leave(self) -> None:
        """Tell nobody."""
