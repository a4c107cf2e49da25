"""Whom an ambiguous status speaks of: what proves it the message's own, and what does not."""

import pytest

from bridge.worker.pausing.evidence import MAX_SUSPECTS, Evidence


@pytest.fixture
def evidence() -> Evidence:
    """Give a memory that knows nothing."""
    return Evidence()


def accepted(evidence: Evidence, key: str = "good", to: str = "") -> None:
    """Send a message that is accepted; `to` is its own number, if it is not named."""
    evidence.accept(key, to or key, "A", request_number=evidence.begin(key))


def suspected(evidence: Evidence, key: str = "bad", to: str = "") -> bool:
    """Send a message that gets an ambiguous status, and say whether that is its own."""
    return evidence.suspect(key, to or key, request_number=evidence.begin(key))


def known(evidence: Evidence, key: str = "bad", to: str = "") -> bool:
    """Say whether a message is a suspect."""
    return evidence.is_suspect(key, to or key)


def test_first_time_proves_nothing(evidence: Evidence) -> None:
    """However much was accepted before, the first ambiguous status proves nothing."""
    accepted(evidence)

    assert not suspected(evidence)


def test_second_time_with_an_acceptance_between(evidence: Evidence) -> None:
    """When another message was accepted between the two tries, the fault is the message's."""
    suspected(evidence)
    accepted(evidence)

    assert suspected(evidence)


def test_second_time_without_an_acceptance_between(evidence: Evidence) -> None:
    """Without an acceptance between, it may still be the set-up, however often it happens."""
    accepted(evidence)

    assert not any(suspected(evidence) for _ in range(10))


def test_acceptance_of_what_left_before_the_first_answer(evidence: Evidence) -> None:
    """What was in flight at the first answer may have been taken before the key was revoked."""
    in_flight = evidence.begin("good")
    suspected(evidence)
    evidence.accept("good", "good", "A", request_number=in_flight)

    assert not suspected(evidence)


def test_acceptance_after_the_second_try_has_left(evidence: Evidence) -> None:
    """What is accepted after the second try has left may profit from a key that is back."""
    suspected(evidence)
    second, good = evidence.begin("bad"), evidence.begin("good")
    evidence.accept("good", "good", "A", request_number=good)

    assert not evidence.suspect("bad", "bad", request_number=second)


def test_acceptance_counts_between_the_last_two_tries(evidence: Evidence) -> None:
    """What was in flight between two tries proves nothing at the third."""
    suspected(evidence)
    good = evidence.begin("good")
    suspected(evidence)
    evidence.accept("good", "good", "A", request_number=good)

    assert not suspected(evidence)


def test_own_acceptance_clears(evidence: Evidence) -> None:
    """A message that was accepted, or refused for good, is known no more."""
    suspected(evidence)
    accepted(evidence, "bad")

    assert (known(evidence), evidence.times("bad")) == (False, 0)
    assert not suspected(evidence)


def test_times_are_counted(evidence: Evidence) -> None:
    """How often a message got such a status is known."""
    for _ in range(3):
        suspected(evidence)

    assert (known(evidence), evidence.times("bad"), evidence.times("good")) == (True, 3, 0)


def test_new_key_starts_anew(evidence: Evidence) -> None:
    """What the old key was good for says nothing about the new one."""
    suspected(evidence)
    old = evidence.begin("other")
    evidence.renew()
    accepted(evidence)

    assert not known(evidence)
    assert not evidence.suspect("other", "other", request_number=old)
    assert not known(evidence, "other")
    assert not suspected(evidence)


def test_acceptance_with_the_old_key(evidence: Evidence) -> None:
    """An acceptance that comes after the key has changed speaks for the old key only."""
    old = evidence.begin("good")
    evidence.renew()
    suspected(evidence)
    evidence.accept("good", "good", "A", request_number=old)

    assert not suspected(evidence)


def test_memory_is_bounded(evidence: Evidence) -> None:
    """Of too many messages those are forgotten whose last answer is the oldest."""
    for number in range(MAX_SUSPECTS):
        suspected(evidence, str(number))
    suspected(evidence, "0")
    suspected(evidence, "one more")

    assert known(evidence, "0")
    assert not known(evidence, "1")
    assert len(evidence._suspects) == len(evidence._recipients) == MAX_SUSPECTS


def test_recipient_is_suspect(evidence: Evidence) -> None:
    """Another message to the number of a suspect is one, until one to it is accepted."""
    suspected(evidence, "first", "number")
    before = known(evidence, "second", "number")
    accepted(evidence, "third", "number")

    assert (before, known(evidence, "second", "number")) == (True, False)


def test_recipient_convicts_nobody(evidence: Evidence) -> None:
    """What another message to the same number got proves nothing about this one."""
    suspected(evidence, "first", "number")
    accepted(evidence)

    assert not suspected(evidence, "second", "number")


def test_acceptance_of_what_left_while_the_first_try_was_under_way(evidence: Evidence) -> None:
    """What left before the first answer had come proves nothing either."""
    bad, good = evidence.begin("bad"), evidence.begin("good")
    evidence.suspect("bad", "bad", request_number=bad)
    evidence.accept("good", "good", "A", request_number=good)

    assert not suspected(evidence)


def test_late_acceptance_takes_no_evidence_away(evidence: Evidence) -> None:
    """An old request that is accepted late does not undo the proof of a newer one."""
    old = evidence.begin("slow")
    suspected(evidence)
    accepted(evidence)
    evidence.accept("slow", "slow", "A", request_number=old)

    assert suspected(evidence)


def test_sender_is_shown_by_other_senders_only(evidence: Evidence) -> None:
    """What is accepted of others after a sender's first such answer shows that it is the sender's.

    Whichever sender was accepted last, and however late an older request of another one is.
    """
    for sender in ("B", "C"):
        old = evidence.begin(sender)
        number = evidence.begin("bad")
        evidence.find_subject("bad", "bad", "A", request_number=number, is_known=False)
        evidence.accept("old", "old", sender, request_number=old)
        assert evidence.about("new", "new", "A") is None
        evidence.accept("good", "good", sender, request_number=evidence.begin("good"))
        assert evidence.about("new", "new", "A") == "sender"
        evidence.accept("own", "own", "A", request_number=evidence.begin("own"))
        assert evidence.about("new", "new", "A") is None
