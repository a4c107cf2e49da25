"""Garbage collection at quiet moments, and the memory limit of the kernel's files."""

import asyncio
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from bridge import memory
from bridge.memory import (
    CHECK_SECONDS,
    COLLECT_SECONDS,
    MAX_CHECKS,
    QUIET_OBJECTS,
    collect_when_quiet,
    read_memory_limit,
)
from tests.clock import LeapingWorld

Objects = Callable[[float], int]

MIB = 2**20
CASES: Mapping[str, tuple[str, Mapping[str, str], float]] = {
    "a container of its own": ("0::/\n", {"memory.max": f"{256 * MIB}\n"}, 256 * MIB),
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
    "nothing mounted": ("0::/\n", {}, math.inf),
}


@pytest.fixture
def world() -> Iterator[LeapingWorld]:
    with closing(LeapingWorld()) as world:
        yield world


def collections(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch, *, seconds: float, objects: Objects
) -> list[float]:
    """Return the times of collections; `objects` gives the number of new objects at a time."""
    found: list[float] = []
    began = world.loop.time()

    def passed() -> float:
        return round(world.loop.time() - began, 1)

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collect_when_quiet(), seconds + 0.5)

    with monkeypatch.context() as patched:
        patched.setattr("bridge.memory.gc.get_count", lambda: (objects(passed()), 0, 0))
        patched.setattr("bridge.memory.gc.collect", lambda: found.append(passed()))
        world.run(run())
    return found


def test_a_quiet_process_collects_every_few_seconds(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection is short at such a moment."""
    found = collections(
        world, monkeypatch, seconds=3 * COLLECT_SECONDS, objects=lambda _: QUIET_OBJECTS
    )

    assert found == [COLLECT_SECONDS, 2 * COLLECT_SECONDS, 3 * COLLECT_SECONDS]


def test_a_collection_waits_for_a_quiet_moment(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quiet tenth of a second is enough."""
    quiet_at = COLLECT_SECONDS + 3

    def objects(seconds: float) -> int:
        return 0 if seconds == quiet_at else 10 * QUIET_OBJECTS

    assert collections(world, monkeypatch, seconds=quiet_at + 1, objects=objects) == [quiet_at]


def test_a_busy_process_collects_anyway(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is always busy makes garbage, too."""
    longest = COLLECT_SECONDS + MAX_CHECKS * CHECK_SECONDS
    found = collections(
        world, monkeypatch, seconds=2 * longest, objects=lambda _: 10 * QUIET_OBJECTS
    )

    assert found == pytest.approx([longest, 2 * longest], abs=0.3)


def test_objects_of_the_start_are_never_traversed() -> None:
    """Nothing is collected during the start, and Python itself collects less often afterwards."""
    program = (
        "import gc; from bridge import memory; memory.disable_gc_until_started(); "
        "before = gc.isenabled(); memory.enable_gc(); "
        "print(before, gc.isenabled(), gc.get_freeze_count() > 1000, gc.get_threshold()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout.split() == ["False", "True", "True", str(memory.MAX_NEW_OBJECTS)]


@pytest.mark.parametrize(("memberships", "files", "limit"), CASES.values(), ids=[*CASES])
def test_the_lowest_limit_counts(
    tmp_path: Path, memberships: str, files: Mapping[str, str], limit: float
) -> None:
    """The lowest limit of the process's cgroup and its parents counts, in either version."""
    (tmp_path / "cgroup").write_text(memberships, encoding="utf-8")
    root = tmp_path / "fs"
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    assert read_memory_limit(tmp_path / "cgroup", root) == limit


def test_no_limit_without_cgroups(tmp_path: Path) -> None:
    assert read_memory_limit(tmp_path / "none", tmp_path) == math.inf
