"""Who is there: heard, silent, gone, forgotten, and what a worker's own deafness means."""

from bridge.worker.cluster.beats import PRESENT, REMEMBERED, Silence
from bridge.worker.cluster.roster import MAX_PEERS, Roster
from tests.clock import Clock
from tests.ears import listening


class World:
    """A roster on a clock that is set by hand, looked after each second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.roster = Roster(clock=self.clock)
        self.roster.resume()

    def passes(self, seconds: int) -> None:
        """Let time pass."""
        for _ in range(seconds):
            self.clock.now += 1
            self.roster.tidy()


def test_who_was_heard_is_there_for_as_long_as_is_asked() -> None:
    """A peer counts within the time since it was heard last, and no longer."""
    world = World()
    world.roster.note("a")
    world.passes(10)
    world.roster.note("b")

    assert world.roster.others(Silence(0, 5)) == {"b"}
    assert world.roster.others(Silence(0, 10)) == {"a", "b"}


def test_who_says_so_may_be_silent_for_longer() -> None:
    """A peer that announces a beat every ten seconds is there for as long as one may be lost."""
    world = World()
    world.roster.note("often")
    world.roster.note("seldom", beat_seconds=10)
    world.roster.note("seldom")

    assert world.roster.beats() == [None, 10]
    world.passes(int(PRESENT.seconds_at(10)))
    assert world.roster.others(PRESENT) == {"seldom"}
    assert world.roster.beats() == [10]
    world.passes(1)
    assert world.roster.others(PRESENT) == set()


def test_who_has_left_is_gone_at_once() -> None:
    """A peer that stops says so, and is not waited for."""
    world = World()
    world.roster.note("a")
    world.roster.leave("a")

    assert world.roster.others(REMEMBERED) == set()


def test_who_was_silent_for_a_minute_is_forgotten() -> None:
    """A process that died takes no place for ever."""
    world = World()
    world.roster.note("a")
    world.passes(61)

    assert world.roster.others(Silence(0, 1000)) == set()


def test_no_more_are_known_than_there_is_room_for() -> None:
    """Of too many, those that were heard last are known."""
    world = World()
    for number in range(MAX_PEERS + 1):
        world.roster.note(str(number))
        world.roster.note("0")

    others = world.roster.others(REMEMBERED)
    assert len(others) == MAX_PEERS
    assert "1" not in others
    assert {"0", "2"} <= others


def test_time_stands_still_for_the_deaf() -> None:
    """Who was heard before the broker went away is still known an hour later."""
    world = World()
    world.roster.note("a")
    world.passes(2)
    world.roster.pause()
    world.clock.now += 3600
    world.roster.resume()
    world.passes(2)

    assert world.roster.others(Silence(0, 5)) == {"a"}
    assert world.roster.others(Silence(0, 3)) == set()


def test_a_frozen_process_forgets_nobody() -> None:
    """The time that a process was stopped is no silence of its peers."""
    world = World()
    world.roster.note("a")
    world.clock.now += 3600
    world.roster.tidy()

    assert world.roster.others(Silence(0, 5)) == {"a"}


def test_coming_and_going_is_logged_once() -> None:
    """Once when a peer is heard first, once when it is gone, and again when it is back."""
    world = World()
    with listening() as ears:
        world.roster.note("a")
        world.roster.note("a")
        world.roster.note("b")
        world.roster.leave("b")
        world.passes(10)
        world.roster.note("a")
    told = [(line.event, line.facts["peer"]) for line in ears.lines]

    assert told == [
        ("peer_present", "a"),
        ("peer_present", "b"),
        ("peer_gone", "b"),
        ("peer_gone", "a"),
        ("peer_present", "a"),
    ]
