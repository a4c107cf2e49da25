"""One timer for many waits: each expires in its time, and not when it has ended before."""

import asyncio

import pytest

from bridge.inbound.deadlines import Deadlines
from tests.inbound.publications import GUARD_SECONDS

SECONDS = 0.05


async def until(expired: list[str], count: int) -> None:
    """Return when so many have expired."""
    async with asyncio.timeout(GUARD_SECONDS):
        while len(expired) < count:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.001)


async def test_each_expires_in_its_time() -> None:
    """Waits expire in the order in which they began, none before its seconds are over."""
    loop = asyncio.get_running_loop()
    expired: list[str] = []
    times: list[float] = []

    def expire(wait: str) -> None:
        expired.append(wait)
        times.append(loop.time())

    deadlines = Deadlines(SECONDS, expire)
    begun = []
    for wait in ("a", "b"):
        begun.append(loop.time())
        deadlines.add(wait)
        await asyncio.sleep(SECONDS / 2)
    await until(expired, 2)

    assert expired == ["a", "b"]
    assert all(at - since >= SECONDS for at, since in zip(times, begun, strict=True))


async def test_what_has_ended_does_not_expire() -> None:
    """A wait ends once, and those beside it still expire, also after a silence."""
    expired: list[str] = []
    deadlines = Deadlines(SECONDS, expired.append)
    deadlines.add("a")
    deadlines.add("b")
    ended = [deadlines.discard("a") for _ in range(2)]
    await until(expired, 1)
    is_late = not deadlines.discard("b")
    await asyncio.sleep(2 * SECONDS)
    deadlines.add("c")
    await until(expired, 2)

    assert (ended, is_late, expired) == ([True, False], True, ["b", "c"])


async def test_there_is_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, one timer is set at a time."""
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    expired: list[str] = []
    deadlines = Deadlines(SECONDS, expired.append)
    call_at = loop.call_at

    def count(when: float, *rest: object) -> object:
        timers.append(when)
        return call_at(when, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_at", count)
        for number in range(1000):
            deadlines.add(str(number))
    await until(expired, 1000)

    assert len(timers) == 1


async def test_what_has_arrived_in_a_stall_is_in_time() -> None:
    """What ends a wait, and was read late because the process stood still, ends it in time."""
    loop = asyncio.get_running_loop()
    expired: list[str] = []
    deadlines = Deadlines(0.0, expired.append)
    deadlines.add("a")
    loop.call_later(0, lambda: loop.call_soon(deadlines.discard, "a"))
    await asyncio.sleep(SECONDS)

    assert expired == []
