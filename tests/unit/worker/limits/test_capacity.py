"""How many requests may be in flight, and how many deliveries are held for them."""

import asyncio
from typing import Any

import pytest

from bridge.config import WorkerSettings
from bridge.worker.fates import Answer, Fate, judge_status
from bridge.worker.limits.adaptive_limit import FIRST_HELD, FIRST_LIMIT
from bridge.worker.limits.capacity import Capacity
from tests.clock import Clock
from tests.deliveries import make_delivery
from tests.ears import Ears


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


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
            with self.capacity.free_slot() or await self.capacity.slot(
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


@pytest.mark.parametrize(("concurrency", "held"), [(1, 1), (9, 9), (10, 11), (50, 55), (200, 220)])
async def test_fixed_capacity(concurrency: int, held: int) -> None:
    """A number is kept, whatever is answered, and a tenth more deliveries are held."""
    world = World(concurrency=concurrency)
    await world.post(SENT, 100)
    await world.post(REFUSED, 100)

    assert (world.capacity.limit, world.capacity.most_held) == (concurrency, held)
    assert not world.changed.is_set()


@pytest.mark.parametrize("answer", [SENT, REFUSED, None], ids=["sent", "refused", "cut off"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["let go", "kept"])
async def test_how_long_a_slot_is_held(answer: Answer | None, *, is_kept: bool) -> None:
    """A slot is held until the end of the block, or, when it is kept, until it is given back."""
    capacity = World(concurrency=1).capacity
    slot = capacity.free_slot()
    assert slot is not None
    with slot:
        slot.begin()
        slot.answer = answer
        if is_kept:
            give_back = slot.keep()
        assert capacity.free_slot() is None

    if is_kept:
        assert capacity.free_slot() is None
        give_back()
    assert capacity.free_slot() is not None
    assert capacity.free_slot() is None


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
    assert world.capacity.most_held == FIRST_HELD
    world.changed.clear()
    await world.grow()

    assert world.capacity.most_held == 64
    assert world.changed.is_set()


async def test_in_order_as_much_as_possible_is_held() -> None:
    """In order, what is held waits for each other, so that the hold is the maximum."""
    world = World(concurrency="auto", max_concurrency=64, ordering="recipient")
    await world.grow()

    assert (world.capacity.limit, world.capacity.most_held) == (64, 64)
    assert not world.changed.is_set()


async def test_wait_for_a_slot_is_measured() -> None:
    """Who finds a free slot has waited for nothing; who does not, for a slot."""
    world = World(concurrency=1)
    first, second = (make_delivery(clock=world.clock) for _ in range(2))

    async def wait() -> None:
        with world.capacity.free_slot() or await world.capacity.slot(second.waits):
            assert second.waiting_for is None

    with world.capacity.free_slot() or await world.capacity.slot(first.waits):
        waiting = asyncio.create_task(wait())
        await settle()
        assert second.may_be_given_back
        world.clock.now += 3
    await waiting

    assert (first.waited_seconds, second.waited_seconds) == ({}, {"slot": 3})


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
