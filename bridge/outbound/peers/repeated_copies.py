"""Which retry copies may be there twice, so that the one that does not say so is asked for as well.

A copy whose confirm was lost is published again, and only the second says that it may be one
(`x-sms-bridge-repeated`). The broker may deliver the second first, and the first minutes later, to
another worker: it tries anew only after three minutes what found no leader at the end of its wait.
So whoever is given the second tells the others, by asking for it, and those that join later.
"""

import time
from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar, Final

from pydantic import Field

from bridge.outbound.acceptances import SENT_SECONDS
from bridge.outbound.entry import Entry
from bridge.outbound.memory import Memory
from bridge.outbound.peers.exchange import Peers
from bridge.outbound.peers.messages import Facts, Hello
from bridge.outbound.peers.questions import MAX_QUESTIONS, EntryFacts, Questions, facts_of

MAX_REMEMBERED: Final = 10_000
# So many of those that were delivered here are told to a worker that joins, the latest.
MAX_TOLD: Final = 4 * MAX_QUESTIONS


class Repeated(Facts):
    """Copies that may be there twice."""

    kind: ClassVar[str] = "repeated"

    entries: Annotated[tuple[EntryFacts, ...], Field(max_length=MAX_QUESTIONS)]


class RepeatedCopies:
    """Remembers them for as long as a message is known to be sent, at most 10,000."""

    def __init__(self, peers: Peers, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._known: Memory[Entry, None] = Memory(SENT_SECONDS, clock, most=MAX_REMEMBERED)
        self._delivered_here: Memory[Entry, None] = Memory(SENT_SECONDS, clock, most=MAX_TOLD)
        peers.on(Questions, lambda _peer, asked: self._learn(asked.questions))
        peers.on(Repeated, lambda _peer, repeated: self._learn(repeated.entries))
        peers.on(Hello, lambda _peer, _hello: self._tell())

    def may_be_one(self, entry: Entry, *, says_so: bool) -> bool:
        """Say whether a delivery may be there twice; that it says so itself is remembered."""
        if says_so and entry.copies and entry not in self._delivered_here:
            self._delivered_here.add(entry, None)
            self._note(entry)
        return says_so or (entry.copies > 0 and entry in self._known)

    def _learn(self, told: tuple[EntryFacts, ...]) -> None:
        # Most questions are of messages that the broker has delivered again, which says so itself.
        for facts in told:
            if facts.copies:
                self._note(facts.entry)

    def _note(self, entry: Entry) -> None:
        if entry not in self._known:
            self._known.add(entry, None)

    def _tell(self) -> None:
        entries = tuple(self._facts())
        for at in range(0, len(entries), MAX_QUESTIONS):
            self._peers.tell(Repeated(entries=entries[at : at + MAX_QUESTIONS]))

    def _facts(self) -> Iterator[EntryFacts]:
        for _, entry, _ in self._delivered_here.latest(MAX_TOLD):
            facts = facts_of(entry)
            if facts is not None:
                yield facts
