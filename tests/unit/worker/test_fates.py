"""What answers mean: every status and every way to get none."""

from typing import get_args

import pytest

from bridge.errors import PostFault
from bridge.worker.fates import Answer, Fate, PauseReason, Result, judge_failure, judge_status

# --- Statuses: the table of the documents, written out a second time ----------------------------

ACCEPTED = range(200, 300)
REDIRECTS = range(300, 400)
SETUP = {401, 402, 407, 426, 511, *REDIRECTS}
AMBIGUOUS = {403, 404, 405, 410, 501, 505}
AGAIN = {408, 409, 421, 425}
ORIGIN_NOT_REACHED = {521, 523, 525, 526, 530}
# As they come; some more that services and gateways are known to answer.
EVERY_STATUS = [*range(100, 600), 600, 999]


def expected_fate(status: int, *, retry_after: bool = False) -> Fate:
    if status in ACCEPTED:
        return Fate.SENT
    if status == 429:
        return Fate.SLOW_DOWN
    if status in SETUP:
        return Fate.SETUP
    if status in AMBIGUOUS:
        return Fate.AMBIGUOUS
    if status in AGAIN or status in ORIGIN_NOT_REACHED or (status == 503 and retry_after):
        return Fate.RETRY
    return Fate.REFUSED if 400 <= status < 500 else Fate.UNCERTAIN


def judged(status: int, *, retry_after: float | None = None) -> Answer:
    return judge_status(status, retry_after_seconds=retry_after)


def test_status() -> None:
    """Each status has the fate that the documents give it."""
    fates = {status: judged(status).fate for status in EVERY_STATUS}

    assert fates == {status: expected_fate(status) for status in EVERY_STATUS}


def test_statuses_with_retry_after() -> None:
    """`Retry-After` says that a 503 was not processed, and changes no other fate."""
    fates = {status: judged(status, retry_after=5).fate for status in EVERY_STATUS}

    assert fates == {status: expected_fate(status, retry_after=True) for status in EVERY_STATUS}


def test_503_to_be_tried_at_once() -> None:
    """A 503 whose `Retry-After` is no wait at all was still not processed."""
    assert judged(503, retry_after=0).fate is Fate.RETRY


PAUSES = {
    401: "credentials_rejected",
    403: "credentials_rejected",
    407: "credentials_rejected",
    511: "credentials_rejected",
    402: "insufficient_funds",
    404: "misconfigured",
    405: "misconfigured",
    410: "misconfigured",
    426: "misconfigured",
    501: "misconfigured",
    505: "misconfigured",
    **dict.fromkeys(REDIRECTS, "misconfigured"),
}


def test_reason_of_the_pause() -> None:
    """What is, or may be, a fault of the set-up says what is to be repaired, nothing else does."""
    assert {s: pause for s in EVERY_STATUS if (pause := judged(s).pause)} == PAUSES


def test_status_is_kept() -> None:
    """An answer has its status, for headers and outcome events."""
    assert [judged(status).status for status in EVERY_STATUS] == EVERY_STATUS


def expected_results(status: int) -> set[str]:
    if status in ACCEPTED:
        return {"success"}
    if status in {401, 403, 407, 511}:
        return {"unauthorized"}
    if status == 429:
        return {"rate_limited"}
    if status == 408:
        return {"timeout", "rejected"}
    if status in {501, 505}:
        return {"rejected", "server_error"}
    if 300 <= status < 500:
        return {"rejected"}
    return {"server_error"} if 500 <= status < 600 else {"protocol_error"}


def test_result() -> None:
    """Each status is counted under a result that says what it was."""
    odd = [s for s in EVERY_STATUS if judged(s).result not in expected_results(s)]

    assert odd == []


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("wait", [None, 0.0, 7.5])
def test_wait_is_kept(status: int, wait: float | None) -> None:
    """The answer has the wait that the service asked for."""
    assert judged(status, retry_after=wait).retry_after_seconds == wait


def test_statuses_of_an_outage() -> None:
    """A 5xx that is no fault of the set-up counts as an outage; what is below does not."""
    counted = {s for s in range(200, 600) if judged(s).counts_as_outage}

    assert counted == set(range(500, 600)) - SETUP - AMBIGUOUS


def test_503_with_retry_after_counts_as_an_outage() -> None:
    """A 503 is a 5xx, whether or not it says when to come again."""
    assert judged(503, retry_after=5).counts_as_outage


# --- Failures ------------------------------------------------------------------------------------

# What became of the request, the result that is counted, and the pause.
FAILURES: dict[PostFault, tuple[Fate, Result, PauseReason | None]] = {
    "connect_failed": (Fate.NOT_SENT, "connection_error", None),
    "connect_timeout": (Fate.NOT_SENT, "timeout", None),
    "proxy_failed": (Fate.NOT_SENT, "connection_error", None),
    "pool_exhausted": (Fate.NOT_SENT, "timeout", None),
    "tls_failed": (Fate.SETUP, "connection_error", "tls_failed"),
    "answer_timeout": (Fate.UNCERTAIN, "timeout", None),
    "connection_lost": (Fate.UNCERTAIN, "connection_error", None),
    "not_http": (Fate.UNCERTAIN, "protocol_error", None),
}


def test_no_failure_is_missing() -> None:
    """The table above has every way in which an attempt ends without an answer."""
    assert set(FAILURES) == set(get_args(PostFault))


@pytest.mark.parametrize(("fault", "meaning"), FAILURES.items(), ids=FAILURES)
def test_failure(fault: PostFault, meaning: tuple[Fate, Result, PauseReason | None]) -> None:
    """Only what fails before the body is written was not sent; all else may have been.

    Time-outs, cut links and no connection count towards an outage; distrust does not.
    """
    answer = judge_failure(fault)

    assert (answer.fate, answer.result, answer.pause) == meaning
    assert answer.counts_as_outage is (fault != "tls_failed")
    assert (answer.status, answer.retry_after_seconds) == (None, None)


def test_details_of_failures_tell_them_apart() -> None:
    """No two ways to fail have the same text in a dead letter."""
    assert len({judge_failure(fault).detail for fault in FAILURES}) == len(FAILURES)


ALL_ANSWERS: list[Answer] = [
    *(judged(status) for status in EVERY_STATUS),
    judged(503, retry_after=5),
    *(judge_failure(fault) for fault in FAILURES),
]


def test_results_are_those_that_are_counted() -> None:
    """No answer has a result that the metrics do not know."""
    assert {answer.result for answer in ALL_ANSWERS} == set(get_args(Result))


def test_pauses_are_those_that_are_counted() -> None:
    """No answer has a reason to pause that the metrics do not know."""
    assert {answer.pause for answer in ALL_ANSWERS if answer.pause} <= set(get_args(PauseReason))


def test_every_fault_of_the_setup_has_a_reason() -> None:
    """An answer has a reason to pause exactly when it is, or may be, a fault of the set-up."""
    pausing = {Fate.SETUP, Fate.AMBIGUOUS}
    assert all((a.fate in pausing) == (a.pause is not None) for a in ALL_ANSWERS)
