"""How much memory the kernel lets this process and those beside it in its cgroup have."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MEMBERSHIPS: Final = Path("/proc/self/cgroup")
_HIERARCHIES: Final = Path("/sys/fs/cgroup")
# Version 1 says that there is none with the largest number of bytes that it can count.
_NONE_BYTES: Final = 2.0**62


def read_memory_limit(memberships: Path = _MEMBERSHIPS, hierarchies: Path = _HIERARCHIES) -> float:
    """Return the limit in bytes, the least of its cgroup and those above; infinity without any.

    The files are those of cgroups(7), versions 1 and 2. In a container the path of the cgroup may
    be one that only the host sees; then the limit of the container is at the root of what it sees.
    """
    try:
        lines = memberships.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return math.inf
    least = min((limit for line in lines for limit in _limits(line, hierarchies)), default=math.inf)
    return least if least < _NONE_BYTES else math.inf


def _limits(membership: str, hierarchies: Path) -> Iterator[float]:
    """Yield what limits a line of the memberships, `id:controllers:path`, means."""
    _, controllers, path = membership.split(":", 2)
    if not controllers:
        root, name = hierarchies, "memory.max"
    elif "memory" in controllers.split(","):
        root, name = hierarchies / "memory", "memory.limit_in_bytes"
    else:
        return
    cgroup = root / path.lstrip("/")
    while True:
        # The root of a host has none, and another's cgroup is not to be seen.
        with contextlib.suppress(OSError):
            yield float((cgroup / name).read_text(encoding="ascii").replace("max", "inf"))
        if cgroup == root:
            return
        cgroup = cgroup.parent
