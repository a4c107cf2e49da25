"""How much memory a process may have, read from what stands in for the kernel's files."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from bridge.memory_limit import read_memory_limit

MIB = 2**20
CASES: Mapping[str, tuple[str, Mapping[str, str], float]] = {
    "a container of its own": ("0::/\n", {"memory.max": f"{256 * MIB}\n"}, 256 * MIB),
    "no limit": ("0::/\n", {"memory.max": "max\n"}, math.inf),
    "a service of systemd": (
        "0::/system.slice/sms-bridge.service\n",
        {
            "system.slice/memory.max": "max\n",
            "system.slice/sms-bridge.service/memory.max": f"{200 * MIB}\n",
        },
        200 * MIB,
    ),
    "a smaller limit above": (
        "0::/pod/container\n",
        {"pod/memory.max": f"{64 * MIB}\n", "pod/container/memory.max": f"{128 * MIB}\n"},
        64 * MIB,
    ),
    "a path that only the host sees": (
        "0::/../../kubepods/pod1\n",
        {"memory.max": f"{256 * MIB}\n"},
        256 * MIB,
    ),
    "version 1": (
        "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n",
        {"memory/memory.limit_in_bytes": f"{96 * MIB}\n"},
        96 * MIB,
    ),
    "version 1, memory beside others": (
        "4:hugetlb,memory:/a\n",
        {"memory/a/memory.limit_in_bytes": f"{80 * MIB}\n"},
        80 * MIB,
    ),
    "version 1, no limit": (
        "4:memory:/\n",
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
        math.inf,
    ),
    "nothing mounted": ("0::/\n", {}, math.inf),
}


@pytest.mark.parametrize(("memberships", "files", "limit"), CASES.values(), ids=[*CASES])
def test_the_least_limit_counts(
    tmp_path: Path, memberships: str, files: Mapping[str, str], limit: float
) -> None:
    """It is the least of the process's cgroup and those above it, of either version."""
    (tmp_path / "cgroup").write_text(memberships, encoding="utf-8")
    root = tmp_path / "fs"
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    assert read_memory_limit(tmp_path / "cgroup", root) == limit


def test_no_limit_without_cgroups(tmp_path: Path) -> None:
    """A system that has none sets no limit."""
    assert read_memory_limit(tmp_path / "none", tmp_path) == math.inf
