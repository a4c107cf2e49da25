"""The checker finds every broken promise of a soak."""

from collections.abc import Sequence
from typing import Any

import pytest

from soak.checker import (
    API_503_LATER,
    WORKER_FREEZE,
    WORKER_KILL,
    DeadLetter,
    Evidence,
    Fault,
    Post,
    Verdict,
    check,
)
from soak.rig import SoakError, join_log
from soak.traffic import Request

KILL = Fault(kind=WORKER_KILL, group="worker", started=100.5, ended=102)
FREEZE = Fault(kind=WORKER_FREEZE, group="worker", started=100.5, ended=120)
END = Fault(kind="worker SIGTERM", group="worker", started=100.5, ended=102)
BROKER_KILL = Fault(kind="broker kill -9", group="broker", started=100.5, ended=108)
API_500 = Fault(kind="API 500", group="api", started=99, ended=101)
API_LATER = Fault(kind=API_503_LATER, group="api", started=99, ended=101)


def _post(at: float = 100.0, status: int | None = 202, **changes: Any) -> Post:
    accepted = status is not None and status < 300
    return Post("a", "a", at, status, accepted)._replace(**changes)


def _check(posts: Sequence[Post], **changes: Any) -> Verdict:
    facts = {"published": {"a": 1}, "confirmed": {"a"}, "posts": posts} | changes
    return check(Evidence(**facts))


def test_finds_nothing_wrong_when_all_is_well() -> None:
    """One message, confirmed and sent once, is no problem."""
    verdict = _check([_post()])

    assert verdict.problems == []
    assert (verdict.sent, verdict.extra_posts, verdict.lost) == (1, {}, [])


def test_finds_a_lost_message() -> None:
    """A confirmed message that is nowhere is lost, and its POSTs and faults are told."""
    verdict = _check([_post(status=500, at=100)], faults=[API_500])

    assert verdict.lost == ["a"]
    assert verdict.problems == ["1 confirmed messages were lost"]
    assert len(verdict.histories["a"]) == 2


def test_an_answer_is_spoiled_after_its_post() -> None:
    """The service may have accepted the POST before the fault began."""
    posts = [_post(at=100), _post(at=140)]

    assert _check(posts, spoiled={"a": [101.2]}).problems == []
    assert _check(posts, spoiled={"a": [99.8, 141], "b": [101]}).problems != []


def test_an_answer_is_cut_after_its_post() -> None:
    """The service counted the POST before the fault that cut its answer began."""
    refused = Fault(kind="API refuses connections", group="api", started=101, ended=103)
    posts = [_post(at=99.5), _post(at=140)]

    assert _check(posts, cut={"a": [101.6]}, faults=[refused]).problems == []
    assert _check(posts, cut={"a": [99.8]}, faults=[refused]).problems != []
    assert _check(posts, faults=[refused]).problems != []


def test_counts_what_was_never_confirmed_apart() -> None:
    """A message without a confirm may be there or not; neither is a loss."""
    posts = [_post(), _post(message_id="b", key="b")]

    verdict = _check(posts, published={"a": 1, "b": 2, "c": 3})

    assert (verdict.sent, verdict.lost, verdict.problems) == (2, [], [])


def test_finds_a_message_that_nobody_published() -> None:
    """What was accepted and never published is unexpected."""
    verdict = _check([_post(), _post(message_id="b", key="b")])

    assert verdict.unexpected == ["b"]
    assert verdict.problems == ["1 messages arrived that were never published"]


def test_finds_a_message_that_still_waits() -> None:
    """At the end nothing may be left in the queues; what is left is not lost."""
    verdict = _check([], waiting=["a"])

    assert verdict.lost == []
    assert verdict.problems == ["1 messages still wait"]


def test_finds_a_new_key() -> None:
    """A POST under another key than the message's id defeats the service's own check."""
    verdict = _check([_post(key="other")])

    assert verdict.new_keys == ["a"]
    assert verdict.problems == ["1 messages were POSTed with another message's key"]


@pytest.mark.parametrize(
    ("first", "changes", "cause"),
    [
        (_post(), {}, "unexplained"),
        (_post(), {"faults": [BROKER_KILL]}, "unexplained"),
        (_post(), {"faults": [END]}, "unexplained"),
        (_post(), {"faults": [API_500]}, "unexplained"),
        (_post(at=90), {"faults": [KILL]}, "unexplained"),
        (_post(status=None), {}, "unexplained"),
        (_post(status=None, accepted=True), {}, "unexplained"),
        (_post(), {"published": {"a": 2}}, "unexplained"),
        (_post(), {"published": {"a": 2}, "faults": [END]}, "publisher_repeat"),
        (_post(), {"published": {"a": 2}, "workers": 2}, "publisher_repeat"),
        (_post(), {"workers": 2}, "unexplained"),
        (_post(), {"faults": [BROKER_KILL], "workers": 2}, "other_worker"),
        (_post(at=109), {"faults": [BROKER_KILL], "workers": 2}, "other_worker"),
        (_post(at=90), {"faults": [BROKER_KILL], "workers": 2}, "unexplained"),
        (_post(), {"faults": [END], "workers": 2}, "unexplained"),
        (_post(), {"slow": {"a": [102.0]}}, "slow_answer"),
        (_post(), {"slow": {"a": [99.0, 120.0]}}, "unexplained"),
        (_post(status=None), {"slow": {"a": [99.0]}}, "slow_answer"),
        (_post(status=None), {"slow": {"a": [97.0]}}, "unexplained"),
        (_post(), {"cut": {"a": [102.0]}}, "unexplained"),
        (_post(), {"cut": {"a": [102.0]}, "faults": [API_500]}, "api_fault"),
        (_post(), {"cut": {"a": [99.0, 120.0]}, "faults": [API_500]}, "unexplained"),
        (_post(), {"faults": [KILL]}, "worker_kill"),
        (_post(status=None), {"faults": [KILL]}, "worker_kill"),
        # Sent before the kill and read by the service a moment after it.
        (_post(at=100.6, status=None), {"faults": [KILL]}, "worker_kill"),
        (_post(), {"faults": [FREEZE], "workers": 2}, "worker_freeze"),
        (_post(at=90), {"faults": [FREEZE], "workers": 2}, "unexplained"),
        (_post(), {"published": {"a": 2}, "nameless": {"a"}}, "publisher_repeat"),
        (_post(status=500), {"faults": [API_500]}, "api_fault"),
        (_post(status=None, accepted=True), {"faults": [API_500]}, "api_fault"),
        (_post(status=503), {"faults": [API_500]}, "api_fault"),
        (_post(status=503), {"faults": [API_LATER]}, None),
        (_post(status=425), {}, None),
        (_post(status=429), {}, None),
    ],
)
def test_tells_why_a_message_was_posted_again(
    first: Post, changes: dict[str, Any], cause: str | None
) -> None:
    """A second POST has a cause unless the first was surely not accepted.

    It is a problem that there is none, or that a worker did not ask the others.
    """
    verdict = _check([first, _post(at=110)], **changes)

    assert verdict.extra_posts == ({} if cause is None else {cause: 1})
    assert bool(verdict.problems) == (cause in {"unexplained", "other_worker"})


def test_explains_each_post_by_the_one_that_it_follows() -> None:
    """A fault of the API excuses only what comes after it, not an earlier repeat."""
    posts = [_post(at=50), _post(at=100, status=500), _post(at=110)]

    verdict = _check(posts, faults=[API_500])

    assert verdict.extra_posts == {"unexplained": 1, "api_fault": 1}
    assert verdict.doubled == {"api_fault": 1}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ["a"]),
        ({"faults": [BROKER_KILL]}, ["a"]),
        ({"faults": [KILL]}, []),
        ({"faults": [FREEZE]}, []),
        ({"published": {"a": 2}}, []),
    ],
)
def test_a_message_without_an_id_keeps_its_key(
    changes: dict[str, Any], found: Sequence[str]
) -> None:
    """Only the end of its worker may cost it, or a publisher that publishes two messages."""
    posts = [_post(key="made"), _post(at=105, key="made"), _post(at=110, key="another")]

    assert _check(posts[:2], nameless={"a"}).new_keys == []
    assert _check(posts, nameless={"a"}, **changes).new_keys == found


def test_finds_a_freeze_that_doubled_more_than_was_in_flight() -> None:
    """As a kill, a freeze may double what the worker sends at a time, and no more."""
    ids = [f"m{index}" for index in range(4)]
    posts = [_post(at=at, message_id=i, key=i) for i in ids for at in (100, 115)]
    facts: dict[str, Any] = {"published": dict.fromkeys(ids, 1), "confirmed": ids}

    within = _check(posts, concurrency=4, faults=[FREEZE], **facts)
    beyond = _check(posts, concurrency=3, faults=[FREEZE], **facts)

    assert (within.worst_freeze, within.problems) == (4, [])
    assert beyond.problems == ["one freeze of a worker doubled 4 messages"]


def test_finds_a_kill_that_doubled_more_than_was_in_flight() -> None:
    """One kill may double as many messages as the worker sends at a time, and no more."""
    ids = [f"m{index}" for index in range(4)]
    posts = [_post(at=at, message_id=i, key=i) for i in ids for at in (100, 110)]
    facts: dict[str, Any] = {"published": dict.fromkeys(ids, 1), "confirmed": ids}

    within = _check(posts, concurrency=4, faults=[KILL], **facts)
    beyond = _check(posts, concurrency=3, faults=[KILL], **facts)

    assert (within.worst_kill, within.problems) == (4, [])
    assert beyond.problems == ["one kill of a worker doubled 4 messages"]


@pytest.mark.parametrize(
    ("posts", "reason", "problems"),
    [
        ([_post(status=500)], "uncertain", []),
        (
            [_post(at=90, status=500)],
            "uncertain",
            ["1 dead letters did not meet a fault of the API"],
        ),
        (
            [_post(status=500)],
            "refused",
            ["1 dead letters say refused, which no fault here causes"],
        ),
    ],
)
def test_finds_a_dead_letter_that_should_not_be(
    posts: list[Post], reason: str, problems: list[str]
) -> None:
    """Only a fault of the API kills a message, and only as uncertain or exhausted."""
    verdict = _check(posts, dead=[DeadLetter("a", reason)], faults=[API_500])

    assert (verdict.dead, verdict.problems) == ({reason: 1}, problems)


def test_measures_the_time_to_the_next_acceptance() -> None:
    """Recovery counts from the end of the fault; a POST that was accepted before is no proof."""
    later = Fault(kind="broker kill -9", group="broker", started=190, ended=200)
    posts = [_post(at=107), _post(at=110, message_id="b", key="b"), _post(at=109.5, status=500)]

    assert _check(posts, faults=[BROKER_KILL, later]).recovery == {"broker kill -9": [2.0]}


ROW = ("a", "b", "c")


@pytest.mark.parametrize(
    ("posts", "found"),
    [
        ([("a", 1, True), ("b", 2, True), ("c", 3, True)], []),
        # A later message may come first when it is the repeat of an earlier one that is late.
        ([("a", 1, True), ("b", 2, True), ("a", 3, True), ("c", 4, True)], []),
        ([("a", 1, False), ("a", 2, True), ("b", 3, True)], []),
        # What is never accepted is dead, and holds up nothing.
        ([("a", 1, False), ("b", 2, True)], []),
        ([("b", 1, True), ("a", 2, True), ("c", 3, True)], ["b"]),
        ([("a", 1, False), ("b", 2, True), ("a", 3, True)], ["b"]),
        ([("c", 1, True), ("a", 2, True), ("b", 3, True)], ["c"]),
        ([("a", 2, True), ("b", 1, False), ("b", 3, True)], ["b"]),
    ],
)
def test_finds_a_message_that_overtook_another(
    posts: Sequence[tuple[str, float, bool]], found: Sequence[str]
) -> None:
    """No message of a key is POSTed before all earlier ones of it are accepted."""
    made = [_post(at, 202 if ok else 503, message_id=i, key=i) for i, at, ok in posts]
    facts: dict[str, Any] = {"published": dict.fromkeys(ROW, 1), "confirmed": (), "rows": [ROW]}

    verdict = _check(made, faults=[Fault(kind="API 503", group="api", started=0, ended=9)], **facts)

    assert verdict.out_of_order == found
    assert any("overtook" in problem for problem in verdict.problems) == bool(found)


REQUEST = Request("soak-1", "+491713920001", "message 1")
MOMENT = "2026-11-21T10:00:00.123Z"


def _attempt(**changes: Any) -> dict[str, Any]:
    fresh = {"to": REQUEST.number, "idempotency_key": "soak-1", "status": 202}
    return fresh | {"received_at": MOMENT} | changes


def _message(**changes: Any) -> dict[str, Any]:
    return {"to": REQUEST.number, "text": REQUEST.text, "received_at": MOMENT} | changes


def test_joins_the_messages_with_the_posts_that_brought_them() -> None:
    """A POST that was cut unanswered counts as accepted when the service has its message."""
    attempts = [_attempt(status=None), _attempt(status=None, received_at="2026-11-21T10:00:09Z")]

    posts = join_log(attempts, [_message()], {REQUEST.number: REQUEST})

    assert [(post.message_id, post.accepted) for post in posts] == [
        ("soak-1", True),
        ("soak-1", False),
    ]


def test_shows_a_number_that_nobody_was_to_be_sent_to() -> None:
    """The owner of an unknown number is the number, so that it shows as unexpected."""
    posts = join_log([_attempt(to="+490")], [_message(to="+490")], {REQUEST.number: REQUEST})

    assert [post.message_id for post in posts] == ["+490"]


def test_refuses_a_message_with_another_text() -> None:
    """A message that was changed on its way is worse than a lost one."""
    with pytest.raises(SoakError, match="another text"):
        join_log([_attempt()], [_message(text="other")], {REQUEST.number: REQUEST})
