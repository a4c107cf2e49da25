"""One pause for all workers of a queue: who finds a reason tells the others, and one probes.

Each tells the state of its pause at every change and with every beat, so that what is lost is made
good by the next one. A pause is shared by workers with the same section `sms_api`, secrets
included: a key or an address that only one of them has wrong stops no other.

The worker that paused first probes; of two that probe, the one with the lower id goes on. When the
waits between probes are so long that a message could come back from the ladder in one, the next
worker takes its turn, for what keeps a probe from its aim may be this worker's own. So it does when
this one can take no messages. The others take nothing while they hear the one that probes; after
some seconds of silence one of them takes over.
The first acceptance resumes all. Who hears nobody decides for itself.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Final

from pydantic import Field

from bridge.config import SmsApiSettings
from bridge.telemetry.logs import Log
from bridge.worker.cluster.beats import SPEAKING
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Facts
from bridge.worker.fates import PauseReason
from bridge.worker.pausing.pace import Pace

log = Log(__name__)

# Who probes beats each second: three beats, and up to two more so that the others do not all take
# over at once.
SILENCE_SECONDS: Final = 3.0
SILENCE_SPREAD_SECONDS: Final = 2.0
# Who has been silent for longer may have been replaced by a peer that says so.
MISSED_SECONDS: Final = 1.5
# Who takes over first hears whether another one does.
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
    """What a worker's pause is like; without a `reason` there is none.

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
    """One worker's part in the pause of all; `setup` names what it sends with.

    `can_take` says whether it could take a message to probe with. It joins no pause that a message
    of its own has refuted.
    """

    def __init__(
        self,
        pace: Pace,
        peers: Peers,
        *,
        setup: Callable[[], str],
        can_take: Callable[[], bool],
        turn_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace = pace
        self._peers = peers
        self._name_setup = setup
        self._named = _begin(setup)
        self._can_take = can_take
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
        pace.others = self
        peers.on(PauseState, self._hear)
        peers.on(Resumed, self._hear_resumed)
        peers.each_second(self._look_after)
        peers.in_each_beat(self._state)
        peers.hurry_while(lambda: self._is_prober)

    @property
    def count(self) -> int:
        """How many peers are there."""
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
    def _is_prober(self) -> bool:
        return self._pace.current is not None and not (self._follows or self._is_own_fault)

    @property
    def _silent_seconds(self) -> float:
        return self._clock() - self._heard_at

    def renew_key(self) -> None:
        """Probe at once: the API key has changed, and those with another one share no pause."""
        self._named = _begin(self._name_setup)
        self._prober = None
        self._paused_peers.clear()
        self._is_own_fault = False
        self._pace.renew_key()

    def leave(self) -> None:
        """Let a peer probe: this worker takes nothing more."""
        self._pass_on()
        self._tell()
        self._is_leaving = True

    # What this worker finds out

    def note_pause(self) -> None:
        """Tell the peers of it, unless they have shown that the fault is this worker's own."""
        self._found_here = True
        if not self._follows:
            self._prober = None
            self._is_own_fault = self._is_found_again_here_alone()
        self._tell()

    def _is_found_again_here_alone(self) -> bool:
        ended, accepted = self._ended_by_peer_at, self._pace.accepted_at
        if ended is None or self._clock() - ended > OWN_FAULT_SECONDS:
            return False
        return accepted is None or accepted < ended

    def note_failure(self) -> None:
        """Tell the peers that the next wait has begun, and whose turn it is then."""
        pause = self._pace.current
        if pause is not None and pause.seconds_to_probe >= self._turn_seconds:
            self._pass_on()
        self._tell()

    def note_slow_down(self) -> None:
        """Tell the peers for how long nothing is wanted."""
        self._tell()

    def note_end(self, reason: PauseReason) -> None:
        """Resume all."""
        if not self._is_own_fault:
            self._peers.tell(Resumed(setup=self._setup, reason=reason))
        self._forget_pause()

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
            self._follow(min(present, key=lambda peer: (peer < own, peer)))

    def _follow(self, prober: str) -> None:
        if prober != self._prober:
            self._silence_seconds = SILENCE_SECONDS + random.uniform(0, SILENCE_SPREAD_SECONDS)  # noqa: S311
        self._prober = prober
        self._heard_at = self._clock()

    def _look_after(self) -> None:
        """Each second: take over from one that has fallen silent, and leave it to one that can."""
        pause = self._pace.current
        if pause is not None and self._follows and self._silent_seconds >= self._silence_seconds:
            log.info("probe_taken_over", peer=self._prober)
            self._prober = None
            self._waits_until = self._clock() + GRACE_SECONDS
            asyncio.get_running_loop().call_later(GRACE_SECONDS, pause.notify)
        if pause is not None and not self._can_take():
            self._pass_on()

    def _tell(self) -> None:
        state = self._state()
        if state is not None:
            self._peers.tell(state)

    def _state(self) -> PauseState | None:
        pause, gate, now = self._pace.current, self._pace.gate, self._clock()
        if self._is_leaving:
            return None
        if pause is None or self._is_own_fault:
            asked = max(0.0, gate.asked_until - now)
            return PauseState(setup=self._setup, reason=None, closed_seconds=asked)
        is_prober = not self._follows
        closed = gate.opens_at if is_prober else gate.asked_until
        return PauseState(
            setup=self._setup,
            reason=pause.reason,
            status=pause.status,
            prober=self._peers.worker_id if is_prober else self._prober,
            failures=pause.failures,
            unaccepted_seconds=max(0.0, now - pause.unaccepted_since),
            closed_seconds=max(0.0, closed - now),
        )

    # What peers tell

    def _hear(self, peer: str, told: PauseState) -> None:
        is_follower = peer == self._prober
        if told.setup != self._setup:
            self._paused_peers.discard(peer)
            if is_follower:
                self._prober = None
            return
        if told.closed_seconds:
            self._pace.gate.stay_closed(told.closed_seconds)
        if told.reason is None:
            self._paused_peers.discard(peer)
            if is_follower:
                self._end()
            return
        self._paused_peers.add(peer)
        if told.prober == peer:
            self._hear_prober(peer, told)
        elif is_follower:
            self._hear_of_turn(told)

    def _hear_prober(self, peer: str, told: PauseState) -> None:
        if self._pace.current is None:
            if self._has_refuted(told):
                return
        elif self._is_own_fault or (peer != self._prober and not self._gives_way_to(peer)):
            return
        self._follow(peer)
        self._take_over(told)

    def _hear_of_turn(self, told: PauseState) -> None:
        if told.prober is None or told.prober == self._peers.worker_id:
            self._prober = None
        else:
            self._follow(told.prober)
        self._take_over(told)

    def _has_refuted(self, told: PauseState) -> bool:
        accepted = self._pace.accepted_at
        return accepted is not None and self._clock() - accepted < told.unaccepted_seconds

    def _gives_way_to(self, peer: str) -> bool:
        """Whether this worker follows one that probes: a successor, or of two the lower id."""
        if self._follows:
            return self._silent_seconds > MISSED_SECONDS
        return peer < self._peers.worker_id or not self._can_take()

    def _take_over(self, told: PauseState) -> None:
        if told.reason is None:
            return
        since = self._clock() - told.unaccepted_seconds
        self._pace.join(told.reason, since=since, status=told.status)
        if (pause := self._pace.current) is not None:
            pause.catch_up(told.failures)
            pause.notify()

    def _hear_resumed(self, _peer: str, told: Resumed) -> None:
        pause = self._pace.current
        if told.setup == self._setup and pause is not None and pause.reason == told.reason:
            self._end()

    def _end(self) -> None:
        """Resume, as a peer has found out that one may."""
        if self._is_own_fault:
            return
        if self._found_here:
            self._ended_by_peer_at = self._clock()
        self._forget_pause()
        self._pace.end_pause()
