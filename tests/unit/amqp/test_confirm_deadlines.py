"""One timer for many waits: each expires in its time, and not when it has ended before."""

import asyncio

import pytest

from bridge.amqp.publication import ConfirmDeadlines
from tests.unit.webhook.publications import GUARD_SECONDS

SECONDS = 0.05


async def until(expired: list[str], count: int) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        while len(expired) < count:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.001)


async def test_each_expires_in_its_time() -> None:
    """Waits expire in the order in which they began, none before its seconds are over."""
    loop = asyncio.get_running_loop()
    expired: list[str] = []
    times: list[float] = []

    def expire(key: int, wait: str) -> None:
        expired.append(f"{key} {wait}")
        times.append(loop.time())

    deadlines = ConfirmDeadlines(SECONDS, expire)
    begun = []
    for key, wait in enumerate(("a", "b")):
        begun.append(loop.time())
        deadlines.add(key, wait)
        await asyncio.sleep(SECONDS / 2)
    await until(expired, 2)

    assert expired == ["0 a", "1 b"]
    # Reckoned as it is there: a difference of two moments may be a bit less.
    assert all(at >= since + SECONDS for at, since in zip(times, begun, strict=True))


async def test_what_has_ended_does_not_expire() -> None:
    """A wait ends once, and those beside it still expire, also after a silence."""
    expired: list[str] = []
    deadlines = ConfirmDeadlines[int, str](SECONDS, lambda _, wait: expired.append(wait))
    deadlines.add(1, "a")
    deadlines.add(2, "b")
    ended = [deadlines.discard(1) for _ in range(2)]
    await until(expired, 1)
    late = deadlines.discard(2)
    await asyncio.sleep(2 * SECONDS)
    deadlines.add(3, "c")
    await until(expired, 2)

    assert (ended, late, expired) == (["a", None], None, ["b", "c"])


async def test_there_is_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, one timer is set at a time."""
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    expired: list[str] = []
    deadlines = ConfirmDeadlines[int, str](SECONDS, lambda _, wait: expired.append(wait))
    call_at = loop.call_at

    def count(when: float, *rest: object) -> object:
        timers.append(when)
        return call_at(when, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_at", count)
        for number in range(1000):
            deadlines.add(number, str(number))
    await until(expired, 1000)

    assert len(timers) == 1
