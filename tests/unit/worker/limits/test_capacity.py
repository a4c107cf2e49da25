"""How many requests may be in flight, and how many deliveries are held for them."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config import WorkerSettings
from bridge.worker.fates import Answer, Fate, judge_status
from bridge.worker.limits.adaptive_limit import FIRST_HELD, FIRST_LIMIT
from bridge.worker.limits.capacity import Capacity, Slots
from tests.clock import Clock
from tests.deliveries import make_delivery
from tests.ears import Ears


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# --- Slots ---


def acquire(slots: Slots, count: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(slots.acquire()) for _ in range(count)]


def count_done(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() and not task.cancelled() for task in tasks)


async def test_more_slots_let_waiting_tasks_go() -> None:
    """When there are more slots, those who wait get them at once, in their order."""
    slots = Slots(1)
    tasks = acquire(slots, 4)
    await settle()

    slots.resize(3)
    await settle()

    assert [task.done() for task in tasks] == [True, True, True, False]
    tasks[3].cancel()


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


async def test_urgent_starve_nobody() -> None:
    """While both wait, each ninth slot goes to one that is not urgent."""
    had = await served("u" * 4 * 8, "oo", "u" * 8)

    turn = "u" * 8 + "o"
    assert had == 2 * turn + "u" * 3 * 8


async def test_urgent_among_themselves_count_for_nothing() -> None:
    """Those that passed nobody do not cost those that come later their place."""
    slots, had = Slots(1), list[str]()

    async def take(who: str) -> None:
        await slots.acquire(is_urgent=who == "u")
        had.append(who)

    await slots.acquire()
    for _ in range(3 * 8):
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


# --- Capacity ---

SENT = Answer(fate=Fate.SENT, result="success", status=202, detail="accepted")
REFUSED = judge_status(503, retry_after_seconds=None)


class World:
    """The capacity of one worker, and the clock that it goes by."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.changed = asyncio.Event()
        self.capacity = Capacity(
            WorkerSettings(queue="q", **settings), changed=self.changed, clock=self.clock
        )

    async def post(self, answer: Answer | None, times: int = 1) -> None:
        """Have so many requests in flight together, each answered after a moment."""
        free = asyncio.Event()

        async def one() -> None:
            with self.capacity.take_free_slot() or await self.capacity.slot(
                make_delivery().waits
            ) as slot:
                slot.begin()
                await free.wait()
                slot.answer = answer

        tasks = [asyncio.create_task(one()) for _ in range(times)]
        await settle()
        self.clock.now += 0.2
        free.set()
        await asyncio.wait(tasks)

    async def grow(self) -> None:
        """Accept everything until the limit does not grow any more."""
        while self.capacity.limit < 64:
            await self.post(SENT, self.capacity.limit)


@pytest.mark.parametrize(("concurrency", "held"), [(1, 1), (9, 9), (10, 11)])
async def test_fixed_capacity(concurrency: int, held: int) -> None:
    """A number is kept, whatever is answered, and a tenth more deliveries are held."""
    world = World(concurrency=concurrency)
    await world.post(SENT, 100)
    await world.post(REFUSED, 100)

    assert (world.capacity.limit, world.capacity.prefetch) == (concurrency, held)
    assert not world.changed.is_set()


@pytest.mark.parametrize("answer", [SENT, REFUSED, None], ids=["sent", "refused", "cut off"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["let go", "kept"])
async def test_how_long_a_slot_is_held(answer: Answer | None, *, is_kept: bool) -> None:
    """A slot is held until the end of the block, or, when it is kept, until it is given back."""
    capacity = World(concurrency=1).capacity
    slot = capacity.take_free_slot()
    assert slot is not None
    with slot:
        slot.begin()
        slot.answer = answer
        if is_kept:
            give_back = slot.keep()
        assert capacity.take_free_slot() is None

    if is_kept:
        assert capacity.take_free_slot() is None
        give_back()
    assert capacity.take_free_slot() is not None
    assert capacity.take_free_slot() is None


async def test_slots_follow_the_limit() -> None:
    """With `auto` there are as many slots as the service can take, and fewer when it refuses."""
    world = World(concurrency="auto", max_concurrency=64)
    assert world.capacity.limit == FIRST_LIMIT

    await world.grow()
    assert world.capacity.limit == 64

    await world.post(REFUSED, 64)
    assert world.capacity.limit == 32


async def test_request_without_an_answer_teaches_nothing() -> None:
    """A request that was cut off is no refusal, and leaves no trace among those in flight."""
    world = World(concurrency="auto", max_concurrency=64)
    await world.grow()
    for _ in range(100):
        await world.post(None, 64)

    assert world.capacity.limit == 64
    await world.post(REFUSED, 1)
    assert world.capacity.limit == 32


async def test_more_is_held_when_the_limit_grows() -> None:
    """The hold follows the limit, and the consumer is told when it is another."""
    world = World(concurrency="auto", max_concurrency=64)
    assert world.capacity.prefetch == FIRST_HELD
    world.changed.clear()
    await world.grow()

    assert world.capacity.prefetch == 64
    assert world.changed.is_set()


async def test_in_order_as_much_as_possible_is_held() -> None:
    """In order, what is held waits for each other, so that the hold is the maximum."""
    world = World(concurrency="auto", max_concurrency=64, ordering="recipient")
    await world.grow()

    assert (world.capacity.limit, world.capacity.prefetch) == (64, 64)
    assert not world.changed.is_set()


async def test_limit_is_logged_when_it_has_doubled(ears: Ears) -> None:
    """The log says where the limit is when it is twice or half of what it said last."""
    world = World(concurrency="auto", max_concurrency=64)
    for answer in (None, SENT, REFUSED):
        if answer is SENT:
            await world.grow()
        else:
            await world.post(answer, world.capacity.limit)
        for _ in range(2):
            world.capacity.log_limit()

    assert [heard["limit"] for heard in ears.heard("concurrency_changed")] == [64, 32]
