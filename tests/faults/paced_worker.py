"""The program with notes of its pace, by its own clock, so that a busy machine does not blur them.

It notes each token that it spends, and the sender it is for (each POST has a token, even without a
limit); the number of workers that it divides the limits by; and the seconds of silence after a 429.

It is a program of `tests/forked.py`, with a file for the notes before the program's own arguments.
Each note is one line, written at once, so that it survives a kill: the time of the monotonic clock,
which all processes share, and what happened.
"""

import os
import sys
import time
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from bridge import __main__ as program
from bridge.sandbox.processes import Guard
from bridge.worker.limits.rate_limits import RateLimits, RateToken
from bridge.worker.service.retry_after import RetryAfter
from tests.forked import ForkedChild

_token: Final = RateLimits.token
_spend: Final = RateToken.spend
_divide_by: Final = RateLimits.divide_by
_after_429: Final = RetryAfter.after_429
_after_peer: Final = RetryAfter.after_peer
# Each message is sent by a task of its own.
_sender: Final[ContextVar[str]] = ContextVar("sender")
_files: Final[list[int]] = []


class PacedChild(ForkedChild):
    """A process of this module."""

    program = "tests.faults.paced_worker"


class PacedWorker:
    """One such process, and its notes."""

    def __init__(self, folder: Path, name: str, guard: Guard, environ: dict[str, str]) -> None:
        self._notes = folder / f"{name}.notes"
        self.child = PacedChild(
            [str(self._notes), "worker"], guard=guard, log=folder / f"{name}.log", environ=environ
        )

    def notes(self, what: str) -> list[tuple[float, str]]:
        """Return the times of a kind of notes, and the rest of each."""
        if not self._notes.exists():
            return []
        lines = self._notes.read_text(encoding="ascii").rpartition("\n")[0].splitlines()
        parts = (line.split(maxsplit=2) for line in lines)
        return [(float(at), " ".join(rest)) for at, word, *rest in parts if word == what]

    def tokens(self, sender: str | None = None) -> list[float]:
        """Return when it spent its tokens, or only those of one sender."""
        return [at for at, one in self.notes("token") if sender in {None, one}]

    def waits(self) -> list[tuple[float, float]]:
        """Return begin and end of each silence after a 429."""
        told = ((at, float(seconds)) for at, seconds in self.notes("closed"))
        return [(at, at + seconds) for at, seconds in told if seconds > 0]

    def shares_with(self, number: int) -> float | None:
        """Return since when it has divided the limit by this number; None if it does not."""
        since = None
        for at, told in self.notes("share"):
            since = None if int(told) != number else since or at
        return since


def note(what: str, *, at: float | None = None) -> None:
    """Note what happens now, or happened at a moment."""
    moment = time.monotonic() if at is None else at
    os.write(_files[0], f"{moment:.6f} {what}\n".encode())


def token(
    rates: RateLimits, sender: str, *args: Any, **how: Any
) -> AbstractAsyncContextManager[RateToken]:
    """Remember for which sender a token will be."""
    _sender.set(sender)
    return _token(rates, sender, *args, **how)


def spend(token: RateToken) -> None:
    """Note a token that is spent."""
    note(f"token {_sender.get()}")
    _spend(token)


def divide_by(rates: RateLimits, workers: int) -> None:
    """Note how many share the limits."""
    _divide_by(rates, workers)
    note(f"share {workers}")


def noting_wait(retry_after: RetryAfter, now: float) -> None:
    """Note for how long the service wants no request."""
    note(f"closed {retry_after.seconds_left(now):.6f}", at=now)


def after_429(
    before: RetryAfter, seconds: float | None, *, now: float, chance: float
) -> tuple[RetryAfter, float]:
    """Note a wait that the service has asked this worker for."""
    after, wait = _after_429(before, seconds, now=now, chance=chance)
    noting_wait(after, now)
    return after, wait


def after_peer(before: RetryAfter, seconds: float, *, now: float) -> RetryAfter:
    """Note a wait that the service has asked another worker for."""
    after = _after_peer(before, seconds, now=now)
    noting_wait(after, now)
    return after


def main() -> None:
    """Be the program, with notes."""
    _files.append(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    RateLimits.token = token  # type: ignore[assignment, method-assign]
    RateToken.spend = spend  # type: ignore[assignment, method-assign]
    RateLimits.divide_by = divide_by  # type: ignore[assignment, method-assign]
    RetryAfter.after_429 = after_429  # type: ignore[assignment, method-assign]
    RetryAfter.after_peer = after_peer  # type: ignore[assignment, method-assign]
    program.main()
