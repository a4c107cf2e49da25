"""How many requests may be in flight: the slots, and who waits for one."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from bridge.outbound.capacity import Slots


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def acquire(slots: Slots, count: int) -> list[asyncio.Task[None]]:
    """Ask for so many slots, one after the other."""
    return [asyncio.create_task(slots.acquire()) for _ in range(count)]


def count_done(tasks: list[asyncio.Task[None]]) -> int:
    """Count the tasks that have got theirs."""
    return sum(task.done() and not task.cancelled() for task in tasks)


async def test_slots_are_as_many_as_they_are() -> None:
    """One more than there are waits until one is given back."""
    slots = Slots(2)
    tasks = acquire(slots, 3)
    await settle()
    assert [task.done() for task in tasks] == [True, True, False]

    slots.give_back()
    await settle()

    assert tasks[2].done()


async def test_more_slots_let_waiting_tasks_go() -> None:
    """When there are more slots, those who wait get them at once, in their order."""
    slots = Slots(1)
    tasks = acquire(slots, 4)
    await settle()

    slots.resize(3)
    await settle()

    assert [task.done() for task in tasks] == [True, True, True, False]
    tasks[3].cancel()


async def test_fewer_slots_take_none_away() -> None:
    """Who has a slot keeps it; the next one goes when fewer are taken than there are."""
    slots = Slots(4)
    acquire(slots, 4)
    tasks = acquire(slots, 1)
    await settle()

    slots.resize(2)
    went = []
    for _ in range(4):
        slots.give_back()
        await settle()
        went.append(tasks[0].done())

    assert went == [False, False, True, True]


async def test_a_cancelled_wait_blocks_nobody() -> None:
    """A slot goes past who has given up, whether it was on its way to him or not."""
    for give_back_first in (False, True):
        slots = Slots(1)
        holder, waiting, next_one = acquire(slots, 3)
        await settle()
        assert holder.done()
        if give_back_first:
            slots.give_back()
            waiting.cancel()
        else:
            waiting.cancel()
            slots.give_back()
        await settle()

        assert waiting.cancelled()
        assert next_one.done()


@given(st.lists(st.integers(min_value=-2, max_value=9), max_size=60))
def test_slots_are_never_more_than_allowed(steps: list[int]) -> None:
    """Whatever the order of events, a slot is given only when there is one, and none is lost."""

    async def play() -> None:
        slots = Slots(3)
        tasks: list[asyncio.Task[None]] = []
        given_back = 0
        for step in steps:
            before = count_done(tasks) - given_back
            if step == -2:
                tasks += acquire(slots, 1)
            elif step == -1 and before:
                given_back += 1
                slots.give_back()
            elif step == 0:
                for task in tasks[-1:]:
                    task.cancel()
            elif step > 0:
                slots.resize(step)
            await settle()
            taken = count_done(tasks) - given_back
            waiting = sum(not task.done() for task in tasks)
            assert taken <= max(before, slots.limit)
            assert not waiting or taken >= slots.limit
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(play())
