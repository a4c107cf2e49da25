"""The program, with notes of its pace, which are its own moments however busy the machine is.

It notes when it spends a token, and for which sender (without a limit, too: each POST has a token);
by how many it divides the limits; and for how many seconds it keeps still after a 429.

It is a program of `tests/forked.py`, with a file for the notes before the program's own arguments.

Each note is one line of the file, written at once, so that a kill leaves what was before it:
a moment of the monotonic clock, which all processes share, and what happened.
"""

import os
import sys
import time
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, Final

from bridge import __main__ as program
from bridge.worker.limits.rates import RateLimits
from bridge.worker.limits.token_line import Token
from bridge.worker.service.retry_after import RetryAfter

_token: Final = RateLimits.token
_spend: Final = Token.spend
_divide_by: Final = RateLimits.divide_by
_after_429: Final = RetryAfter.after_429
_after_peer: Final = RetryAfter.after_peer
# Each message is sent by a task of its own.
_sender: Final[ContextVar[str]] = ContextVar("sender")
_files: Final[list[int]] = []


def note(what: str, *, at: float | None = None) -> None:
    """Note what happens now, or happened at a moment."""
    moment = time.monotonic() if at is None else at
    os.write(_files[0], f"{moment:.6f} {what}\n".encode())


def token(
    rates: RateLimits, sender: str, *args: Any, **how: Any
) -> AbstractAsyncContextManager[Token]:
    """Remember for which sender a token will be."""
    _sender.set(sender)
    return _token(rates, sender, *args, **how)


def spend(token: Token) -> None:
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
    Token.spend = spend  # type: ignore[assignment, method-assign]
    RateLimits.divide_by = divide_by  # type: ignore[assignment, method-assign]
    RetryAfter.after_429 = after_429  # type: ignore[assignment, method-assign]
    RetryAfter.after_peer = after_peer  # type: ignore[assignment, method-assign]
    program.main()
