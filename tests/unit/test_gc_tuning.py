"""When a process searches for reference cycles."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from bridge import gc_tuning
from bridge.gc_tuning import (
    LOOK_SECONDS,
    MOST_LOOKS,
    QUIET_OBJECTS,
    REST_SECONDS,
    collect_when_quiet,
)
from tests.clock import LeapingWorld

Objects = Callable[[float], int]


@pytest.fixture
def world() -> Iterator[LeapingWorld]:
    """Lend an event loop whose time leaps."""
    with closing(LeapingWorld()) as world:
        yield world


def searches(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch, *, seconds: float, objects: Objects
) -> list[float]:
    """Return when there was a search, where so many objects are in hand after so many seconds."""
    found: list[float] = []
    began = world.loop.time()

    def passed() -> float:
        return round(world.loop.time() - began, 1)

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collect_when_quiet(), seconds + 0.5)

    with monkeypatch.context() as patched:
        patched.setattr("bridge.gc_tuning.gc.get_count", lambda: (objects(passed()), 0, 0))
        patched.setattr("bridge.gc_tuning.gc.collect", lambda: found.append(passed()))
        world.run(run())
    return found


def test_every_few_seconds_while_it_is_quiet(
    world: LeapingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search takes a moment then."""
    found = searches(world, monkeypatch, seconds=3 * REST_SECONDS, objects=lambda _: QUIET_OBJECTS)

    assert found == [REST_SECONDS, 2 * REST_SECONDS, 3 * REST_SECONDS]


def test_it_waits_for_a_quiet_moment(world: LeapingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second is enough."""
    quiet_at = REST_SECONDS + 3

    def objects(seconds: float) -> int:
        return 0 if seconds == quiet_at else 10 * QUIET_OBJECTS

    assert searches(world, monkeypatch, seconds=quiet_at + 1, objects=objects) == [quiet_at]


def test_it_does_not_wait_for_ever(world: LeapingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is always busy makes garbage too."""
    longest = REST_SECONDS + MOST_LOOKS * LOOK_SECONDS
    found = searches(world, monkeypatch, seconds=2 * longest, objects=lambda _: 10 * QUIET_OBJECTS)

    assert found == pytest.approx([longest, 2 * longest], abs=0.3)


def test_what_is_there_at_the_start_is_never_searched() -> None:
    """Nothing is searched before, and less often by Python itself afterwards."""
    program = (
        "import gc; from bridge import gc_tuning; gc_tuning.forgo_until_started(); "
        "before = gc.isenabled(); gc_tuning.begin(); "
        "print(before, gc.isenabled(), gc.get_freeze_count() > 1000, gc.get_threshold()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout.split() == ["False", "True", "True", str(gc_tuning.MOST_OBJECTS)]
