"""What became of recent deliveries of this process, so that a redelivery is not a second SMS.

A request is known by its publisher's `message_id` and its body. Without an id two equal bodies
are two messages, unless the broker says `redelivered` and the first was taken from a connection
that has been lost since: then, once for each such first, the second is the first.
"""

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from bridge.envelope import Envelope
from bridge.fates import Outcome

MAX_ENTRIES: Final = 100_000
SENT_SECONDS: Final = 900.0
DOUBT_SECONDS: Final = 300.0
# An ack that was written shortly before its connection is found dead may not have arrived. It
# takes up to three heartbeats of 10 s to notice a broker that hangs.
UNSURE_ACK_SECONDS: Final = 45.0
# A broker that is there delivers again as soon as a connection is lost.
COMES_AGAIN_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One delivery: which message it is, and which of its copies."""

    message: tuple[str, bytes]
    copies: int

    @property
    def has_id(self) -> bool:
        """Whether the publisher named the message."""
        return bool(self.message[0])


def entry_of(envelope: Envelope, body: bytes) -> Entry:
    """Make the entry of a delivery. An id that is used for two bodies names two messages."""
    digest = hashlib.sha256(body)
    if envelope.message_id is None:
        digest.update(str(envelope.published_at).encode())
    return Entry((envelope.message_id or "", digest.digest()), envelope.copies)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a delivery that went back unsettled: its key and counts, and its outcome."""

    envelope: Envelope
    outcome: Outcome | None


@dataclass(slots=True, eq=False)
class Claim:
    """A delivery that is being worked on. `is_orphan`: its connection has been lost."""

    entry: Entry
    settled: "asyncio.Future[bool]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_orphan: bool = False
    is_awaited: bool = False


class Ledger:
    """Remembers deliveries in flight and settled; bounded in entries and in time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_sent_at = -UNSURE_ACK_SECONDS
        self._unsure_until = clock()
        self._in_flight: dict[tuple[str, bytes], list[Claim]] = {}
        self._sent: _Memory[tuple[str, bytes], None] = _Memory(SENT_SECONDS, clock)
        self._settled: _Memory[Entry, None] = _Memory(UNSURE_ACK_SECONDS, clock)
        self._doubtful: _Memory[Entry, None] = _Memory(DOUBT_SECONDS, clock)
        self._owed: _Memory[Entry, None] = _Memory(DOUBT_SECONDS, clock)
        self._kept: _Memory[Entry, Kept] = _Memory(DOUBT_SECONDS, clock)

    @property
    def owes_acks(self) -> bool:
        """Whether something is done, or being done, whose ack cannot be written.

        It comes again, and only this process knows that it is a repeat.
        """
        orphans = (claim for claims in self._in_flight.values() for claim in claims)
        return bool(self._owed) or any(claim.is_orphan for claim in orphans)

    @property
    def expects_redeliveries(self) -> bool:
        """Whether something that is done may come again soon: owed, or acked just before a loss."""
        return self.owes_acks or self._clock() < self._unsure_until

    async def claim(self, entry: Entry, *, redelivered: bool) -> Claim | None:
        """Take a delivery to work on; None means that it is a repeat and is to be acked only.

        Waits while the same message is in flight here. A claim must be given to `settle` or
        `release`; that a repeat was acked is told to `note_repeat`.
        """
        while (earlier := self._earlier(entry, redelivered=redelivered)) is not None:
            earlier.is_awaited = earlier.is_awaited or redelivered
            if await asyncio.shield(earlier.settled) and redelivered:
                self._owed.take(entry)
                return None
        if entry.message in self._sent or (redelivered and self._doubtful.take(entry) is not None):
            self._owed.take(entry)
            return None
        claim = Claim(entry)
        self._in_flight.setdefault(entry.message, []).append(claim)
        return claim

    def settle(self, claim: Claim, *, sent: bool, acked: bool) -> None:
        """Remember that a delivery is settled: accepted when `sent`, else replaced by a copy.

        `acked` says whether the ack was written; one that was may still be lost.
        """
        acked = acked and not claim.is_orphan
        if not acked:
            self._owed.add(claim.entry, None)
        if sent and claim.entry.has_id:
            self._sent.add(claim.entry.message, None)
            self._last_sent_at = self._clock()
        elif not claim.is_awaited:
            self._note_ack(claim.entry, acked=acked)
        self._finish(claim, settled=True)

    def note_repeat(self, entry: Entry, *, acked: bool) -> None:
        """Remember that a repeat was acked, because that ack may be lost as well."""
        if not acked:
            self._owed.add(entry, None)
        if entry.message not in self._sent:
            self._note_ack(entry, acked=acked)

    def release(self, claim: Claim, kept: Kept) -> None:
        """Let go of a delivery that goes back to the queue unsettled.

        What was decided about it is kept: when it comes again, it must not be sent again.
        """
        self._kept.add(claim.entry, kept)
        self._finish(claim, settled=False)

    def recall(self, entry: Entry, *, redelivered: bool) -> Kept | None:
        """Return, once, what is known of a delivery that went back and has come again."""
        taken = self._kept.take(entry) if redelivered else None
        return None if taken is None else taken[0]

    def connection_lost(self) -> None:
        """Note that what is in flight comes again, and that the last acks may be lost."""
        for claims in self._in_flight.values():
            for claim in claims:
                claim.is_orphan = True
        unsure = self._settled.clear()
        for entry in unsure:
            self._doubtful.add(entry, None)
        if unsure or self._clock() - self._last_sent_at < UNSURE_ACK_SECONDS:
            self._unsure_until = math.inf

    def consuming_again(self) -> None:
        """Note that the broker delivers from now on, what comes again first."""
        if self._unsure_until == math.inf:
            self._unsure_until = self._clock() + COMES_AGAIN_SECONDS

    def _earlier(self, entry: Entry, *, redelivered: bool) -> Claim | None:
        claims = self._in_flight.get(entry.message, [])
        if entry.has_id:
            return claims[0] if claims else None
        if not redelivered:
            return None
        return next((c for c in claims if c.is_orphan and not c.is_awaited), None)

    def _note_ack(self, entry: Entry, *, acked: bool) -> None:
        (self._settled if acked else self._doubtful).add(entry, None)

    def _finish(self, claim: Claim, *, settled: bool) -> None:
        claims = self._in_flight[claim.entry.message]
        claims.remove(claim)
        if not claims:
            del self._in_flight[claim.entry.message]
        if not claim.settled.done():
            claim.settled.set_result(settled)


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class _Memory(Generic[_Key, _Value]):
    """Values by key, several for one key; forgotten with time, and the oldest for room."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._order: deque[tuple[float, _Key]] = deque()
        self._values: dict[_Key, deque[tuple[float, _Value]]] = {}

    def __contains__(self, key: _Key) -> bool:
        self._forget()
        return key in self._values

    def __bool__(self) -> bool:
        self._forget()
        return bool(self._values)

    def add(self, key: _Key, value: _Value) -> None:
        now = self._clock()
        self._order.append((now, key))
        self._values.setdefault(key, deque()).append((now, value))
        self._forget()

    def take(self, key: _Key) -> tuple[_Value] | None:
        """Remove and return the oldest value of a key, in a tuple of its own."""
        self._forget()
        values = self._values.get(key)
        if not values:
            return None
        _, value = values.popleft()
        if not values:
            del self._values[key]
        return (value,)

    def clear(self) -> list[_Key]:
        """Forget all, and return the keys, one for each value."""
        self._forget()
        keys = [key for key, values in self._values.items() for _ in values]
        self._order.clear()
        self._values.clear()
        return keys

    def _forget(self) -> None:
        limit = self._clock() - self._seconds
        while self._order and (self._order[0][0] <= limit or len(self._order) > MAX_ENTRIES):
            at, key = self._order.popleft()
            values = self._values.get(key)
            # What was taken meanwhile left its mark in the order behind.
            if values and values[0][0] <= at:
                values.popleft()
                if not values:
                    del self._values[key]
