"""What became of recent deliveries of this process, so that a redelivery is not a second SMS.

A request is known by its publisher's `message_id` and its body. Without an id two equal bodies
are two messages, unless the broker says `redelivered` and the first was taken from a connection
that has been lost since: then, once for each such first, the second is the first. One that went
back unsettled comes again for certain, and so goes before one whose ack may have arrived. Only the
last acks are in doubt, as many as the prefetch: had the broker not read those before them, it would
have delivered no more.

A copy of ours can be there twice: it is published again when its channel ends before its confirm.
What has replaced the first of the two replaces the second as well.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from bridge.amqp.publication import Publication
from bridge.worker.delivery import Waits
from bridge.worker.envelope import Envelope
from bridge.worker.expiring_map import ExpiringMap
from bridge.worker.message_identity import MessageIdentity, pack_identity, unpack_identity
from bridge.worker.outcomes import Outcome
from bridge.worker.sent_messages import SENT_SECONDS, Accepted, SentMessages

# How long a delivery whose ack may be lost, or that went back unsettled, is expected again.
DOUBT_SECONDS: Final = 300.0
# How many messages may stay unacked because the broker refuses their copies.
MAX_SET_ASIDE: Final = 1_000
# A broker that is there delivers again as soon as a connection is lost.
COMES_AGAIN_SECONDS: Final = 2.0


def unsure_ack_seconds(heartbeat_seconds: float) -> float:
    """Return how old an ack may be that was written to a connection which was dead already.

    It takes up to three heartbeats to notice a broker that hangs, and some time to close.
    """
    return min(3 * (heartbeat_seconds + 1) + 12, SENT_SECONDS)


class Repeat(NamedTuple):
    """A delivery of what is done, to be acked only.

    `first`: how the first was accepted, when this is not the same delivery once more but one that
    the publisher sent again, and whoever waits for a reply to it has none.
    """

    first: Accepted | None


@dataclass(frozen=True, slots=True)
class Released:
    """What is known of a delivery that went back unsettled: its key and counts, and its outcome.

    `replacement`: the copy that was published for the outcome, and may yet be confirmed.
    `waits_in_place`: nothing has to be done for the outcome but to wait for the next try.
    """

    envelope: Envelope
    outcome: Outcome | None
    replacement: Publication | None = None
    waits_in_place: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether something has to be done for its outcome before it may be acked."""
        return self.outcome is not None and not self.waits_in_place


@dataclass(slots=True, eq=False)
class InFlight:
    """A delivery that is being worked on. `is_orphan`: its connection has been lost.

    `is_awaited`: a redelivery waits for it.
    """

    identity: MessageIdentity
    is_orphan: bool = False
    is_awaited: bool = False
    _settled: "asyncio.Future[bool] | None" = None

    async def until_settled(self) -> bool:
        """Wait until it is settled (True) or back in the queue (False)."""
        # Few are ever waited for.
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._settled)

    def end(self, *, settled: bool) -> None:
        """Tell those that wait what became of it."""
        if self._settled is not None:
            self._settled.set_result(settled)


class Deduplicator:
    """Remembers deliveries in flight and settled; bounded in entries and in time.

    `window_seconds`: how long a sent message makes another one a repeat, see `SentMessages`. Time
    stands still while the broker is away: what comes again comes after that.
    """

    def __init__(
        self,
        *,
        heartbeat_seconds: float,
        window_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._away_since: float | None = None
        self._away_seconds = 0.0
        self._unsure_ack_seconds = unsure_ack_seconds(heartbeat_seconds)
        self._unsure_until = clock()
        self._in_flight: dict[bytes, list[InFlight]] = {}
        self.sent = SentMessages(self._now, window_seconds=window_seconds)
        # Copies that were replaced by the next one here, or settled by a peer.
        self._replaced: ExpiringMap[MessageIdentity, None] = ExpiringMap(SENT_SECONDS, self._now)
        self._acks = 0
        # With the number of the ack. They are many: as bytes, as `ExpiringMap` wants it.
        self._settled: ExpiringMap[bytes, int] = ExpiringMap(self._unsure_ack_seconds, self._now)
        self._doubtful: ExpiringMap[MessageIdentity, None] = ExpiringMap(DOUBT_SECONDS, self._now)
        self._owed: ExpiringMap[MessageIdentity, None] = ExpiringMap(DOUBT_SECONDS, self._now)
        # What went back unsettled: what was decided about it has still to be done, or nothing was.
        self._decided: ExpiringMap[MessageIdentity, Released] = ExpiringMap(
            DOUBT_SECONDS, self._now
        )
        self._undecided: ExpiringMap[MessageIdentity, Released] = ExpiringMap(
            DOUBT_SECONDS, self._now
        )
        self._put_off: ExpiringMap[MessageIdentity, Released] = ExpiringMap(
            DOUBT_SECONDS, self._now
        )
        # What stays unacked on a session that lives; when that ends, it has gone back as well.
        self._set_aside: dict[MessageIdentity, list[Released]] = {}
        self.set_aside_count = 0

    def _now(self) -> float:
        now = self._clock() if self._away_since is None else self._away_since
        return now - self._away_seconds

    @property
    def _owes_acks(self) -> bool:
        """Whether something is done, being done, or decided, whose ack cannot be written.

        It comes again, and only this process knows that it must not be sent again.
        """
        orphans = (claim for claims in self._in_flight.values() for claim in claims)
        is_owed = bool(self._owed) or bool(self._decided)
        return is_owed or any(claim.is_orphan for claim in orphans)

    @property
    def expects_redeliveries(self) -> bool:
        """Whether something that is done, or decided, may come again soon.

        It is owed its ack, or was acked just before a loss.
        """
        return self._owes_acks or self._clock() < self._unsure_until

    @property
    def keeps_any(self) -> bool:
        """Whether anything went back to the queue unsettled, and has not come again."""
        return bool(self._decided) or bool(self._undecided) or bool(self._set_aside)

    @property
    def has_room_aside(self) -> bool:
        """Whether one more message may be given to `set_aside`."""
        return self.set_aside_count < MAX_SET_ASIDE

    async def claim(
        self, identity: MessageIdentity, *, redelivered: bool, waits: Waits, may_wait: bool = True
    ) -> InFlight | Repeat | None:
        """Take a delivery to work on, unless it is a repeat.

        Waits while the same message is in flight here; with `may_wait` false it returns None for
        one that the publisher sent again. A claim must be given to `settle` or `give_back`; that a
        repeat was acked is told to `note_repeat`.
        """
        while (earlier := self._earlier(identity, redelivered=redelivered)) is not None:
            # What is still held by its connection is not what the broker delivers again.
            is_same = redelivered and earlier.is_orphan
            if not may_wait and not is_same:
                return None
            earlier.is_awaited = earlier.is_awaited or is_same
            with waits("ledger"):
                is_settled = await earlier.until_settled()
            if is_settled and is_same:
                self._owed.take(identity)
                return Repeat(None)
        return self._take_or_repeat(identity, redelivered=redelivered)

    def claim_at_once(self, identity: MessageIdentity) -> InFlight | Repeat | None:
        """Take what is no redelivery as `claim` does; None says that it would have to wait."""
        if self._earlier(identity, redelivered=False) is not None:
            return None
        return self._take_or_repeat(identity, redelivered=False)

    def _take_or_repeat(self, identity: MessageIdentity, *, redelivered: bool) -> InFlight | Repeat:
        first = self.sent.find(identity.message, redelivered=redelivered)
        is_done = first is not None or identity in self._replaced
        if is_done or (redelivered and self._is_in_doubt(identity)):
            is_same = redelivered and self._is_this_delivery(identity, is_sent=first is not None)
            return Repeat(None if is_same else first)
        claim = InFlight(identity)
        self._in_flight.setdefault(identity.message, []).append(claim)
        return claim

    def settle(self, claim: InFlight, accepted: Accepted | None, *, acked: bool) -> None:
        """Remember that a delivery is settled: `accepted`, else replaced by a copy.

        `acked` says whether the ack was written; one that was may still be lost.
        """
        acked = acked and not claim.is_orphan
        self._count_ack(claim.identity, acked=acked)
        if accepted is not None and claim.identity.has_id:
            self.sent.add(claim.identity.message, accepted)
        elif not claim.is_awaited:
            self._note_ack(claim.identity, acked=acked)
        if accepted is None and claim.identity.has_id and claim.identity.copies:
            self._replaced.add(claim.identity, None)
        self._finish(claim, settled=True)

    def note_repeat(self, identity: MessageIdentity, *, acked: bool) -> None:
        """Remember that a repeat was acked, because that ack may be lost as well."""
        self._count_ack(identity, acked=acked)
        if identity.message not in self.sent:
            self._note_ack(identity, acked=acked)

    def give_back(self, claim: InFlight, kept: Released) -> None:
        """Remember that a delivery goes back to the queue unsettled.

        What was decided about it is kept: when it comes again, it must not be sent again.
        """
        memory = self._decided if kept.is_decided else self._undecided
        memory.add(claim.identity, kept)
        self._finish(claim, settled=False)

    def set_aside(self, claim: InFlight, kept: Released) -> None:
        """Remember a delivery that stays unacked, because the broker refuses its copy.

        It comes again when its session ends, be that hours later. Until then nobody waits for it.
        """
        self._set_aside.setdefault(claim.identity, []).append(kept)
        self.set_aside_count += 1
        self._finish(claim, settled=False)

    def recall(self, identity: MessageIdentity, *, redelivered: bool) -> Released | None:
        """Return, once, what is known of a delivery that went back and has come again."""
        if not redelivered:
            return None
        # Of two that are equal in all, none is sent again whose fate is known.
        taken = self._decided.take(identity) or self._undecided.take(identity)
        return self._take_from_aside(identity) if taken is None else taken[0]

    def _take_from_aside(self, identity: MessageIdentity) -> Released | None:
        equal = self._set_aside.get(identity)
        if equal is None:
            return None
        self.set_aside_count -= 1
        kept = equal.pop()
        if not equal:
            del self._set_aside[identity]
        return kept

    # What peers know, and what they are told

    def knows(self, identity: MessageIdentity) -> bool:
        """Say whether anything is known here of a redelivery, so that no peer has to be asked."""
        memories = (
            *(self._replaced, self._doubtful, self._decided, self._undecided),
            self._set_aside,
        )
        is_here = self.is_working_on(identity) or identity.message in self.sent
        return is_here or any(identity in memory for memory in memories)

    def learn(self, identity: MessageIdentity, kept: Released | None) -> None:
        """Note what a peer knows of a redelivery: it is done (None), or it went back unsettled."""
        if kept is None:
            self._doubtful.add(identity, None)
        else:
            (self._decided if kept.is_decided else self._undecided).add(identity, kept)

    def is_settled(self, identity: MessageIdentity) -> bool:
        """Say whether a copy that is there twice is done: sent, or replaced."""
        return identity.message in self.sent or identity in self._replaced

    def learn_settled(self, identity: MessageIdentity) -> None:
        """Note that a peer has settled one of copies that may be there twice."""
        # What has not been up the ladder is told from what its publisher sends again only by being
        # a redelivery.
        memory = self._replaced if identity.copies else self._doubtful
        if identity not in memory:
            memory.add(identity, None)

    def is_working_on(self, identity: MessageIdentity) -> bool:
        """Say whether what was redelivered, to whomever, is being worked on here."""
        return self._earlier(identity, redelivered=True) is not None

    def depends_on_session(self, identity: MessageIdentity) -> bool:
        """Say whether `hand_on` has to be asked once it is known that the session lives.

        What is in flight or was acked on it comes again if it does not.
        """
        is_held = identity.message in self._in_flight or identity in self._set_aside
        return is_held or pack_identity(identity) in self._settled

    def hand_on(self, identity: MessageIdentity) -> Repeat | Released | None:
        """Return, once, what a peer has to know of what was redelivered to it."""
        if (
            identity.message in self.sent
            or identity in self._replaced
            or self._is_in_doubt(identity)
        ):
            self._owed.take(identity)
            return Repeat(None)
        return self.recall(identity, redelivered=True)

    def give_back_repeat(self, identity: MessageIdentity, kept: Released) -> None:
        """Remember that a repeat that was put off goes back to the queue unsettled."""
        self._put_off.add(identity, kept)

    def recall_repeat(self, identity: MessageIdentity, *, redelivered: bool) -> Released | None:
        """Return, once, what is known of a repeat that was put off and has come again."""
        taken = self._put_off.take(identity) if redelivered else None
        return None if taken is None else taken[0]

    def connection_lost(self, *, most_unacked: int) -> None:
        """Note that what is in flight comes again, and that the last acks may be lost.

        `most_unacked`: how many deliveries the broker has had open on the connection at most. What
        is held is a part of them; no more acks than the rest can be lost.
        """
        most_unread = most_unacked - self.set_aside_count
        for aside, equal in self._set_aside.items():
            for kept in equal:
                (self._decided if kept.is_decided else self._undecided).add(aside, kept)
        self._set_aside.clear()
        self.set_aside_count = 0
        for claims in self._in_flight.values():
            for claim in claims:
                most_unread -= not claim.is_orphan
                claim.is_orphan = True
                # Whoever waited for it comes again as well.
                claim.is_awaited = False
        unsure = [e for e, ack in self._settled.clear() if ack > self._acks - most_unread]
        for identity in unsure:
            self._doubtful.add(unpack_identity(identity), None)
        if unsure or self.sent.is_any_younger_than(self._unsure_ack_seconds):
            self._unsure_until = math.inf
        if self._away_since is None:
            self._away_since = self._clock()

    def consuming_again(self) -> None:
        """Note that the broker delivers from now on, what comes again first."""
        if self._away_since is not None:
            self._away_seconds += self._clock() - self._away_since
            self._away_since = None
        if self._unsure_until == math.inf:
            self._unsure_until = self._clock() + COMES_AGAIN_SECONDS

    def _earlier(self, identity: MessageIdentity, *, redelivered: bool) -> InFlight | None:
        claims = self._in_flight.get(identity.message, [])
        if identity.has_id:
            return claims[0] if claims else None
        if not redelivered:
            return None
        return next((c for c in claims if c.is_orphan and not c.is_awaited), None)

    def _is_in_doubt(self, identity: MessageIdentity) -> bool:
        """Whether a redelivery is one that is done, for all that is known; once for each ack."""
        memories = (self._decided, self._undecided, self._set_aside)
        is_unsettled = any(identity in memory for memory in memories)
        return not is_unsettled and self._doubtful.take(identity) is not None

    def _is_this_delivery(self, identity: MessageIdentity, *, is_sent: bool) -> bool:
        """Whether a redelivery is of what was settled here, or by a peer that was asked for it."""
        is_owed = self._owed.take(identity) is not None
        return is_owed or (is_sent and self._doubtful.take(identity) is not None)

    def _count_ack(self, identity: MessageIdentity, *, acked: bool) -> None:
        if acked:
            self._acks += 1
        else:
            self._owed.add(identity, None)

    def _note_ack(self, identity: MessageIdentity, *, acked: bool) -> None:
        if acked:
            self._settled.add(pack_identity(identity), self._acks)
        else:
            self._doubtful.add(identity, None)

    def _finish(self, claim: InFlight, *, settled: bool) -> None:
        claims = self._in_flight[claim.identity.message]
        claims.remove(claim)
        if not claims:
            del self._in_flight[claim.identity.message]
        claim.end(settled=settled)
