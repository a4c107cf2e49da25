"""The circuit breaker's transitions: a state and an event on each row, and the state after it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.fates import Answer, PauseReason, judge_failure, judge_status
from bridge.worker.service.breaker_events import (
    Answered,
    BrokerBlocked,
    BrokerUnblocked,
    Do,
    Effect,
    Event,
    KeyRenewed,
    MadeRoom,
    OperatorPaused,
    OperatorResumed,
    OutageChecked,
    PauseBegan,
    PauseEnded,
    PauseRefused,
    PauseTurned,
    PeerAskedToWait,
    PeerClosed,
    PeerOpened,
    ProbeGivenUp,
    ProbeHeld,
    ProbeLeft,
    ProbeOffered,
    Rank,
    Unstored,
    WaitChecked,
)
from bridge.worker.service.breaker_states import (
    MAX_OUTAGE_PROBE_SECONDS,
    MAX_PROBE_SECONDS,
    OUTAGE_REQUESTS,
    Breaker,
    State,
    transition,
)
from bridge.worker.service.retry_after import MAX_JITTER, MAX_LEAVING, MAX_RECEIVED_SECONDS

START = 1000.0
OUTAGE_AFTER = 10.0
LATER = START + OUTAGE_AFTER
NEW = Breaker(OUTAGE_AFTER, counted_since=START)
UNSTORED = Unstored("q.dead", "nacked")


def answered(
    answer: Answer, key: str = "m", to: str = "1", *, is_refused_in_a_row: bool = False
) -> Answered:
    """Make the event of an answer."""
    return Answered(answer, key, to, is_refused_in_a_row)


def status(code: int, *, wait: float | None = None, **facts: Any) -> Answer:
    """Make the answer of a status."""
    return judge_status(code, retry_after_seconds=wait)._replace(**facts)


SENT, FAILED, FORBIDDEN = status(200), status(500), status(403)
REJECTED = "credentials_rejected"


def after(
    breaker: Breaker, *events: Event, now: float = START, chance: float = 1.0
) -> tuple[Breaker, list[Effect]]:
    """Let events happen at one moment; return the state, and the effects of the last one."""
    effects: list[Effect] = []
    for event in events:
        breaker, effects = transition(breaker, event, now, chance)
    return breaker, effects


def opened(reason: PauseReason = "misconfigured", **facts: Any) -> Breaker:
    """Make an open breaker without a probe, as another worker opens it."""
    return after(NEW, PeerOpened(reason, START, **facts))[0]


def half_open(
    reason: PauseReason = "misconfigured", rank: Rank = Rank.WILLING, key: str = "p"
) -> Breaker:
    """Make an open breaker with a probe."""
    return after(opened(reason), ProbeOffered(key, rank, is_probed_elsewhere=False))[0]


FAILING = after(NEW, *[answered(FAILED)] * OUTAGE_REQUESTS)[0]
LIMITED = after(NEW, answered(status(429, wait=20)))[0]
WAKE_AND_OPEN = [Do.WAKE, Do.PUBLISH_OPEN]


class Row(NamedTuple):
    """A state, an event at a moment, and what follows."""

    before: Breaker
    event: Event
    state: State
    effects: Sequence[Effect] = ()
    now: float = START


STATES: dict[str, Row] = {
    # From a closed breaker.
    "accepted": Row(NEW, answered(SENT), State.CLOSED),
    "refused": Row(NEW, answered(status(400)), State.CLOSED),
    "failed once": Row(NEW, answered(FAILED), State.CLOSED, now=LATER),
    "429": Row(NEW, answered(status(429, wait=20)), State.RETRY_AFTER, [Do.PUBLISH_RETRY_AFTER]),
    "429 of one message": Row(NEW, answered(status(429, about="message")), State.CLOSED),
    "429 with a long wait": Row(
        NEW,
        answered(status(429, wait=MAX_HOLD_SECONDS + 1)),
        State.OPEN,
        [PauseBegan("rate_limited"), *WAKE_AND_OPEN, Do.PUBLISH_RETRY_AFTER],
    ),
    "401": Row(
        NEW,
        answered(status(401)),
        State.OPEN,
        [PauseBegan("credentials_rejected", 401), *WAKE_AND_OPEN],
    ),
    "402 behind a code": Row(
        NEW,
        answered(status(402)._replace(status=200, code="9")),
        State.OPEN,
        [PauseBegan("insufficient_funds", 200, "9"), *WAKE_AND_OPEN],
    ),
    "401 of one message": Row(
        NEW, answered(status(401, about="message", pause=None)), State.CLOSED
    ),
    "no TLS": Row(
        NEW,
        answered(judge_failure("tls_failed")),
        State.OPEN,
        [PauseBegan("tls_failed"), *WAKE_AND_OPEN],
    ),
    "ambiguous once": Row(NEW, answered(FORBIDDEN), State.CLOSED),
    "ambiguous, third in a row": Row(
        NEW._replace(ambiguous=2),
        answered(FORBIDDEN),
        State.OPEN,
        [PauseBegan("credentials_rejected", 403), *WAKE_AND_OPEN],
    ),
    "unknown refusal, tenth in a row": Row(
        NEW,
        answered(FORBIDDEN, is_refused_in_a_row=True),
        State.OPEN,
        [PauseBegan("credentials_rejected", 403), *WAKE_AND_OPEN],
    ),
    "peer opened": Row(
        NEW, PeerOpened("outage", START), State.OPEN, [PauseBegan("outage"), Do.WAKE]
    ),
    "peer closed": Row(NEW, PeerClosed(), State.CLOSED),
    "peer has to wait": Row(NEW, PeerAskedToWait(5), State.RETRY_AFTER),
    # From a suspected outage.
    "tenth failure": Row(
        NEW._replace(failures=9), answered(FAILED), State.SUSPECTED, [Do.LOG_SUSPICION]
    ),
    "eleventh failure": Row(FAILING, answered(FAILED), State.SUSPECTED, now=LATER - 1),
    "eleventh failure, later": Row(
        FAILING, answered(FAILED), State.OPEN, [PauseBegan("outage"), *WAKE_AND_OPEN], now=LATER
    ),
    "suspicion is refuted": Row(FAILING, answered(status(400)), State.CLOSED, now=LATER),
    "suspicion is checked early": Row(FAILING, OutageChecked(), State.SUSPECTED, now=LATER - 1),
    "suspicion lasts": Row(
        FAILING, OutageChecked(), State.OPEN, [PauseBegan("outage"), *WAKE_AND_OPEN], now=LATER
    ),
    # From a wait.
    "wait is over": Row(LIMITED, answered(SENT), State.CLOSED, now=START + 23),
    # From an open breaker.
    "another reason": Row(
        opened(),
        answered(status(401)),
        State.OPEN,
        [PauseTurned("misconfigured"), PauseBegan("credentials_rejected", 401), *WAKE_AND_OPEN],
    ),
    "same reason": Row(opened(), answered(status(426)), State.OPEN),
    "accepted late": Row(opened(), answered(SENT), State.OPEN),
    "accepted in an outage": Row(
        opened("outage"),
        answered(SENT),
        State.CLOSED,
        [Do.START_SLOWLY, PauseEnded("outage", is_found_here=True), Do.WAKE],
    ),
    "peer has closed": Row(
        opened(), PeerClosed(), State.CLOSED, [PauseEnded("misconfigured"), Do.WAKE]
    ),
    "long wait is over": Row(
        opened("rate_limited"),
        WaitChecked(is_probed_elsewhere=False),
        State.CLOSED,
        [PauseEnded("rate_limited", is_found_here=True), Do.WAKE],
    ),
    "long wait is over, a peer probes": Row(
        opened("rate_limited"), WaitChecked(is_probed_elsewhere=True), State.OPEN
    ),
    "only a wait is over by itself": Row(
        opened(), WaitChecked(is_probed_elsewhere=False), State.OPEN, now=LATER * 9
    ),
    "probe": Row(
        opened(),
        ProbeOffered("p", Rank.WILLING, is_probed_elsewhere=False),
        State.HALF_OPEN,
        [Do.WAKE],
    ),
    "a peer probes": Row(
        opened(), ProbeOffered("p", Rank.WILLING, is_probed_elsewhere=True), State.OPEN
    ),
    "message is held": Row(
        opened(), ProbeHeld("m", is_probed_elsewhere=False), State.HALF_OPEN, [Do.WAKE]
    ),
    # From a half-open breaker.
    "probe is accepted": Row(
        half_open(),
        answered(SENT, "p"),
        State.CLOSED,
        [PauseEnded("misconfigured", is_found_here=True), Do.WAKE],
    ),
    "probe is refused": Row(
        half_open(),
        answered(status(400), "p"),
        State.CLOSED,
        [PauseEnded("misconfigured", is_found_here=True), Do.WAKE],
    ),
    "probe fails": Row(
        half_open(), answered(FAILED, "p"), State.HALF_OPEN, [Do.WAKE, Do.PUBLISH_PROBE_FAILED]
    ),
    "another message fails": Row(half_open(), answered(FAILED), State.HALF_OPEN),
    "probe is given up": Row(half_open(), ProbeGivenUp("p"), State.OPEN, [Do.WAKE]),
    "another gives up": Row(half_open(), ProbeGivenUp("m"), State.HALF_OPEN),
    "a peer probes instead": Row(
        half_open(),
        ProbeOffered("p", Rank.WILLING, is_probed_elsewhere=True),
        State.OPEN,
        [Do.WAKE],
    ),
    "new key": Row(half_open(), KeyRenewed(), State.HALF_OPEN, [Do.WAKE]),
    "long wait with a probe": Row(
        half_open("rate_limited"),
        WaitChecked(is_probed_elsewhere=False),
        State.HALF_OPEN,
        now=LATER * 9,
    ),
    # Beside the service's state.
    "operator": Row(NEW, OperatorPaused(), State.CLOSED, [PauseBegan("operator"), Do.WAKE]),
    "operator again": Row(NEW._replace(is_paused_by_operator=True), OperatorPaused(), State.CLOSED),
    "operator resumes": Row(
        opened()._replace(is_paused_by_operator=True),
        OperatorResumed(),
        State.OPEN,
        [PauseEnded("operator"), Do.WAKE],
    ),
    "operator resumes nothing": Row(NEW, OperatorResumed(), State.CLOSED),
    "suspicion of before an operator's pause": Row(
        FAILING._replace(is_paused_by_operator=True),
        OperatorResumed(),
        State.CLOSED,
        [PauseEnded("operator"), Do.WAKE],
        now=LATER,
    ),
    "broker stores nothing": Row(
        NEW,
        BrokerBlocked(UNSTORED),
        State.CLOSED,
        [PauseBegan("broker_blocked", unstored=UNSTORED), Do.WAKE],
    ),
    "broker stores nothing again": Row(
        NEW._replace(is_broker_blocked=True),
        BrokerBlocked(UNSTORED),
        State.CLOSED,
        [PauseRefused(UNSTORED)],
    ),
    "broker stores": Row(
        opened()._replace(is_broker_blocked=True),
        BrokerUnblocked(),
        State.OPEN,
        [PauseEnded("broker_blocked"), Do.WAKE],
    ),
    "broker stored before": Row(NEW, BrokerUnblocked(), State.CLOSED),
}


@pytest.mark.parametrize("row", STATES.values(), ids=STATES)
def test_transition(row: Row) -> None:
    """Each event leads from a state to the next one, and has these effects."""
    breaker, effects = transition(row.before, row.event, row.now)

    assert (breaker.state_at(row.now), effects) == (row.state, [*row.effects])


@pytest.mark.parametrize(
    ("held", "offered", "is_replaced"),
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
def test_a_better_probe_replaces_another(held: Rank, offered: Rank, *, is_replaced: bool) -> None:
    """A probe keeps its place against one that is as good."""
    before = half_open(rank=held)
    breaker, _ = after(before, ProbeOffered("q", offered, is_probed_elsewhere=False))

    assert breaker.is_probe("q") == is_replaced


@pytest.mark.parametrize(
    ("rank", "wanted"),
    [(Rank.NOBODY, 1), (Rank.WILLING, 0), (Rank.RELUCTANT, 2), (Rank.TRIED, 2)],
)
def test_probes_wanted(rank: Rank, wanted: int) -> None:
    """A message is taken while there is no probe, two while another would be the better one."""
    before = opened()
    assert before.open is not None
    breaker = before._replace(open=before.open._replace(rank=rank))
    waits = breaker._replace(retry_after=breaker.retry_after._replace(ends_at=START + 600))

    assert breaker.probes_wanted(START, is_probed_elsewhere=False) == wanted
    assert breaker.probes_wanted(START, is_probed_elsewhere=True) == 0
    assert waits.probes_wanted(START, is_probed_elsewhere=False) == 0


@pytest.mark.parametrize(
    ("reason", "rank", "failures", "seconds"),
    [
        ("outage", Rank.WILLING, 0, 1),
        ("outage", Rank.WILLING, 3, 8),
        ("outage", Rank.WILLING, 9, MAX_OUTAGE_PROBE_SECONDS),
        ("outage", Rank.RELUCTANT, 5, 32),
        ("misconfigured", Rank.WILLING, 9, MAX_PROBE_SECONDS),
        ("misconfigured", Rank.RELUCTANT, 9, MAX_PROBE_SECONDS),
    ],
)
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_wait_to_probe(
    reason: PauseReason, rank: Rank, failures: int, seconds: float, chance: float
) -> None:
    """The wait doubles with each failure up to a limit, and chance shortens it by a fifth."""
    told = PeerOpened(reason, START, failures=(failures, failures))
    offered = ProbeOffered("p", rank, is_probed_elsewhere=False)
    breaker, _ = after(NEW, told, offered, chance=chance)

    assert breaker.seconds_to_probe(START) == pytest.approx(seconds * (0.8 + 0.2 * chance))


def test_probe_that_would_wait_for_minutes_is_none() -> None:
    """A message on its last attempt waits up to five minutes, and not here."""
    breaker = opened("outage", failures=(9, 9))
    offered = ProbeOffered("p", Rank.RELUCTANT, is_probed_elsewhere=False)

    assert not after(breaker, offered)[0].is_probe("p")


def test_a_willing_probe_that_fails_makes_both_waits_longer() -> None:
    """A reluctant one does not make a new message wait."""
    willing, _ = after(half_open(), answered(FAILED, "p"))
    reluctant, _ = after(half_open(rank=Rank.RELUCTANT), answered(FAILED, "p"))

    assert willing.open is not None
    assert reluctant.open is not None
    assert (willing.open.failures, reluctant.open.failures) == ((1, 1), (0, 1))


def test_new_key_goes_at_once_and_once() -> None:
    """A changed key ends the wait of one probe."""
    renewed, _ = after(half_open(), KeyRenewed())
    left, _ = after(renewed, ProbeLeft())

    assert (renewed.seconds_to_probe(START), left.seconds_to_probe(START)) == (0, 1)


def test_wait_that_was_asked_for_comes_before_a_probe() -> None:
    """A probe is due neither before its back-off nor before the service's wait is over."""
    breaker, _ = after(half_open(), answered(status(429, wait=20)))

    assert breaker.seconds_to_probe(START) == pytest.approx(20 * MAX_JITTER)


def test_only_some_messages_leave_in_a_wait() -> None:
    """In a long wait, or the second in a row, a thousand messages may leave, and then no more."""
    short, _ = after(NEW, answered(status(429, wait=5)))
    second, _ = after(short, answered(status(429, wait=5)), now=START + 6)
    gone, _ = after(LIMITED, *[MadeRoom()] * MAX_LEAVING)

    assert not short.retry_after.lets_leave(START)
    assert second.retry_after.lets_leave(START + 6)
    assert LIMITED.retry_after.lets_leave(START)
    assert not LIMITED.retry_after.lets_leave(START + 23)
    assert not gone.retry_after.lets_leave(START)


@pytest.mark.parametrize(("told", "kept"), [(5.0, 5.0), (1e9, MAX_RECEIVED_SECONDS)])
def test_no_peer_asks_for_more_than_a_service_may(told: float, kept: float) -> None:
    """A broken worker stops no other for ever."""
    breaker, _ = after(NEW, PeerAskedToWait(told))

    assert breaker.retry_after.seconds_left(START) == pytest.approx(kept)


def test_pause_tells_since_when_it_is_not_refuted() -> None:
    """The first of the ambiguous answers counts, or the last acceptance before an outage."""
    first, _ = after(NEW, answered(FORBIDDEN))
    doubted, _ = after(first, *[answered(FORBIDDEN)] * 2, now=START + 5)
    accepted, _ = after(NEW, answered(SENT), now=START + 2)
    failed, _ = after(accepted, *[answered(FAILED)] * OUTAGE_REQUESTS, now=START + 20)

    assert doubted.open is not None
    assert failed.open is not None
    assert (doubted.open.unaccepted_since, failed.open.unaccepted_since) == (START, START + 2)


def test_closing_counts_anew() -> None:
    """After a pause an outage and a doubt about the set-up have to be seen from the start."""
    before = opened()._replace(failures=9, ambiguous=2, limited_recipient="1")
    breaker, _ = after(before, PeerClosed(), now=LATER)

    assert breaker == NEW._replace(counted_since=LATER, closed_at=LATER)
