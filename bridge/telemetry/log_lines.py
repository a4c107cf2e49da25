"""Formats a line of the log, as JSON or for a person. Pure; whatever the facts, it is one line."""

import functools
import json
import time
from typing import Final

from pydantic_core import PydanticSerializationError, to_json

Facts = dict[str, object]

# All of a second's, written.
_MILLISECONDS: Final = tuple(f".{number:03d}Z" for number in range(1000))


def json_line(now: float, level: str, logger: str, event: str, facts: Facts) -> str:
    """Make a line of JSON: time, level, logger, event, then the facts."""
    second = int(now)
    moment = _format_second(second) + _MILLISECONDS[int((now - second) * 1000)]
    head = _format_head(level, logger, event)
    rest = f",{dump_json(facts)[1:]}" if facts else "}"
    return f'{{"time":"{moment}{head}{rest}\n'


def console_line(now: float, level: str, _logger: str, event: str, facts: Facts) -> str:
    """Make a line for a person: time of day, level, event, then the facts as `name=value`."""
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    pairs = " ".join(f"{name}={value}" for name, value in facts.items())
    line = f"{clock} {level:<8} {event} {pairs}".rstrip()
    return "".join(char if char.isprintable() else "?" for char in line) + "\n"


def utc_text(moment: float) -> str:
    """Write a moment, in unix seconds, for people and programs: `2030-01-31T03:12:00Z`."""
    return f"{_format_second(int(moment))}Z"


def shown_seconds(seconds: float) -> float:
    """Round a duration to what a line shows of it, 0.1 ms."""
    # A tenth of the time that `round` takes.
    return int(seconds * 10_000 + 0.5) / 10_000


def dump_json(value: object) -> str:
    """Write a value as one line of JSON."""
    try:
        # A quarter of the time of the standard library's.
        text = to_json(value, fallback=str)
    except PydanticSerializationError:  # half of a surrogate pair has no UTF-8
        pass
    else:
        if text.isascii():
            return text.decode()
    return json.dumps(value, default=str, separators=(",", ":"))


@functools.lru_cache(maxsize=4)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


# Our own events are few; those of libraries may be any text, hence the bound.
@functools.lru_cache(maxsize=256)
def _format_head(level: str, logger: str, event: str) -> str:
    return f'","level":"{level}","logger":{dump_json(logger)},"event":{dump_json(event)}'
