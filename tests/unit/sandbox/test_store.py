"""The sandbox's memory: what waits for a message misses none, and what falls behind is told."""

import asyncio

import pytest

from bridge.sandbox.records import MAX_SHOWN_BYTES, AcceptedMessage, cut_body, mask_logins
from bridge.sandbox.store import ChangeFeed, SandboxStore


def message(message_id: str, to: str) -> AcceptedMessage:
    return AcceptedMessage(message_id, to, "Acme", "Hi", None, 0)


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
    """Of the messages with this id and for this number it is the last one accepted."""
    store = SandboxStore(10)
    for name, number in (("a", "+15550100"), ("b", "+15550100"), ("c", "+15550101")):
        store.add_message(message(name, number))
    newest = store.newest(message_id, to)

    assert (None if newest is None else newest.id) == found


def test_changes_after_a_number_are_known_while_they_are_kept() -> None:
    """None says that a reader has missed changes, or that all records were dropped."""
    feed = ChangeFeed(max_changes=3)
    for number in range(5):
        feed.publish(str(number), dict)
    kinds = [None if (found := feed.after(n)) is None else [c.kind for c in found] for n in (2, 5)]
    beyond = (feed.after(1), feed.after(6))
    feed.restart()

    assert kinds == [["2", "3", "4"], []]
    assert beyond == (None, None)
    assert (feed.after(5), feed.after(6)) == (None, [])


async def test_a_change_wakes_all_who_wait() -> None:
    feed = ChangeFeed()
    waiting = [asyncio.create_task(feed.wait(0, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    feed.publish("read", dict)

    assert await asyncio.gather(*waiting) == [True, True]
    assert await feed.wait(0, 0)
    assert not await feed.wait(1, 0)


@pytest.mark.parametrize(
    ("header", "shown"),
    [
        (("Authorization", "Bearer a-key"), "Bearer ***"),
        (("Proxy-Authorization", "Basic YTpi"), "Basic ***"),
        (("Cookie", "session=a-key"), "***"),
        (("Idempotency-Key", "a-key"), "a-key"),
    ],
)
def test_logins_are_masked(header: tuple[str, str], shown: str) -> None:
    """Only the scheme of a login is shown, of the preset's own header too."""
    assert mask_logins([header], {"x-api-token"}) == ((header[0], shown),)


def test_long_bodies_are_cut() -> None:
    """A long body ends with the number of bytes that are not shown; any bytes can be."""
    assert cut_body(b"short \xff") == "short \ufffd"
    assert cut_body(b"x" * (MAX_SHOWN_BYTES + 7)) == "x" * MAX_SHOWN_BYTES + "\n... and 7 bytes"
