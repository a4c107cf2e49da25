"""Share the circuit breaker between all workers of a queue: one opens it for all, and one probes.

Each worker publishes the state of its breaker at each change and in each heartbeat. Workers share a
pause if they have the same `sms_api` section, including secrets, so a wrong key or address of one
worker stops no other.

The prober publishes a heartbeat each second. If there are several, the one with the fewest turns
continues, of these the one with the lowest id. The prober gives up its turn when it cannot consume,
or when the wait between probes is as long as the first retry delay, because the fault may be its
own. The worker that the same rule selects begins at once.

Because messages may be lost and workers may die, workers may select different successors. So a
worker that sees nobody probe begins in any case: after three seconds of silence, or half a second
after a turn was given up. If two begin, the rule stops one.

The first acceptance closes all breakers. A worker without peers decides alone.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from bridge.config import SmsApiSettings
from bridge.telemetry.logs import Log
from bridge.worker.cluster.membership import ACTIVE, Membership, Part, Silence
from bridge.worker.cluster.messages import BreakerState, Message, Resumed, WorkerState
from bridge.worker.fates import PauseReason
from bridge.worker.service.breaker import CircuitBreaker, News
from bridge.worker.service.breaker_states import ServiceState

log = Log(__name__)

# After this silence the prober, which publishes a heartbeat each second, is replaced.
SILENCE_SECONDS: Final = 3.0
PROBING: Final = Silence(0, SILENCE_SECONDS)
# How long the others wait until a successor has published that it probes.
SUCCESSION_SECONDS: Final = 0.5
# If a worker opens its breaker again this soon after peers have closed it, and none of its messages
# was accepted in between, the fault is its own.
OWN_FAULT_SECONDS: Final = 300.0
_SETUP_BYTES: Final = 8
# Each guess at a secret takes some hundredths of a second, and 16 MiB.
_SCRYPT_COST: Final = 2**14
_SCRYPT_BLOCK: Final = 8


def setup_of(settings: SmsApiSettings, secrets: Iterable[str]) -> str:
    """Return an identifier of the SMS API's settings and secrets, for comparison by peers.

    It reveals a secret only to someone who guesses all of it, at the cost of scrypt (RFC 7914).
    """
    known = hashlib.sha256(settings.model_dump_json().encode()).digest()
    secret = "\0".join(secrets).encode()
    name = hashlib.scrypt(
        secret, salt=known, n=_SCRYPT_COST, r=_SCRYPT_BLOCK, p=1, dklen=_SETUP_BYTES
    )
    return name.hex()


def _in_a_thread(name_setup: Callable[[], str]) -> Future[str]:
    """Compute the identifier in a thread, because it would block the event loop for too long."""
    with_one_thread = ThreadPoolExecutor(max_workers=1)
    named = with_one_thread.submit(name_setup)
    with_one_thread.shutdown(wait=False)
    return named


class JointPause:
    """The peers' breakers, as this worker's breaker sees them; `setup` returns `setup_of`.

    The prober gives up its turn if the next probe is at least `turn_seconds` away.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        setup: Callable[[], str],
        turn_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.membership = membership
        self._name_setup = setup
        self._named = _in_a_thread(setup)
        self._turn_seconds = turn_seconds
        self._clock = clock
        # The elected prober during a joint pause, and when one last published that it probes or
        # gives up.
        self._prober: str | None = None
        self._heard_at = 0.0
        self._turns = 0
        self._can_take = True
        self._is_leaving = False
        self._found_here = False
        self._ended_by_peer_at: float | None = None
        self._is_own_fault = False

    @property
    def others(self) -> int:
        return len(self.membership.others(ACTIVE))

    @property
    def is_probing(self) -> bool:
        """Whether a peer probes instead of this worker."""
        is_peer = self._prober not in {None, self.membership.worker_id}
        return is_peer and self.membership.is_up

    @property
    def _setup(self) -> str:
        return self._named.result()

    # This worker's breaker

    def publish(self, news: News, state: ServiceState) -> None:
        """Publish a change of this worker's breaker, and elect the prober anew."""
        if news == "opened":
            self._found_here = True
            if not self.is_probing:
                self._is_own_fault = self._is_found_again_here_alone(state.accepted_at)
        elif news == "leaving":
            self._is_leaving = True
        elif news == "probe_failed" and (
            state.seconds_to_probe(self._clock()) >= self._turn_seconds
        ):
            self._give_up_turn()
        self._elect(state)
        self.membership.publish(WorkerState(breaker=self.describe(state)))

    def publish_closed(self, reason: PauseReason) -> None:
        if not self._is_own_fault:
            self.membership.publish(WorkerState(resumed=Resumed(setup=self._setup, reason=reason)))
        self._forget_pause()

    def describe(self, state: ServiceState) -> BreakerState:
        """Return this worker's breaker as it is published; a fault of its own is left out."""
        opened, now = state.trip, self._clock()
        wait = state.retry_after
        if opened is None or self._is_own_fault:
            asked = max(0.0, wait.asked_until - now)
            return BreakerState(setup=self._setup, reason=None, closed_seconds=asked)
        return BreakerState(
            setup=self._setup,
            reason=opened.reason,
            status=opened.status,
            is_prober=self._prober == self.membership.worker_id,
            can_probe=self._may_probe,
            turns=self._turns,
            failures=opened.failures,
            unaccepted_seconds=max(0.0, now - opened.unaccepted_since),
            closed_seconds=max(0.0, (wait.asked_until if self.is_probing else wait.ends_at) - now),
        )

    @property
    def _may_probe(self) -> bool:
        return self._can_take and not self._is_leaving

    def _is_found_again_here_alone(self, accepted_at: float | None) -> bool:
        ended = self._ended_by_peer_at
        if ended is None or self._clock() - ended > OWN_FAULT_SECONDS:
            return False
        return accepted_at is None or accepted_at < ended

    def _give_up_turn(self) -> None:
        if not self.is_probing:
            self._turns += 1
            self._prober = None

    def _forget_pause(self) -> None:
        self._prober = None
        self._turns = 0
        self._found_here = self._is_own_fault = False
        for peer in self.membership.peers.values():
            peer.breaker = None

    def _elect(self, state: ServiceState, *, is_due: bool = False) -> None:
        """Elect the prober; this worker begins to probe if `is_due` and nobody else probes."""
        own, before = self.membership.worker_id, self._prober
        probing: list[tuple[int, str]] = []
        waiting: list[tuple[int, str]] = []
        if state.trip is not None and not self._is_own_fault:
            heard = self.membership.others(PROBING)
            for worker_id in self.membership.others(ACTIVE):
                told = self.membership.peers[worker_id].breaker
                if told is None or not told.can_probe or told.setup != self._setup:
                    continue
                if not told.is_prober:
                    waiting.append((told.turns, worker_id))
                elif worker_id in heard:
                    probing.append((told.turns, worker_id))
            if self._may_probe:
                does_probe = before == own or (is_due and not probing)
                (probing if does_probe else waiting).append((self._turns, own))
        _, self._prober = min(probing or waiting, default=(0, None))
        if self._prober == own:
            self._heard_at = self._clock()

    def _elect_anew(self, breaker: CircuitBreaker, *, is_due: bool = False) -> None:
        """Elect the prober, and publish it if this worker has begun or stopped to probe."""
        own, before = self.membership.worker_id, self._prober
        self._elect(breaker.state, is_due=is_due)
        if (before == own) != (self._prober == own):
            if before is not None and self._prober == own:
                log.info("probe_taken_over", peer=before)
            self.membership.publish(WorkerState(breaker=self.describe(breaker.state)))
            breaker.wake()

    # The breakers of peers

    def renew_key(self, breaker: CircuitBreaker) -> None:
        """Probe at once, because the API key has changed; peers with the old key share no pause."""
        self._named = _in_a_thread(self._name_setup)
        self._forget_pause()
        breaker.renew_key()

    def look_after(self, breaker: CircuitBreaker, *, can_take: bool) -> None:
        """Run each second: begin to probe if the prober is silent or a successor did not begin."""
        self._can_take = can_take
        is_due = self._clock() - self._heard_at >= SUCCESSION_SECONDS
        self._elect_anew(breaker, is_due=is_due)

    def receive(self, breaker: CircuitBreaker, worker_id: str, message: WorkerState) -> None:
        """Apply a peer's state to this worker's breaker."""
        told, resumed = message.breaker, message.resumed
        if resumed is not None and resumed.setup == self._setup:
            opened = breaker.state.trip
            if opened is not None and opened.reason == resumed.reason:
                self._end(breaker)
        if told is None:
            return
        was_prober = worker_id == self._prober
        if told.setup == self._setup and (was_prober or told.is_prober):
            self._heard_at = self._clock()
        if told.reason is not None:
            self._elect_anew(breaker)
        if told.setup == self._setup:
            if told.closed_seconds:
                breaker.peer_asked_to_wait(told.closed_seconds)
            if told.reason is None and was_prober:
                self._end(breaker)
            elif told.reason is not None and (told.is_prober or was_prober):
                self._follow(breaker, worker_id, told, told.reason, was_prober=was_prober)
        self._elect_anew(breaker)

    def _follow(
        self,
        breaker: CircuitBreaker,
        worker_id: str,
        told: BreakerState,
        reason: PauseReason,
        *,
        was_prober: bool,
    ) -> None:
        """Join a pause unless this worker has evidence against it; keep the prober's intervals."""
        state, now = breaker.state, self._clock()
        if state.trip is None:
            accepted = state.accepted_at
            is_to_follow = accepted is None or now - accepted >= told.unaccepted_seconds
            # A worker that joins late does not come first.
            self._turns = max(self._turns, told.turns)
        else:
            is_to_follow = not self._is_own_fault and (was_prober or self._prober == worker_id)
        if is_to_follow:
            since = now - told.unaccepted_seconds
            breaker.peer_opened(reason, since, status=told.status, failures=told.failures)

    def _end(self, breaker: CircuitBreaker) -> None:
        """Close the breaker, because the service has accepted a message of a peer."""
        if self._is_own_fault:
            return
        if self._found_here:
            self._ended_by_peer_at = self._clock()
        self._forget_pause()
        breaker.peer_closed()


class PauseFollower(Part):
    """Connects a breaker with the joint pause; `can_take`: whether this worker can consume."""

    def __init__(
        self, joint_pause: JointPause, breaker: CircuitBreaker, *, can_take: Callable[[], bool]
    ) -> None:
        self._joint_pause = joint_pause
        self._breaker = breaker
        self._can_take = can_take

    def facts(self) -> dict[str, Any]:
        return {"breaker": self._joint_pause.describe(self._breaker.state)}

    def receive(self, peer: str, message: Message) -> None:
        if isinstance(message, WorkerState):
            self._joint_pause.receive(self._breaker, peer, message)

    def tick(self) -> None:
        self._joint_pause.look_after(self._breaker, can_take=self._can_take())
