"""What becomes of a delivery: the ladder, again or dead, and what is put off."""

from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import PostFault
from bridge.worker.fates import Answer, Fate, Result, RetryReason, judge_failure, judge_status
from bridge.worker.outcomes import Dead, Outcome, Policy, Retried, Sent, decide, put_off_for


def judged(status: int, *, retry_after: float | None = None) -> Answer:
    return judge_status(status, retry_after_seconds=retry_after)


ALL_ANSWERS: list[Answer] = [
    *(judged(status) for status in range(100, 600)),
    judged(503, retry_after=5),
    *(judge_failure(fault) for fault in get_args(PostFault)),
]


# --- The ladder ----------------------------------------------------------------------------------

LADDER = (5.0, 30.0, 120.0, 600.0, 3600.0)
POLICY = Policy(max_attempts=6, max_uncertain_attempts=3, retry_delays_seconds=LADDER)


@pytest.mark.parametrize(("attempts", "delay"), [(1, 5), (2, 30), (5, 3600), (6, 3600), (99, 3600)])
def test_step(attempts: int, delay: float) -> None:
    """Each attempt waits a step longer, and the last step is repeated."""
    assert POLICY.delay_for(attempts) == delay


@pytest.mark.parametrize(
    ("asked", "delay"),
    [(0, 5), (4, 5), (5, 5), (5.1, 30), (60, 120), (601, 3600), (3600, 3600), (9999, 3600)],
)
def test_step_that_was_asked_for(asked: float, delay: float) -> None:
    """The step is as long as the service asked for, if any step is."""
    assert POLICY.delay_for(1, at_least_seconds=asked) == delay


def test_step_is_never_shorter_for_being_asked() -> None:
    """A short wait that was asked for does not shorten a later step."""
    assert POLICY.delay_for(4, at_least_seconds=1) == 600


@pytest.mark.parametrize(
    ("seconds", "step"), [(0, 5), (4.9, 5), (5, 5), (29, 5), (30, 30), (119, 30), (1e6, 120)]
)
def test_longest_step_within_a_time(seconds: float, step: float) -> None:
    """What is to come back by a moment goes up the longest step that ends before, or the first."""
    policy = Policy(
        max_attempts=6, max_uncertain_attempts=3, retry_delays_seconds=(5.0, 30.0, 120.0)
    )

    assert policy.longest_within(seconds) == step


@given(st.integers(1, 50), st.floats(0, 10_000))
def test_step_is_always_on_the_ladder(attempts: int, asked: float) -> None:
    """Every delay is that of a queue that exists."""
    assert POLICY.delay_for(attempts, at_least_seconds=asked) in LADDER


# --- Again or dead -------------------------------------------------------------------------------


def answer(fate: Fate, *, result: Result = "server_error", wait: float | None = None) -> Answer:
    return Answer(
        fate=fate,
        result=result,
        detail="why",
        status=500,
        retry_after_seconds=wait,
        provider_id="p",
    )


# Fates of which the message is not the cause, and the reason for which it is put off.
PUT_OFF: dict[Fate, RetryReason] = {
    Fate.SETUP: "paused",
    Fate.AMBIGUOUS: "ambiguous",
    Fate.SLOW_DOWN: "rate_limited",
}


def outcome(
    fate: Fate,
    *,
    attempts: int = 0,
    uncertain: int = 0,
    park: bool = False,
    policy: Policy = POLICY,
    wait: float | None = None,
) -> Outcome:
    return decide(
        answer(fate, wait=wait),
        policy,
        attempts=attempts,
        uncertain_attempts=uncertain,
        park=park,
    )


SENT = Sent(status=500, provider_id="p")
REFUSED = Dead(reason="refused", detail="why", status=500, counted=True)
EXHAUSTED = REFUSED._replace(reason="exhausted")
UNCERTAIN_DEAD = REFUSED._replace(reason="uncertain", uncertain=True)


def again(
    delay_seconds: float, reason: RetryReason = "server_error", *, counted: bool = True
) -> Retried:
    is_uncertain = reason == "uncertain"
    return Retried(reason, delay_seconds, "why", 500, counted=counted, uncertain=is_uncertain)


STEPS: list[Outcome] = [
    *(again(5), again(30), again(120), again(600), again(3600)),
    *(EXHAUSTED, EXHAUSTED),
]
# Fate, attempts and uncertain attempts before this one, whether uncertain messages are parked, and
# the outcome.
DECISIONS: list[tuple[Fate, int, int, bool, Outcome]] = [
    *((Fate.SENT, attempts, 0, park, SENT) for attempts in (0, 5, 99) for park in (False, True)),
    *((Fate.REFUSED, tried, 0, park, REFUSED) for tried in (0, 5, 99) for park in (False, True)),
    # Neither fault is the message's own: no attempt is counted, and it never dies of it.
    *(
        (fate, tried, 99, park, again(5, reason, counted=False))
        for fate, reason in PUT_OFF.items()
        for tried in (0, 5, 99)
        for park in (False, True)
    ),
    # Each further attempt waits a step longer, and the sixth is the last.
    *(
        (fate, tried, 0, park, outcome)
        for fate in (Fate.RETRY, Fate.NOT_SENT)
        for park in (False, True)
        for tried, outcome in enumerate(STEPS)
    ),
    # What was certainly not sent has all its attempts, whatever happened before.
    (Fate.RETRY, 4, 2, True, again(3600)),
    (Fate.NOT_SENT, 4, 2, True, again(3600)),
    # Uncertain attempts have a limit of their own: the third is the last, with `park` the first.
    (Fate.UNCERTAIN, 0, 0, False, again(5, "uncertain")),
    (Fate.UNCERTAIN, 1, 1, False, again(30, "uncertain")),
    (Fate.UNCERTAIN, 4, 1, False, again(3600, "uncertain")),
    *((Fate.UNCERTAIN, tried, tried, False, UNCERTAIN_DEAD) for tried in (2, 3, 99)),
    *((Fate.UNCERTAIN, 0, uncertain, True, UNCERTAIN_DEAD) for uncertain in (0, 1, 2)),
    # The last attempt of all: dead as uncertain, not as exhausted.
    (Fate.UNCERTAIN, 5, 0, False, UNCERTAIN_DEAD),
]


@pytest.mark.parametrize(("fate", "attempts", "uncertain", "park", "expected"), DECISIONS)
def test_decision(
    fate: Fate, attempts: int, uncertain: int, *, park: bool, expected: Outcome
) -> None:
    """What becomes of a message after an answer of each fate."""
    assert outcome(fate, attempts=attempts, uncertain=uncertain, park=park) == expected


@pytest.mark.parametrize("park", [False, True])
def test_what_was_taken_in_part_is_never_tried_again(*, park: bool) -> None:
    """The accepted part of the text would arrive twice."""
    answer = judged(500)._replace(detail="why", in_part=True)
    ended = decide(answer, POLICY, attempts=0, uncertain_attempts=0, park=park)

    assert ended == UNCERTAIN_DEAD


@pytest.mark.parametrize("fate", [Fate.RETRY, Fate.NOT_SENT])
def test_one_attempt_is_all(fate: Fate) -> None:
    """With one attempt allowed nothing is tried twice."""
    once = Policy(max_attempts=1, max_uncertain_attempts=3, retry_delays_seconds=LADDER)

    assert outcome(fate, policy=once) == EXHAUSTED


@pytest.mark.parametrize("fate", [Fate.RETRY, Fate.NOT_SENT, Fate.UNCERTAIN, Fate.SLOW_DOWN])
def test_wait_that_was_asked_for(fate: Fate) -> None:
    """A message does not come back before the service wants it."""
    ended = outcome(fate, wait=100)

    assert isinstance(ended, Retried)
    assert ended.delay_seconds == 120


REASONS: dict[str, tuple[Callable[[], Answer], str]] = {
    "408": (lambda: judged(408), "timeout"),
    "500": (lambda: judged(500), "uncertain"),
    "503 with Retry-After": (lambda: judged(503, retry_after=1), "server_error"),
    "refused": (lambda: judge_failure("connect_failed"), "connection_error"),
    "connect time-out": (lambda: judge_failure("connect_timeout"), "timeout"),
    "reset": (lambda: judge_failure("connection_lost"), "uncertain"),
}


@pytest.mark.parametrize(("make", "reason"), REASONS.values(), ids=REASONS)
def test_reason_of_a_retry(make: Callable[[], Answer], reason: str) -> None:
    """A copy on the ladder says why it waits."""
    ended = decide(make(), POLICY, attempts=0, uncertain_attempts=0, park=False)

    assert isinstance(ended, Retried)
    assert ended.reason == reason


@pytest.mark.parametrize("attempts", [5, 99])
def test_no_outcome_repeats_a_message_for_ever(attempts: int) -> None:
    """Whatever is answered, the sixth attempt that counts is the last."""
    ends = [
        decide(judged, POLICY, attempts=attempts, uncertain_attempts=0, park=False)
        for judged in ALL_ANSWERS
    ]

    assert not [end for end in ends if isinstance(end, Retried) and end.counted]


# --- Putting off ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "reason"),
    [*PUT_OFF.items(), (Fate.UNCERTAIN, "paused")],
)
def test_put_off(fate: Fate, reason: str) -> None:
    """A delivery that the worker must not hold any longer waits a step and burns nothing."""
    ended = put_off_for(answer(fate), POLICY)

    assert (ended.reason, ended.delay_seconds, ended.detail) == (reason, 5, "why")
    assert (ended.status, ended.counted) == (500, False)
    assert ended.uncertain is (fate is Fate.UNCERTAIN)


@pytest.mark.parametrize(("times", "delay"), [(1, 5), (2, 30), (5, 3600), (99, 3600)])
def test_put_off_again_and_again(times: int, delay: float) -> None:
    """A delivery that is put off once more for its own sake waits a step higher."""
    assert put_off_for(answer(Fate.AMBIGUOUS), POLICY, times=times).delay_seconds == delay


@pytest.mark.parametrize(
    ("attempts", "uncertain", "is_last"),
    [(0, 0, False), (4, 0, False), (5, 0, True), (1, 1, False), (2, 2, True)],
)
def test_last_try(attempts: int, uncertain: int, *, is_last: bool) -> None:
    """A try is the last one when its failure, in doubt or not, would use up a cap."""
    assert POLICY.is_last_attempt(attempts=attempts, uncertain_attempts=uncertain) is is_last


@pytest.mark.parametrize(
    ("wait", "delay"), [(3, 5), (50, 30), (60, 120), (100, 120), (900, 600), (2000, 3600)]
)
def test_put_off_as_long_as_asked(wait: float, delay: float) -> None:
    """A delivery that is put off comes back when the service wants it; not twice as late."""
    assert put_off_for(answer(Fate.SLOW_DOWN, wait=wait), POLICY).delay_seconds == delay


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.SENT])
@pytest.mark.parametrize("attempts", [0, 5])
def test_error_code_is_kept(fate: Fate, attempts: int) -> None:
    """Whatever becomes of a message that was not sent, the service's code goes along."""
    coded = answer(fate)._replace(code="21211")
    decided = decide(coded, POLICY, attempts=attempts, uncertain_attempts=0, park=False)

    assert isinstance(decided, Retried | Dead)
    assert decided.code == "21211"
