"""The caches with a time limit: the newest value of each key, and all values of a key."""

import gc
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.ttl_cache import ExpiringMap, TtlCache
from tests.clock import Clock

SECONDS = 60.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> TtlCache:
    return TtlCache(SECONDS, clock, min_size=8)


def add(cache: TtlCache, count: int, *, first: int = 0) -> list[bytes]:
    keys = [b"%d" % number for number in range(first, first + count)]
    for key in keys:
        cache.add(key, b"of " + key)
    return keys


def test_the_newest_value_of_a_key_counts(cache: TtlCache) -> None:
    """A new value replaces the old one, however many other keys came between."""
    cache.add(b"a", b"1")
    assert cache.get(b"a") == b"1"
    cache.add(b"a", b"2")
    assert cache.get(b"a") == b"2"
    add(cache, 6)
    cache.add(b"a", b"3")

    assert (cache.get(b"a"), cache.get(b"b")) == (b"3", None)


def test_a_value_expires(cache: TtlCache, clock: Clock) -> None:
    """Each value expires at its own time; later values stay."""
    cache.add(b"a", b"1")
    clock.now += SECONDS / 2
    cache.add(b"b", b"2")
    clock.now += SECONDS / 2

    assert (cache.get(b"a"), cache.get(b"b")) == (None, b"2")
    assert cache.latest(9) == [(clock.now - SECONDS / 2, b"b")]


def test_a_value_may_be_added_with_an_age(cache: TtlCache, clock: Clock) -> None:
    """The age counts for the limit of a look-up and for the expiry."""
    cache.add(b"a", b"1")
    cache.add(b"b", b"2", age_seconds=5)

    assert cache.get(b"b", within_seconds=5.1) == b"2"
    assert cache.get(b"b", within_seconds=5) is None
    clock.now += SECONDS - 5
    assert (cache.get(b"a"), cache.get(b"b")) == (b"1", None)


def test_the_oldest_values_make_room(cache: TtlCache) -> None:
    """The last eight values are always known, and never more than ten."""
    keys: list[bytes] = []
    for first in range(40):
        keys += add(cache, 1, first=first)
        known = [key for key in keys if cache.get(key) is not None]

        assert known == keys[-len(known) :]
        assert min(len(keys), 8) <= len(known) <= 10


def test_the_size_is_bounded(clock: Clock) -> None:
    """At most 1.5 times the minimum, even if a segment was closed for its age when almost full."""
    cache = TtlCache(SECONDS, clock, min_size=100)
    add(cache, 25)
    add(cache, 24, first=100)
    clock.now += SECONDS / 4
    most = 0
    for number in range(1000, 1200):
        add(cache, 1, first=number)
        most = max(most, sum(map(len, cache._segments)))

    assert 125 < most <= 150


def test_an_expired_value_is_freed_by_a_later_one(clock: Clock) -> None:
    """After a pause no old value stays; under steady load it stays a quarter of its time longer."""
    cache = TtlCache(SECONDS, clock, min_size=100)
    add(cache, 20)
    clock.now += SECONDS
    add(cache, 1, first=100)
    after_a_pause = sum(map(len, cache._segments))
    for _ in range(20):
        clock.now += SECONDS / 16
        add(cache, 1, first=round(clock.now * 16))

    assert after_a_pause == 1
    assert b"100" not in {key for segment in cache._segments for key in segment}


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.5, 7.0, 31.0])), max_size=60))
def test_the_last_and_the_young_values_are_known(added: list[tuple[int, float]]) -> None:
    """A value that has not expired and is among the last eight is known."""
    clock = Clock()
    cache = TtlCache(SECONDS, clock, min_size=8)
    log: list[tuple[float, bytes, bytes]] = []
    for number, (key, pause) in enumerate(added):
        clock.now += pause
        log.append((clock.now, b"%d" % key, b"%d" % number))
        cache.add(*log[-1][1:])

    expected = {key: value for at, key, value in log[-8:] if clock.now - at < SECONDS}
    assert {key: cache.get(key) for key in expected} == expected
    for one, (at, value) in {key: (at, value) for at, key, value in log}.items():
        found = cache.get(one)
        assert found is None or (found == value and clock.now - at < SECONDS)


def test_the_latest_are_sorted_by_addition(cache: TtlCache, clock: Clock) -> None:
    """The last one first; a key that is added again moves to the front."""
    add(cache, 3)
    clock.now += 1
    cache.add(b"2", b"again")
    cache.add(b"x", b"y", age_seconds=2)

    assert cache.latest(3) == [
        (clock.now - 2, b"x"),
        (clock.now, b"2"),
        (clock.now - 1, b"1"),
    ]
    assert cache.latest(0) == []


def test_the_age_of_the_youngest(cache: TtlCache, clock: Clock) -> None:
    """The value that was added last counts."""
    assert not cache.is_any_younger_than(SECONDS)
    add(cache, 2)
    clock.now += 5

    assert [cache.is_any_younger_than(seconds) for seconds in (5, 6)] == [False, True]


def test_a_window_of_zero_keeps_nothing(clock: Clock) -> None:
    """Without time, no value is known, and none takes up memory."""
    cache = TtlCache(0, clock, min_size=8)
    keys = add(cache, 20)

    assert [cache.get(key) for key in keys] == [None] * 20
    assert sum(map(len, cache._segments)) == 1


def test_the_garbage_collector_has_nothing_to_traverse(clock: Clock) -> None:
    """However many values there are: the event loop stands still during a collection."""
    many = TtlCache(SECONDS, clock, min_size=10_000)
    gc.collect()
    before = len(gc.get_objects())
    add(many, 10_000)

    assert len(gc.get_objects()) - before < 100


def test_a_full_cache_needs_memory_for_its_values_only(clock: Clock) -> None:
    """The cache is never rebuilt as a whole, which would take time and twice the memory."""
    many, key_bytes, dictionary_bytes = TtlCache(SECONDS, clock, min_size=20_000), 64, 64
    tracemalloc.start()
    try:
        for number in range(100_000):
            many.add(number.to_bytes(16), b"")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    value_bytes = sys.getsizeof(b"12345678")
    assert peak_bytes / 25_000 < key_bytes + value_bytes + dictionary_bytes


# Several values of a key


@pytest.fixture
def remembered(clock: Clock) -> ExpiringMap[str, int]:
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


def test_the_garbage_collector_has_nothing_to_traverse_in_a_map(clock: Clock) -> None:
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


def test_the_latest_values_of_a_map(remembered: ExpiringMap[str, int]) -> None:
    """As many as are asked for, but for those that were taken."""
    for value, key in enumerate("abcd"):
        remembered.add(key, value)
    remembered.take("c")

    assert [identity[1:] for identity in remembered.latest(2)] == [("d", 3), ("b", 1)]
