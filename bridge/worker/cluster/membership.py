"""The other workers of the queue, and the messages for them.

`Membership` keeps the last known state of each peer, and the messages that wait to be published.
`Coordination` dispatches received messages, and publishes this worker's state as a heartbeat and
to each peer that joins. Its parts decide everything else. A lost message is not sent again; the
next heartbeat or the next question replaces it.

RabbitMQ delivers the heartbeat of each of N workers to N queues. The more workers there are, the
fewer heartbeats each publishes. A heartbeat contains its interval, so that peers know how long a
silence is normal.
"""

import asyncio
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from bridge.amqp.frames import Body
from bridge.deadline import wait_at_most
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log
from bridge.topology.declarations import workers_exchange
from bridge.worker.cluster.messages import (
    BreakerState,
    Join,
    Leave,
    Message,
    WorkerState,
    read_message,
    write_message,
)
from bridge.worker.metrics import WorkerMetrics

log = Log(__name__)

# How often a worker checks its peers, and whether a heartbeat is due.
TICK_SECONDS: Final = 1.0
# Limit of heartbeats that the broker delivers; up to 20 workers publish one each second.
MAX_HEARTBEATS_A_SECOND: Final = 400
# A peer is remembered for a minute, so that two lost heartbeats do not matter.
MAX_HEARTBEAT_SECONDS: Final = 20
# After a longer time between two ticks this process was frozen, and received nothing.
MAX_GAP_SECONDS: Final = 3.0
# How long the broker keeps a message for a worker that does not read.
MESSAGE_SECONDS: Final = 10
# If there are more peers, those heard last are known.
MAX_PEERS: Final = 1000
# If more messages wait, the newest are kept.
MAX_UNPUBLISHED: Final = 1024
# How long to wait until the last message is written.
LEAVE_SECONDS: Final = 1.0
# If none of its own messages has come back after this many ticks, a worker receives nothing: its
# queue or the exchange was deleted by hand.
MAX_TICKS_WITHOUT_ECHO: Final = 5
# How long a worker that starts waits for the states of its peers.
MAX_START_SECONDS: Final = 2.0
# A worker whose first join comes later than this after its start found no broker.
LATE_SECONDS: Final = 1.0
# Its peers have lost their connections too, and reconnect within this time.
RECONNECT_SECONDS: Final = 6.0
# How long a worker that stops waits for a connection on which to publish that.
MAX_REJOIN_SECONDS: Final = 3.0


class Silence(NamedTuple):
    """How long a peer may be silent: a number of its heartbeats, plus some seconds."""

    heartbeats: float
    seconds: float

    def seconds_at(self, heartbeat_seconds: float) -> float:
        """Return the time for a peer with this heartbeat interval."""
        return self.heartbeats * heartbeat_seconds + self.seconds


# After a longer silence a peer may be gone: one heartbeat, and its latency.
HEARD: Final = Silence(1, 0.25)
# After a longer silence another worker takes over the peer's tasks.
ACTIVE: Final = Silence(2, 1)
# After a longer silence a peer counts as gone.
PRESENT: Final = Silence(2, 3)
# After a longer silence a peer is forgotten.
REMEMBERED: Final = Silence(0, 60)


@dataclass(slots=True)
class Peer:
    """Another worker's last known state; `heard_at`: when it last published anything."""

    heard_at: float
    heartbeat_seconds: float = 1.0
    breaker: BreakerState | None = None
    consumers: int = 1
    is_leaving: bool = False
    is_present: bool = False

    def learn(self, message: Message) -> None:
        """Note what a message says about the peer's state."""
        if isinstance(message, Join | WorkerState):
            self.heartbeat_seconds = message.heartbeat_seconds or self.heartbeat_seconds
        if isinstance(message, WorkerState):
            self.breaker = message.breaker or self.breaker
            self.is_leaving = self.is_leaving or message.leaving is not None
            if message.consumers is not None:
                self.consumers = message.consumers.count


class Blockable(Protocol):
    """A connection that publishes."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes, because of a resource alarm."""


class Membership:
    """The peers of one worker by their ids, and the messages that wait to be published.

    Its clock stops while this worker receives nothing, because peers need not be gone then. Without
    `is_enabled` it has no peers.
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
        # Ordered by the time when they were last heard.
        self.peers: dict[str, Peer] = {}
        # How often it has joined the exchange, and whether the broker has refused that.
        self.joins = 0
        self.is_refused = False
        # Whether this process was frozen for longer than the broker keeps messages.
        self.has_missed_messages = False
        self._clock = clock
        self._connection: Blockable | None = None
        self._has_left = False
        self._started_at = clock()
        # When its peers have had time to reconnect; None before its first join.
        self._peers_are_back_at: float | None = None
        self._is_acquainted = asyncio.Event()
        self._has_joined = asyncio.Event()
        self._deaf_since: float | None = clock()
        self._deaf_seconds = 0.0
        self._ticked_at = clock()
        # Messages, each with the name of its queue, or None if it is for all peers.
        self._unpublished: deque[tuple[bytes, str | None]] = deque(maxlen=MAX_UNPUBLISHED)
        self._may_publish = asyncio.Event()
        self._all_published = asyncio.Event()
        # Whether none of its own messages has come back since it last published one to all.
        self.awaits_echo = False
        self._ticks_without_echo = 0
        metrics.peers.set_function(lambda: self.count)
        metrics.coordination_up.set_function(lambda: self.is_up)

    # The peers

    @property
    def is_up(self) -> bool:
        """Whether this worker receives messages and the broker accepts its own."""
        return self._connection is not None and not self._connection.is_blocked

    @property
    def count(self) -> int:
        return len(self.others(PRESENT))

    @property
    def expects_answers(self) -> bool:
        """Whether any peer was heard in the last minute, and may answer a question."""
        is_member = self.is_enabled and not self._has_left and not self.is_refused
        return is_member and bool(self.others(REMEMBERED))

    @property
    def awaits_peers(self) -> bool:
        """Whether peers that this worker has never heard may still join or reconnect."""
        if self._peers_are_back_at is None:
            return self.is_enabled and not self.is_refused
        return self._clock() < self._peers_are_back_at

    def queue_name(self, worker_id: str, joins: int) -> str:
        """Return the name of a worker's queue; each join has its own."""
        return f"{self.exchange}.{worker_id}.{joins}"

    def others(self, silence: Silence) -> frozenset[str]:
        """Return the peers that have not been silent for longer than `silence`."""
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
        """Return the heartbeat interval for the current number of workers."""
        workers = self.count + 1
        return min(-(-workers * workers // MAX_HEARTBEATS_A_SECOND), MAX_HEARTBEAT_SECONDS)

    # Joining and leaving

    def join(self, connection: Blockable) -> None:
        """Note that it receives, and may publish on `connection`."""
        if self._peers_are_back_at is None:
            now = self._clock()
            is_late = now - self._started_at > LATE_SECONDS
            self._peers_are_back_at = now + RECONNECT_SECONDS if is_late else now
        self._connection = connection
        self.is_refused = False
        self._unpublished.clear()
        self.awaits_echo = False
        self._ticks_without_echo = 0
        self._start_clock()
        self._has_joined.set()

    def lose(self) -> None:
        """Note that it can neither receive nor publish."""
        self._connection = None
        self._has_joined.clear()
        self._all_published.set()
        self._stop_clock()

    def tick(self) -> None:
        """Check the peers, each second; raise BrokerError if its own messages do not come back."""
        gap_seconds = self._clock() - self._ticked_at
        self.has_missed_messages = gap_seconds > MESSAGE_SECONDS
        if gap_seconds > MAX_GAP_SECONDS and self._deaf_since is None:
            self._deaf_seconds += gap_seconds
        # During an alarm of the broker no worker publishes anything.
        if self.is_up:
            self._start_clock()
        else:
            self._stop_clock()
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
            raise BrokerError("this worker does not receive its own messages")

    def note_echo(self) -> None:
        self.awaits_echo = False

    def note_acquainted(self) -> None:
        self._is_acquainted.set()

    async def until_acquainted(self) -> None:
        """Wait, when this worker starts, until peers have had time to publish their states."""
        if self.is_enabled:
            await wait_at_most(MAX_START_SECONDS, self._is_acquainted)
            self._is_acquainted.set()

    async def until_peers_are_back(self) -> None:
        """Wait until this worker has joined and, if it found no broker, peers have had time to."""
        if self._peers_are_back_at is None:
            await wait_at_most(RECONNECT_SECONDS, self._has_joined)
        if self._peers_are_back_at is not None:
            await asyncio.sleep(max(0.0, self._peers_are_back_at - self._clock()))

    async def until_joined(self, *, most_seconds: float) -> None:
        """Wait, when this worker stops, until it can publish that; not if it has no peers."""
        if self.expects_answers:
            await wait_at_most(min(most_seconds, MAX_REJOIN_SECONDS), self._has_joined)

    async def leave(self) -> None:
        """Publish that this worker ends, so that no peer waits for it; nothing follows."""
        self.publish(Leave())
        self._has_left = True
        if self.is_up:
            await wait_at_most(LEAVE_SECONDS, self._all_published)

    # Publishing

    def publish(self, message: Message, *, to: str | None = None) -> None:
        """Publish to all peers, or to one queue, soon and unconfirmed; lost unless `is_up`."""
        if self.is_up and not self._has_left:
            self._unpublished.append((write_message(self.worker_id, message), to))
            self._all_published.clear()
            self._may_publish.set()

    def next_unpublished(self) -> tuple[bytes, str | None] | None:
        """Return the next message to publish, with its queue, or None if it is for all peers."""
        if not self.is_up:
            self._unpublished.clear()
        if not self._unpublished:
            self._all_published.set()
            return None
        body, queue = self._unpublished.popleft()
        self.awaits_echo = self.awaits_echo or queue is None
        return body, queue

    async def until_unpublished(self, seconds: float) -> None:
        """Wait until there is a message to publish, or for `seconds`."""
        await wait_at_most(max(0.0, seconds), self._may_publish)
        self._may_publish.clear()

    def wake(self) -> None:
        self._may_publish.set()

    # The clock

    def _now(self) -> float:
        now = self._clock() if self._deaf_since is None else self._deaf_since
        return now - self._deaf_seconds

    def _stop_clock(self) -> None:
        if self._deaf_since is None:
            self._deaf_since = self._clock()

    def _start_clock(self) -> None:
        if self._deaf_since is not None:
            self._deaf_seconds += self._clock() - self._deaf_since
            self._deaf_since = None
            self._ticked_at = self._clock()

    def _note_gone(self, worker_id: str, peer: Peer, *, why: str) -> None:
        if peer.is_present:
            peer.is_present = False
            log.info("peer_gone", peer=worker_id, why=why)


class Part:
    """One subject of the messages between workers; by default it does nothing."""

    def facts(self) -> dict[str, Any]:
        """Return its fields of this worker's `WorkerState`."""
        return {}

    def joined(self) -> None:
        """Make up for messages lost before this worker joined the exchange."""

    def receive(self, peer: str, message: Message) -> None:
        """Process a peer's message, after `Membership` has learned from it; must not block."""

    def tick(self) -> None:
        """Run each second while this worker is a member, before a heartbeat that is due."""


class Coordination:
    """Passes messages between `Membership`, the exchange and the parts."""

    def __init__(
        self, membership: Membership, parts: Sequence[Part], *, metrics: WorkerMetrics
    ) -> None:
        self.membership = membership
        self._parts = parts
        self._metrics = metrics
        self._heartbeat_seconds = 1
        self._seconds_to_heartbeat = 0

    def join(self, connection: Blockable) -> None:
        """Start to receive, and to publish on `connection`."""
        self.membership.join(connection)
        self._seconds_to_heartbeat = 0
        self._heartbeat_seconds = 1
        self._introduce()

    def _introduce(self) -> None:
        """Exchange everything with the peers that they or this worker may have missed."""
        membership = self.membership
        membership.publish(Join(joins=membership.joins, heartbeat_seconds=self._heartbeat_seconds))
        for part in self._parts:
            part.joined()

    def tick(self) -> None:
        """Check peers and parts, each second, and publish a heartbeat if one is due."""
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
            # Up to a quarter earlier, so that the heartbeats of workers that started together
            # spread out.
            self._seconds_to_heartbeat = random.randint(seconds - seconds // 4, seconds)  # noqa: S311
            self.membership.publish(self._state(seconds))

    def receive(self, body: Body) -> None:
        """Pass a message to all parts; count one that cannot be read, and drop it."""
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
            queue = membership.queue_name(worker_id, message.joins)
            membership.publish(self._state(self._heartbeat_seconds), to=queue)
        for part in self._parts:
            part.receive(worker_id, message)

    def _state(self, heartbeat_seconds: float | None) -> WorkerState:
        facts = {name: fact for part in self._parts for name, fact in part.facts().items()}
        return WorkerState(heartbeat_seconds=heartbeat_seconds, **facts)
