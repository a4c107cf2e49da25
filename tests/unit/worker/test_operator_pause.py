"""Whom to believe that an operator's pause is over.

A connection stands in for a node, and says whether that knows of the pause.
"""

import asyncio
from typing import cast

import pytest

from bridge.amqp.client import Connection
from bridge.worker import operator_pause
from bridge.worker.operator_pause import STALE_SECONDS, OperatorPause
from bridge.worker.pauses import WorkerPauses
from tests.clock import Clock

LITTLE = 1.0


class Node:
    """What stands in for a connection to a node."""

    def __init__(self, *, knows: bool) -> None:
        self.knows = knows


class Pauses:
    """A stand-in for the circuit breaker."""

    by_operator = False

    def operator_paused(self) -> None:
        self.by_operator = True

    def operator_resumed(self) -> None:
        self.by_operator = False


class World:
    """A worker that is stopped, as a node has said to which it has no connection any more."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pauses = Pauses()
        self.pause = OperatorPause("q", cast("WorkerPauses", self.pauses), clock=self.clock)
        self.first = Node(knows=True)
        self.look(self.first)

    def look(self, node: Node) -> bool:
        """Look at a node, and say whether the worker is stopped then."""
        asyncio.run(self.pause.look(cast("Connection", node)))
        return self.pauses.by_operator


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    async def knows(connection: Connection, _queue: str) -> bool:
        return cast("Node", connection).knows

    async def no_note(_connection: Connection, _queue: str) -> None: ...

    monkeypatch.setattr(operator_pause, "is_paused", knows)
    monkeypatch.setattr(operator_pause, "read_note", no_note)
    return World()


def test_who_has_known_of_it_is_believed_at_once(world: World) -> None:
    """What the same node does not know any more, an operator has ended."""
    world.first.knows = False

    assert not world.look(world.first)


def test_another_node_is_believed_after_a_while(world: World) -> None:
    """It may not have heard of the pause yet."""
    node = Node(knows=False)

    assert world.look(node)
    world.clock.now += STALE_SECONDS - LITTLE
    assert world.look(node)
    world.clock.now += LITTLE
    assert not world.look(node)


def test_each_node_takes_its_own_while(world: World) -> None:
    """How long one has known nothing says nothing of the next, however long none was there."""
    assert world.look(Node(knows=False))
    world.clock.now += 2 * STALE_SECONDS

    last = Node(knows=False)
    assert world.look(last)
    world.clock.now += STALE_SECONDS
    assert not world.look(last)
