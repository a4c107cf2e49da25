"""The other workers of the queue, as this one knows them, and what is published to them.

`Membership` keeps the last state of each peer, and the messages that wait to be published.
`Cluster` receives their messages and publishes this worker's state, as a heartbeat and when a peer
joins; what else is said and learned is the business of its parts. A message that is lost is not
repeated: the next heartbeat, or the next question, makes good for it.

The broker delivers the heartbeat of each of N workers N times. So of many workers each publishes
fewer heartbeats, and its interval with them: how long its silence is borne depends on that.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from bridge.amqp.frames import Body
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log
from bridge.topology.declarations import workers_exchange
from bridge.worker.cluster.messages import (
    BreakerState,
    Join,
    Leave,
    Message,
    State,
    read_message,
    write_message,
)
from bridge.worker.metrics import WorkerMetrics

log = Log(__name__)

# How often a worker looks after its peers, and whether a heartbeat is due.
TICK_SECONDS: Final = 1.0
# What the broker may deliver a second, so that twenty workers publish a heartbeat each second.
MAX_HEARTBEATS_A_SECOND: Final = 400
# So that a peer of which two heartbeats were lost is not forgotten yet.
MAX_HEARTBEAT_SECONDS: Final = 20
# After a longer time between two ticks this process was frozen, and received nothing.
MAX_GAP_SECONDS: Final = 3.0
# How long the broker keeps a message for a worker that does not read.
MESSAGE_SECONDS: Final = 10
# Of more peers, those heard last are known.
MAX_PEERS: Final = 1000
# Of more unpublished messages, the newest are kept.
MAX_UNPUBLISHED: Final = 1024
# How long the last message may take to be written.
LEAVE_SECONDS: Final = 1.0
# After so many ticks without any of its own messages a worker receives nothing: its queue, or the
# exchange, was deleted by hand.
MAX_TICKS_WITHOUT_ECHO: Final = 5
# How long a worker that starts waits for the states of its peers.
MAX_START_SECONDS: Final = 2.0
# How long a worker that stops waits for a connection to publish that on.
MAX_REJOIN_SECONDS: Final = 3.0


class Silence(NamedTuple):
    """How long a peer may be silent: so many of its heartbeats, and some seconds."""

    heartbeats: float
    seconds: float

    def seconds_at(self, heartbeat_seconds: float) -> float:
        """Return the time, for a peer that publishes a heartbeat so often."""
        return self.heartbeats * heartbeat_seconds + self.seconds


# A peer that was silent for longer may be gone: a heartbeat, and some time for it to come.
HEARD: Final = Silence(1, 0.25)
# A peer that was silent for longer is to be replaced.
ACTIVE: Final = Silence(2, 1)
# A peer that was silent for longer is taken to be gone.
PRESENT: Final = Silence(2, 3)
# A peer that was silent for longer is forgotten.
REMEMBERED: Final = Silence(0, 60)


@dataclass(slots=True)
class Peer:
    """Another worker: its last state, and when it published anything."""

    heard_at: float
    heartbeat_seconds: float = 1.0
    breaker: BreakerState | None = None
    consumers: int = 1
    is_leaving: bool = False
    is_present: bool = False

    def learn(self, message: Message) -> None:
        """Note what a message says about the peer's state."""
        if isinstance(message, Join | State):
            self.heartbeat_seconds = message.heartbeat_seconds or self.heartbeat_seconds
        if isinstance(message, State):
            self.breaker = message.breaker or self.breaker
            self.is_leaving = self.is_leaving or message.leaving is not None
            if message.consumers is not None:
                self.consumers = message.consumers.count


class Wire(Protocol):
    """A connection that publishes; `is_blocked` while the broker takes nothing."""

    @property
    def is_blocked(self) -> bool:
        """Whether an alarm of the broker is on."""


class Membership:
    """The peers of one worker, by their ids; `worker_id` is its own.

    Its time stands still while this worker receives nothing: a peer that is silent then need not
    be gone. Unless `is_enabled` it never has peers.
    """

    def __init__(
        self,
        queue: str,
        *,
        is_enabled: bool,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker_id = secrets.token_hex(8)
        self.exchange = workers_exchange(queue)
        self.is_enabled = is_enabled
        # In the order in which they were heard last.
        self.peers: dict[str, Peer] = {}
        # How often it has joined the exchange, and whether the broker has refused that.
        self.joins = 0
        self.is_refused = False
        # Whether this process was frozen for so long that the broker dropped messages for it.
        self.has_missed_messages = False
        self._clock = clock
        self._wire: Wire | None = None
        self._has_left = False
        self._is_acquainted = asyncio.Event()
        self._has_joined = asyncio.Event()
        self._deaf_since: float | None = clock()
        self._deaf_seconds = 0.0
        self._ticked_at = clock()
        # Each for one queue, or for all.
        self._unpublished: deque[tuple[bytes, str | None]] = deque(maxlen=MAX_UNPUBLISHED)
        self._may_publish = asyncio.Event()
        self._all_published = asyncio.Event()
        # Whether none of its own messages has come back since it published one.
        self.awaits_echo = False
        self._ticks_without_echo = 0
        metrics.peers.set_function(lambda: self.count)
        metrics.coordination_up.set_function(lambda: self.is_up)

    # The peers

    @property
    def is_up(self) -> bool:
        """Whether it receives what its peers publish, and the broker takes its own messages."""
        return self._wire is not None and not self._wire.is_blocked

    @property
    def count(self) -> int:
        """How many peers there are."""
        return len(self.others(PRESENT))

    def queue_name(self, worker_id: str, joins: int) -> str:
        """Name the queue of a worker at one of its joins."""
        return f"{self.exchange}.{worker_id}.{joins}"

    @property
    def expects_answers(self) -> bool:
        """Whether there are peers, heard in the last minute, that may answer sooner or later."""
        is_member = self.is_enabled and not self._has_left and not self.is_refused
        return is_member and bool(self.others(REMEMBERED))

    def others(self, silence: Silence) -> frozenset[str]:
        """Return the peers that were silent for no longer than so."""
        now = self._now()
        return frozenset(
            one
            for one, peer in self.peers.items()
            if now - peer.heard_at <= silence.seconds_at(peer.heartbeat_seconds)
        )

    def learn(self, worker_id: str, message: Message) -> None:
        """Note that a peer has published a message, and its state."""
        peer = self.peers.pop(worker_id, None) or Peer(self._now())
        if isinstance(message, Leave):
            self._note_gone(worker_id, peer, why="it has stopped")
            return
        self.peers[worker_id] = peer
        peer.heard_at = self._now()
        peer.learn(message)
        if len(self.peers) > MAX_PEERS:
            del self.peers[next(iter(self.peers))]
        if not peer.is_present:
            peer.is_present = True
            log.info("peer_present", peer=worker_id)

    def heartbeat_seconds(self) -> int:
        """Return how often to publish a heartbeat, for so many workers."""
        workers = self.count + 1
        return min(-(-workers * workers // MAX_HEARTBEATS_A_SECOND), MAX_HEARTBEAT_SECONDS)

    # Joining and leaving

    def join(self, wire: Wire) -> None:
        """Note that it receives and may publish on a connection."""
        self._wire = wire
        self.is_refused = False
        self._unpublished.clear()
        self.awaits_echo = False
        self._ticks_without_echo = 0
        self._hear()
        self._has_joined.set()

    def lose(self) -> None:
        """Note that it neither receives nor publishes."""
        self._wire = None
        self._has_joined.clear()
        self._all_published.set()
        self._stop_time()

    def tick(self) -> None:
        """Look after the peers each second; raise BrokerError if its messages do not come back."""
        gap_seconds = self._clock() - self._ticked_at
        self.has_missed_messages = gap_seconds > MESSAGE_SECONDS
        if gap_seconds > MAX_GAP_SECONDS and self._deaf_since is None:
            self._deaf_seconds += gap_seconds
        # During an alarm of the broker no worker publishes anything.
        if self.is_up:
            self._hear()
        else:
            self._stop_time()
        self._ticked_at = self._clock()
        present, remembered = self.others(PRESENT), self.others(REMEMBERED)
        for worker_id, peer in list(self.peers.items()):
            if worker_id not in present:
                self._note_gone(worker_id, peer, why="it is silent")
            if worker_id not in remembered:
                del self.peers[worker_id]
        is_waiting = self.is_up and self.awaits_echo
        self._ticks_without_echo = self._ticks_without_echo + 1 if is_waiting else 0
        if self._ticks_without_echo > MAX_TICKS_WITHOUT_ECHO:
            raise BrokerError("the messages that this worker publishes do not come back to it")

    def note_echo(self) -> None:
        """Note that one of its own messages came back."""
        self.awaits_echo = False

    def note_acquainted(self) -> None:
        """End `until_acquainted`."""
        self._is_acquainted.set()

    async def until_acquainted(self) -> None:
        """Return when peers have had time to publish their states, after this worker's start."""
        if self.is_enabled:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_START_SECONDS):
                    await self._is_acquainted.wait()
            self._is_acquainted.set()

    async def until_joined(self, *, most_seconds: float) -> None:
        """Return when a worker that stops may publish that, or after some time.

        A worker that has no peers waits for nothing.
        """
        if self.expects_answers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(most_seconds, MAX_REJOIN_SECONDS)):
                    await self._has_joined.wait()

    async def leave(self) -> None:
        """Publish that this worker ends, so that no peer waits for it, and nothing after that."""
        self.publish(Leave())
        self._has_left = True
        if self.is_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._all_published.wait()

    # Publishing

    def publish(self, message: Message, *, to: str | None = None) -> None:
        """Publish to all peers, or to one queue, soon and unconfirmed; lost while not `is_up`."""
        if self.is_up and not self._has_left:
            self._unpublished.append((write_message(self.worker_id, message), to))
            self._all_published.clear()
            self._may_publish.set()

    def next_unpublished(self) -> tuple[bytes, str | None] | None:
        """Return a message to publish, and its queue unless it is for all."""
        if not self.is_up:
            self._unpublished.clear()
        if not self._unpublished:
            self._all_published.set()
            return None
        body, queue = self._unpublished.popleft()
        self.awaits_echo = self.awaits_echo or queue is None
        return body, queue

    async def until_unpublished(self, seconds: float) -> None:
        """Return when there is a message to publish, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._may_publish.wait()
        self._may_publish.clear()

    def wake(self) -> None:
        """End `until_unpublished`."""
        self._may_publish.set()

    # Time

    def _now(self) -> float:
        now = self._clock() if self._deaf_since is None else self._deaf_since
        return now - self._deaf_seconds

    def _stop_time(self) -> None:
        if self._deaf_since is None:
            self._deaf_since = self._clock()

    def _hear(self) -> None:
        if self._deaf_since is not None:
            self._deaf_seconds += self._clock() - self._deaf_since
            self._deaf_since = None
            self._ticked_at = self._clock()

    def _note_gone(self, worker_id: str, peer: Peer, *, why: str) -> None:
        if peer.is_present:
            peer.is_present = False
            log.info("peer_gone", peer=worker_id, why=why)


class Part:
    """Something that publishes to the peers and learns from them; by default it does nothing."""

    def facts(self) -> dict[str, Any]:
        """Return its fields of this worker's `State`."""
        return {}

    def joined(self) -> None:
        """Make good for messages that were missed before this worker joined the exchange."""

    def receive(self, peer: str, message: Message) -> None:
        """Learn from a peer's message, which `Membership` has noted; must not block."""

    def tick(self) -> None:
        """Each second while on the exchange, before a heartbeat that is due."""


class Cluster:
    """This worker among its peers."""

    def __init__(
        self, membership: Membership, parts: Sequence[Part], *, metrics: WorkerMetrics
    ) -> None:
        self.membership = membership
        self._parts = parts
        self._metrics = metrics
        self._heartbeat_seconds = 1
        self._seconds_to_heartbeat = 0

    def join(self, wire: Wire) -> None:
        """Publish that this worker has joined the exchange for one more time."""
        membership = self.membership
        membership.join(wire)
        self._seconds_to_heartbeat = 0
        self._heartbeat_seconds = 1
        self._introduce()

    def _introduce(self) -> None:
        """Have the peers publish what this worker missed, and publish what they missed."""
        membership = self.membership
        membership.publish(Join(joins=membership.joins, heartbeat_seconds=self._heartbeat_seconds))
        for part in self._parts:
            part.joined()

    def tick(self) -> None:
        """Look after peers and parts each second, and publish a heartbeat if one is due."""
        self.membership.tick()
        if self.membership.has_missed_messages:
            self._introduce()
        for part in self._parts:
            part.tick()
        state = self._state(None)
        is_prober = state.breaker is not None and state.breaker.is_prober
        seconds = 1 if is_prober else self.membership.heartbeat_seconds()
        self._seconds_to_heartbeat = min(self._seconds_to_heartbeat, seconds) - 1
        if self._seconds_to_heartbeat <= 0:
            self._heartbeat_seconds = seconds
            # Up to a quarter earlier, so that workers that started together part.
            self._seconds_to_heartbeat = random.randint(seconds - seconds // 4, seconds)  # noqa: S311
            self.membership.publish(self._state(seconds))

    def receive(self, body: Body) -> None:
        """Hand a message to all parts; rubbish is counted and goes no further."""
        try:
            received = read_message(body)
        except ValueError:
            self._metrics.peer_messages_malformed.inc()
            return
        if received is None:
            return
        worker_id, message = received
        membership = self.membership
        if worker_id == membership.worker_id:
            membership.note_echo()
            return
        membership.learn(worker_id, message)
        if isinstance(message, Join):
            queue = None
            if message.joins is not None:
                queue = membership.queue_name(worker_id, message.joins)
            membership.publish(self._state(self._heartbeat_seconds), to=queue)
        for part in self._parts:
            part.receive(worker_id, message)

    def _state(self, heartbeat_seconds: float | None) -> State:
        facts = {name: fact for part in self._parts for name, fact in part.facts().items()}
        return State(heartbeat_seconds=heartbeat_seconds, **facts)
