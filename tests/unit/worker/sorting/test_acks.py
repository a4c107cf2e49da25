"""Acks of what is sorted: in as few as can be, and of nothing that is not done."""

from typing import cast

import pytest

from bridge.worker.session import Session
from bridge.worker.sorting.acks import Acks
from tests.unit.worker.stand_ins import Channel


def make_acks(count: int) -> tuple[Acks, Channel]:
    """Make the acks of a session with so many deliveries, whose tags begin with 1."""
    channel = Channel()
    acks = Acks(cast("Session", channel))
    for tag in range(1, count + 1):
        acks.note(tag)
    return acks, channel


def test_all_that_are_done_are_acked_at_once() -> None:
    """In whatever order they were done."""
    acks, channel = make_acks(9)

    assert acks.ack([3, 1, 2])
    assert acks.ack([4])
    assert (channel.acked, channel.for_many) == ([3, 4], [3, 4])


def test_what_is_not_done_is_never_acked_with_others() -> None:
    """Those behind it are acked one by one; when it is done, so are those before the next one."""
    acks, channel = make_acks(6)
    acks.ack([1, 3, 4])
    assert sorted(channel.acked) == [1, 3, 4]
    assert channel.for_many == [1]

    acks.ack([2, 5])
    assert channel.for_many == [1, 5]


def test_none_is_acked_twice() -> None:
    """The broker would close the channel over a tag that it does not know any more."""
    acks, channel = make_acks(5)
    acks.ack([2])
    acks.ack([4])
    acks.ack([1])
    acks.ack([3, 5])

    assert channel.acked == [2, 4, 1, 5]
    assert channel.for_many == [1, 5]


@pytest.mark.parametrize("tags", [[1], [2]], ids=["for many", "for one"])
def test_an_ack_that_is_not_written_is_told(tags: list[int]) -> None:
    """The broker delivers the message again."""
    acks, channel = make_acks(2)
    channel.is_over = True

    assert not acks.ack(tags)
