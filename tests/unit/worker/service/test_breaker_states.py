"""The circuit breaker's transitions: a state and an event on each row, and the state after it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.fates import Answer, PauseReason, judge_failure, judge_status
from bridge.worker.service.breaker_states import (
    OUTAGE_REQUESTS,
    BreakerPhase,
    Rank,
    ServiceState,
)
from bridge.worker.service.retry_after import MAX_JITTER, MAX_RECEIVED_SECONDS

START = 1000.0
OUTAGE_AFTER = 10.0
LATER = START + OUTAGE_AFTER
NEW = ServiceState(OUTAGE_AFTER, counted_since=START)

# What happens to a breaker at a moment.
Event = Callable[[ServiceState, float], ServiceState]


def answered(
    answer: Answer, key: str = "m", to: str = "1", *, is_refused_in_a_row: bool = False
) -> Event:
    return lambda breaker, now: breaker.after_answer(
        answer, key, to, now, 1.0, is_refused_in_a_row=is_refused_in_a_row
    )


def offered(key: str, rank: Rank, *, elsewhere: bool = False) -> Event:
    return lambda breaker, now: breaker.with_probe(key, rank, now, elsewhere=elsewhere)


def held(key: str) -> Event:
    return lambda breaker, _: breaker.with_held_probe(key, elsewhere=False)


def given_up(key: str) -> Event:
    return lambda breaker, _: breaker.without_probe(key)


def peer_opened(reason: PauseReason, **facts: Any) -> Event:
    return lambda breaker, now: breaker.after_trip_of_peer(reason, START, now, 1.0, **facts)


def peer_waits(seconds: float) -> Event:
    return lambda breaker, now: breaker.after_peers_wait(seconds, now)


def wait_checked(*, elsewhere: bool = False) -> Event:
    return lambda breaker, now: breaker.after_passed_wait(now, elsewhere=elsewhere)


def outage_checked(breaker: ServiceState, now: float) -> ServiceState:
    return breaker.after_lasting_failures(now, 1.0)


def status(code: int, *, wait: float | None = None, **facts: Any) -> Answer:
    return judge_status(code, retry_after_seconds=wait)._replace(**facts)


SENT, FAILED, FORBIDDEN = status(200), status(500), status(403)


def after(breaker: ServiceState, *events: Event, now: float = START) -> ServiceState:
    for event in events:
        breaker = event(breaker, now)
    return breaker


def opened(reason: PauseReason = "misconfigured", **facts: Any) -> ServiceState:
    """Make an open breaker without a probe, as another worker opens it."""
    return after(NEW, peer_opened(reason, **facts))


def half_open(
    reason: PauseReason = "misconfigured", rank: Rank = Rank.WILLING, key: str = "p"
) -> ServiceState:
    return after(opened(reason), offered(key, rank))


FAILING = after(NEW, *[answered(FAILED)] * OUTAGE_REQUESTS)
LIMITED = after(NEW, answered(status(429, wait=20)))
_401 = ("credentials_rejected", 401, None)
_403 = ("credentials_rejected", 403, None)
OURS = ("misconfigured", None, None)
OUTAGE = ("outage", None, None)
LIMIT = ("rate_limited", None, None)


class Row(NamedTuple):
    """A state, an event at a moment, and what follows: the state, and why it is open."""

    before: ServiceState
    event: Event
    state: BreakerPhase
    why: tuple[str, int | None, str | None] | None = None
    now: float = START


ROWS: dict[str, Row] = {
    # From a closed breaker.
    "accepted": Row(NEW, answered(SENT), BreakerPhase.CLOSED),
    "refused": Row(NEW, answered(status(400)), BreakerPhase.CLOSED),
    "failed once": Row(NEW, answered(FAILED), BreakerPhase.CLOSED, now=LATER),
    "429": Row(NEW, answered(status(429, wait=20)), BreakerPhase.RETRY_AFTER),
    "429 of one message": Row(NEW, answered(status(429, about="message")), BreakerPhase.CLOSED),
    "429 with a long wait": Row(
        NEW, answered(status(429, wait=MAX_HOLD_SECONDS + 1)), BreakerPhase.OPEN, LIMIT
    ),
    "401": Row(NEW, answered(status(401)), BreakerPhase.OPEN, _401),
    "402 behind a code": Row(
        NEW,
        answered(status(402)._replace(status=200, code="9")),
        BreakerPhase.OPEN,
        ("insufficient_funds", 200, "9"),
    ),
    "401 of one message": Row(
        NEW, answered(status(401, about="message", pause=None)), BreakerPhase.CLOSED
    ),
    "no TLS": Row(
        NEW, answered(judge_failure("tls_failed")), BreakerPhase.OPEN, ("tls_failed", None, None)
    ),
    "ambiguous once": Row(NEW, answered(FORBIDDEN), BreakerPhase.CLOSED),
    "ambiguous, third in a row": Row(
        NEW._replace(ambiguous=2), answered(FORBIDDEN), BreakerPhase.OPEN, _403
    ),
    "unknown refusal, tenth in a row": Row(
        NEW, answered(FORBIDDEN, is_refused_in_a_row=True), BreakerPhase.OPEN, _403
    ),
    "peer opened": Row(NEW, peer_opened("outage"), BreakerPhase.OPEN, OUTAGE),
    "peer closed": Row(NEW, ServiceState.after_reset, BreakerPhase.CLOSED),
    "peer has to wait": Row(NEW, peer_waits(5), BreakerPhase.RETRY_AFTER),
    "doubts that only a refusal separates": Row(
        after(NEW._replace(ambiguous=2), answered(status(400))),
        answered(FORBIDDEN),
        BreakerPhase.OPEN,
        _403,
    ),
    "tenth failure, with a refusal between": Row(
        after(NEW._replace(failures=9), answered(status(400))),
        answered(FAILED),
        BreakerPhase.CLOSED,
        now=LATER,
    ),
    # From a suspected outage.
    "tenth failure": Row(NEW._replace(failures=9), answered(FAILED), BreakerPhase.SUSPECTED),
    "eleventh failure": Row(FAILING, answered(FAILED), BreakerPhase.SUSPECTED, now=LATER - 1),
    "eleventh failure, later": Row(FAILING, answered(FAILED), BreakerPhase.OPEN, OUTAGE, now=LATER),
    "suspicion is refuted": Row(FAILING, answered(status(400)), BreakerPhase.CLOSED, now=LATER),
    "suspicion is checked early": Row(
        FAILING, outage_checked, BreakerPhase.SUSPECTED, now=LATER - 1
    ),
    "suspicion lasts": Row(FAILING, outage_checked, BreakerPhase.OPEN, OUTAGE, now=LATER),
    # From a wait.
    "wait is over": Row(LIMITED, answered(SENT), BreakerPhase.CLOSED, now=START + 23),
    # From an open breaker.
    "another reason": Row(opened(), answered(status(401)), BreakerPhase.OPEN, _401),
    "same reason": Row(opened(), answered(status(426)), BreakerPhase.OPEN, OURS),
    "accepted late": Row(opened(), answered(SENT), BreakerPhase.OPEN, OURS),
    "accepted in an outage": Row(opened("outage"), answered(SENT), BreakerPhase.CLOSED),
    "peer has closed": Row(opened(), ServiceState.after_reset, BreakerPhase.CLOSED),
    "long wait is over": Row(opened("rate_limited"), wait_checked(), BreakerPhase.CLOSED),
    "long wait is over, a peer probes": Row(
        opened("rate_limited"), wait_checked(elsewhere=True), BreakerPhase.OPEN, LIMIT
    ),
    "only a wait is over by itself": Row(
        opened(), wait_checked(), BreakerPhase.OPEN, OURS, now=LATER * 9
    ),
    "probe": Row(opened(), offered("p", Rank.WILLING), BreakerPhase.HALF_OPEN, OURS),
    "a peer probes": Row(
        opened(), offered("p", Rank.WILLING, elsewhere=True), BreakerPhase.OPEN, OURS
    ),
    "message is held": Row(opened(), held("m"), BreakerPhase.HALF_OPEN, OURS),
    # From a half-open breaker.
    "probe is accepted": Row(half_open(), answered(SENT, "p"), BreakerPhase.CLOSED),
    "probe is refused": Row(half_open(), answered(status(400), "p"), BreakerPhase.CLOSED),
    "probe fails": Row(half_open(), answered(FAILED, "p"), BreakerPhase.HALF_OPEN, OURS),
    "probe is limited": Row(
        half_open(), answered(status(429, wait=1), "p"), BreakerPhase.HALF_OPEN, OURS
    ),
    "probe is to come again": Row(
        half_open(), answered(status(503, wait=1), "p"), BreakerPhase.HALF_OPEN, OURS
    ),
    "probe is answered 404": Row(
        half_open(), answered(status(404), "p"), BreakerPhase.HALF_OPEN, OURS
    ),
    "another message fails": Row(half_open(), answered(FAILED), BreakerPhase.HALF_OPEN, OURS),
    "probe is given up": Row(half_open(), given_up("p"), BreakerPhase.OPEN, OURS),
    "another gives up": Row(half_open(), given_up("m"), BreakerPhase.HALF_OPEN, OURS),
    "a peer probes instead": Row(
        half_open(), offered("p", Rank.WILLING, elsewhere=True), BreakerPhase.OPEN, OURS
    ),
    "new key": Row(half_open(), lambda b, _: b.with_new_key(), BreakerPhase.HALF_OPEN, OURS),
    "long wait with a probe": Row(
        half_open("rate_limited"), wait_checked(), BreakerPhase.HALF_OPEN, LIMIT, now=LATER * 9
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_transition(row: Row) -> None:
    """Each event leads from a state to the next one, which is open for this reason."""
    breaker = row.event(row.before, row.now)
    opened = breaker.trip
    why = None if opened is None else (opened.reason, opened.status, opened.code)

    assert (breaker.phase_at(row.now), why) == (row.state, row.why)


@pytest.mark.parametrize(
    ("former", "better", "is_replaced"),
    [
        (Rank.NOBODY, Rank.RELUCTANT, True),
        (Rank.TRIED, Rank.RELUCTANT, True),
        (Rank.TRIED, Rank.WILLING, True),
        (Rank.RELUCTANT, Rank.WILLING, True),
        (Rank.RELUCTANT, Rank.RELUCTANT, False),
        (Rank.WILLING, Rank.RELUCTANT, False),
        (Rank.WILLING, Rank.WILLING, False),
    ],
)
def test_a_better_probe_replaces_another(former: Rank, better: Rank, *, is_replaced: bool) -> None:
    """A probe keeps its place against one that is as good."""
    breaker = after(half_open(rank=former), offered("q", better))

    assert breaker.is_probe("q") == is_replaced


@pytest.mark.parametrize(
    ("rank", "wanted"),
    [(Rank.NOBODY, 1), (Rank.WILLING, 0), (Rank.RELUCTANT, 2), (Rank.TRIED, 2)],
)
def test_probes_wanted(rank: Rank, wanted: int) -> None:
    """A message is taken while there is no probe, two while another would be the better one."""
    before = opened()
    assert before.trip is not None
    breaker = before._replace(trip=before.trip._replace(rank=rank))
    waits = breaker._replace(retry_after=breaker.retry_after._replace(ends_at=START + 600))

    assert breaker.probes_wanted(START, elsewhere=False) == wanted
    assert breaker.probes_wanted(START, elsewhere=True) == 0
    assert waits.probes_wanted(START, elsewhere=False) == 0


@pytest.mark.parametrize(
    ("reason", "rank", "failures", "seconds"),
    [
        ("outage", Rank.WILLING, 0, 1),
        ("outage", Rank.WILLING, 3, 8),
        ("outage", Rank.WILLING, 9, 15),
        ("outage", Rank.RELUCTANT, 5, 32),
        ("outage", Rank.RELUCTANT, 9, 300),
        ("misconfigured", Rank.WILLING, 9, 60),
        ("misconfigured", Rank.RELUCTANT, 9, 60),
    ],
)
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_wait_to_probe(
    reason: PauseReason, rank: Rank, failures: int, seconds: float, chance: float
) -> None:
    """The wait doubles with each failure up to a limit, and chance shortens it by a fifth."""
    breaker = NEW.after_trip_of_peer(reason, START, START, chance, failures=(failures, failures))
    breaker = after(breaker, offered("p", rank))

    assert breaker.seconds_to_probe(START) == pytest.approx(seconds * (0.8 + 0.2 * chance))


def test_a_peer_that_repeats_itself_does_not_put_the_probe_off() -> None:
    """Each heartbeat has the number of failed probes; only a larger one restarts the wait."""
    before = opened(failures=(3, 3))
    repeated = after(before, peer_opened("misconfigured", failures=(3, 3)), now=START + 5)
    failed = after(before, peer_opened("misconfigured", failures=(4, 4)), now=START + 5)

    assert [one.seconds_to_probe(START + 5) for one in (repeated, failed)] == [8 - 5, 16]


def test_probe_that_would_wait_for_minutes_is_none() -> None:
    """A message on its last attempt waits up to five minutes, and not here."""
    breaker = opened("outage", failures=(9, 9))

    assert not after(breaker, offered("p", Rank.RELUCTANT)).is_probe("p")


def test_a_willing_probe_that_fails_makes_both_waits_longer() -> None:
    """A reluctant one does not make a new message wait."""
    willing = after(half_open(), answered(FAILED, "p"))
    reluctant = after(half_open(rank=Rank.RELUCTANT), answered(FAILED, "p"))

    assert willing.trip is not None
    assert reluctant.trip is not None
    assert (willing.trip.failures, reluctant.trip.failures) == ((1, 1), (0, 1))


def test_new_key_goes_at_once_and_once() -> None:
    """A changed key ends the wait of one probe."""
    renewed = after(half_open(), lambda b, _: b.with_new_key())
    left = after(renewed, lambda b, _: b.after_probe_left())

    assert (renewed.seconds_to_probe(START), left.seconds_to_probe(START)) == (0, 1)


def test_wait_that_was_asked_for_comes_before_a_probe() -> None:
    """A probe is due neither before its back-off nor before the service's wait is over."""
    breaker = after(half_open(), answered(status(429, wait=20)))

    assert breaker.seconds_to_probe(START) == pytest.approx(20 * MAX_JITTER)


def test_only_some_messages_leave_in_a_wait() -> None:
    """In a wait over 6 s, or the second in a row, a thousand messages may leave, and no more."""
    short = after(NEW, answered(status(429, wait=5)))
    longer = after(NEW, answered(status(429, wait=7)))
    second = after(short, answered(status(429, wait=5)), now=START + 6)
    gone = after(LIMITED, *[lambda b, _: b.after_leaving()] * 1000)

    assert not short.retry_after.lets_leave(START)
    assert longer.retry_after.lets_leave(START)
    assert second.retry_after.lets_leave(START + 6)
    assert LIMITED.retry_after.lets_leave(START)
    assert not LIMITED.retry_after.lets_leave(START + 23)
    assert not gone.retry_after.lets_leave(START)


@pytest.mark.parametrize(("told", "kept"), [(5.0, 5.0), (1e9, MAX_RECEIVED_SECONDS)])
def test_no_peer_asks_for_more_than_a_service_may(told: float, kept: float) -> None:
    """A broken worker stops no other for ever."""
    breaker = after(NEW, peer_waits(told))

    assert breaker.retry_after.seconds_left(START) == pytest.approx(kept)


def test_pause_tells_since_when_it_is_not_refuted() -> None:
    """The first of the ambiguous answers counts, or the last acceptance before an outage."""
    first = after(NEW, answered(FORBIDDEN))
    doubted = after(first, *[answered(FORBIDDEN)] * 2, now=START + 5)
    accepted = after(NEW, answered(SENT), now=START + 2)
    failed = after(accepted, *[answered(FAILED)] * OUTAGE_REQUESTS, now=START + 20)

    assert doubted.trip is not None
    assert failed.trip is not None
    assert (doubted.trip.unaccepted_since, failed.trip.unaccepted_since) == (START, START + 2)


def test_closing_counts_anew() -> None:
    """After a pause an outage and a doubt about the set-up have to be seen from the start."""
    before = opened()._replace(failures=9, ambiguous=2, limited_recipient="1")
    breaker = after(before, ServiceState.after_reset, now=LATER)

    assert breaker == NEW._replace(counted_since=LATER, reset_at=LATER)
