"""Slots: how many there are, who waits for one, and in which order they are handed out."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from bridge.worker.limits.capacity import URGENT_IN_A_ROW, Slots


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


# --- Urgent ones ----------------------------------------------------------------------------------


async def served(*waiting: str) -> str:
    """Have the urgent (u) and others (o) wait in this order for one slot, and tell who had it."""
    slots, had = Slots(1), list[str]()
    await slots.acquire()

    async def wait(who: str) -> None:
        await slots.acquire(is_urgent=who == "u")
        had.append(who)
        await asyncio.sleep(0)
        slots.give_back()

    tasks = [asyncio.create_task(wait(who)) for who in "".join(waiting)]
    await settle()
    slots.give_back()
    await asyncio.wait(tasks)
    return "".join(had)


async def test_urgent_pass_all_others() -> None:
    """However many were there before."""
    assert await served("o" * 50, "uuu") == "uuu" + "o" * 50


async def test_urgent_starve_nobody() -> None:
    """While both wait, each ninth slot goes to one that is not urgent."""
    had = await served("u" * 4 * URGENT_IN_A_ROW, "oo", "u" * URGENT_IN_A_ROW)

    turn = "u" * URGENT_IN_A_ROW + "o"
    assert had == 2 * turn + "u" * 3 * URGENT_IN_A_ROW


async def test_urgent_among_themselves_count_for_nothing() -> None:
    """Those that passed nobody do not cost those that come later their place."""
    slots, had = Slots(1), list[str]()

    async def take(who: str) -> None:
        await slots.acquire(is_urgent=who == "u")
        had.append(who)

    await slots.acquire()
    for _ in range(3 * URGENT_IN_A_ROW):
        task = asyncio.create_task(take("u"))
        await settle()
        slots.give_back()
        await task
    waiting = [asyncio.create_task(take(who)) for who in "ou"]
    for _ in waiting:
        await settle()
        slots.give_back()
    await asyncio.wait(waiting)

    assert had[-2:] == ["u", "o"]


async def test_an_urgent_one_does_not_take_the_place_of_one_that_is_served() -> None:
    """A slot that is on its way to somebody stays his."""
    slots = Slots(1)
    await slots.acquire()
    other = asyncio.create_task(slots.acquire())
    await settle()
    slots.give_back()
    urgent = asyncio.create_task(slots.acquire(is_urgent=True))
    await settle()

    assert (other.done(), urgent.done()) == (True, False)
    urgent.cancel()


async def test_an_urgent_one_that_gives_up_blocks_nobody() -> None:
    """The slot goes to the next, urgent or not."""
    slots = Slots(1)
    await slots.acquire()
    urgent = asyncio.create_task(slots.acquire(is_urgent=True))
    other = asyncio.create_task(slots.acquire())
    await settle()
    urgent.cancel()
    await settle()
    slots.give_back()
    await settle()

    assert other.done()


async def test_one_that_gives_up_as_its_turn_comes() -> None:
    """It ends as any that gives up, and the next has the slot."""
    slots = Slots(1)
    await slots.acquire()
    first, second = (asyncio.create_task(slots.acquire()) for _ in "12")
    await settle()
    first.cancel()
    slots.give_back()
    await settle()

    assert (first.cancelled(), second.done()) == (True, True)
    assert slots.taken == 1
