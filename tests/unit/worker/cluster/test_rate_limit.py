"""One pace for several workers: what each has of a limit while workers come and go.

Workers, queue and service live on a clock that leaps; see `tests/simulation`.
"""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from bridge.config import RateLimitSettings
from bridge.worker.cluster.membership import ACTIVE, HEARD
from bridge.worker.cluster.messages import Consumers, WorkerState
from bridge.worker.cluster.rate_limit import COUNT_SECONDS, LOOK_SECONDS, MISSING_SECONDS
from tests.clock import in_world
from tests.simulation.windows import fewest_in, most_in
from tests.simulation.world import World

HEARD_SECONDS = HEARD.seconds_at(1)
GONE_SECONDS = ACTIVE.seconds_at(1)
# Until a count finds that consumers are missing, and the look after it.
MISSED_SECONDS = COUNT_SECONDS + MISSING_SECONDS + 2 * LOOK_SECONDS
LIMIT = {"per_second": 100, "burst": 5, "scope": "cluster"}


def make_world(limit: dict[str, Any]) -> World:
    return World(limit=limit, concurrency=20)


@pytest.fixture
def world() -> Iterator[World]:
    made = make_world(LIMIT)
    yield made
    made.close()


def parts(world: World) -> list[int]:
    return [worker.rate_limit.workers for worker in world.workers]


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
@in_world
async def test_the_limit_is_kept_and_used_while_workers_come_and_go(
    world: World, *, kill: bool
) -> None:
    """From one to three, to one and to eight: no second over 105 %, no ten seconds under 90 %."""
    world.queue.publish(10_000)
    for number in (1, 3, 1, 8):
        world.scale(number, kill=kill)
        await asyncio.sleep(15.37)
    posts = world.posts()

    assert most_in(posts, 1) <= 105
    assert fewest_in(posts, 10) >= 900


@pytest.mark.parametrize(
    ("kill", "seconds"), [(False, 0.2), (True, MISSED_SECONDS)], ids=["stopped", "killed"]
)
@in_world
async def test_the_part_of_one_that_goes_is_soon_the_others(
    world: World, *, kill: bool, seconds: float
) -> None:
    """A worker that stops says so; one that is killed is missed, and soon after has no part.

    What it held comes to the others, which consume anew beside it: their consumers that are
    cancelled are no workers.
    """
    world.queue.publish(10_000)
    world.scale(3)
    # To between two counts of the consumers.
    await asyncio.sleep(3.3)
    assert parts(world) == [3, 3, 3]
    for worker in world.workers:
        worker.member.cluster.tick()
    await asyncio.sleep(0.01)
    world.scale(1, kill=kill)
    await asyncio.sleep(seconds)
    assert parts(world) == [1]


@in_world
async def test_others_give_up_their_part_before_a_newcomer_sends(world: World) -> None:
    """A worker that starts is counted by the others when it says hello."""
    world.queue.publish(10_000)
    world.scale(1)
    await asyncio.sleep(3)
    world.start(2)
    await asyncio.sleep(0.2)

    assert parts(world)[0] == 3
    assert {post.worker for post in world.service.posts} == {0}


@pytest.mark.parametrize(("scales", "fewest"), [((3,), 250), ((1, 3, 2), 150)])
def test_the_limit_of_a_sender_is_shared(scales: tuple[int, ...], fewest: int) -> None:
    """Each sender has its own limit, however many workers send for it.

    What waits on the ladder has its time from the number of workers at that moment, so that less
    than the limit is used for a while after a change.
    """
    world = make_world({"per_sender": 30, "burst": 3, "scope": "cluster"})

    async def story() -> None:
        for number in scales:
            world.scale(number)
            for _ in range(150):
                world.queue.publish(4, "A")
                world.queue.publish(4, "B")
                await asyncio.sleep(0.1)

    world.play(story())
    world.close()

    for sender in ("A", "B"):
        posts = sorted(post.at for post in world.service.posts if post.sender == sender)
        assert most_in(posts, 1) <= 34
        assert fewest_in(posts, 10) >= fewest


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "no consumer"])
@in_world
async def test_one_that_is_only_silent_or_only_no_consumer_keeps_its_part(
    world: World, *, is_silent: bool
) -> None:
    """A worker may be too busy for a heartbeat, or may be consuming anew."""
    world.queue.publish(10_000)
    world.scale(3)
    await asyncio.sleep(3)
    if is_silent:
        world.workers[1].member.fall_silent()
        await asyncio.sleep(HEARD_SECONDS + 1)
    else:
        world.queue.register(world.workers[1], is_consumer=False)
        await asyncio.sleep(0.7)

    assert [parts(world)[0], parts(world)[2]] == [3, 3]


@in_world
async def test_one_that_does_not_answer_keeps_its_part_unless_a_consumer_is_missing(
    world: World,
) -> None:
    """Of two that are silent when one was killed, the one that is a consumer has its part."""
    world.queue.publish(10_000)
    world.scale(4)
    await asyncio.sleep(3)
    world.workers[1].member.fall_silent()
    world.workers[2].kill()
    await asyncio.sleep(MISSED_SECONDS)
    seen = [parts(world)[0], parts(world)[3]]
    await asyncio.sleep(HEARD_SECONDS)
    seen += [parts(world)[0], parts(world)[3]]

    assert seen == [3, 3, 3, 3]


@in_world
async def test_one_that_speaks_to_nobody_has_its_part(world: World) -> None:
    """A consumer that is no peer's is a worker that does not speak here."""
    world.queue.publish(10_000)
    stranger = world.start()[0]
    await asyncio.sleep(1)
    stranger.member.fall_silent()
    world.start(2)
    await asyncio.sleep(2)

    assert parts(world)[1:] == [3, 3]


@in_world
async def test_what_cannot_be_counted_is_heard(world: World) -> None:
    """Where the broker does not tell how many consumers there are, silence alone decides."""

    async def unknown() -> None:
        return None

    # Without a limit nobody counts by itself.
    world.settings = world.settings.model_copy(update={"rate_limit": RateLimitSettings()})
    first = world.start(3)[0]
    following = asyncio.create_task(first.rate_limit.follow(unknown))
    await asyncio.sleep(2)
    for worker in world.workers[1:]:
        worker.kill()
    await asyncio.sleep(HEARD_SECONDS)
    seen = [first.rate_limit.workers]
    await asyncio.sleep(GONE_SECONDS)
    seen.append(first.rate_limit.workers)
    following.cancel()

    assert seen == [3, 1]


@in_world
async def test_a_count_that_differs_is_soon_followed_by_another(world: World) -> None:
    """A change that a peer publishes while the consumers are counted may not be in the count."""
    counted_at: list[float] = []

    # Without a limit nobody counts by itself.
    world.settings = world.settings.model_copy(update={"rate_limit": RateLimitSettings()})
    first, second, _ = world.start(3)
    await asyncio.sleep(1)

    async def count() -> int:
        counted_at.append(world.now)
        if len(counted_at) == 4:
            second.membership.publish(WorkerState(consumers=Consumers(count=0)))
            await asyncio.sleep(0.01)
        return 3

    following = asyncio.create_task(first.rate_limit.follow(count))
    await asyncio.sleep(10)
    following.cancel()

    waits = [after - before for before, after in itertools.pairwise(counted_at)]
    assert waits[3] < 2 * LOOK_SECONDS < COUNT_SECONDS <= min(waits[2], waits[4])


@in_world
async def test_who_hears_nobody_counts_consumers(world: World) -> None:
    """Without the exchange the limit is divided by the consumers of the queue."""
    world.queue.publish(10_000)
    fresh = world.start(2)
    await asyncio.sleep(0.1)
    for worker in fresh:
        worker.member.fall_silent()
    await asyncio.sleep(20)

    assert {post.worker for post in world.service.posts} == {0, 1}
    assert 90 <= most_in([at for at in world.posts() if at > 5], 1) <= 105


@in_world
async def test_who_hears_nobody_keeps_its_part_in_a_pause(world: World) -> None:
    """A paused worker is no consumer at times, and counts on the others to come back."""
    fresh = world.start(2)
    await asyncio.sleep(0.1)
    for worker in fresh:
        worker.member.fall_silent()
    await asyncio.sleep(5)
    world.service.answer = lambda *_: (401, None)
    world.queue.publish(100)
    await asyncio.sleep(1)
    assert fresh[0].breaker.pause_reason
    fresh[1].kill()
    await asyncio.sleep(20)

    assert fresh[0].rates._workers == 2
