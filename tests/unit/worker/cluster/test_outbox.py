"""What a worker says is written in order, to whom it is meant for, and misses its echo in time."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from bridge.amqp.client import Channel
from bridge.errors import BrokerError
from bridge.worker.cluster.outbox import MAX_UNHEARD_LOOKS, MAX_UNSAID, SAY_SECONDS, Outbox
from tests.clock import LeapingWorld


class Wire(LeapingWorld):
    """What stands in for a channel, and the outbox that writes on it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[bytes, dict[str, str]]] = []
        self.hangs = False
        self.outbox = Outbox("q.workers")

    async def basic_publish(self, body: bytes, **where: str) -> None:
        """Write a message."""
        if self.hangs:
            await asyncio.Event().wait()
        self.written.append((body, where))

    def say_all(self, *, may_say: bool = True) -> Any:
        """Say what is there."""
        return self.outbox.say_all(cast("Channel", self), may_say=lambda: may_say)


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Give one on which nothing was said."""
    made = Wire()
    yield made
    made.close()


def test_said_in_order_and_to_whom_it_is_meant_for(wire: Wire) -> None:
    """Most is for all; an answer goes to the queue of one."""
    wire.outbox.put(b"1")
    wire.outbox.put(b"2", queue="q.workers.one")
    wire.run(wire.say_all())
    assert wire.written == [
        (b"1", {"exchange": "q.workers"}),
        (b"2", {"routing_key": "q.workers.one"}),
    ]


def test_of_too_much_the_newest_is_said(wire: Wire) -> None:
    """What waits for a broker that does not read has a bound."""
    for number in range(MAX_UNSAID + 1):
        wire.outbox.put(b"%d" % number)
    wire.run(wire.say_all())
    assert [body for body, _ in wire.written] == [b"%d" % n for n in range(1, MAX_UNSAID + 1)]


def test_what_may_not_be_said_is_lost(wire: Wire) -> None:
    """In an alarm of the broker nothing is kept for later, when it would be wrong."""
    wire.outbox.put(b"1")
    assert not wire.outbox.has_lost
    wire.run(wire.say_all(may_say=False))
    wire.run(wire.say_all())
    assert wire.written == []
    assert wire.outbox.has_lost


def test_what_was_not_said_on_one_channel_is_not_said_on_the_next(wire: Wire) -> None:
    """It was meant for those that listened then."""
    wire.outbox.put(b"1")
    wire.outbox.begin()
    wire.run(wire.say_all())
    assert wire.written == []


def test_a_broker_that_does_not_read_is_not_waited_for(wire: Wire) -> None:
    """A word that cannot be written ends the channel, and the last one holds up no end."""
    wire.hangs = True
    wire.outbox.put(b"1")
    assert wire.seconds(wire.outbox.until_all_said()) == SAY_SECONDS
    with pytest.raises(TimeoutError):
        wire.run(wire.say_all())


def test_the_end_is_waited_for_by_nobody(wire: Wire) -> None:
    """Without a channel there is no last word."""
    wire.outbox.put(b"1")
    wire.outbox.end()
    assert wire.seconds(wire.outbox.until_all_said()) == 0


def test_a_word_ends_a_wait(wire: Wire) -> None:
    """It is said at once, and silence is looked after in time."""
    assert wire.seconds(wire.outbox.wait(3)) == 3
    wire.outbox.put(b"1")
    assert wire.seconds(wire.outbox.wait(3)) == 0
    wire.run(wire.say_all())
    assert wire.seconds(wire.outbox.wait(3)) == 3
    wire.outbox.wake()
    assert wire.seconds(wire.outbox.wait(3)) == 0


def look(wire: Wire, times: int, *, may_say: bool = True) -> None:
    """Look so often whether anything has come back."""
    for _ in range(times):
        wire.outbox.look_for_echo(may_say=may_say)


def test_nothing_comes_back(wire: Wire) -> None:
    """Too many looks at it in a row say that this worker hears nobody."""
    wire.outbox.put(b"1")
    wire.run(wire.say_all())
    look(wire, MAX_UNHEARD_LOOKS)
    with pytest.raises(BrokerError, match="does not come back"):
        look(wire, 1)


def test_something_comes_back(wire: Wire) -> None:
    """An echo ends the count; so do an alarm and another channel. An answer to one has none."""
    wire.outbox.put(b"1", queue="q.workers.one")
    wire.run(wire.say_all())
    look(wire, MAX_UNHEARD_LOOKS + 1)
    wire.outbox.put(b"2")
    wire.run(wire.say_all())
    look(wire, MAX_UNHEARD_LOOKS)
    look(wire, 1, may_say=False)
    look(wire, MAX_UNHEARD_LOOKS)
    wire.outbox.begin()
    look(wire, MAX_UNHEARD_LOOKS + 1)
    wire.outbox.put(b"3")
    wire.run(wire.say_all())
    look(wire, MAX_UNHEARD_LOOKS)
    wire.outbox.note_echo()
    look(wire, MAX_UNHEARD_LOOKS + 1)
