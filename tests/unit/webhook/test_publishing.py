"""Events that come more than once: published once, and remembered for a while."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.amqp.publication import Publication
from bridge.errors import Confirm, PublishError
from bridge.webhook.publishing import RecentEvents
from tests.unit.webhook.publications import GUARD_SECONDS, Gate, write

# A time of the event loop that no test sees.
LATER = 1e9


async def unanswered(recent: RecentEvents, gate: Gate, repeats: int) -> None:
    """Publish an event, and repeat it, each until a deadline at which there is no confirm."""
    loop = asyncio.get_running_loop()
    with pytest.raises(PublishError, match="no confirm"):
        await recent.once(b"key", gate, deadline=loop.time())
    for _ in range(repeats):
        with pytest.raises(TimeoutError):
            await recent.once(b"key", gate, deadline=loop.time())


async def test_a_late_confirm_counts() -> None:
    """What has no confirm in time is not published again, and is a repeat once it is confirmed."""
    gate, recent = Gate(), RecentEvents(600)
    await unanswered(recent, gate, repeats=3)
    gate.confirms[0].set_result("confirmed")

    assert [await recent.once(b"key", gate, deadline=LATER) for _ in range(2)] == [False] * 2
    assert len(gate.confirms) == 1


async def test_a_repeat_in_time_for_the_late_confirm() -> None:
    """A repeat that waits when the confirm comes is answered with it."""
    gate, recent = Gate(), RecentEvents(600)
    await unanswered(recent, gate, repeats=0)
    repeat = asyncio.create_task(recent.once(b"key", gate, deadline=LATER))
    await asyncio.sleep(0)
    gate.confirms[0].set_result("confirmed")

    assert (await repeat, len(gate.confirms)) == (False, 1)


@pytest.mark.parametrize("fate", ["nacked", "returned", "error"])
async def test_what_is_late_and_not_stored_is_published_anew(fate: Confirm) -> None:
    """A refusal after the deadline, or the end of the channel, makes room for the next repeat."""
    gate, recent = Gate(), RecentEvents(600)
    await unanswered(recent, gate, repeats=1)
    gate.confirms[0].set_result(fate)
    repeat = asyncio.create_task(recent.once(b"key", gate, deadline=LATER))
    await gate.until(2)
    gate.confirms[1].set_result("confirmed")

    assert await repeat


async def test_nothing_is_kept_of_what_ended() -> None:
    """Whatever became of a publish, its place is free."""
    recent = RecentEvents(600)
    confirms: list[asyncio.Future[Confirm]] = []

    async def write_one() -> Publication:
        confirms.append(asyncio.get_running_loop().create_future())
        return write(confirms[-1])

    async def fail() -> Publication:
        raise PublishError("timeout")

    loop = asyncio.get_running_loop()
    with pytest.raises(PublishError):
        await recent.once(b"a", fail, deadline=loop.time() + GUARD_SECONDS)
    for key in (b"b", b"c", b"d"):
        with pytest.raises(PublishError):
            await recent.once(key, write_one, deadline=loop.time())
    before = set(recent._in_flight)
    fates: tuple[Confirm, ...] = ("confirmed", "nacked", "error")
    for confirm, fate in zip(confirms, fates, strict=True):
        confirm.set_result(fate)
    await asyncio.sleep(0)

    assert (before, set(recent._in_flight)) == ({b"b", b"c", b"d"}, set())
    assert [key for key in (b"a", b"b", b"c", b"d") if recent.is_remembered(key)] == [b"b"]


async def _write() -> Publication:
    return write()


async def test_memory_of_repeats_ends() -> None:
    """An event is remembered for the window, and then it is new again."""
    clock = [0.0]
    recent = RecentEvents(10, clock=lambda: clock[0])

    async def is_new_at(seconds: float) -> bool:
        clock[0] = seconds
        return await recent.once(b"key", _write, deadline=LATER)

    found = [await is_new_at(seconds) for seconds in (0, 9.9, 10.1, 15, 20.2)]
    assert found == [True, False, True, False, True]


@given(
    now=st.floats(0, 1e8, allow_nan=False),
    window_seconds=st.floats(0.001, 1e6, allow_nan=False),
)
async def test_the_first_is_never_a_repeat(now: float, window_seconds: float) -> None:
    """An event that was not published is new, whatever the clock and the window are."""
    recent = RecentEvents(window_seconds, clock=lambda: now)

    assert await recent.once(b"key", _write, deadline=LATER)
    assert not await recent.once(b"key", _write, deadline=LATER)


async def test_memory_of_repeats_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its size the memory forgets the oldest event first."""
    monkeypatch.setattr("bridge.webhook.publishing.LEAST_RECENT_EVENTS", 4)
    recent = RecentEvents(600)
    keys = [b"0", b"1", b"2", b"3", b"4", b"5"]
    for key in keys:
        await recent.once(key, _write, deadline=LATER)

    assert [recent.is_remembered(key) for key in keys] == [False, *[True] * 5]
    assert [await recent.once(key, _write, deadline=LATER) for key in keys[::-5]] == [False, True]


async def test_events_without_a_key_are_never_repeats() -> None:
    """What has no id is published each time."""
    recent = RecentEvents(600)

    assert [await recent.once(None, _write, deadline=LATER) for _ in range(3)] == [True] * 3
