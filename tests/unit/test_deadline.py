"""A deadline ends blocks that swallow cancellations; a bounded wait says whether its event came."""

import asyncio

import pytest

from bridge import deadline
from bridge.deadline import Deadline, wait_at_most


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "CANCEL_AGAIN_SECONDS", 0.01)


async def _swallow(times: int) -> None:
    """Wait for ever and drop a number of cancellations, as some libraries do."""
    for _ in range(times):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_swallowed_cancellation_does_not_lift_the_deadline(times: int) -> None:
    """A block that drops its cancellation and goes on is cancelled again until it ends."""
    task = asyncio.current_task()

    async def work() -> None:
        async with Deadline(0.01):
            await _swallow(times)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await work()

    assert task is not None
    assert task.cancelling() == 0


async def test_a_block_that_ends_by_itself_keeps_its_result() -> None:
    """A result, or an error, that comes together with the deadline is not lost."""
    async with Deadline(0.01):
        await _swallow(1)
        result = 7

    async def fail() -> None:
        async with Deadline(0.01):
            await _swallow(1)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    async with Deadline(60):
        pass

    assert result == 7


@pytest.mark.parametrize("replaced", [False, True], ids=["dropped", "replaced"])
async def test_a_cancellation_from_outside_is_raised_at_the_end(*, replaced: bool) -> None:
    """The cancellation is raised even if a library drops it or replaces it by an error."""
    is_beyond = False

    async def work() -> None:
        nonlocal is_beyond
        async with Deadline(60):
            await _swallow(1)
            if replaced:
                raise KeyError
        is_beyond = True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not is_beyond


async def test_the_outer_deadline_reaches_through_the_inner() -> None:
    """A block that drops the outer deadline's cancellation still ends with the outer deadline."""

    async def work() -> None:
        async with Deadline(0.01):
            while True:
                async with Deadline(60):
                    await _swallow(1)

    with pytest.raises(TimeoutError):
        await work()


async def test_a_task_that_is_cancelled_may_have_deadlines() -> None:
    """During the clean-up after a cancellation, a deadline still raises TimeoutError."""

    async def work() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with pytest.raises(TimeoutError):
                async with Deadline(0.01):
                    await asyncio.Event().wait()
            async with Deadline(60):
                return "closed"
        return ""

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()

    assert await task == "closed"


@pytest.mark.parametrize("seconds", [None, 0.0, 30.0])
async def test_an_event_that_is_set_ends_the_wait(seconds: float | None) -> None:
    event = asyncio.Event()
    event.set()

    assert await wait_at_most(seconds, event)


async def test_a_wait_for_an_event_ends_without_it() -> None:
    assert not await wait_at_most(0.01, asyncio.Event())


async def test_a_wait_for_an_event_can_be_cancelled() -> None:
    waiting = asyncio.create_task(wait_at_most(30.0, asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
