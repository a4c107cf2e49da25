"""The program, with notes of its pace: when it spends a token, and by how many it divides limits.

    PYTHONPATH=. python tests/soak/paced_worker.py NOTES worker

Each note is one line of the file, written at once, so that a kill leaves what was before it:
a moment of the monotonic clock, which all processes share, and what happened.
"""

import os
import sys
import time
from typing import Final

from bridge.__main__ import main
from bridge.outbound.limits.rates import RateLimits
from bridge.outbound.limits.token_line import Token

_spend: Final = Token.spend
_divide_by: Final = RateLimits.divide_by
_file: Final = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what: str) -> None:
    """Note what happens now."""
    os.write(_file, f"{time.monotonic():.6f} {what}\n".encode())


def spend(token: Token) -> None:
    """Note a token that is spent."""
    note("token")
    _spend(token)


def divide_by(rates: RateLimits, workers: int) -> None:
    """Note how many share the limits."""
    _divide_by(rates, workers)
    note(f"share {workers}")


Token.spend = spend  # type: ignore[assignment, method-assign]
RateLimits.divide_by = divide_by  # type: ignore[assignment, method-assign]
main()
