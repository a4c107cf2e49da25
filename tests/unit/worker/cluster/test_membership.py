"""Which peers there are: heard, silent, gone, forgotten; and what a worker publishes by itself."""

import pytest

from bridge.errors import BrokerError
from bridge.telemetry.metrics import new_registry
from bridge.worker.cluster.membership import (
    MAX_PEERS,
    MAX_TICKS_WITHOUT_ECHO,
    MAX_UNPUBLISHED,
    PRESENT,
    REMEMBERED,
    Coordination,
    Membership,
    Silence,
)
from bridge.worker.cluster.messages import (
    Join,
    Leave,
    RecentQuestion,
    WorkerState,
    read_message,
    write_message,
)
from bridge.worker.metrics import WorkerMetrics
from tests.clock import Clock
from tests.ears import listening


class Wire:
    """A connection to the broker."""

    is_blocked = False


class World:
    """One worker on a clock that is set by hand, and ticks each second."""

    def __init__(self) -> None:
        self.clock = Clock()
        metrics = WorkerMetrics(new_registry(), queue="q", retry_queues=[], dead="dead")
        self.membership = Membership("q", is_enabled=True, metrics=metrics, clock=self.clock)
        self.cluster = Coordination(self.membership, [], metrics=metrics)
        self.wire = Wire()
        self.membership.joins = 1
        self.cluster.join(self.wire)

    def hears(self, worker_id: str, heartbeat_seconds: float | None = None) -> None:
        self.membership.learn(worker_id, WorkerState(heartbeat_seconds=heartbeat_seconds))

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            self.cluster.tick()
            self.membership.note_echo()

    def published(self) -> list[object]:
        bodies = iter(self.membership.next_unpublished, None)
        return [read[1] for body, _ in bodies if (read := read_message(body))]


@pytest.fixture
def world() -> World:
    return World()


def test_a_peer_is_there_for_as_long_as_is_asked(world: World) -> None:
    world.hears("a")
    world.passes(10)
    world.hears("b")

    assert world.membership.others(Silence(0, 5)) == {"b"}
    assert world.membership.others(Silence(0, 10)) == {"a", "b"}


def test_a_peer_with_fewer_heartbeats_may_be_silent_for_longer(world: World) -> None:
    world.hears("often")
    world.hears("seldom", 10)
    world.hears("seldom")
    world.passes(int(PRESENT.seconds_at(10)))
    assert world.membership.others(PRESENT) == {"seldom"}
    world.passes(1)
    assert world.membership.others(PRESENT) == set()


def test_a_peer_that_leaves_is_gone_at_once(world: World) -> None:
    world.hears("a")
    world.membership.learn("a", Leave())

    assert world.membership.others(REMEMBERED) == set()


def test_a_peer_that_was_silent_for_a_minute_is_forgotten(world: World) -> None:
    world.hears("a")
    world.passes(61)

    assert not world.membership.peers


def test_no_more_peers_are_known_than_there_is_room_for(world: World) -> None:
    """Of too many, those heard last are known."""
    for number in range(MAX_PEERS + 1):
        world.hears(str(number))
        world.hears("0")

    assert len(world.membership.peers) == MAX_PEERS
    assert "1" not in world.membership.peers
    assert "0" in world.membership.peers


@pytest.mark.parametrize("is_lost", [True, False], ids=["connection lost", "alarm"])
def test_time_stands_still_while_nothing_is_received(world: World, *, is_lost: bool) -> None:
    """A peer that was heard before the broker went away is still known an hour later."""
    world.hears("a")
    world.passes(2)
    if is_lost:
        world.membership.lose()
        world.clock.now += 3600
        world.cluster.join(world.wire)
    else:
        world.wire.is_blocked = True
        world.passes(3600)
        world.wire.is_blocked = False
    world.passes(2)

    assert world.membership.others(Silence(0, 6)) == {"a"}
    assert world.membership.others(Silence(0, 3)) == set()


def test_a_frozen_process_forgets_nobody(world: World) -> None:
    """The time that a process was stopped is no silence of its peers."""
    world.hears("a")
    world.clock.now += 3600
    world.cluster.tick()

    assert world.membership.others(Silence(0, 5)) == {"a"}


def test_coming_and_going_is_logged_once(world: World) -> None:
    with listening() as ears:
        world.hears("a")
        world.hears("a")
        world.hears("b")
        world.membership.learn("b", Leave())
        world.passes(10)
        world.hears("a")
    told = [(line.event, line.facts["peer"]) for line in ears.lines]

    assert told == [
        ("peer_present", "a"),
        ("peer_present", "b"),
        ("peer_gone", "b"),
        ("peer_gone", "a"),
        ("peer_present", "a"),
    ]


@pytest.mark.parametrize(
    ("workers", "seconds"), [(1, 1), (20, 1), (21, 2), (50, 7), (100, 20), (400, 20)]
)
def test_of_many_workers_each_publishes_fewer_heartbeats(
    world: World, workers: int, seconds: int
) -> None:
    """The broker delivers N times what each of N workers publishes."""
    world.published()
    for _ in range(4):
        for number in range(workers - 1):
            world.hears(str(number), 1000)
        world.passes(seconds)
    states = [one for one in world.published() if isinstance(one, WorkerState)]

    assert {state.heartbeat_seconds for state in states} == {seconds}
    assert 4 <= len(states) <= 7


def test_a_worker_that_joins_is_answered_on_its_queue(world: World) -> None:
    world.published()
    world.cluster.receive(write_message("1" * 16, Join(joins=3, heartbeat_seconds=1)))
    unpublished = world.membership.next_unpublished()

    assert unpublished is not None
    assert unpublished[1] == f"q.workers.{'1' * 16}.3"


def test_messages_are_lost_while_nothing_can_be_published(world: World) -> None:
    """And of more than there is room for, the newest are published."""
    world.published()
    for number in range(MAX_UNPUBLISHED + 1):
        world.membership.publish(RecentQuestion(to=str(number), joins=1))
    assert world.published()[0] == RecentQuestion(to="1", joins=1)
    world.wire.is_blocked = True
    world.membership.publish(RecentQuestion(to="lost", joins=1))
    world.wire.is_blocked = False
    assert world.published() == []


def test_an_exchange_that_returns_nothing_is_given_up(world: World) -> None:
    """Its own messages come back to a worker: if none does, it receives no others either."""
    world.published()
    for _ in range(MAX_TICKS_WITHOUT_ECHO):
        world.cluster.tick()
    with pytest.raises(BrokerError):
        world.cluster.tick()
