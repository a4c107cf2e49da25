"""Growth is distinguished from filling caches and noise."""

import random

import pytest

from soak.growth import MOST_MORE_FILES, Growth, Sample, is_judged, measure

MIB = 2**20


def _measure(memory: list[int]) -> Growth:
    return measure([Sample(bytes_, 30) for bytes_ in memory])


def test_what_fills_up_and_stays_does_not_grow() -> None:
    """A memory that is filled in the first half is no growth, nor are single peaks."""
    rng = random.Random(1)
    filled = [min(40 + second / 20, 100) * MIB for second in range(3600)]
    samples = [int(one + rng.randrange(MIB)) for one in filled]
    samples[3000] += 100 * MIB

    growth = _measure(samples)

    assert growth.problems() == []
    assert growth.start < growth.quarters[0] < growth.quarters[1]
    assert growth.peak > 190 * MIB


@pytest.mark.parametrize("second", [1810, 2400, 2700, 3100, 3590])
def test_a_table_that_becomes_larger_once_is_no_growth(second: int) -> None:
    """A dict that has room for twice as many is a step, whenever it comes."""
    samples = [120 * MIB] * second + [125 * MIB] * (3600 - second)

    assert _measure(samples).problems() == []


def test_a_leak_that_comes_in_two_steps_is_growth() -> None:
    """Only one step is a table's: what comes back leaks, however seldom."""
    samples = [120 * MIB] * 2200 + [125 * MIB] * 900 + [130 * MIB] * 500

    assert _measure(samples).problems()


@pytest.mark.parametrize("bytes_per_message", [16, 64])
def test_a_leak_of_one_object_for_each_message_is_growth(bytes_per_message: int) -> None:
    """At 150 messages a second the smallest leak shows, also behind what fills up first."""
    base = 70 * MIB
    samples = [base + second * 150 * bytes_per_message for second in range(3600)]

    assert _measure(samples).problems()


def test_more_and_more_open_files_are_growth() -> None:
    """Sockets come and go; one that stays open every few minutes is a leak."""
    steady = [Sample(70 * MIB, 30 + second % (MOST_MORE_FILES + 1)) for second in range(3600)]
    leaking = [Sample(70 * MIB, 30 + second // 180) for second in range(3600)]

    assert measure(steady).problems() == []
    assert measure(leaking).problems() == ["10 more open files"]


def test_a_short_run_is_not_judged() -> None:
    """Within a quarter of an hour what is remembered still fills."""
    assert is_judged(3600)
    assert not is_judged(600)
