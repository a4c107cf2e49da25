"""What the sandbox remembers of messages."""

import asyncio

import pytest

from bridge.sandbox.memory import Memory
from bridge.sandbox.messages import Message


def message(message_id: str, to: str) -> Message:
    """Make a message."""
    return Message(message_id, to, "Acme", "Hi", None, 0)


@pytest.mark.parametrize(
    ("message_id", "to", "found"),
    [
        (None, None, "c"),
        (None, "+15550100", "b"),
        ("a", None, "a"),
        ("a", "+15550101", None),
    ],
)
def test_the_newest_that_fits(message_id: str | None, to: str | None, found: str | None) -> None:
    """Of the messages with this id and for this number it is the last one taken."""
    memory = Memory(10, key=None)
    memory.messages += [
        message("a", "+15550100"),
        message("b", "+15550100"),
        message("c", "+15550101"),
    ]
    newest = memory.newest(message_id, to)

    assert (None if newest is None else newest.id) == found


async def test_a_message_that_comes_before_the_wait_begins_ends_it() -> None:
    """Between asking for it and the first look nothing is missed."""
    memory = Memory(10, key=None)
    waiting = memory.wait(-1, "+15550100", 30)
    memory.keep(message("a", "+15550100"))
    async with asyncio.timeout(10):
        found = await waiting

    assert [one.id for one in found] == ["a"]
