"""Formats log lines, as JSON or for a terminal. Pure functions; the result is always one line."""

import functools
import json
import time
from typing import Final

from pydantic_core import PydanticSerializationError, to_json

Facts = dict[str, object]

# The end of a timestamp, by millisecond.
_MILLISECONDS: Final = tuple(f".{number:03d}Z" for number in range(1000))


def json_line(now: float, level: str, logger: str, event: str, facts: Facts) -> str:
    """Format a line of JSON: time, level, logger, event, then the facts."""
    head = _format_head(level, logger, event)
    rest = f",{dump_json(facts)[1:]}" if facts else "}"
    return f'{{"time":"{utc_milliseconds(now)}{head}{rest}\n'


def console_line(now: float, level: str, _logger: str, event: str, facts: Facts) -> str:
    """Format a line for a terminal: time of day, level, event, then the facts as `name=value`."""
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    pairs = " ".join(f"{name}={value}" for name, value in facts.items())
    line = f"{clock} {level:<8} {event} {pairs}".rstrip()
    return "".join(char if char.isprintable() else "?" for char in line) + "\n"


def utc_milliseconds(moment: float) -> str:
    """Format unix seconds as `2030-01-31T03:12:00.250Z`."""
    second = int(moment)
    return _format_second(second) + _MILLISECONDS[int((moment - second) * 1000)]


def utc_text(moment: float) -> str:
    """Format unix seconds as `2030-01-31T03:12:00Z`."""
    return f"{_format_second(int(moment))}Z"


def shown_seconds(seconds: float) -> float:
    """Round a duration to 0.1 ms, the precision of log lines."""
    # Takes a tenth of the time of `round`.
    return int(seconds * 10_000 + 0.5) / 10_000


def dump_json(value: object) -> str:
    """Write a value as one line of JSON."""
    try:
        # Takes a quarter of the time of the standard library's encoder.
        text = to_json(value, fallback=str)
    except PydanticSerializationError:  # Half of a surrogate pair has no UTF-8.
        pass
    else:
        if text.isascii():
            return text.decode()
    return json.dumps(value, default=str, separators=(",", ":"))


@functools.lru_cache(maxsize=4)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


# The bridge has few events of its own; an event of a library may be any text, hence the bound.
@functools.lru_cache(maxsize=256)
def _format_head(level: str, logger: str, event: str) -> str:
    return f'","level":"{level}","logger":{dump_json(logger)},"event":{dump_json(event)}'
