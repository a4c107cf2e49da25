"""When a process searches for reference cycles."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from bridge import garbage
from bridge.garbage import ALL_SECONDS, MOST_SECONDS, QUIET_OBJECTS, collect_when_quiet
from tests.clock import LeapingWorld

Objects = Callable[[float], int]


@pytest.fixture
def world() -> Iterator[LeapingWorld]:
    """Lend an event loop whose time leaps."""
    with closing(LeapingWorld()) as world:
        yield world


def searches(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch, *, seconds: float, objects: Objects
) -> list[tuple[float, int]]:
    """Return when what was searched, where so many objects are in hand after so many seconds."""
    found: list[tuple[float, int]] = []
    began = world.loop.time()
    with monkeypatch.context() as patched:
        patched.setattr(
            "bridge.garbage.gc.get_count", lambda: (objects(world.loop.time() - began), 0, 0)
        )
        patched.setattr(
            "bridge.garbage.gc.collect",
            lambda generation: found.append((round(world.loop.time() - began), generation)),
        )

        async def run() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(collect_when_quiet(), seconds + 0.5)

        world.run(run())
    return found


def test_each_second_while_it_is_quiet(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of what is new takes a moment then."""
    found = searches(world, monkeypatch, seconds=5, objects=lambda _: QUIET_OBJECTS)

    assert found == [(second, 1) for second in range(1, 6)]


def test_a_busy_process_searches_rarely(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a quiet moment, but not for ever."""
    quiet_at = 4

    def objects(seconds: float) -> int:
        return 0 if round(seconds) == quiet_at else 10 * QUIET_OBJECTS

    found = searches(world, monkeypatch, seconds=4 + 2 * MOST_SECONDS, objects=objects)

    assert found == [(quiet_at + MOST_SECONDS * times, 1) for times in range(3)]


def test_all_is_searched_now_and_then(world: LeapingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may have lived through a search before it was garbage."""
    found = searches(world, monkeypatch, seconds=2 * ALL_SECONDS + 2, objects=lambda _: 0)

    assert [second for second, generation in found if generation == 2] == [
        ALL_SECONDS,
        2 * ALL_SECONDS,
    ]


def test_what_is_there_at_the_start_is_never_searched() -> None:
    """Nothing is searched before, and less often by Python itself afterwards."""
    program = (
        "import gc; from bridge import garbage; garbage.forgo_until_started(); "
        "before = gc.isenabled(); garbage.begin(); "
        "print(before, gc.isenabled(), gc.get_freeze_count() > 1000, gc.get_threshold()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout.split() == ["False", "True", "True", str(garbage.MOST_OBJECTS)]
