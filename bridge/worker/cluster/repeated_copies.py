"""Which copies may be there twice, so that one is not sent when the other is done.

A copy whose confirm was lost is published again, and only the second says that it may be one
(`x-sms-bridge-repeated`). The broker may deliver the second first, and the first minutes later, to
another worker: it tries anew only after three minutes what found no leader at the end of its wait.
So whoever publishes the second, or is given it, tells the others, and those that join later. So
does who settles either: it may be gone when the other comes.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Annotated, ClassVar, Final

from pydantic import Field

from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.worker.cluster.beats import PRESENT
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Facts, Hello
from bridge.worker.cluster.questions import MAX_QUESTIONS, IdentityFacts, Questions, facts_of
from bridge.worker.deduplicator import Deduplicator
from bridge.worker.envelope import bare_envelope
from bridge.worker.expiring_map import ExpiringMap
from bridge.worker.message_identity import IdentityOf, MessageIdentity
from bridge.worker.sent_messages import SENT_SECONDS

MAX_REMEMBERED: Final = 10_000
# So many are told to a worker that joins, the latest.
MAX_TOLD: Final = 4 * MAX_QUESTIONS

_Entries = Annotated[tuple[IdentityFacts, ...], Field(max_length=MAX_QUESTIONS)]


class Repeated(Facts):
    """Copies that may be there twice."""

    kind: ClassVar[str] = "repeated"

    entries: _Entries


class Settled(Facts):
    """Copies that may be there twice, of which one is sent or replaced."""

    kind: ClassVar[str] = "settled"

    entries: _Entries


class RepeatedCopies:
    """Remembers them for as long as a message is known to be sent, at most 10,000.

    `deduplicator` knows what was settled here, and learns what was settled by peers.
    """

    def __init__(
        self,
        peers: Peers,
        deduplicator: Deduplicator,
        *,
        identity_of: IdentityOf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._deduplicator = deduplicator
        self._identity_of = identity_of
        self._known: ExpiringMap[MessageIdentity, None] = ExpiringMap(
            SENT_SECONDS, clock, most=MAX_REMEMBERED
        )
        # Those that were published again, delivered, or settled here.
        self._own: ExpiringMap[MessageIdentity, None] = ExpiringMap(
            SENT_SECONDS, clock, most=MAX_TOLD
        )
        self._to_tell: dict[MessageIdentity, None] = {}
        peers.on(Questions, lambda _peer, asked: self._learn_asked(asked.questions))
        peers.on(Repeated, lambda _peer, told: self._learn_repeated(told.entries))
        peers.on(Settled, lambda _peer, told: self._learn_settled(told.entries))
        peers.on(Hello, lambda peer, _hello: self._welcome(peer))
        peers.when_heard(self._tell_own)

    def note_published(self, properties: Properties, body: Body) -> None:
        """Note that a copy was published that says that it may be there twice."""
        identity = self._identity_of(bare_envelope(properties, now=time.time()), body)
        self._note_own(identity)
        self._tell_soon(identity)

    def may_be_one(self, identity: MessageIdentity, *, says_so: bool) -> bool:
        """Say whether a delivery may be there twice; that it says so itself is remembered."""
        if says_so and identity.copies:
            # The others hear of it when they are asked for it.
            self._note_own(identity)
        return says_so or (identity.copies > 0 and identity in self._known)

    def settle(self, identity: MessageIdentity, *, is_sent: bool) -> None:
        """Tell the others that the deduplicator has settled a delivery, if it may be there twice.

        What has not been up the ladder has no number of its own: its publisher may send another
        one with its id, which is to be tried unless the first `is_sent`.
        """
        if identity in self._known and (is_sent or identity.copies):
            self._note_own(identity)
            self._tell_soon(identity)

    # What peers tell

    def _learn_asked(self, told: tuple[IdentityFacts, ...]) -> None:
        # Most questions are of messages that the broker has delivered again, which says so itself.
        for facts in told:
            if facts.copies:
                self._note(facts.identity)

    def _learn_repeated(self, told: tuple[IdentityFacts, ...]) -> None:
        for facts in told:
            self._note(facts.identity)
            if self._deduplicator.is_settled(facts.identity):
                self._tell_soon(facts.identity)

    def _learn_settled(self, told: tuple[IdentityFacts, ...]) -> None:
        for facts in told:
            self._note(facts.identity)
            self._deduplicator.learn_settled(facts.identity)

    def _note(self, identity: MessageIdentity) -> None:
        if identity not in self._known:
            self._known.add(identity, None)

    def _note_own(self, identity: MessageIdentity) -> None:
        self._note(identity)
        if identity not in self._own:
            self._own.add(identity, None)

    # What is told

    def _tell_soon(self, identity: MessageIdentity) -> None:
        """Tell of it at the end of this iteration of the event loop, together with all others."""
        if not self._to_tell:
            asyncio.get_running_loop().call_soon(self._tell_now)
        self._to_tell[identity] = None

    def _tell_now(self) -> None:
        entries = list(self._to_tell)
        self._to_tell.clear()
        self._tell(entries)

    def _welcome(self, newcomer: str) -> None:
        """Tell a worker that joins what happened here; one of all tells all that it knows."""
        others = self._peers.roster.others(PRESENT) - {newcomer}
        is_first = all(self._peers.worker_id < other for other in others)
        memory = self._known if is_first else self._own
        self._tell(identity for _, identity, _ in memory.latest(MAX_TOLD))

    def _tell_own(self) -> None:
        """Tell what happened here, of which the others may have missed something."""
        self._tell(identity for _, identity, _ in self._own.latest(MAX_TOLD))

    def _tell(self, entries: Iterable[MessageIdentity]) -> None:
        repeated, settled = list[IdentityFacts](), list[IdentityFacts]()
        for identity in entries:
            facts = facts_of(identity)
            if facts is not None:
                (settled if self._deduplicator.is_settled(identity) else repeated).append(facts)
        for at in range(0, len(repeated), MAX_QUESTIONS):
            self._peers.tell(Repeated(entries=tuple(repeated[at : at + MAX_QUESTIONS])))
        for at in range(0, len(settled), MAX_QUESTIONS):
            self._peers.tell(Settled(entries=tuple(settled[at : at + MAX_QUESTIONS])))
