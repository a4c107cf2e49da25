"""Recognise messages that are in the queue twice, even if two workers receive one each.

`ClusterDeduplicator` recognises messages that their publisher sent twice. Each worker reports the
messages that it takes, sends, and settles in another way, up to 50 times a second, each time in one
message. A delivery of a message that a peer has in flight waits; one of a message that a peer has
sent is a repeat. If two workers take equal messages before either report arrives, both are sent. A
lost report is repeated when a delivery waits for it, and when a worker joins again.

`RepeatedCopies` recognises retry copies. A copy whose confirm was lost is published again, and only
the second one is marked (`sms-bridge-possible-duplicate`). The broker may deliver it first, and the
unmarked one to another worker minutes later: if a message finds no queue leader at the end of its
wait, the broker tries again only after three minutes. So each worker publishes the identities of
the copies that it publishes again, receives or settles, also to workers that join later.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.deadline import wait_at_most
from bridge.ttl_cache import MAX_ENTRIES, ExpiringMap
from bridge.worker.cluster.membership import (
    PRESENT,
    REMEMBERED,
    Membership,
    Part,
)
from bridge.worker.cluster.messages import (
    MAX_QUESTIONS,
    MAX_REPORTED,
    CopyList,
    IdentityFacts,
    Join,
    Message,
    Questions,
    Recent,
    RecentQuestion,
    Report,
    WorkerState,
    facts_of,
    read_digests,
    read_records,
    write_digests,
    write_records,
)
from bridge.worker.cluster.questions import ASK_AGAIN_SECONDS, BUSY_SECONDS, MOST_BUSY_SECONDS
from bridge.worker.deduplicator import Deduplicator, IdentityOf, MessageIdentity
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import bare_envelope
from bridge.worker.sent_messages import SENT_SECONDS, Accepted, SentMessages

# Shortest time between two reports. After a quiet time a report is published at once.
REPORT_SECONDS: Final = 0.02
# Messages sent while no peer could be reached are reported afterwards, at most the newest.
MAX_UNREPORTED: Final = 10_000
# A worker that joins again reports the messages of this time again: a connection that was cut
# silently loses everything until the missing heartbeats end it.
REPORTED_AGAIN_SECONDS: Final = 60.0
# A worker that joins is told this many of the messages that were sent last, a part at a time; it
# takes a second in all.
MAX_RECENT: Final = 20_000
PART_SECONDS: Final = 0.02
# How long to wait for the next part of an answer before a peer is asked again, and for how long to
# ask at all.
RECENT_AGAIN_SECONDS: Final = 2.0
MAX_RECENT_SECONDS: Final = 10.0
# How many peers are answered at the same time; the others ask again.
MAX_ANSWERED: Final = 4
MAX_COPIES: Final = 10_000
# A worker that joins is told this many copies, the newest.
MAX_WELCOME: Final = 4 * MAX_QUESTIONS


class ClusterDeduplicator(Part):
    """One worker's reports, and the messages that its peers have in flight.

    `sent` has the messages sent by any worker. `now` returns unix seconds.
    """

    def __init__(
        self,
        membership: Membership,
        sent: SentMessages,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._membership = membership
        self._sent_messages = sent
        self._clock = clock
        self._now = now
        self._in_flight: set[bytes] = set()
        # The peer that has a message in flight, and when it last reported that.
        self._busy: dict[bytes, tuple[str, float]] = {}
        self._awaited: dict[bytes, asyncio.Event] = {}
        # The next report.
        self._taken: dict[bytes, None] = {}
        self._ended: dict[bytes, None] = {}
        self._asked: dict[bytes, None] = {}
        self._sent: deque[tuple[bytes, Accepted]] = deque(maxlen=MAX_UNREPORTED)
        self._reporting: asyncio.TimerHandle | None = None
        self._reported_at = -REPORT_SECONDS
        # Until when to ask peers for the messages sent recently; when one was asked or answered;
        # peers that have answered, but may not know all.
        self._asks_until = 0.0
        self._recent_at = 0.0
        self._recent_answered: set[str] = set()
        self._answering: set[asyncio.Task[None]] = set()

    # This worker's messages

    async def until_ended_elsewhere(
        self, delivery: Delivery, identity: MessageIdentity, *, may_wait: Callable[[], bool]
    ) -> bool:
        """Wait until no peer has the same message in flight.

        Returns False if one still has when the delivery `may_wait` no longer. Waits only a few
        seconds for a peer that is silent, or no longer confirms that it has the message.
        """
        message, since = identity.message, self._clock()
        if message not in self._busy:
            return True
        with delivery.waits("peers"):
            while self._is_busy(message, since):
                if not may_wait() or self._clock() - since >= MOST_BUSY_SECONDS:
                    return False
                self._asked[message] = None
                self._report_soon()
                ended = self._awaited.setdefault(message, asyncio.Event())
                await wait_at_most(ASK_AGAIN_SECONDS, ended)
        return True

    def take(self, identity: MessageIdentity) -> None:
        """Report that this worker has begun to process a message."""
        if identity.has_id:
            self._in_flight.add(identity.message)
            self._taken[identity.message] = None
            self._ended.pop(identity.message, None)
            self._report_soon()

    def end(self, identity: MessageIdentity, accepted: Accepted | None) -> None:
        """Report that a message was accepted, or was not, so that an equal one may be tried."""
        if not identity.has_id:
            return
        self._in_flight.discard(identity.message)
        self._taken.pop(identity.message, None)
        if accepted is None:
            self._ended[identity.message] = None
        else:
            self._sent.append((identity.message, accepted))
        self._report_soon()

    # Reports

    def _report_soon(self) -> None:
        if self._reporting is None:
            wait_seconds = self._reported_at + REPORT_SECONDS - self._clock()
            loop = asyncio.get_running_loop()
            self._reporting = loop.call_later(max(0.0, wait_seconds), self.report)

    def report(self) -> None:
        """Publish everything that has not been reported yet."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        self._reported_at = self._clock()
        has_peers = bool(self._membership.others(REMEMBERED))
        while (
            self._membership.is_up
            and has_peers
            and (self._taken or self._sent or self._ended or self._asked)
        ):
            sent = [self._sent.popleft() for _ in range(min(len(self._sent), MAX_REPORTED))]
            self._membership.publish(
                Report(
                    taken=_take_some(self._taken),
                    sent=write_records(sent, now=self._now()),
                    ended=_take_some(self._ended),
                    asked=_take_some(self._asked),
                )
            )
        # A peer that joins later is told then what is in flight, and what was sent.
        self._taken.clear()
        self._ended.clear()
        self._asked.clear()
        if not has_peers:
            self._sent.clear()

    def joined(self) -> None:
        """Report the last minute again, and ask the peers for the messages sent meanwhile."""
        self._asks_until = self._clock() + MAX_RECENT_SECONDS
        self._recent_at = self._clock() - RECENT_AGAIN_SECONDS
        self._recent_answered.clear()
        since = self._now() - REPORTED_AGAIN_SECONDS
        lately = itertools.takewhile(
            lambda sent: sent[1].at >= since, self._sent_messages.latest(MAX_UNREPORTED)
        )
        # The newest first, so that the oldest are left out if there is no room for all.
        self._sent.extendleft(itertools.islice(lately, MAX_UNREPORTED - len(self._sent)))
        self._taken.update(dict.fromkeys(self._in_flight))
        self._report_soon()

    def tick(self) -> None:
        """Report messages that were sent while no peer could be reached."""
        if self._sent:
            self._report_soon()

    def receive(self, peer: str, message: Message) -> None:
        """Learn from reports and answers, and answer a worker that joins."""
        own = self._membership.worker_id
        match message:
            case Report():
                self._on_report(peer, message)
            case Join():
                self._taken.update(dict.fromkeys(self._in_flight))
                self._report_soon()
            case WorkerState():
                self._ask_recent(peer)
            case RecentQuestion() if message.to == own and len(self._answering) < MAX_ANSWERED:
                task = asyncio.create_task(self._publish_recent(peer, message.joins))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Recent() if message.to == own:
                self._on_recent(peer, message)

    def _on_report(self, peer: str, told: Report) -> None:
        now = self._clock()
        for message in read_digests(told.taken):
            self._busy[message] = (peer, now)
        while len(self._busy) > MAX_ENTRIES:
            self._forget(next(iter(self._busy)))
        self._learn(told.sent)
        for message in read_digests(told.ended):
            if self._busy.get(message, ("",))[0] == peer:
                self._forget(message)
        for message in read_digests(told.asked):
            if message in self._in_flight:
                self._taken[message] = None
                self._report_soon()
            elif (accepted := self._sent_messages.own(message)) is not None:
                self._sent.append((message, accepted))
                self._report_soon()

    def _learn(self, sent: bytes) -> None:
        now = self._now()
        for message, attempts, status, age_seconds in read_records(sent):
            self._sent_messages.learn(message, attempts, status, now - age_seconds, age_seconds)
            self._forget(message)

    def _is_busy(self, message: bytes, since: float) -> bool:
        """Whether a present peer has it in flight, and confirms that when asked."""
        busy = self._busy.get(message)
        if busy is None:
            return False
        peer, heard_at = busy
        silent_seconds = self._clock() - max(since, heard_at)
        if silent_seconds < BUSY_SECONDS and peer in self._membership.others(PRESENT):
            return True
        self._forget(message)
        return False

    def _forget(self, message: bytes) -> None:
        self._busy.pop(message, None)
        ended = self._awaited.pop(message, None)
        if ended is not None:
            ended.set()

    # Messages sent recently

    def _ask_recent(self, peer: str) -> None:
        """Ask a peer, unless another one is answering."""
        now = self._clock()
        is_answering = now - self._recent_at < RECENT_AGAIN_SECONDS
        if now < self._asks_until and not is_answering and peer not in self._recent_answered:
            self._recent_at = now
            self._membership.publish(RecentQuestion(to=peer, joins=self._membership.joins))

    async def _publish_recent(self, peer: str, joins: int) -> None:
        """Answer a peer in parts, through its own queue, so that no other worker reads them."""
        queue = self._membership.queue_name(peer, joins)
        recent = self._sent_messages.latest(MAX_RECENT)
        while part := write_records(itertools.islice(recent, MAX_REPORTED), now=self._now()):
            self._membership.publish(Recent(to=peer, sent=part), to=queue)
            await asyncio.sleep(PART_SECONDS)
        # A worker that is still asking may not know all; the peer then asks another one.
        is_all = self._clock() >= self._asks_until
        self._membership.publish(Recent(to=peer, is_last=is_all), to=queue)

    def _on_recent(self, peer: str, told: Recent) -> None:
        self._learn(told.sent)
        self._recent_at = self._clock()
        if told.is_last:
            self._asks_until = self._clock()
        elif not told.sent:
            self._recent_answered.add(peer)
            self._recent_at -= RECENT_AGAIN_SECONDS


def _take_some(waiting: dict[bytes, None]) -> bytes:
    """Remove the first entries, as many as fit into one message, and pack them."""
    some = list(itertools.islice(waiting, MAX_REPORTED))
    for message in some:
        del waiting[message]
    return write_digests(some)


class RepeatedCopies(Part):
    """Remembers copies that may be in the queue twice, as long as sent messages, at most 10,000.

    `deduplicator` knows the copies settled by this worker, and learns those settled by peers.
    """

    def __init__(
        self,
        membership: Membership,
        deduplicator: Deduplicator,
        *,
        identity_of: IdentityOf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._deduplicator = deduplicator
        self._identity_of = identity_of
        self._known: ExpiringMap[MessageIdentity, None] = ExpiringMap(
            SENT_SECONDS, clock, most=MAX_COPIES
        )
        # Copies that this worker has published again, received or settled.
        self._own: ExpiringMap[MessageIdentity, None] = ExpiringMap(
            SENT_SECONDS, clock, most=MAX_WELCOME
        )
        # Copies of which the peers have not been told.
        self._unpublished: dict[MessageIdentity, None] = {}

    def note_published(self, properties: Properties, body: Body) -> None:
        """Note that a copy was published again, marked."""
        identity = self._identity_of(bare_envelope(properties, now=time.time()), body)
        self._note_own(identity)
        self._publish_soon(identity)

    def note_received(self, identity: MessageIdentity, *, says_so: bool) -> bool:
        """Note a received copy; return whether it may be in the queue twice.

        `says_so`: it is marked, or redelivered.
        """
        if says_so and identity.copies:
            # The peers learn it from the question about it.
            self._note_own(identity)
        return says_so or (identity.copies > 0 and identity in self._known)

    def settle(self, identity: MessageIdentity) -> None:
        """Publish that a copy was settled, if it may be in the queue twice."""
        if identity in self._known:
            self._note_own(identity)
            self._publish_soon(identity)

    def joined(self) -> None:
        """Publish this worker's copies, because the peers may have missed some."""
        self._publish(identity for _, identity, _ in self._own.latest(MAX_WELCOME))

    def tick(self) -> None:
        """Publish identities that could not be published before."""
        if self._unpublished:
            self._publish_now()

    def receive(self, peer: str, message: Message) -> None:
        """Learn which copies may be in the queue twice, and which of them are settled.

        If a peer joins, publishes the copies that this worker knows. If a peer names a copy that
        this worker has settled, publishes that it is settled.
        """
        match message:
            case Questions():
                # Other questions are about messages that the broker marks as redelivered.
                for asked in message.questions:
                    if asked.copies:
                        self._note(asked.identity)
            case Join():
                # One worker publishes everything it knows, the others what they did themselves.
                others = self._membership.others(PRESENT) - {peer}
                is_first = all(self._membership.worker_id < other for other in others)
                memory = self._known if is_first else self._own
                self._publish(identity for _, identity, _ in memory.latest(MAX_WELCOME))
            case WorkerState():
                for told in message.repeated.entries if message.repeated else ():
                    self._note(told.identity)
                    if self._deduplicator.is_settled(told.identity):
                        self._publish_soon(told.identity)
                for told in message.settled.entries if message.settled else ():
                    self._note(told.identity)
                    self._deduplicator.learn_settled(told.identity)
            case _:
                pass

    def _note(self, identity: MessageIdentity) -> None:
        if identity not in self._known:
            self._known.add(identity, None)

    def _note_own(self, identity: MessageIdentity) -> None:
        self._note(identity)
        if identity not in self._own:
            self._own.add(identity, None)

    def _publish_soon(self, identity: MessageIdentity) -> None:
        """Publish it at the end of this event loop iteration, with all others."""
        self._unpublished[identity] = None
        asyncio.get_running_loop().call_soon(self._publish_now)

    def _publish_now(self) -> None:
        if self._membership.is_up:
            entries = list(self._unpublished)
            self._unpublished.clear()
            self._publish(entries)
        else:
            # The newest are published when this worker is up again.
            for identity in list(self._unpublished)[:-MAX_WELCOME]:
                del self._unpublished[identity]

    def _publish(self, entries: Iterable[MessageIdentity]) -> None:
        repeated, settled = list[IdentityFacts](), list[IdentityFacts]()
        for identity in entries:
            facts = facts_of(identity)
            if facts is not None:
                (settled if self._deduplicator.is_settled(identity) else repeated).append(facts)
        for at in range(0, len(repeated), MAX_QUESTIONS):
            part = CopyList(entries=tuple(repeated[at : at + MAX_QUESTIONS]))
            self._membership.publish(WorkerState(repeated=part))
        for at in range(0, len(settled), MAX_QUESTIONS):
            part = CopyList(entries=tuple(settled[at : at + MAX_QUESTIONS]))
            self._membership.publish(WorkerState(settled=part))
