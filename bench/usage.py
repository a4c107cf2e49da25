"""Reads CPU time and memory of processes from Linux."""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
# Indices after the name, which may contain spaces: proc(5), /proc/pid/stat.
_OF_ENDED_CHILDREN: Final = slice(13, 15)
# A process's CPU clock, which counts in nanoseconds instead of ticks: clock_gettime(2).
_PROCESS_CLOCK: Final = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """User time, system time and peak resident memory."""

    cpu_seconds: float
    peak_mib: float


def read_usage(pids: Iterable[int]) -> Usage:
    """Add up processes and their descendants. Ended processes add nothing."""
    members = [member for pid in pids for member in family(pid)]
    return Usage(
        cpu_seconds=sum(_own_seconds(pid) + _seconds_of_ended(pid) for pid in members),
        peak_mib=sum(_peak_kib(pid) for pid in members) / 1024,
    )


def read_run_delay(pid: int) -> float:
    """Return how many seconds a process's main thread was runnable but had no CPU.

    See proc(5), /proc/pid/schedstat. Raises OSError if the process has ended.
    """
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    text = _read(f"/proc/{pid}/task/{pid}/children")
    return [pid, *(member for child in text.split() for member in family(int(child)))]


def _own_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:  # the process has ended
        return 0


def _seconds_of_ended(pid: int) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[_OF_ENDED_CHILDREN]) / _TICKS_PER_SECOND


def _peak_kib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", _read(f"/proc/{pid}/status"))
    return int(found[1]) if found else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""
