"""How a duration is written: in a setting, in an option, in the name of a retry queue."""

import re
from typing import Final

_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)")


def parse_duration(value: object) -> object:
    """Turn `90`, `10s`, `5m`, `2h` or `30d` into seconds; return what is no text as it is.

    Raises ValueError with an example of what is meant.
    """
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a number of seconds or like 10s, 5m, 2h, 30d")
    return float(match[1]) * _UNIT_SECONDS[match[2] or "s"]


def format_duration(seconds: float) -> str:
    """Write seconds in the largest unit that divides them: 120 is `2m`. Queue names use it."""
    for unit in "dhms":
        if seconds % _UNIT_SECONDS[unit] == 0:
            return f"{int(seconds // _UNIT_SECONDS[unit])}{unit}"
    return f"{seconds:g}s"
