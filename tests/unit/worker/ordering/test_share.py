"""Which lanes are whose."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Bye, Facts, Message
from bridge.worker.ordering.share import LaneShare, TakesLanes, deal
from tests.clock import LeapingWorld

LANES = 32
PEER = "00000000000000ff"


def names(count: int) -> list[str]:
    """Name so many workers."""
    return [f"{number:016x}" for number in range(count)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 31, 32, 33, 100])
def test_lanes_are_dealt_out_evenly(workers: int) -> None:
    """Nobody has two more than another."""
    counts = Counter(deal(LANES, names(workers)))
    most, least = max(counts.values()), min(counts[name] for name in names(workers))

    assert sum(counts.values()) == LANES
    assert most - least <= 1


def test_all_deal_alike() -> None:
    """In whatever order each has heard of the others."""
    assert deal(LANES, names(7)) == deal(LANES, names(7)[::-1])


def test_most_lanes_stay_where_they_are() -> None:
    """A fourth worker takes its part, and few move between the others."""
    before, after = deal(LANES, names(3)), deal(LANES, names(4))
    moved = sum(one != other for one, other in zip(before, after, strict=True))

    assert moved <= LANES // 2


class World(LeapingWorld):
    """A worker, and what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.peers = Peers("q", is_enabled=True, metrics=self.metrics, clock=self.loop.time)
        self.peers.roster.resume()
        self.changes = 0
        self.share = LaneShare(LANES, self.peers, changed=self._note)

    def _note(self) -> None:
        self.changes += 1

    def hear(self, peer: str, facts: Facts) -> None:
        """Hear of a peer (a look inside: its queue would bring it)."""
        told = facts.model_dump(mode="json")
        self.peers._hear(Message(worker_id=peer, kind=facts.kind, facts=told))


def takes(**facts: Any) -> TakesLanes:
    """Say what a worker says that takes from its lanes."""
    return TakesLanes(**{"lanes": LANES, "takes": True, "sorts": False} | facts)


@pytest.fixture
def world() -> Iterator[World]:
    """Make a worker that has heard nobody."""
    with closing(World()) as made:
        yield made


def test_one_alone_has_all_lanes(world: World) -> None:
    """Also when it hears nobody for want of a permission."""
    assert len(world.share.own) == LANES


def test_a_peer_that_takes_has_its_part(world: World) -> None:
    """At once; what it says again changes nothing."""
    world.hear(PEER, takes())
    world.hear(PEER, takes())

    assert len(world.share.own) == LANES // 2
    assert world.changes == 1


@pytest.mark.parametrize("facts", [takes(takes=False), takes(lanes=2 * LANES)])
def test_a_peer_that_takes_nothing_here_has_no_part(world: World, facts: TakesLanes) -> None:
    """One that stops, or that has another number of lanes."""
    world.hear(PEER, facts)

    assert len(world.share.own) == LANES


def test_a_peer_that_leaves_gives_up_its_part(world: World) -> None:
    """When it says so, not when it has ended."""
    first, second = names(2)
    world.hear(first, takes())
    world.hear(second, takes())
    world.hear(first, takes(takes=False))
    assert len(world.share.own) == LANES // 2
    world.hear(second, Bye())

    assert len(world.share.own) == LANES


def test_a_silent_peer_gives_up_its_part(world: World) -> None:
    """After three of its beats."""
    world.hear(PEER, takes())
    world.passes(2.9)
    assert len(world.share.own) == LANES // 2
    world.passes(0.2)

    assert len(world.share.own) == LANES


def test_who_sorts_is_known_while_it_is_heard(world: World) -> None:
    """So that no other tries for the lock."""
    seen = [world.share.is_sorted_elsewhere]
    world.hear(PEER, takes(sorts=True))
    seen.append(world.share.is_sorted_elsewhere)
    world.passes(3.1)
    seen.append(world.share.is_sorted_elsewhere)

    assert seen == [False, True, False]
