"""What is remembered for a while: the values of a key in order, for a time, up to a number."""

import gc

import pytest

from bridge.worker.expiring_map import ExpiringMap
from tests.clock import Clock

SECONDS = 60.0


@pytest.fixture
def clock() -> Clock:
    """Give a clock that stands still."""
    return Clock()


@pytest.fixture
def remembered(clock: Clock) -> ExpiringMap[str, int]:
    """Give a memory with nothing in it."""
    return ExpiringMap(SECONDS, clock)


def test_values_of_a_key_are_taken_in_order(remembered: ExpiringMap[str, int]) -> None:
    """The oldest first, each once, and apart from those of other keys."""
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("a", 4)):
        remembered.add(key, value)

    assert (remembered.get("a"), remembered.get("b"), remembered.get("c")) == (1, 2, None)
    assert [remembered.take("a") for _ in range(4)] == [(1,), (3,), (4,), None]
    assert ("a" in remembered, "b" in remembered, bool(remembered.live_keys())) == (
        False,
        True,
        True,
    )


def test_a_value_is_forgotten_with_time(remembered: ExpiringMap[str, int], clock: Clock) -> None:
    """Each has its own time; what came later stays."""
    remembered.add("a", 1)
    clock.now += SECONDS / 2
    remembered.add("a", 2)
    clock.now += SECONDS / 2

    assert remembered.get("a") == 2
    clock.now += SECONDS / 2
    assert ("a" in remembered, bool(remembered.live_keys())) == (False, False)


def test_a_value_that_was_taken_is_not_forgotten_twice(
    remembered: ExpiringMap[str, int], clock: Clock
) -> None:
    """The end of its time takes no other value of its key away."""
    remembered.add("a", 1)
    clock.now += 1.0
    remembered.add("a", 2)
    assert remembered.take("a") == (1,)
    clock.now += SECONDS - 1.0

    assert remembered.take("a") == (2,)


def test_the_oldest_makes_room(clock: Clock) -> None:
    """There are never more than the bound, whatever their keys."""
    remembered: ExpiringMap[str, int] = ExpiringMap(SECONDS, clock, most=3)
    for value, key in enumerate("abca"):
        remembered.add(key, value)

    assert remembered.clear() == [("b", 1), ("c", 2), ("a", 3)]
    assert (bool(remembered.live_keys()), remembered.clear()) == (False, [])


def test_what_was_taken_is_not_cleared(remembered: ExpiringMap[str, int]) -> None:
    """Only what is still remembered comes back, the oldest first."""
    for value, key in enumerate("aab"):
        remembered.add(key, value)
    remembered.take("a")

    assert remembered.clear() == [("a", 1), ("b", 2)]


def test_the_latest_are_those_that_came_last(remembered: ExpiringMap[str, int]) -> None:
    """As many as are asked for, but for those that were taken."""
    for value, key in enumerate("abcd"):
        remembered.add(key, value)
    remembered.take("c")

    assert [identity[1:] for identity in remembered.latest(2)] == [("d", 3), ("b", 1)]


def test_a_memory_may_have_a_bound_of_its_own(clock: Clock) -> None:
    """The oldest make room, as with the common bound."""
    small: ExpiringMap[str, int] = ExpiringMap(SECONDS, clock, most=2)
    for value, key in enumerate("abc"):
        small.add(key, value)

    assert small.clear() == [("b", 1), ("c", 2)]


def test_a_search_for_garbage_has_nothing_to_visit(clock: Clock) -> None:
    """Of bytes by bytes, however many: the event loop stands still while a search visits them."""
    many: ExpiringMap[bytes, bytes] = ExpiringMap(SECONDS, clock)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(10_000):
        many.add(number.to_bytes(16), b"value")

    assert len(gc.get_objects()) - before < 100
    assert len(many.latest(20_000)) == 10_000


def test_places_are_found_after_others_have_gone(
    remembered: ExpiringMap[str, int], clock: Clock
) -> None:
    """What was forgotten, taken and cleared before moves no other value to another key."""
    for value in range(5):
        remembered.add("old", value)
    clock.now += SECONDS / 2
    for value, key in enumerate("abab"):
        remembered.add(key, value)
    clock.now += SECONDS / 2

    assert "old" not in remembered
    assert (remembered.take("b"), remembered.get("a"), remembered.get("b")) == ((1,), 0, 3)
    assert (remembered.take("a"), remembered.get("a")) == ((0,), 2)
    assert [identity[1:] for identity in remembered.latest(9)] == [("b", 3), ("a", 2)]
    assert remembered.clear() == [("a", 2), ("b", 3)]
    remembered.add("b", 9)
    assert (remembered.get("a"), remembered.get("b")) == (None, 9)
