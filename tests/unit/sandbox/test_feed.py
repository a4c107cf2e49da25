"""What happens in the sandbox, numbered."""

import asyncio

from bridge.sandbox.feed import Feed


def numbers(feed: Feed, after: int) -> list[int] | None:
    """Return the numbers of what happened after one."""
    news = feed.after(after)
    return None if news is None else [one.number for one in news]


def test_what_happened_after_a_number_is_known_while_it_is_kept() -> None:
    """Who has missed more than is kept, or names a number that is not reached, is told so."""
    feed = Feed(max_kept=3)
    for _ in range(5):
        feed.tell("read", dict)

    assert numbers(feed, 2) == [3, 4, 5]
    assert numbers(feed, 5) == []
    assert (numbers(feed, 1), numbers(feed, -1), numbers(feed, 6)) == (None, None, None)


async def test_who_waits_is_woken_by_the_next() -> None:
    """A happening wakes all who wait; one that is there already is not waited for."""
    feed = Feed()
    waiting = [asyncio.create_task(feed.wait(0, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    feed.tell("read", dict)

    assert await asyncio.gather(*waiting) == [True, True]
    assert await feed.wait(0, 0)
    assert not await feed.wait(1, 0)
