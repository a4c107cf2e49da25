"""Runs garbage collection at quiet moments, and reads the memory limit of the container.

By itself, Python starts a collection when many more objects were created than freed. In a worker,
that is when most messages are in flight and a collection takes longest: tens of milliseconds in
which no message is processed. Therefore the process collects when few messages are in flight.
"""

import asyncio
import contextlib
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

# Python collects by itself if this many objects accumulate between two collections.
MAX_NEW_OBJECTS: Final = 100_000
# Interval of collections. The garbage of two seconds, mostly from closed channels, takes a few
# milliseconds to free, and is far less than `QUIET_OBJECTS`.
COLLECT_SECONDS: Final = 2.0
# The process is quiet up to this many new objects since the last collection: a few dozen messages
# in flight.
QUIET_OBJECTS: Final = 3_000
# Interval of the checks whether the process is quiet, and the number of checks after which it
# collects anyway.
CHECK_SECONDS: Final = 0.1
MAX_CHECKS: Final = 100

_MEMBERSHIPS: Final = Path("/proc/self/cgroup")
_HIERARCHIES: Final = Path("/sys/fs/cgroup")
# Cgroups of version 1 represent "no limit" by the largest number that they can store.
_NO_LIMIT_BYTES: Final = 2.0**62


def disable_gc_until_started() -> None:
    """Turn collection off while the process starts: objects created then live until it ends."""
    gc.disable()


def enable_gc() -> None:
    """Turn collection on, but never traverse the objects that exist already."""
    gc.freeze()
    gc.set_threshold(MAX_NEW_OBJECTS)
    gc.enable()


async def collect_when_quiet() -> NoReturn:
    """Collect every few seconds, at a moment when few messages are in flight."""
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        for _ in range(MAX_CHECKS):
            if gc.get_count()[0] <= QUIET_OBJECTS:
                break
            await asyncio.sleep(CHECK_SECONDS)
        gc.collect()


def read_memory_limit(memberships: Path = _MEMBERSHIPS, hierarchies: Path = _HIERARCHIES) -> float:
    """Return the memory limit of the process's cgroup and its parents in bytes, or infinity.

    Reads the files of cgroups(7), versions 1 and 2. In a container, the path of the cgroup may be
    visible only to the host; the limit of the container is then at the root of the hierarchy.
    """
    try:
        lines = memberships.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return math.inf
    limits = (limit for line in lines for limit in _limits(line, hierarchies))
    lowest = min(limits, default=math.inf)
    return lowest if lowest < _NO_LIMIT_BYTES else math.inf


def _limits(membership: str, hierarchies: Path) -> Iterator[float]:
    """Yield the limits that apply to one line of the memberships, `id:controllers:path`."""
    _, controllers, path = membership.split(":", 2)
    if not controllers:
        root, name = hierarchies, "memory.max"
    elif "memory" in controllers.split(","):
        root, name = hierarchies / "memory", "memory.limit_in_bytes"
    else:
        return
    cgroup = root / path.lstrip("/")
    while True:
        # The root cgroup of a host has no such file, and parent cgroups may not be readable.
        with contextlib.suppress(OSError):
            yield float((cgroup / name).read_text(encoding="ascii").replace("max", "inf"))
        if cgroup == root:
            return
        cgroup = cgroup.parent
