"""One breaker for all workers of a queue: one worker opens it for all, and one probes.

Each worker publishes the state of its breaker at every change and with every heartbeat, so that the
next message makes good for a lost one. Workers share a pause if they have the same section
`sms_api`, secrets included: a wrong key or address of one worker stops no other.

The worker that paused first probes; of two that probe, the one with the lower id goes on. When the
waits between probes are so long that a message could come back from the ladder in one, the next
worker takes its turn, for the probe's fault may be this worker's own. So it does when this one can
take no messages. The others take nothing while they hear the one that probes; after some seconds of
silence one of them takes over.
The first acceptance closes all breakers. A worker that hears nobody decides for itself.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Final

from pydantic import Field

from bridge.config import SmsApiSettings
from bridge.telemetry.logs import Log
from bridge.worker.cluster.beats import SPEAKING
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Facts
from bridge.worker.fates import PauseReason
from bridge.worker.service.breaker import CircuitBreaker, News
from bridge.worker.service.breaker_states import Breaker

log = Log(__name__)

# The worker that probes beats each second: three beats, and up to two more so that the others do
# not all take over at once.
SILENCE_SECONDS: Final = 3.0
SILENCE_SPREAD_SECONDS: Final = 2.0
# A worker that has been silent for longer may have been replaced by a peer that says so.
MISSED_SECONDS: Final = 1.5
# A worker that takes over first hears whether another one does.
GRACE_SECONDS: Final = 0.2
# When a pause that others have ended is found again by a worker of which no message was accepted
# in between, soon after, the fault is its own.
OWN_FAULT_SECONDS: Final = 300.0
_SETUP_BYTES: Final = 8
# Each guess at a secret takes as long as ours does: some hundredths of a second, and 16 MiB.
_SCRYPT_COST: Final = 2**14
_SCRYPT_BLOCK: Final = 8

_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Failures = Annotated[int, Field(ge=0, le=2**31)]
_Hex = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * _SETUP_BYTES}}}$")]


class PauseState(Facts):
    """A worker's breaker; it is open if there is a `reason`.

    `prober` is the worker that is to probe, `failures` how many willing probes have failed and how
    many of all. For `unaccepted_seconds` nothing has refuted the pause. For `closed_seconds` the
    service wants no request.
    """

    kind = "pause"

    setup: _Hex
    reason: PauseReason | None
    status: int | None = None
    prober: _Hex | None = None
    failures: tuple[_Failures, _Failures] = (0, 0)
    unaccepted_seconds: _Seconds = 0.0
    closed_seconds: _Seconds = 0.0


class Resumed(Facts):
    """A worker has found out that a pause is over."""

    kind = "resumed"

    setup: _Hex
    reason: PauseReason


def setup_of(settings: SmsApiSettings, secrets: Iterable[str]) -> str:
    """Name the set-up towards the SMS API, so that workers can see whether theirs is the same.

    Nothing can be learned from it but by guessing a whole secret, at the cost of scrypt (RFC 7914).
    """
    known = hashlib.sha256(settings.model_dump_json().encode()).digest()
    secret = "\0".join(secrets).encode()
    name = hashlib.scrypt(
        secret, salt=known, n=_SCRYPT_COST, r=_SCRYPT_BLOCK, p=1, dklen=_SETUP_BYTES
    )
    return name.hex()


def _begin(name_setup: Callable[[], str]) -> Future[str]:
    """Have the set-up named in a thread: it takes longer than an event loop may stand still."""
    with_one_thread = ThreadPoolExecutor(max_workers=1)
    named = with_one_thread.submit(name_setup)
    with_one_thread.shutdown(wait=False)
    return named


class JointPause:
    """The breakers of the other workers, for this worker's breaker; `setup` names the set-up.

    `publish` tells the others of this breaker's state. `follow` has a breaker receive theirs.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        setup: Callable[[], str],
        turn_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._name_setup = setup
        self._named = _begin(setup)
        self._turn_seconds = turn_seconds
        self._clock = clock
        # The peer that probes, when it was heard, and for how long its silence is borne.
        self._prober: str | None = None
        self._heard_at = 0.0
        self._silence_seconds = SILENCE_SECONDS
        self._waits_until = 0.0
        self._paused_peers: set[str] = set()
        self._found_here = False
        self._ended_by_peer_at: float | None = None
        self._is_own_fault = False
        self._is_leaving = False

    @property
    def others(self) -> int:
        """How many peers there are."""
        return len(self._peers.roster.others(SPEAKING))

    @property
    def is_probing(self) -> bool:
        """Whether a peer probes, so that this worker does not."""
        return self._follows or (self._peers.is_up and self._clock() < self._waits_until)

    @property
    def _setup(self) -> str:
        return self._named.result()

    @property
    def _follows(self) -> bool:
        return self._prober is not None and self._peers.is_up

    @property
    def _silent_seconds(self) -> float:
        return self._clock() - self._heard_at

    # What this worker finds out

    def publish(self, news: News, state: Breaker) -> None:
        """Tell the peers of a change, and let one of them probe if it is their turn."""
        match news:
            case "opened":
                self._note_opened(state)
            case "probe_failed":
                if state.seconds_to_probe(self._clock()) >= self._turn_seconds:
                    self._pass_on()
            case "leaving":
                self._pass_on()
            case "retry_after":
                pass
        told = self._told_of(state)
        if told is not None:
            self._peers.tell(told)
        self._is_leaving = self._is_leaving or news == "leaving"

    def publish_closed(self, reason: PauseReason) -> None:
        """Close all breakers."""
        if not self._is_own_fault:
            self._peers.tell(Resumed(setup=self._setup, reason=reason))
        self._forget_pause()

    def _note_opened(self, state: Breaker) -> None:
        """Note a pause of this worker, and whether the peers have shown that it is its own."""
        self._found_here = True
        if not self._follows:
            self._prober = None
            self._is_own_fault = self._is_found_again_here_alone(state.accepted_at)

    def _is_found_again_here_alone(self, accepted_at: float | None) -> bool:
        ended = self._ended_by_peer_at
        if ended is None or self._clock() - ended > OWN_FAULT_SECONDS:
            return False
        return accepted_at is None or accepted_at < ended

    def _forget_pause(self) -> None:
        self._prober = None
        self._paused_peers.clear()
        self._found_here = self._is_own_fault = False

    def _pass_on(self) -> None:
        """Have the next of the peers in the same pause probe, if there is one."""
        if self._follows or self._is_own_fault:
            return
        present = self._peers.roster.others(SPEAKING) & self._paused_peers
        own = self._peers.worker_id
        if present:
            self._follow_prober(min(present, key=lambda peer: (peer < own, peer)))

    def _follow_prober(self, prober: str) -> None:
        if prober != self._prober:
            self._silence_seconds = SILENCE_SECONDS + random.uniform(0, SILENCE_SPREAD_SECONDS)  # noqa: S311
        self._prober = prober
        self._heard_at = self._clock()

    def _told_of(self, state: Breaker) -> PauseState | None:
        """Describe this worker's breaker to the peers; None when it takes no part any more."""
        opened, now = state.open, self._clock()
        if self._is_leaving:
            return None
        if opened is None or self._is_own_fault:
            asked = max(0.0, state.retry_after.asked_until - now)
            return PauseState(setup=self._setup, reason=None, closed_seconds=asked)
        is_prober = not self._follows
        wait = state.retry_after
        return PauseState(
            setup=self._setup,
            reason=opened.reason,
            status=opened.status,
            prober=self._peers.worker_id if is_prober else self._prober,
            failures=opened.failures,
            unaccepted_seconds=max(0.0, now - opened.unaccepted_since),
            closed_seconds=max(0.0, (wait.ends_at if is_prober else wait.asked_until) - now),
        )

    # What peers find out

    def follow(self, breaker: CircuitBreaker, *, can_take: Callable[[], bool]) -> None:
        """Have a breaker receive what peers publish, and publish its state in each heartbeat.

        `can_take` says whether this worker could take a message to probe with.
        """
        peers = self._peers
        peers.on(PauseState, partial(self._hear, breaker, can_take))
        peers.on(Resumed, partial(self._hear_resumed, breaker))
        peers.each_second(partial(self._look_after, breaker, can_take))
        peers.in_each_beat(lambda: self._told_of(breaker.state))
        peers.hurry_while(
            lambda: breaker.state.open is not None and not (self._follows or self._is_own_fault)
        )

    def renew_key(self, breaker: CircuitBreaker) -> None:
        """Probe at once: the API key has changed, and peers with another one share no pause."""
        self._named = _begin(self._name_setup)
        self._prober = None
        self._paused_peers.clear()
        self._is_own_fault = False
        breaker.renew_key()

    def _look_after(self, breaker: CircuitBreaker, can_take: Callable[[], bool]) -> None:
        """Each second: take over from a silent prober, and leave the probe to a worker that can."""
        if breaker.state.open is None:
            return
        if self._follows and self._silent_seconds >= self._silence_seconds:
            log.info("probe_taken_over", peer=self._prober)
            self._prober = None
            self._waits_until = self._clock() + GRACE_SECONDS
            asyncio.get_running_loop().call_later(GRACE_SECONDS, breaker.wake)
        if not can_take():
            self._pass_on()

    def _hear(
        self, breaker: CircuitBreaker, can_take: Callable[[], bool], peer: str, told: PauseState
    ) -> None:
        is_prober = peer == self._prober
        if told.setup != self._setup:
            self._paused_peers.discard(peer)
            if is_prober:
                self._prober = None
            return
        if told.closed_seconds:
            breaker.peer_asked_to_wait(told.closed_seconds)
        if told.reason is None:
            self._paused_peers.discard(peer)
            if is_prober:
                self._end(breaker)
            return
        self._paused_peers.add(peer)
        if told.prober == peer:
            if self._is_to_follow(breaker.state, can_take, peer, told):
                self._follow_prober(peer)
                self._open_with(breaker, told)
        elif is_prober:
            self._hear_of_turn(breaker, told)

    def _is_to_follow(
        self, state: Breaker, can_take: Callable[[], bool], peer: str, told: PauseState
    ) -> bool:
        """Whether this worker follows a peer that probes.

        It joins no pause that a message of its own has refuted. In one, it follows a successor of
        the prober, or of two that probe the one with the lower id.
        """
        if state.open is None:
            accepted = state.accepted_at
            return accepted is None or self._clock() - accepted >= told.unaccepted_seconds
        if self._is_own_fault:
            return False
        if peer == self._prober:
            return True
        if self._follows:
            return self._silent_seconds > MISSED_SECONDS
        return peer < self._peers.worker_id or not can_take()

    def _hear_of_turn(self, breaker: CircuitBreaker, told: PauseState) -> None:
        if told.prober is None or told.prober == self._peers.worker_id:
            self._prober = None
        else:
            self._follow_prober(told.prober)
        self._open_with(breaker, told)

    def _open_with(self, breaker: CircuitBreaker, told: PauseState) -> None:
        if told.reason is not None:
            since = self._clock() - told.unaccepted_seconds
            breaker.peer_opened(told.reason, since, status=told.status, failures=told.failures)

    def _hear_resumed(self, breaker: CircuitBreaker, _peer: str, told: Resumed) -> None:
        opened = breaker.state.open
        if told.setup == self._setup and opened is not None and opened.reason == told.reason:
            self._end(breaker)

    def _end(self, breaker: CircuitBreaker) -> None:
        """Close the breaker, as a peer has found out that the service takes messages."""
        if self._is_own_fault:
            return
        if self._found_here:
            self._ended_by_peer_at = self._clock()
        self._forget_pause()
        breaker.peer_closed()
