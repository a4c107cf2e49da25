"""Which messages were accepted lately, and for how long that makes another one a repeat."""

import secrets
import time
import tracemalloc
from collections.abc import Callable

import pytest

from bridge.worker import sent_messages
from bridge.worker.sent_messages import SENT_SECONDS, Accepted, SentMessages
from tests.clock import Clock

WINDOW_SECONDS = 60.0
FIRST = Accepted(attempts=2, status=202, provider_id="sms-1", at=1_800_000_000.0)
SECOND = FIRST._replace(provider_id="sms-2", at=FIRST.at + WINDOW_SECONDS)


def learn(known: SentMessages, message: bytes, *, at: float = FIRST.at, age: float = 1.0) -> None:
    known.learn(message, FIRST.attempts, FIRST.status, at, age)


@pytest.fixture
def known(clock: Clock) -> SentMessages:
    return SentMessages(clock, window_seconds=WINDOW_SECONDS)


def test_a_short_window_forgets_no_redelivery(known: SentMessages, clock: Clock) -> None:
    """After the window the publisher's next one is no repeat; what the broker delivers again is."""
    known.add(b"a", FIRST)
    clock.now += WINDOW_SECONDS

    assert known.find(b"a", redelivered=False) is None
    assert known.own(b"a") is None
    assert known.find(b"a", redelivered=True) == FIRST
    clock.now += SENT_SECONDS
    assert known.find(b"a", redelivered=True) is None


def test_the_last_acceptance_counts(known: SentMessages, clock: Clock) -> None:
    """What was sent again after the window begins another window."""
    known.add(b"a", FIRST)
    clock.now += WINDOW_SECONDS
    known.add(b"a", SECOND)
    clock.now += WINDOW_SECONDS - 1

    assert known.find(b"a", redelivered=False) == SECOND


def test_a_long_window_keeps_as_long(clock: Clock) -> None:
    """It may be longer than what redeliveries need."""
    known = SentMessages(clock, window_seconds=4 * SENT_SECONDS)
    known.add(b"a", FIRST)
    clock.now += 4 * SENT_SECONDS - 1

    assert known.find(b"a", redelivered=False) == FIRST


def test_what_a_peer_sent_is_as_old_as_it_says(known: SentMessages, clock: Clock) -> None:
    """It is a repeat for the rest of the window, and is not this worker's own."""
    learn(known, b"a", age=WINDOW_SECONDS - 10)

    assert (known.find(b"a", redelivered=False), b"a" in known, known.own(b"a")) == (
        FIRST._replace(provider_id=None),
        False,
        None,
    )
    clock.now += 10
    assert known.find(b"a", redelivered=False) is None


def test_what_is_told_again_is_known_once(known: SentMessages) -> None:
    """Several may tell the same; what is older than the known one changes nothing."""
    for age_seconds in (5, 5, 9, 4.9):
        learn(known, b"a", age=age_seconds)

    assert len(list(known.latest(10))) == 1


def test_the_newest_are_told_first(known: SentMessages, clock: Clock) -> None:
    """Whoever sent them, in whatever order they were heard of, and no more than are asked for."""
    known.add(b"a", FIRST)
    clock.now += 3
    learn(known, b"b", age=1)
    learn(known, b"d", age=4)
    known.add(b"e", FIRST)
    clock.now += 1
    learn(known, b"c", age=3)

    assert [message for message, _ in known.latest(4)] == [b"e", b"b", b"c", b"a"]


@pytest.mark.parametrize("pause_seconds", [WINDOW_SECONDS - 20, WINDOW_SECONDS + 1])
def test_a_newcomer_is_told_of_what_was_sent_twice(
    known: SentMessages, clock: Clock, pause_seconds: float
) -> None:
    """A peer sent once more what was sent here: for a newcomer, too, the window is of the last."""
    newcomer = SentMessages(clock, window_seconds=WINDOW_SECONDS)
    known.add(b"a", FIRST)
    clock.now += pause_seconds
    learn(known, b"a", at=FIRST.at + pause_seconds, age=0)
    clock.now += 1
    for message, accepted in known.latest(10):
        age = clock.now - 1000.0 - (accepted.at - FIRST.at)
        learn(newcomer, message, at=accepted.at, age=age)
    clock.now += WINDOW_SECONDS - 2

    assert newcomer.find(b"a", redelivered=False) is not None
    clock.now += 1
    assert newcomer.find(b"a", redelivered=False) is None


def test_what_peers_send_pushes_nothing_of_its_own_out(
    known: SentMessages, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """There is room for so many of them, the oldest go first."""
    monkeypatch.setattr(sent_messages, "LEAST_TOLD", 4)
    known = SentMessages(clock, window_seconds=WINDOW_SECONDS)
    known.add(b"own", FIRST)
    for message in (b"a", b"b", b"c", b"d", b"e", b"f"):
        learn(known, message)

    found = {message for message, _ in known.latest(10)}
    assert found == {b"own", b"b", b"c", b"d", b"e", b"f"}


def test_what_a_newcomer_is_told_is_looked_up_bit_by_bit(clock: Clock) -> None:
    """What is done at once is a small part of it, so that nothing else has to wait for long."""
    known = SentMessages(clock, window_seconds=WINDOW_SECONDS)
    for number in range(20_000):
        known.add(number.to_bytes(16, "big"), FIRST)
        learn(known, (number + 20_000).to_bytes(16, "big"))

    def cpu_seconds(look: Callable[[], object]) -> float:
        began = time.process_time()
        look()
        return time.process_time() - began

    # The least of some: what else the machine does may be in any of them.
    at_once = min(cpu_seconds(lambda: known.latest(10_000)) for _ in range(5))
    in_all = min(cpu_seconds(lambda: list(known.latest(10_000))) for _ in range(5))
    assert at_once < in_all / 2


def test_memory_of_what_is_known_is_small(known: SentMessages) -> None:
    """A message that was sent, here or elsewhere, takes less than 250 bytes."""
    count = 10_000
    tracemalloc.start()
    try:
        for _ in range(count):
            known.add(secrets.token_bytes(16), FIRST._replace(provider_id="x" * 36))
            learn(known, secrets.token_bytes(16))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert used_bytes / (2 * count) < 250
