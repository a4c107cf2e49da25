"""Whose fault an answer shows: what proves it the message's own, or its sender's."""

import pytest

from bridge.worker.fates import Answer, Fate, judge_status
from bridge.worker.service.failure_classifier import MAX_SUSPECTS, FailureClassifier

ACCEPTED = judge_status(200, retry_after_seconds=None)
NOT_FOUND = judge_status(404, retry_after_seconds=None)
LIMITED = judge_status(429, retry_after_seconds=None)


@pytest.fixture
def classifier() -> FailureClassifier:
    return FailureClassifier()


def answered(
    classifier: FailureClassifier,
    answer: Answer,
    key: str,
    to: str = "",
    sender: str = "A",
    *,
    number: int | None = None,
) -> Answer:
    """Classify the answer to a request that leaves now, or left as `number`."""
    return classifier.classify(
        answer,
        key,
        to or key,
        sender,
        request_number=classifier.begin(key) if number is None else number,
        is_known=False,
        trip=None,
    )


def accepted(
    classifier: FailureClassifier,
    key: str = "good",
    to: str = "",
    sender: str = "A",
    *,
    number: int | None = None,
) -> None:
    """Have a message accepted; `to` is its own number, if it is not named."""
    answered(classifier, ACCEPTED, key, to, sender, number=number)


def suspected(
    classifier: FailureClassifier, key: str = "bad", to: str = "", *, number: int | None = None
) -> bool:
    """Have a message answered with an ambiguous status, and say whether that is its own."""
    return answered(classifier, NOT_FOUND, key, to, number=number).fate is Fate.REFUSED


def known(classifier: FailureClassifier, key: str = "bad", to: str = "") -> bool:
    return classifier.is_suspect(key, to or key)


def test_second_time_without_an_acceptance_between(classifier: FailureClassifier) -> None:
    """Without an acceptance between, it may still be the set-up, however often it happens."""
    accepted(classifier)

    assert not any(suspected(classifier) for _ in range(10))


def test_acceptance_after_the_second_try_has_left(classifier: FailureClassifier) -> None:
    """What is accepted after the second try has left may profit from a key that is back."""
    suspected(classifier)
    second, good = classifier.begin("bad"), classifier.begin("good")
    accepted(classifier, "good", number=good)

    assert not suspected(classifier, "bad", number=second)


def test_acceptance_counts_between_the_last_two_tries(classifier: FailureClassifier) -> None:
    """What was in flight between two tries proves nothing at the third."""
    suspected(classifier)
    good = classifier.begin("good")
    suspected(classifier)
    accepted(classifier, "good", number=good)

    assert not suspected(classifier)


def test_own_acceptance_clears(classifier: FailureClassifier) -> None:
    """A message that was accepted, or refused for good, is known no more."""
    suspected(classifier)
    accepted(classifier, "bad")

    assert (known(classifier), classifier.ambiguous_answers("bad")) == (False, 0)
    assert not suspected(classifier)


def test_new_key_starts_anew(classifier: FailureClassifier) -> None:
    """What the old key was good for says nothing about the new one."""
    suspected(classifier)
    old = classifier.begin("other")
    classifier.renew_key()
    accepted(classifier)

    assert not known(classifier)
    assert not suspected(classifier, "other", number=old)
    assert not known(classifier, "other")
    assert not suspected(classifier)


def test_acceptance_with_the_old_key(classifier: FailureClassifier) -> None:
    """An acceptance that comes after the key has changed speaks for the old key only."""
    old = classifier.begin("good")
    classifier.renew_key()
    suspected(classifier)
    accepted(classifier, "good", number=old)

    assert not suspected(classifier)


def test_memory_is_bounded(classifier: FailureClassifier) -> None:
    """Of too many messages those are forgotten whose last answer is the oldest."""
    for number in range(MAX_SUSPECTS):
        suspected(classifier, str(number))
    suspected(classifier, "0")
    suspected(classifier, "one more")

    assert known(classifier, "0")
    assert not known(classifier, "1")
    assert len(classifier._suspects) == len(classifier._recipients) == MAX_SUSPECTS


def test_memory_of_limits_is_bounded(classifier: FailureClassifier) -> None:
    """Of too many limited messages, numbers and senders the oldest are forgotten."""
    for number in range(10_001):
        answered(classifier, LIMITED, f"m{number}", sender=f"s{number}")

    assert not classifier.is_subject("m0")
    assert classifier.is_subject("m1")
    assert len(classifier._messages) == len(classifier._numbers) == 10_000
    assert len(classifier._senders) == len(classifier._tallies) == 1000


def test_recipient_is_suspect(classifier: FailureClassifier) -> None:
    """Another message to the number of a suspect is one, until one to it is accepted."""
    suspected(classifier, "first", "number")
    before = known(classifier, "second", "number")
    accepted(classifier, "third", "number")

    assert (before, known(classifier, "second", "number")) == (True, False)


def test_recipient_convicts_nobody(classifier: FailureClassifier) -> None:
    """What another message to the same number got proves nothing about this one."""
    suspected(classifier, "first", "number")
    accepted(classifier)

    assert not suspected(classifier, "second", "number")


def test_acceptance_of_what_left_while_the_first_try_was_under_way(
    classifier: FailureClassifier,
) -> None:
    """What left before the first answer had come proves nothing either."""
    bad, good = classifier.begin("bad"), classifier.begin("good")
    suspected(classifier, "bad", number=bad)
    accepted(classifier, "good", number=good)

    assert not suspected(classifier)


def test_late_acceptance_takes_no_evidence_away(classifier: FailureClassifier) -> None:
    """An old request that is accepted late does not undo the proof of a newer one."""
    old = classifier.begin("slow")
    suspected(classifier)
    accepted(classifier)
    accepted(classifier, "slow", number=old)

    assert suspected(classifier)


def test_limit_is_not_shown_by_what_was_in_flight(classifier: FailureClassifier) -> None:
    """What left before the first such answer had come does not show whom the limit concerns."""
    bad, good = classifier.begin("bad"), classifier.begin("good")
    answered(classifier, LIMITED, "bad", number=bad)
    accepted(classifier, number=good)
    assert classifier.about("bad", "bad", "A") is None

    accepted(classifier)
    assert classifier.about("bad", "bad", "A") == "message"


def test_a_tenth_of_the_others_may_be_limited_too(classifier: FailureClassifier) -> None:
    """With one such answer to another message, ten acceptances show whom the limit concerns."""
    answered(classifier, LIMITED, "bad")
    answered(classifier, LIMITED, "other")
    for number in range(9):
        accepted(classifier, str(number))
    assert classifier.about("bad", "bad", "A") is None

    accepted(classifier)
    assert classifier.about("bad", "bad", "A") == "message"


def test_limit_of_the_old_key_is_forgotten(classifier: FailureClassifier) -> None:
    """A 429 that arrives after the key has changed says nothing about the new one."""
    old = classifier.begin("bad")
    classifier.renew_key()
    answered(classifier, LIMITED, "bad", number=old)

    assert not classifier.is_subject("bad")


def test_sender_is_shown_by_other_senders_only(classifier: FailureClassifier) -> None:
    """What is accepted of others after a sender's first such answer shows that it is the sender's.

    Whichever sender was accepted last, and however late an older request of another one is.
    """
    for sender in ("B", "C"):
        old = classifier.begin(sender)
        number = classifier.begin("bad")
        answered(classifier, LIMITED, "bad", number=number)
        accepted(classifier, "old", sender=sender, number=old)
        assert classifier.about("new", "new", "A") is None
        accepted(classifier, "good", sender=sender)
        assert classifier.about("new", "new", "A") == "sender"
        accepted(classifier, "own")
        assert classifier.about("new", "new", "A") is None
