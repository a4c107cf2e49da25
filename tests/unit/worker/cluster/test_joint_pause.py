"""One pause for several workers: who is told, who probes, and when all go on.

Workers, queue and service live on a clock that leaps; see `tests/simulation`.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from pydantic import SecretStr

from bridge.config import SmsApiSettings
from bridge.worker.cluster.joint_pause import SILENCE_SECONDS, setup_of
from bridge.worker.cluster.membership import TICK_SECONDS
from bridge.worker.cluster.messages import Message, WorkerState
from tests.clock import in_world
from tests.ears import Ears
from tests.simulation.service import POST_SECONDS
from tests.simulation.worker import Worker
from tests.simulation.world import World

SLOTS = 10
GUARD_SECONDS = 10
# The time that it takes until an answer has come in and its news has been heard.
HEARD_SECONDS = POST_SECONDS + 0.01
# A tick finds the silence.
TAKEN_OVER_SECONDS = SILENCE_SECONDS + 1.1 * TICK_SECONDS


@pytest.fixture
def world() -> Iterator[World]:
    made = World(concurrency=SLOTS)
    yield made
    made.close()


async def settled(world: World, number: int = 3) -> None:
    """Start workers that have nothing to do, and have them know each other."""
    world.start(number)
    await asyncio.sleep(2)


async def revoke(world: World, number: int = 3) -> None:
    await settled(world, number)
    world.service.answer = lambda *_: (401, None)
    world.queue.publish(1000)
    await asyncio.sleep(HEARD_SECONDS)


def reasons(world: World) -> set[str | None]:
    return {worker.breaker.pause_reason for worker in world.workers}


def probers(world: World) -> list[int]:
    return [worker.number for worker in world.workers if not worker.joint_pause.is_probing]


def accept(world: World) -> None:
    world.service.answer = lambda *_: (200, None)


async def until_accepted(world: World) -> None:
    async with asyncio.timeout(120):
        while not world.posts(200):  # noqa: ASYNC110  time leaps to the next event
            await asyncio.sleep(0.001)


# --- One pause -----------------------------------------------------------------------------------


@in_world
async def test_first_acceptance_resumes_all(world: World) -> None:
    """All go on with the first message that is accepted, and finish the queue together."""
    await revoke(world)
    accept(world)
    await until_accepted(world)
    await asyncio.sleep(HEARD_SECONDS)
    assert reasons(world) == {None}
    await asyncio.sleep(10)

    assert world.sent == 1000
    assert {post.worker for post in world.service.posts if post.status == 200} == {0, 1, 2}


@in_world
async def test_two_that_pause_at_once_have_one_probe(world: World) -> None:
    """Of workers that find out at the same time the one with the lowest id probes."""
    await revoke(world)
    await asyncio.sleep(HEARD_SECONDS)
    lowest = min(world.workers, key=lambda worker: worker.membership.worker_id)

    assert probers(world) == [lowest.number]


@pytest.mark.parametrize("fact", ["breaker", "resumed"])
@in_world
async def test_what_is_lost_is_made_good(world: World, fact: str) -> None:
    """If only heartbeats tell of a pause, all pause and resume a second later."""

    def loses(_sender: str, message: Message) -> bool:
        is_change = isinstance(message, WorkerState) and message.heartbeat_seconds is None
        return is_change and getattr(message, fact) is not None

    world.exchange.loses = loses
    await revoke(world)
    await asyncio.sleep(1.2)
    assert reasons(world) == {"credentials_rejected"}
    accept(world)
    await until_accepted(world)
    await asyncio.sleep(1.2)
    assert reasons(world) == {None}


@in_world
async def test_who_hears_nobody_decides_for_itself(world: World) -> None:
    """Without the exchange each worker probes, as if it were alone."""
    world.exchange.loses = lambda _sender, _message: True
    await revoke(world)
    await asyncio.sleep(2)

    assert probers(world) == [0, 1, 2]
    late = {post.worker for post in world.service.posts if post.at > world.began + 2.7}
    assert late == {0, 1, 2}


@in_world
async def test_one_that_the_others_cannot_hear_probes_for_itself(world: World) -> None:
    """Of three, one cannot speak to the others: it finds pause and end by answers of its own."""
    await settled(world)
    world.workers[2].member.fall_silent()
    world.service.answer = lambda *_: (401, None)
    world.queue.publish(1000)
    await asyncio.sleep(2)
    assert reasons(world) == {"credentials_rejected"}
    assert len(probers(world)) == 2
    assert 2 in probers(world)

    world.service.answer = lambda worker, _: (401, None) if worker == 2 else (200, None)
    await asyncio.sleep(5)
    assert [worker.breaker.pause_reason for worker in world.workers] == [
        None,
        None,
        "credentials_rejected",
    ]

    accept(world)
    await asyncio.sleep(10)
    assert reasons(world) == {None}


@in_world
async def test_the_log_tells_of_a_joint_pause(world: World, ears: Ears) -> None:
    """Each worker logs the pause with the status that the API answered to one of them."""
    await settled(world)
    world.service.answer = lambda *_: (426, None)
    world.queue.publish(1)
    await asyncio.sleep(HEARD_SECONDS)

    assert ears.heard("paused") == [{"reason": "misconfigured", "status": 426}] * 3


# --- Who probes ----------------------------------------------------------------------------------


def prober(world: World) -> Worker:
    (number,) = probers(world)
    (found,) = (worker for worker in world.workers if worker.number == number)
    return found


def kill(world: World, worker: Worker) -> None:
    world.workers.remove(worker)
    worker.kill()


def kill_with_successor(world: World, worker: Worker) -> None:
    """Kill a worker, and the one that all others would have probe next."""
    kill(world, worker)
    kill(world, min(world.workers, key=lambda one: one.membership.worker_id))


def stop(world: World, worker: Worker) -> None:
    world.workers.remove(worker)
    worker.stop()


END: dict[str, tuple[Callable[[World, Worker], None], float, int]] = {
    "killed": (kill, TAKEN_OVER_SECONDS, 3),
    "killed with its successor": (kill_with_successor, TAKEN_OVER_SECONDS, 25),
    "stopped": (stop, HEARD_SECONDS, 3),
}


@pytest.mark.parametrize(("end", "seconds", "workers"), END.values(), ids=END)
@in_world
async def test_another_worker_takes_the_probe_over(
    world: World, end: Callable[[World, Worker], None], seconds: float, workers: int
) -> None:
    """When the one that probes is gone another one goes on, in the same rhythm.

    Also where workers are so many that each says less often that it is there.
    """
    await revoke(world, workers)
    await asyncio.sleep(HEARD_SECONDS)
    end(world, prober(world))
    await asyncio.sleep(seconds)
    assert len(probers(world)) == 1
    await asyncio.sleep(60)

    probes = [at for at in world.posts(401) if at > 3]
    # Two that find the silence before either is heard both probe, once.
    rhythm = [at for before, at in pairwise([0.0, *probes]) if at - before > HEARD_SECONDS]
    assert 3 <= len(rhythm) <= 6
    assert len(probes) <= len(rhythm) + 1


@in_world
async def test_no_two_workers_wait_for_each_other(world: World) -> None:
    """Of many, each of which is lost that it lets another probe, one does when that is killed."""

    def loses(_sender: str, message: Message) -> bool:
        is_change = isinstance(message, WorkerState) and message.heartbeat_seconds is None
        told = message.breaker if isinstance(message, WorkerState) else None
        return is_change and told is not None and not told.is_prober

    await settled(world, 25)
    world.exchange.loses = loses
    await revoke(world, 0)
    await asyncio.sleep(HEARD_SECONDS)
    kill(world, prober(world))
    await asyncio.sleep(TAKEN_OVER_SECONDS)

    assert len(probers(world)) == 1


@pytest.mark.parametrize("seed", range(2))
def test_where_many_messages_are_lost_one_worker_probes(seed: int) -> None:
    """While a third of what is published is lost, hardly ever do two probe, or none."""
    world = World(seed=seed, concurrency=SLOTS)
    counts: Counter[int] = Counter()

    async def story() -> None:
        await settled(world, 8)
        world.exchange.loses = lambda _sender, _message: world.exchange.chance.random() < 1 / 3
        await revoke(world, 0)
        for _ in range(600):
            await asyncio.sleep(0.1)
            counts[len(probers(world))] += 1

    world.play(story())
    world.close()

    assert counts[1] > 0.8 * counts.total()


@in_world
async def test_workers_probe_in_turn_when_probes_are_rare(world: World) -> None:
    """In a long pause each has its turn: what keeps a probe from its aim may be the worker's."""
    await revoke(world)
    await asyncio.sleep(300)

    late = [post.worker for post in world.service.posts if post.at > world.began + 10]
    assert set(late[:3]) == {0, 1, 2}


@in_world
async def test_one_that_reaches_nothing_holds_up_nobody(world: World, ears: Ears) -> None:
    """While others are accepted, a worker that has no connection to the service pauses alone."""
    world.service.answer = lambda worker, _: None if worker == 0 else (200, None)
    await settled(world)
    for _ in range(400):
        world.queue.publish(5)
        await asyncio.sleep(0.1)

    assert [worker.breaker.pause_reason for worker in world.workers] == ["outage", None, None]
    assert world.sent > 1900

    assert ears.heard("paused") == [{"reason": "outage"}]


@in_world
async def test_one_that_reaches_nothing_holds_up_idle_workers_once(world: World) -> None:
    """When nobody else has sent anything, all pause until another one has its turn to probe.

    Then the fault is known to be the worker's own, and stays with it.
    """
    world.service.answer = lambda worker, _: None if worker == 0 else (200, None)
    world.start(1)
    world.queue.publish(20)
    await asyncio.sleep(12)
    world.start(2)
    await asyncio.sleep(1)
    assert reasons(world) == {"outage"}
    await asyncio.sleep(60)
    assert None in reasons(world)
    for _ in range(1000):
        world.queue.publish(1)
        await asyncio.sleep(0.1)
        assert world.workers[1].breaker.pause_reason is None

    assert world.workers[0].breaker.pause_reason == "outage"
    # Nor does one join it that has not sent anything yet.
    (fresh,) = world.start(1)
    await asyncio.sleep(1.5)
    assert fresh.breaker.pause_reason is None


# --- Whose pause it is ---------------------------------------------------------------------------


@in_world
async def test_a_wrong_key_of_one_worker_stops_no_other(world: World) -> None:
    """A worker that is started with another set-up pauses alone."""
    world.service.answer = lambda worker, _: (401 if worker == 3 else 200, None)
    await settled(world)
    world.start(1, setup="11" * 8)
    await asyncio.sleep(1)
    world.queue.publish(1000)
    await asyncio.sleep(10)

    assert [worker.breaker.pause_reason for worker in world.workers] == [
        *[None] * 3,
        "credentials_rejected",
    ]
    assert world.sent > 980


@in_world
async def test_a_new_key_is_tried_at_once(world: World) -> None:
    """Each worker tries its new key when it gets it, and waits for nobody who has the old one."""
    keys = dict.fromkeys(range(3), "old")
    await revoke(world)
    await asyncio.sleep(20)
    world.queue.publish(5000)
    world.service.answer = lambda worker, _: (200 if keys[worker] == "new" else 401, None)
    resumed = []
    for worker in world.workers:
        keys[worker.number], worker.setup = "new", "22" * 8
        worker.joint_pause.renew_key(worker.breaker)
        await asyncio.sleep(1)
        resumed.append([one.breaker.pause_reason is None for one in world.workers])

    assert resumed == [[True, False, False], [True, True, False], [True, True, True]]


def test_the_set_up_is_named_by_all_that_is_sent_with() -> None:
    """Workers have the same set-up when address, settings and secrets are the same."""
    settings = SmsApiSettings(base_url="https://sms.example", key=SecretStr("a-key"))
    other = SmsApiSettings(base_url="https://other.example", key=SecretStr("a-key"))

    names = [
        setup_of(settings, ["a-key", ""]),
        setup_of(settings, ["a-key", ""]),
        setup_of(settings, ["b-key", ""]),
        setup_of(settings, ["", "a-key"]),
        setup_of(other, ["a-key", ""]),
    ]

    assert names[0] == names[1]
    assert len(set(names)) == 4
    assert "a-key" not in "".join(names)


# --- Retry-After ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "waiting"), [(2, {2}), (0, {0, 1})], ids=["it", "another"])
@in_world
async def test_one_that_the_others_cannot_hear_keeps_its_own_wait(
    world: World, asked: int, waiting: set[int]
) -> None:
    """Of three, one cannot speak to the others: a wait is kept by those who know of it."""
    limited_at: list[float] = []

    def answer(worker: int, now: float) -> tuple[int, float | None]:
        if now > world.began + 3 and worker == asked and not limited_at:
            limited_at.append(now)
            return 429, 2.0
        return 200, None

    await settled(world)
    world.workers[2].member.fall_silent()
    world.service.answer = answer
    world.queue.publish(5000)
    await asyncio.sleep(4)
    (began,) = limited_at
    inside = {
        post.worker for post in world.service.posts if began + HEARD_SECONDS < post.at < began + 2
    }
    after = {post.worker for post in world.service.posts if post.at > began + 2.3}

    assert inside == {0, 1, 2} - waiting
    assert after == {0, 1, 2}


# --- What is said --------------------------------------------------------------------------------


@in_world
async def test_the_event_loop_does_not_wait_for_the_name_of_the_set_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming takes longer than a loop may stand still, and is done beside it."""
    may_go_on = threading.Event()

    def name_slowly() -> str:
        assert may_go_on.wait(GUARD_SECONDS)
        return "22" * 8

    await settled(world, 1)
    joint_pause, breaker = world.workers[0].joint_pause, world.workers[0].breaker
    monkeypatch.setattr(joint_pause, "_name_setup", name_slowly)
    joint_pause.renew_key(breaker)
    may_go_on.set()

    assert joint_pause.describe(breaker.state).setup == "22" * 8
