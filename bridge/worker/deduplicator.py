"""Recognise repeats by the deliveries that this process has in flight or has settled.

A delivery is in flight from its claim until it is settled, released or set aside.

A message is identified by its publisher's `message_id` and its body. A second delivery of it is a
repeat; the delivery before it is the original. Without an id, two equal bodies are two messages,
unless the broker marks the second as redelivered and the session of the original has ended since;
each original accounts for one such redelivery. If one of two equal deliveries was released
unsettled and the ack of the other is doubtful, the redelivery is taken for the released one, which
is certain to come again. Only the last acks on a lost connection are doubtful, at most as many as
the prefetch: the broker delivers no more before it has read an ack.

A retry copy may be in the queue twice, because it is published again if its channel closes before
the confirm. When one of the two is replaced by its next copy, the other one is a repeat.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from bridge.amqp.frames import Body
from bridge.amqp.publication import Publication
from bridge.config import WorkerSettings
from bridge.ttl_cache import MAX_ENTRIES, ExpiringMap, TtlCache
from bridge.worker.envelope import Envelope
from bridge.worker.outcomes import Dead, Retried
from bridge.worker.request import RequestReader, SendRequest
from bridge.worker.sent_messages import SENT_SECONDS, Accepted, SentMessages

# How long to expect the redelivery of a delivery that was released, or whose ack may be lost.
DOUBT_SECONDS: Final = 300.0
# How many messages may stay unacked because the broker refuses their copies.
MAX_SET_ASIDE: Final = 1_000
# A broker that is up redelivers within this time after a connection is lost.
COMES_AGAIN_SECONDS: Final = 2.0
_DIGEST_BYTES: Final = 16

# States of a delivery that may be redelivered. `unconfirmed`: its ack was written, and may be lost.
# `unacked`: its ack could not be written, so it is certain to be redelivered. `decided`: it was
# released unsettled, with an outcome that has to be applied before the ack. `undecided`: it was
# released without such an outcome. `put_off`: a repeat that was released before its copy was
# confirmed.
State = Literal["unconfirmed", "unacked", "decided", "undecided", "put_off"]


def unsure_ack_seconds(heartbeat_seconds: float) -> float:
    """Return for how long an ack may have been written to a connection that was already dead.

    It takes up to three heartbeats to notice a broker that hangs, and some time to close.
    """
    return min(3 * (heartbeat_seconds + 1) + 12, SENT_SECONDS)


class MessageIdentity(NamedTuple):
    """Which message a delivery carries, and which copy of it.

    `message` is a digest. `has_id`: it is identified by its publisher's id, or by its text.
    `try_of` distinguishes the copies of one publish from those of a later publish of the same
    message.
    """

    message: bytes
    has_id: bool
    copies: int
    try_of: str = ""


IdentityOf = Callable[[Envelope, Body], MessageIdentity]


def identity_function(settings: WorkerSettings, *, short_codes: bool) -> IdentityOf:
    """Return the function that identifies messages: by id and body, or by text and number.

    `short_codes`: whether short codes are valid recipients.
    """
    if settings.deduplicate_by != "text":
        return identity_of
    reader = RequestReader(settings, short_codes=short_codes)

    def by_text(envelope: Envelope, body: Body) -> MessageIdentity:
        with contextlib.suppress(Exception):  # invalid: reported when it is sent
            return identity_of_text(envelope, reader.read(body))
        return identity_of(envelope, body)

    return by_text


def pack_identity(identity: MessageIdentity) -> bytes:
    """Pack an identity into bytes for large maps; equal identities give equal bytes."""
    # `copies` and `try_of` come from headers, which a publisher may have set to anything.
    try_of = identity.try_of.encode("utf-8", "surrogatepass")
    return b"%d %d %d %b%b" % (
        identity.has_id,
        identity.copies,
        len(try_of),
        try_of,
        identity.message,
    )


def unpack_identity(packed: bytes) -> MessageIdentity:
    """Reverse `pack_identity`."""
    has_id, copies, length, rest = packed.split(b" ", 3)
    end = int(length)
    try_of = rest[:end].decode("utf-8", "surrogatepass")
    return MessageIdentity(rest[end:], has_id=has_id == b"1", copies=int(copies), try_of=try_of)


def identity_of(envelope: Envelope, body: Body) -> MessageIdentity:
    """Identify a message by id and body; one id with two bodies names two messages."""
    has_id = envelope.message_id is not None
    name = f"({envelope.message_id!a}, {None if has_id else envelope.published_at!a})"
    digest = hashlib.blake2b(name.encode() + b"\0", digest_size=_DIGEST_BYTES)
    digest.update(body)
    return MessageIdentity(digest.digest(), has_id, envelope.copies, envelope.try_of)


def identity_of_text(envelope: Envelope, request: SendRequest) -> MessageIdentity:
    """Identify a message by recipient, sender, text and extra fields, whatever its id."""
    members = [request.to, request.sender, request.text, request.model_extra]
    written = json.dumps(members, sort_keys=True).encode()
    message = hashlib.blake2b(written, digest_size=_DIGEST_BYTES).digest()
    return MessageIdentity(message, has_id=True, copies=envelope.copies, try_of=envelope.try_of)


@dataclass(frozen=True, slots=True)
class Released:
    """State of a delivery that returned to the queue unsettled: its envelope and its outcome.

    `replacement`: the copy published for the outcome; its confirm may still arrive.
    `waits_in_place`: the outcome is a retry in ordered mode, for which the delivery only has to
    wait.
    """

    envelope: Envelope
    outcome: Retried | Dead | None
    replacement: Publication | None = None
    waits_in_place: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether its outcome has to be applied before it may be acked."""
        return self.outcome is not None and not self.waits_in_place


class InFlight:
    """A delivery that is being processed, with or without an open request.

    `session_lost`: its consuming session has ended, so the broker will redeliver it. `redelivery`:
    the wait of that redelivery, if it has arrived.
    """

    __slots__ = ("_settled", "identity", "redelivery", "session_lost")

    def __init__(self, identity: MessageIdentity) -> None:
        self.identity = identity
        self.redelivery: object | None = None
        self.session_lost = False
        self._settled: asyncio.Future[bool] | None = None

    async def until_settled(self) -> bool:
        """Wait until it is settled (True) or released (False)."""
        # Created on demand, because few deliveries are waited for.
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._settled)

    def end(self, *, settled: bool) -> None:
        """Wake the deliveries that wait for it."""
        if self._settled is not None:
            self._settled.set_result(settled)


class New:
    """Verdict: a message to process. `released`: its state, if it was released before."""

    __slots__ = ("in_flight", "released")

    def __init__(self, in_flight: InFlight, released: Released | None) -> None:
        self.in_flight = in_flight
        self.released = released


class Repeat(NamedTuple):
    """Verdict: a delivery of a settled message, which only has to be acked.

    `first`: how the message was accepted, if the publisher sent it again and expects a reply; None
    for a redelivery.
    """

    first: Accepted | None


class WaitForOriginal(NamedTuple):
    """Verdict: the same message is in flight, and its end decides about this delivery.

    `first` is the delivery in flight, None if another worker has it. `is_redelivery`: this delivery
    is the redelivery of `first`, not a duplicate from the publisher.
    """

    first: InFlight | None
    is_redelivery: bool


Verdict = New | Repeat | WaitForOriginal


class Deduplicator:
    """Remembers deliveries in flight and settled, limited in number and time.

    `window_seconds`: how long after a message was sent an equal one is a repeat; see
    `SentMessages`. The clock stops while the broker is away, because redeliveries arrive only after
    that.
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
        # Packed identities of copies that were replaced here, or settled by another worker.
        self._replaced = TtlCache(SENT_SECONDS, self._now, min_size=MAX_ENTRIES)
        self._acks = 0
        # Packed identities with the sequence number of their ack. The acks are lost if the
        # connection is.
        self._acked: ExpiringMap[bytes, int] = ExpiringMap(self._unsure_ack_seconds, self._now)
        # Deliveries that may be redelivered, by state.
        self._known: ExpiringMap[tuple[State, MessageIdentity], Released | None] = ExpiringMap(
            DOUBT_SECONDS, self._now
        )
        # Deliveries that stay unacked until their connection ends.
        self._set_aside: list[tuple[MessageIdentity, Released]] = []

    def _now(self) -> float:
        now = self._clock() if self._away_since is None else self._away_since
        return now - self._away_seconds

    @property
    def expects_redeliveries(self) -> bool:
        """Whether a settled or decided delivery may be redelivered soon.

        Its ack could not be written, or was written just before the connection was lost. Only this
        process knows that the message must not be sent again.
        """
        return self._clock() < self._unsure_until or self._has_unacked

    @property
    def _has_unacked(self) -> bool:
        lost = any(one.session_lost for equal in self._in_flight.values() for one in equal)
        return lost or any(state in {"unacked", "decided"} for state, _ in self._known.live_keys())

    @property
    def has_released(self) -> bool:
        """Whether any delivery was released unsettled and has not been redelivered yet."""
        if self._set_aside:
            return True
        return any(state in {"decided", "undecided"} for state, _ in self._known.live_keys())

    @property
    def set_aside_count(self) -> int:
        """Number of deliveries that stay unacked until their connection ends."""
        return len(self._set_aside)

    def claim(self, identity: MessageIdentity, *, redelivered: bool) -> Verdict:
        """Return the verdict: process the delivery, ack it as a repeat, or wait for the original.

        A new message is claimed: it is in flight from now on, and its released state is taken.
        The caller must pass `New.in_flight` to `settle`, `release` or `set_aside`, report the ack
        of a `Repeat` with `note_repeat`, and pass a `WaitForOriginal` to `claim_after` or
        `release_repeat`.
        """
        first = self._first_in_flight(identity, redelivered=redelivered)
        if first is not None:
            # The broker redelivers nothing that is unacked on an open connection.
            return WaitForOriginal(first, redelivered and first.session_lost)
        accepted = self.sent.find(identity.message, redelivered=redelivered)
        if accepted is not None or self._is_replaced(identity):
            is_same = redelivered and self._take_same(identity, is_sent=accepted is not None)
            return Repeat(None if is_same else accepted)
        if redelivered and self._take_settled(identity):
            return Repeat(None)
        released = self.take_released(identity) if redelivered else None
        in_flight = InFlight(identity)
        self._in_flight.setdefault(identity.message, []).append(in_flight)
        return New(in_flight, released)

    async def claim_after(
        self, first: InFlight, identity: MessageIdentity, *, redelivered: bool
    ) -> Verdict:
        """Claim a delivery after the original, `first`, is settled or released."""
        is_redelivery = redelivered and first.session_lost
        wait = object()
        if is_redelivery:
            first.redelivery = wait
        try:
            is_settled = await first.until_settled()
        finally:
            if first.redelivery is wait:
                # If this wait is cancelled, the broker redelivers the message once more.
                first.redelivery = None
        if is_settled and is_redelivery:
            self._known.take(("unacked", identity))
            return Repeat(None)
        return self.claim(identity, redelivered=redelivered)

    def settle(self, in_flight: InFlight, accepted: Accepted | None, *, acked: bool) -> None:
        """Remember that a delivery is settled: accepted by the service, or replaced by a copy.

        `acked` says whether the ack was written; a written ack may still be lost.
        """
        identity = in_flight.identity
        is_known = accepted is not None and identity.has_id
        if accepted is not None and is_known:
            self.sent.add(identity.message, accepted)
        acked = acked and not in_flight.session_lost
        self._note_ack(identity, acked=acked, is_known=is_known)
        if accepted is None and identity.has_id and identity.copies:
            self._replaced.add(pack_identity(identity), b"")
        self._end(in_flight, settled=True)

    def note_repeat(self, identity: MessageIdentity, *, acked: bool) -> None:
        """Remember that a repeat was acked, because that ack may be lost as well."""
        self._note_ack(identity, acked=acked, is_known=identity.message in self.sent)

    def release(self, in_flight: InFlight, released: Released) -> None:
        """Remember a delivery that returns to the queue unsettled, and its outcome.

        If its outcome is decided, its redelivery must not be sent again.
        """
        self._note_released(in_flight.identity, released)
        self._end(in_flight, settled=False)

    def set_aside(self, in_flight: InFlight, released: Released) -> None:
        """Remember a delivery that stays unacked because the broker refuses its copy.

        It is redelivered when its session ends, possibly hours later. Until then no delivery waits
        for it.
        """
        self._set_aside.append((in_flight.identity, released))
        self._end(in_flight, settled=False)

    def release_repeat(self, identity: MessageIdentity, released: Released) -> None:
        """Remember a repeat that returns to the queue before its copy is confirmed."""
        self._known.add(("put_off", identity), released)

    def take_released_repeat(
        self, identity: MessageIdentity, *, redelivered: bool
    ) -> Released | None:
        """Return the state of a released repeat that was redelivered, and forget it."""
        taken = self._known.take(("put_off", identity)) if redelivered else None
        return None if taken is None else taken[0]

    def take_released(self, identity: MessageIdentity) -> Released | None:
        """Return the state of a released delivery that was redelivered, and forget it."""
        # Of two equal deliveries, take the one with a decided outcome first: it must not be sent.
        taken = self._known.take(("decided", identity)) or self._known.take(("undecided", identity))
        return None if taken is None else taken[0]

    # Questions and answers of other workers

    def knows(self, identity: MessageIdentity) -> bool:
        """Whether this process knows about a redelivery, so that no worker has to be asked."""
        return (
            self.is_working_on(identity)
            or self.is_settled(identity)
            or self._is_released(identity)
            or self._is_in_doubt(identity)
        )

    def learn(self, identity: MessageIdentity, released: Released | None) -> None:
        """Learn from another worker that a redelivery is settled (None), or was released."""
        if released is None:
            self._known.add(("unconfirmed", identity), None)
        else:
            self._note_released(identity, released)

    def is_settled(self, identity: MessageIdentity) -> bool:
        """Whether the message, or one of two equal copies, is settled: sent or replaced."""
        return identity.message in self.sent or self._is_replaced(identity)

    def learn_settled(self, identity: MessageIdentity) -> None:
        """Learn that another worker has settled one of two equal messages or copies."""
        # Without a retry copy, only the redelivered flag distinguishes a message from a later one
        # with its id.
        if not identity.copies:
            if not self._is_in_doubt(identity):
                self._known.add(("unconfirmed", identity), None)
        elif not self._is_replaced(identity):
            self._replaced.add(pack_identity(identity), b"")

    def is_working_on(self, identity: MessageIdentity) -> bool:
        """Whether a message that was redelivered to any worker is in flight here."""
        return self._first_in_flight(identity, redelivered=True) is not None

    def depends_on_session(self, identity: MessageIdentity) -> bool:
        """Whether `hand_on` must first prove that the session is alive.

        If the session is dead, the deliveries in flight or acked on it will be redelivered.
        """
        return (
            identity.message in self._in_flight
            or any(one == identity for one, _ in self._set_aside)
            or pack_identity(identity) in self._acked
        )

    def hand_on(self, identity: MessageIdentity) -> Repeat | Released | None:
        """Return this worker's record of a message that another worker received, and forget it."""
        if self.is_settled(identity):
            self._known.take(("unacked", identity))
            return Repeat(None)
        if self._take_settled(identity):
            return Repeat(None)
        return self.take_released(identity)

    # Sessions

    def session_lost(self, *, most_unacked: int) -> None:
        """Expect redelivery of everything in flight, and assume that the last acks are lost.

        A session ends with its connection, or when only its channel closes. `most_unacked`: upper
        bound of the deliveries that were unacked in the session. It includes the deliveries in
        flight; at most the rest are lost acks.
        """
        most_lost = most_unacked - len(self._set_aside)
        for identity, released in self._set_aside:
            self._note_released(identity, released)
        self._set_aside.clear()
        for in_flight in (one for equal in self._in_flight.values() for one in equal):
            most_lost -= not in_flight.session_lost
            in_flight.session_lost = True
            # A redelivery that waited for it will also be redelivered.
            in_flight.redelivery = None
        lost = [packed for packed, ack in self._acked.clear() if ack > self._acks - most_lost]
        for packed in lost:
            self._known.add(("unconfirmed", unpack_identity(packed)), None)
        if lost or self.sent.is_any_younger_than(self._unsure_ack_seconds):
            self._unsure_until = math.inf
        if self._away_since is None:
            self._away_since = self._clock()

    def consuming_again(self) -> None:
        """Note that the broker delivers again; redeliveries come first."""
        if self._away_since is not None:
            self._away_seconds += self._clock() - self._away_since
            self._away_since = None
        if self._unsure_until == math.inf:
            self._unsure_until = self._clock() + COMES_AGAIN_SECONDS

    def _first_in_flight(self, identity: MessageIdentity, *, redelivered: bool) -> InFlight | None:
        equal = self._in_flight.get(identity.message)
        if equal is None:
            return None
        if identity.has_id:
            return equal[0]
        if redelivered:
            for one in equal:
                if one.session_lost and one.redelivery is None:
                    return one
        return None

    def _is_replaced(self, identity: MessageIdentity) -> bool:
        return identity.copies != 0 and self._replaced.get(pack_identity(identity)) is not None

    def _is_released(self, identity: MessageIdentity) -> bool:
        known = self._known
        return ("decided", identity) in known or ("undecided", identity) in known

    def _note_released(self, identity: MessageIdentity, released: Released) -> None:
        state: State = "decided" if released.is_decided else "undecided"
        self._known.add((state, identity), released)

    def _is_in_doubt(self, identity: MessageIdentity) -> bool:
        known = self._known
        return ("unconfirmed", identity) in known or ("unacked", identity) in known

    def _take_settled(self, identity: MessageIdentity) -> bool:
        """Whether a redelivery is settled as far as is known; each settled delivery counts once."""
        if self._is_released(identity):
            return False
        known = self._known
        taken = known.take(("unacked", identity)) or known.take(("unconfirmed", identity))
        return taken is not None

    def _take_same(self, identity: MessageIdentity, *, is_sent: bool) -> bool:
        """Whether a redelivery is the settled delivery itself, rather than a duplicate.

        A duplicate, sent by the publisher and returned by another worker, must be answered.
        """
        if self._known.take(("unacked", identity)) is not None:
            return True
        return is_sent and self._known.take(("unconfirmed", identity)) is not None

    def _note_ack(self, identity: MessageIdentity, *, acked: bool, is_known: bool) -> None:
        """Note the ack of a delivery; `is_known`: its redelivery is recognised by its id."""
        if not acked:
            self._known.add(("unacked", identity), None)
            return
        self._acks += 1
        if not is_known:
            self._acked.add(pack_identity(identity), self._acks)

    def _end(self, in_flight: InFlight, *, settled: bool) -> None:
        message = in_flight.identity.message
        equal = self._in_flight[message]
        equal.remove(in_flight)
        if not equal:
            del self._in_flight[message]
        in_flight.end(settled=settled)
