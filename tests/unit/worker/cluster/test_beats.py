"""How often workers say that they are there: often when they are few, not too often when many."""

import pytest

from bridge.worker.cluster.beats import (
    BEAT_SECONDS,
    MAX_BEAT_SECONDS,
    MAX_BEATS_A_SECOND,
    PRESENT,
    REMEMBERED,
    Beats,
)


def beats_in(seconds: int, present: list[float | None], *, hurries: bool = False) -> list[int]:
    """Return in which of so many seconds a worker with these peers beats."""
    beats = Beats(lambda: present)
    beats.hurry_while(lambda: hurries)
    return [second for second in range(seconds) if beats.is_due()]


@pytest.mark.parametrize("workers", [1, 2, 8, 20])
def test_few_beat_each_second(workers: int) -> None:
    """Up to twenty, so that one that is killed is missed within two seconds."""
    assert beats_in(10, [BEAT_SECONDS] * (workers - 1)) == list(range(10))


@pytest.mark.parametrize("workers", [21, 50, 89])
def test_what_the_broker_hands_out_is_bounded(workers: int) -> None:
    """All beats of all workers are no more a second than is said, or a third more at the most."""
    seconds = 1000
    number = len(beats_in(seconds, [BEAT_SECONDS] * (workers - 1)))
    handed_out = workers * workers * number / seconds

    assert MAX_BEATS_A_SECOND / 2 < handed_out < MAX_BEATS_A_SECOND * 4 / 3


@pytest.mark.parametrize("workers", [30, 60, 1000])
def test_no_beat_comes_later_than_it_was_said(workers: int) -> None:
    """Each beat says when the next one comes at the latest; none has to be waited for longer."""
    beats = Beats(lambda: [BEAT_SECONDS] * (workers - 1))
    said_at, promised = 0, beats.seconds
    for second in range(1, 300):
        if beats.is_due():
            assert second - said_at <= promised
            said_at, promised = second, beats.seconds

    assert promised > BEAT_SECONDS
    assert PRESENT.seconds_at(promised) < REMEMBERED.seconds


def test_one_that_does_not_say_how_often_is_met_with_a_beat_each_second() -> None:
    """A peer of an earlier version would take one that is silent for five seconds to be gone."""
    assert beats_in(10, [MAX_BEAT_SECONDS] * 98 + [None]) == list(range(10))


def test_one_in_a_hurry_beats_each_second() -> None:
    """Whoever is waited for by all says each second that it is there, among however many."""
    assert beats_in(10, [MAX_BEAT_SECONDS] * 99, hurries=True) == list(range(10))


def test_one_that_gets_into_a_hurry_beats_at_once() -> None:
    """The next beat is not that which was said."""
    present: list[float | None] = [MAX_BEAT_SECONDS] * 99
    beats = Beats(lambda: present)
    assert [beats.is_due() for _ in range(5)] == [True] + [False] * 4
    beats.hurry_while(lambda: True)

    assert beats.is_due()
    assert beats.seconds == BEAT_SECONDS


def test_those_that_started_together_part() -> None:
    """A hundred workers that first beat in the same second do not do so again and again."""
    number = 100
    workers = [Beats(lambda: [BEAT_SECONDS] * (number - 1)) for _ in range(number)]
    together = [sum(beats.is_due() for beats in workers) for _ in range(60)]

    assert together[0] == number
    assert max(together[2 * MAX_BEAT_SECONDS :]) < number / 2
