"""What became of recent deliveries of this process, so that a redelivery is not a second SMS.

A request is known by its publisher's `message_id` and its body. Without an id two equal bodies
are two messages, unless the broker says `redelivered` and the first is still in flight here or
its ack may have been lost: then, and only then, the second is the first.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bridge.envelope import Envelope
from bridge.fates import Outcome

MAX_ENTRIES: Final = 100_000
SENT_SECONDS: Final = 900.0
DOUBT_SECONDS: Final = 300.0
# An ack that was written shortly before its connection is found dead may not have arrived. It
# takes up to three heartbeats of 10 s to notice a broker that hangs.
UNSURE_ACK_SECONDS: Final = 45.0


@dataclass(frozen=True, slots=True)
class Decision:
    """An outcome that could not be settled, because the delivery's channel ended first."""

    envelope: Envelope
    outcome: Outcome


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


class Ledger:
    """Remembers deliveries in flight and settled; bounded in entries and in time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight: dict[tuple[str, bytes], asyncio.Future[bool]] = {}
        self._sent: OrderedDict[object, float] = OrderedDict()
        self._settled: OrderedDict[object, float] = OrderedDict()
        self._doubtful: OrderedDict[object, float] = OrderedDict()
        self._decided: OrderedDict[Entry, Decision] = OrderedDict()

    async def claim(self, entry: Entry, *, redelivered: bool) -> bool:
        """Take a delivery to work on; False means that it is a repeat and is to be acked only.

        Waits while the same message is in flight here. Every claim that returned True must be
        followed by `settle` or `release`.
        """
        while (earlier := self._in_flight.get(entry.message)) is not None:
            if not (entry.has_id or redelivered):
                break
            if await asyncio.shield(earlier) and redelivered:
                self._doubtful.pop(entry, None)
                return False
        if self._is_repeat(entry, redelivered=redelivered):
            return False
        self._in_flight[entry.message] = asyncio.get_running_loop().create_future()
        return True

    def settle(self, entry: Entry, *, sent: bool, acked: bool) -> None:
        """Remember that a delivery is settled: accepted when `sent`, else replaced by a copy.

        `acked` says whether the ack was written; one that was may still be lost.
        """
        if sent and entry.has_id:
            self._remember(self._sent, entry.message, SENT_SECONDS)
        elif acked:
            self._remember(self._settled, entry, UNSURE_ACK_SECONDS)
        else:
            self._remember(self._doubtful, entry, DOUBT_SECONDS)
        self._finish(entry, done=True)

    def release(self, entry: Entry, decision: Decision | None) -> None:
        """Let go of a delivery that goes back to the queue unsettled.

        What was decided about it is kept: when it comes again, it must not be sent again.
        """
        if decision is not None:
            self._decided[entry] = decision
            while len(self._decided) > MAX_ENTRIES:
                self._decided.popitem(last=False)
        self._finish(entry, done=False)

    def recall(self, entry: Entry) -> Decision | None:
        """Return, once, what was decided about a delivery that could not be settled then."""
        return self._decided.pop(entry, None)

    def connection_lost(self) -> None:
        """Note that the last acks may not have reached the broker."""
        now = self._clock()
        for entry, at in self._settled.items():
            if now - at < UNSURE_ACK_SECONDS:
                self._remember(self._doubtful, entry, DOUBT_SECONDS)
        self._settled.clear()

    def _is_repeat(self, entry: Entry, *, redelivered: bool) -> bool:
        now = self._clock()
        if now - self._sent.get(entry.message, now - SENT_SECONDS) < SENT_SECONDS:
            return True
        if not redelivered:
            return False
        # Each doubt excuses one redelivery.
        return now - self._doubtful.pop(entry, now - DOUBT_SECONDS) < DOUBT_SECONDS

    def _finish(self, entry: Entry, *, done: bool) -> None:
        future = self._in_flight.pop(entry.message, None)
        if future is not None and not future.done():
            future.set_result(done)

    def _remember(self, entries: OrderedDict[object, float], key: object, seconds: float) -> None:
        now = self._clock()
        entries[key] = now
        entries.move_to_end(key)
        while len(entries) > MAX_ENTRIES or now - next(iter(entries.values())) >= seconds:
            entries.popitem(last=False)
