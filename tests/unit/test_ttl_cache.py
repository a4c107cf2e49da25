"""What is remembered in generations: the newest value of a key, for a time, the last so many."""

import gc
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.ttl_cache import Generations
from tests.clock import Clock

SECONDS = 60.0


@pytest.fixture
def clock() -> Clock:
    """Give a clock that stands still."""
    return Clock()


@pytest.fixture
def remembered(clock: Clock) -> Generations:
    """Give a memory with nothing in it, and room for eight."""
    return Generations(SECONDS, clock, least=8)


def add(remembered: Generations, count: int, *, first: int = 0) -> list[bytes]:
    """Add so many keys, and return them."""
    keys = [b"%d" % number for number in range(first, first + count)]
    for key in keys:
        remembered.add(key, b"of " + key)
    return keys


def test_the_newest_value_of_a_key_counts(remembered: Generations) -> None:
    """However many others are between the two."""
    remembered.add(b"a", b"1")
    assert remembered.get(b"a") == b"1"
    remembered.add(b"a", b"2")
    assert remembered.get(b"a") == b"2"
    add(remembered, 6)
    remembered.add(b"a", b"3")

    assert (remembered.get(b"a"), remembered.get(b"b")) == (b"3", None)


def test_a_value_is_forgotten_with_time(remembered: Generations, clock: Clock) -> None:
    """Each has its own time, which ends at the moment; what came later stays."""
    remembered.add(b"a", b"1")
    clock.now += SECONDS / 2
    remembered.add(b"b", b"2")
    clock.now += SECONDS / 2

    assert (remembered.get(b"a"), remembered.get(b"b")) == (None, b"2")
    assert remembered.latest(9) == [(clock.now - SECONDS / 2, b"b")]


def test_a_value_may_be_older_than_what_was_added_before(
    remembered: Generations, clock: Clock
) -> None:
    """Its age may be told, and it is asked for what is not as old as that."""
    remembered.add(b"a", b"1")
    remembered.add(b"b", b"2", age_seconds=5)

    assert remembered.get(b"b", within_seconds=5.1) == b"2"
    assert remembered.get(b"b", within_seconds=5) is None
    clock.now += SECONDS - 5
    assert (remembered.get(b"a"), remembered.get(b"b")) == (b"1", None)


def test_the_oldest_make_room(remembered: Generations) -> None:
    """The last eight are always known, and never more than ten."""
    keys: list[bytes] = []
    for first in range(40):
        keys += add(remembered, 1, first=first)
        known = [key for key in keys if remembered.get(key) is not None]

        assert known == keys[-len(known) :]
        assert min(len(keys), 8) <= len(known) <= 10


def test_there_are_half_more_at_most(clock: Clock) -> None:
    """Also where one ended for its age when it was almost full."""
    remembered = Generations(SECONDS, clock, least=100)
    add(remembered, 25)
    add(remembered, 24, first=100)
    clock.now += SECONDS / 4
    most = 0
    for number in range(1000, 1200):
        add(remembered, 1, first=number)
        most = max(most, sum(map(len, remembered._all)))

    assert 125 < most <= 150


def test_what_is_over_goes_with_the_next(clock: Clock) -> None:
    """After a lull nothing of before stays, and before it no longer than a quarter of the time."""
    remembered = Generations(SECONDS, clock, least=100)
    add(remembered, 20)
    clock.now += SECONDS
    add(remembered, 1, first=100)
    after_a_lull = sum(map(len, remembered._all))
    for _ in range(20):
        clock.now += SECONDS / 16
        add(remembered, 1, first=round(clock.now * 16))

    assert after_a_lull == 1
    assert b"100" not in {key for values in remembered._all for key in values}


def test_old_ones_are_let_go_though_there_is_room(clock: Clock) -> None:
    """A process with little to do does not gather what is long over, whatever came before."""
    remembered = Generations(SECONDS, clock, least=1000)
    add(remembered, 700)
    for number in range(1000, 1200):
        clock.now += SECONDS / 20
        add(remembered, 1, first=number)

    assert len(remembered.latest(999)) == 20
    assert sum(map(len, remembered._all)) <= 25


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.5, 7.0, 31.0])), max_size=60))
def test_the_last_and_the_young_are_known(added: list[tuple[int, float]]) -> None:
    """What is not older than the time, and among the last eight, is known with its last value."""
    clock = Clock()
    remembered = Generations(SECONDS, clock, least=8)
    log: list[tuple[float, bytes, bytes]] = []
    for number, (key, pause) in enumerate(added):
        clock.now += pause
        log.append((clock.now, b"%d" % key, b"%d" % number))
        remembered.add(*log[-1][1:])

    expected = {key: value for at, key, value in log[-8:] if clock.now - at < SECONDS}
    assert {key: remembered.get(key) for key in expected} == expected
    for one, (at, value) in {key: (at, value) for at, key, value in log}.items():
        found = remembered.get(one)
        assert found is None or (found == value and clock.now - at < SECONDS)


def test_the_latest_are_those_that_came_last(remembered: Generations, clock: Clock) -> None:
    """As many as are asked for, the last one first, and a key in its new place."""
    add(remembered, 3)
    clock.now += 1
    remembered.add(b"2", b"again")
    remembered.add(b"x", b"y", age_seconds=2)

    assert remembered.latest(3) == [
        (clock.now - 2, b"x"),
        (clock.now, b"2"),
        (clock.now - 1, b"1"),
    ]
    assert remembered.latest(0) == []


def test_the_age_of_the_youngest(remembered: Generations, clock: Clock) -> None:
    """What was added last counts."""
    assert not remembered.is_any_younger_than(SECONDS)
    add(remembered, 2)
    clock.now += 5

    assert [remembered.is_any_younger_than(seconds) for seconds in (5, 6)] == [False, True]


def test_nothing_is_known_for_no_time(clock: Clock) -> None:
    """A window of nothing remembers nothing, and takes no room."""
    remembered = Generations(0, clock, least=8)
    keys = add(remembered, 20)

    assert [remembered.get(key) for key in keys] == [None] * 20
    assert sum(map(len, remembered._all)) == 1


def test_a_search_for_garbage_has_nothing_to_visit(clock: Clock) -> None:
    """However many there are: the event loop stands still while a search visits them."""
    many = Generations(SECONDS, clock, least=10_000)
    gc.collect()
    before = len(gc.get_objects())
    add(many, 10_000)

    assert len(gc.get_objects()) - before < 100


def test_a_full_memory_takes_no_more_than_its_values(clock: Clock) -> None:
    """It is never made anew as a whole: an event loop would wait for that, with memory for two."""
    many, key_bytes, dictionary_bytes = Generations(SECONDS, clock, least=20_000), 64, 64
    tracemalloc.start()
    try:
        for number in range(100_000):
            many.add(number.to_bytes(16), b"")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    value_bytes = sys.getsizeof(b"12345678")
    assert peak_bytes / 25_000 < key_bytes + value_bytes + dictionary_bytes
