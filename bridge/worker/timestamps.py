"""Moments as headers hold them: read in every form that publishers use, written in one."""

from datetime import datetime
from decimal import Decimal
from typing import Final

# The last moment that RFC 3339 can write.
YEAR_9999: Final = 253_402_300_799


def write_moment(seconds: float) -> str:
    """Write unix seconds as the text that `to_seconds` reads."""
    # pamqp writes a float in 32 bits, which would be wrong by up to a minute here.
    return f"{seconds:.3f}"


def to_seconds(value: object) -> float | None:
    """Read unix seconds, or RFC 3339 with a time zone; None when it is neither."""
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode("ascii", "replace")
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        return _text_to_seconds(value)
    return None


def _text_to_seconds(value: str) -> float | None:
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        moment = datetime.fromisoformat(value.upper())
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()
