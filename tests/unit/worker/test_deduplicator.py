"""Redeliveries: what is a repeat of something done, and what is another message."""

import asyncio
import gc
import json
import random
import time
import uuid

import pytest

from bridge.config import WorkerSettings
from bridge.ttl_cache import MAX_ENTRIES
from bridge.worker.deduplicator import (
    COMES_AGAIN_SECONDS,
    DOUBT_SECONDS,
    Deduplicator,
    InFlight,
    MessageIdentity,
    New,
    Released,
    Repeat,
    Verdict,
    WaitForOriginal,
    identity_function,
    identity_of,
    identity_of_text,
    pack_identity,
    unpack_identity,
    unsure_ack_seconds,
)
from bridge.worker.envelope import Envelope
from bridge.worker.outcomes import Dead
from bridge.worker.request import OpenSendRequest, SendRequest
from bridge.worker.sent_messages import LEAST_OWN, SENT_SECONDS, Accepted
from tests.clock import Clock

BODY = b'{"to":"+491713920001","from":"Acme","text":"Hi"}'
DECISION = Released(
    Envelope(key="k", message_id="m", published_at=None, first_delivered_at=0.0),
    Dead(reason="refused", detail="no"),
)

ACCEPTED = Accepted(attempts=2, status=202, provider_id="sms-1", at=1_800_000_000.123)


NOTHING_DECIDED = Released(DECISION.envelope, None)


async def claim(
    known: Deduplicator, one: MessageIdentity, *, redelivered: bool, may_wait: bool = True
) -> Verdict:
    verdict = known.claim(one, redelivered=redelivered)
    while isinstance(verdict, WaitForOriginal) and (may_wait or verdict.is_redelivery):
        assert verdict.first is not None
        verdict = await known.claim_after(verdict.first, one, redelivered=redelivered)
    return verdict


class Book:
    """A deduplicator whose deliveries are settled by identity, and whose repeats are acked."""

    def __init__(self, clock: Clock) -> None:
        self._deduplicator = Deduplicator(heartbeat_seconds=10, clock=clock)
        self._in_flight: dict[MessageIdentity, list[InFlight]] = {}
        self._released: dict[MessageIdentity, Released] = {}
        self.consuming_again = self._deduplicator.consuming_again

    @property
    def expects_redeliveries(self) -> bool:
        return self._deduplicator.expects_redeliveries

    def session_lost(self, *, and_back: bool = True, most_unacked: int = MAX_ENTRIES) -> None:
        self._deduplicator.session_lost(most_unacked=most_unacked)
        if and_back:
            self.consuming_again()

    async def take(self, one: MessageIdentity, *, redelivered: bool, acked: bool = True) -> bool:
        """Say whether a delivery is to be worked on; `acked`, whether a repeat could be acked."""
        match await claim(self._deduplicator, one, redelivered=redelivered):
            case New(in_flight=in_flight, released=released):
                self._in_flight.setdefault(one, []).append(in_flight)
                if released is not None:
                    self._released[one] = released
                return True
            case _:
                self._deduplicator.note_repeat(one, acked=acked)
                return False

    async def take_repeat(self, one: MessageIdentity, *, redelivered: bool) -> Accepted | None:
        repeat = await claim(self._deduplicator, one, redelivered=redelivered)
        assert isinstance(repeat, Repeat)
        self._deduplicator.note_repeat(one, acked=True)
        return repeat.first

    def settle(self, one: MessageIdentity, *, sent: bool, acked: bool) -> None:
        in_flight = self._in_flight[one].pop(0)
        self._deduplicator.settle(in_flight, ACCEPTED if sent else None, acked=acked)

    def release(self, one: MessageIdentity, released: Released | None) -> None:
        self._deduplicator.release(self._in_flight[one].pop(0), released or NOTHING_DECIDED)

    def set_aside(self, one: MessageIdentity, released: Released) -> None:
        self._deduplicator.set_aside(self._in_flight[one].pop(0), released)

    def recall(self, one: MessageIdentity) -> Released | None:
        """Return how a redelivery goes on, whether it was taken already or not."""
        return self._released.pop(one, None) or self._deduplicator.take_released(one)


@pytest.fixture
def deduplicator(clock: Clock) -> Book:
    return Book(clock)


def identity(
    message_id: str | None = "m-1",
    *,
    body: bytes = BODY,
    copies: int = 0,
    try_of: str = "",
    published_at: float | None = None,
) -> MessageIdentity:
    envelope = Envelope(
        key=message_id or "random",
        message_id=message_id,
        published_at=published_at,
        first_delivered_at=0.0,
        copies=copies,
        try_of=try_of,
    )
    return identity_of(envelope, body)


NAMED = identity("m-1")
NAMELESS = identity(None)
each_kind = pytest.mark.parametrize("one", [NAMED, NAMELESS], ids=["with id", "without id"])


async def others_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def done(
    deduplicator: Book, one: MessageIdentity, *, sent: bool = True, acked: bool = True
) -> None:
    assert await deduplicator.take(one, redelivered=False)
    deduplicator.settle(one, sent=sent, acked=acked)


# --- The identity of a message -------------------------------------------------------------------

MEMBERS = {"to": "+491713920001", "from": "Acme", "text": "Hi"}


def make_envelope(message_id: str | None, *, published_at: float | None = None) -> Envelope:
    return Envelope(
        key="k", message_id=message_id, published_at=published_at, first_delivered_at=0.0
    )


def by_text(message_id: str | None = None, **changed: str) -> MessageIdentity:
    request: SendRequest = OpenSendRequest.model_validate(MEMBERS | changed)
    return identity_of_text(make_envelope(message_id), request)


def test_an_id_with_its_body_names_a_message() -> None:
    """The same id with another body is another message; without an id it is not named."""
    first = identity_of(make_envelope("a"), b"1")

    assert first == identity_of(make_envelope("a"), b"1")
    assert first.message not in {
        identity.message
        for identity in (
            identity_of(make_envelope("a"), b"2"),
            identity_of(make_envelope("b"), b"1"),
            identity_of(make_envelope(None), b"1"),
        )
    }
    assert (first.has_id, identity_of(make_envelope(None), b"1").has_id) == (True, False)


def test_when_it_was_published_matters_without_an_id() -> None:
    """A publisher that repeats an id means the same message, whenever it says so."""
    moments = (None, 1.0, 2.0)
    named = {identity_of(make_envelope("a", published_at=at), b"1") for at in moments}
    unnamed = {identity_of(make_envelope(None, published_at=at), b"1") for at in moments}

    assert (len(named), len(unnamed)) == (1, 3)


def test_copies_are_the_same_message() -> None:
    """All copies of a message are one message, and each has its own identity."""
    first = identity_of(make_envelope("a"), b"1")
    copy = identity_of(make_envelope("a")._replace(copies=1), b"1")

    assert first != copy
    assert first.message == copy.message


def test_equal_texts_are_one_message_whatever_their_ids() -> None:
    """By its text a message without an id is as good as named."""
    assert by_text("a") == by_text("b") == by_text(None)
    assert by_text().has_id


def test_equal_texts_to_a_short_code_are_one_message() -> None:
    """Where the service sends to short codes."""
    settings = WorkerSettings.model_validate({"deduplicate": "1h", "deduplicate_by": "text"})
    body = json.dumps(MEMBERS | {"to": "12345"}).encode()
    find_identity = identity_function(settings, short_codes=True)

    assert (
        find_identity(make_envelope("a"), body).message
        == find_identity(make_envelope("b"), body).message
    )


@pytest.mark.parametrize("member", ["to", "from", "text", "reference"])
def test_another_member_is_another_message(member: str) -> None:
    """Number, sender, text, and what is forwarded beside them, all have to be equal."""
    assert by_text().message != by_text(**{member: "+491713920002"}).message


@pytest.mark.parametrize(
    "identity",
    [
        MessageIdentity(b"1234567890abcdef", has_id=True, copies=0),
        MessageIdentity(b" 1 2 3\0\xff", has_id=False, copies=3, try_of="2026-01-01T09:00:00.000"),
        MessageIdentity(b"", has_id=True, copies=-(2**63), try_of=" \udcff\0 ä"),
        MessageIdentity(b"x", has_id=False, copies=2**64, try_of="1 x"),
    ],
)
def test_an_entry_is_the_same_as_bytes(identity: MessageIdentity) -> None:
    """Whatever a publisher has written into the headers of copies."""
    assert unpack_identity(pack_identity(identity)) == identity


def test_what_differs_differs_as_bytes() -> None:
    """No two entries are one where they are remembered as bytes."""
    entries = {
        MessageIdentity(message, has_id, copies, try_of)
        for message in (b"a", b"1 a", b"")
        for has_id in (True, False)
        for copies in (0, 1, 11)
        for try_of in ("", "1", "a", "1 a")
    }

    assert len({pack_identity(identity) for identity in entries}) == len(entries)


# --- Histories of one message --------------------------------------------------------------------

UNSURE = unsure_ack_seconds(10)
LONG = 10 * SENT_SECONDS
LATER = 2 * COMES_AGAIN_SECONDS
COPY = identity("m-1", copies=1)

# The steps of each history; it holds for these identities. `new`, `again`: a delivery, or a
# redelivery, is processed. `repeat`, `known`: it is a repeat. `new-waits`, `again-waits`: it waits,
# until the next `taken`, `dropped` or `cancelled`. `sent` to `set-aside`: how the oldest delivery
# in progress ends. `recalled`, `undecided`, `nothing`: what is known of a released delivery.
# A number is a time in seconds.
HISTORIES: dict[str, tuple[str, tuple[MessageIdentity, ...]]] = {
    "unknown": ("new", (NAMED, NAMELESS)),
    "unknown redelivery": ("again", (NAMED, NAMELESS)),
    "released": ("new released again", (NAMED, NAMELESS)),
    "in flight": ("new new", (NAMELESS,)),
    # Sent
    "sent id": ("new sent repeat repeat known known", (NAMED,)),
    "sent id, ack not written": ("new unacked known repeat known", (NAMED,)),
    "sent id is known": (f"new sent {SENT_SECONDS - 1} known", (NAMED,)),
    "sent id is forgotten": (f"new sent {SENT_SECONDS} again", (NAMED,)),
    "same words": ("new sent new sent again", (NAMELESS,)),
    "ack not written": ("new unacked known again", (NAMELESS,)),
    "connection lost": ("new sent lost known again", (NAMELESS,)),
    "same words after a lost ack": ("new unacked new sent known again", (NAMELESS,)),
    "two lost acks": ("new unacked new unacked known known again", (NAMELESS,)),
    "ack of a repeat lost": ("new unacked known lost known", (NAMELESS,)),
    # How long the ack is in doubt
    "ack shortly before the loss": (f"new sent {UNSURE - 1} lost known", (NAMELESS,)),
    "ack long before the loss": (f"new sent {UNSURE} lost again", (NAMELESS,)),
    "within the doubt": (f"new unacked {DOUBT_SECONDS - 1} known", (NAMELESS,)),
    "after the doubt": (f"new unacked {DOUBT_SECONDS} again", (NAMELESS,)),
    "doubt counts from the loss": (
        f"new sent {UNSURE - 1} lost {DOUBT_SECONDS - 1} known",
        (NAMELESS,),
    ),
    "each doubt has its time": (
        f"new unacked known {DOUBT_SECONDS / 2} new unacked {DOUBT_SECONDS / 2 + 0.1} known",
        (NAMELESS,),
    ),
    # Replaced by a copy
    "replaced, ack not written": ("new replaced-unacked known", (NAMED, NAMELESS)),
    "replaced, connection lost": ("new replaced lost known", (NAMED, NAMELESS)),
    "replaced id is published again": ("new replaced new", (NAMED,)),
    "copy there twice": ("new replaced repeat known", (COPY,)),
    "copy released": ("new released new", (COPY,)),
    "copies without an id": ("new replaced new", (identity(None, copies=1),)),
    # Decided and not settled
    "decided": ("new decided again recalled nothing", (NAMED, NAMELESS)),
    "decided twice": ("new decided again recalled decided again recalled", (NAMED,)),
    "undecided": ("new released again undecided", (NAMED,)),
    "decided, same words": ("new decided new again recalled nothing", (NAMELESS,)),
    "decided, a day later": ("new decided 86400 nothing", (NAMELESS,)),
    "decided before undecided": ("new released new decided recalled undecided", (NAMELESS,)),
    "undecided before in doubt": ("new sent new lost released again undecided known", (NAMELESS,)),
    "undecided before unacked": (
        "new unacked new lost released again undecided known",
        (NAMELESS,),
    ),
    "set aside": (
        f"new set-aside not-expected {10 * DOUBT_SECONDS} lost expected again recalled nothing",
        (NAMED, NAMELESS),
    ),
    # While the original is in flight
    "redelivery waits": ("new lost again-waits", (NAMED, NAMELESS)),
    "sent meanwhile": ("new lost again-waits sent dropped", (NAMED, NAMELESS)),
    "sent meanwhile, ack lost": ("new lost again-waits unacked dropped", (NAMED, NAMELESS)),
    "replaced meanwhile": ("new lost again-waits replaced dropped", (NAMED, NAMELESS)),
    "replaced, ack lost": ("new lost again-waits replaced-unacked dropped", (NAMED, NAMELESS)),
    "released meanwhile": ("new lost again-waits released taken", (NAMED, NAMELESS)),
    "one of several is taken": ("new again-waits again-waits released taken", (NAMED,)),
    "published again, sent": ("new new-waits sent dropped", (NAMED,)),
    "published again, not sent": ("new new-waits replaced taken", (NAMED,)),
    "copy there twice at once": ("new new-waits replaced dropped", (COPY,)),
    "another worker's repeat": ("new again-waits replaced taken", (NAMED,)),
    "ack of the original": (
        "new again-waits replaced taken lost replaced-unacked known known",
        (NAMED,),
    ),
    "another worker's same words": ("new again sent", (NAMELESS,)),
    "two in flight": (
        "new new lost again-waits again-waits unacked unacked dropped dropped",
        (NAMELESS,),
    ),
    "one of two in flight": ("new new unacked lost again-waits known", (NAMELESS,)),
    "wait is cancelled": ("new again-waits again-waits cancelled sent dropped", (NAMED,)),
    "cancelled and redelivered": (
        "new lost again-waits cancelled again-waits unacked dropped",
        (NAMED, NAMELESS),
    ),
    "lost twice": (
        "new lost again-waits cancelled lost again-waits unacked dropped",
        (NAMELESS,),
    ),
    # Which redeliveries a drain waits for
    "connection alive": ("new sent not-expected", (NAMED,)),
    "sent before the loss": (
        f"new sent away {LATER} expected back {LATER / 2 - 0.1} expected 0.2 not-expected",
        (NAMED,),
    ),
    "registered twice": (
        f"new sent away back {LATER / 2 - 0.1} back 0.2 not-expected",
        (NAMED,),
    ),
    "owed an ack": (
        f"new lost unacked {LATER} expected known-unacked expected known not-expected",
        (NAMED, NAMELESS),
    ),
    "owed an outcome": (f"new decided lost {LATER} expected again recalled not-expected", (NAMED,)),
    "owed nothing": (f"new lost released {LATER} not-expected", (NAMED,)),
    # A broker that is away: time stands still
    "away, decided": (f"new away decided {LONG} back again recalled", (NAMED,)),
    "away": (f"new away unacked {LONG} back known", (NAMED, NAMELESS)),
    "away twice": (f"new away unacked {LONG} back away {LONG} back known", (NAMELESS,)),
    "forgotten after it is back": (
        f"new away unacked {LONG} back {DOUBT_SECONDS} again",
        (NAMELESS,),
    ),
}


class History:
    """What happens to one message, step by step."""

    def __init__(self, deduplicator: Book, clock: Clock, one: MessageIdentity) -> None:
        self._deduplicator = deduplicator
        self._clock = clock
        self._one = one
        self._waiting: list[asyncio.Task[bool]] = []

    async def play(self, steps: list[str]) -> None:
        """Do the steps; all waits that have ended must have been expected."""
        for step in steps:
            match step:
                case "new" | "again" | "repeat" | "known" | "known-unacked":
                    await self._take(step)
                case "new-waits" | "again-waits" | "taken" | "dropped" | "cancelled":
                    self._wait(step)
                case "lost" | "away":
                    self._deduplicator.session_lost(and_back=step == "lost")
                case "back":
                    self._deduplicator.consuming_again()
                case "recalled" | "undecided" | "nothing":
                    known = {"recalled": DECISION, "undecided": NOTHING_DECIDED, "nothing": None}
                    assert self._deduplicator.recall(self._one) is known[step]
                case "expected" | "not-expected":
                    assert self._deduplicator.expects_redeliveries == (step == "expected")
                case _ if step[0].isdigit():
                    self._clock.now += float(step)
                case _:
                    self._end(step)
            await others_run()
        assert not [task for task in self._waiting if task.done()]
        for task in self._waiting:
            task.cancel()

    async def _take(self, step: str) -> None:
        taken = await self._deduplicator.take(
            self._one, redelivered=step not in {"new", "repeat"}, acked=step != "known-unacked"
        )
        assert taken == (step in {"new", "again"}), step

    def _wait(self, step: str) -> None:
        if step.endswith("-waits"):
            taking = self._deduplicator.take(self._one, redelivered=step == "again-waits")
            self._waiting.append(asyncio.create_task(taking))
        elif step == "cancelled":
            self._waiting.pop(0).cancel()
        else:
            ended = next(task for task in self._waiting if task.done())
            self._waiting.remove(ended)
            assert ended.result() == (step == "taken")

    def _end(self, step: str) -> None:
        deduplicator, one = self._deduplicator, self._one
        match step:
            case "sent" | "unacked":
                deduplicator.settle(one, sent=True, acked=step == "sent")
            case "replaced" | "replaced-unacked":
                deduplicator.settle(one, sent=False, acked=step == "replaced")
            case "released" | "decided":
                deduplicator.release(one, DECISION if step == "decided" else NOTHING_DECIDED)
            case _:
                assert step == "set-aside"
                deduplicator.set_aside(one, DECISION)


@pytest.mark.parametrize(
    ("history", "one"),
    [
        pytest.param(history, one, id=f"{name}, {'with' if one.has_id else 'without'} id")
        for name, (history, entries) in HISTORIES.items()
        for one in entries
    ],
)
async def test_history(
    deduplicator: Book, clock: Clock, history: str, one: MessageIdentity
) -> None:
    """A redelivery is a repeat if its original is settled, as far as this process can know."""
    await History(deduplicator, clock, one).play(history.split())


async def test_copy_of_a_sent_id_is_a_repeat(deduplicator: Book) -> None:
    """A retry copy of a message that was sent after all is not sent again."""
    await done(deduplicator, NAMED)

    assert not await deduplicator.take(COPY, redelivered=False)


class Model:
    """A broker and a worker with one message, or several equal ones without an id.

    The broker delivers a message again if its connection is lost before it has read the ack.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.known = Deduplicator(heartbeat_seconds=10, clock=Clock())
        self.one = self.chance.choice([NAMED, NAMELESS])
        self.messages = 1 if self.one.has_id else self.chance.randint(1, 3)
        self.sent = 0
        self.queue = [False] * self.messages
        self.held: list[InFlight] = []
        self.waiting: list[asyncio.Task[Verdict]] = []
        self.unread = 0
        # What is worked on though its connection is lost.
        self.lost: list[InFlight] = []

    def note(self, verdict: Verdict) -> None:
        if isinstance(verdict, New):
            self.held.append(verdict.in_flight)
        else:
            self.known.note_repeat(self.one, acked=True)
            self.unread += 1

    def deliver(self) -> None:
        if self.queue:
            redelivered = self.queue.pop(0)
            identifying = claim(self.known, self.one, redelivered=redelivered)
            self.waiting.append(asyncio.create_task(identifying))

    def settle(self) -> None:
        if self.held:
            self.sent += 1
            self.known.settle(self.held.pop(0), ACCEPTED, acked=True)
            self.unread += 1

    def settle_lost(self) -> None:
        """End a message whose connection is lost: it is sent, or given back."""
        if self.lost:
            in_flight = self.lost.pop(0)
            if self.chance.random() < 0.5:
                self.known.release(in_flight, NOTHING_DECIDED)
            else:
                self.sent += 1
                self.known.settle(in_flight, ACCEPTED, acked=False)

    def read_acks(self) -> None:
        self.unread = 0

    def lose(self) -> None:
        again = len(self.held) + len(self.waiting) + self.unread
        self.known.session_lost(most_unacked=again)
        self.known.consuming_again()
        for task in self.waiting:
            task.cancel()
        self.lost += self.held
        self.held, self.waiting, self.unread = [], [], 0
        self.queue += [True] * again

    def cancel(self) -> None:
        """Give up a wait; the broker delivers the message once more."""
        if self.waiting:
            self.waiting.pop().cancel()
            self.queue.append(True)

    async def play(self, steps: int) -> None:
        usual = [self.deliver, self.deliver, self.settle, self.settle_lost, self.read_acks]
        for _ in range(steps):
            self.chance.choice([*usual, self.lose, self.cancel])()
            await self._identify()
        while self.queue or self.held or self.waiting or self.lost:
            self.deliver()
            self.settle()
            self.settle_lost()
            await self._identify()

    async def _identify(self) -> None:
        await others_run()
        done = [task for task in self.waiting if task.done()]
        self.waiting = [task for task in self.waiting if not task.done()]
        for task in done:
            self.note(task.result())


async def test_random_histories() -> None:
    """Whatever happens to acks and connections, each message is sent, and none twice."""
    for seed in range(300):
        model = Model(seed)
        await model.play(25)
        assert model.sent == model.messages, seed


# --- Sent, with an id ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accepted",
    [
        ACCEPTED,
        Accepted(attempts=2**63, status=0, provider_id=None, at=0.0),
        Accepted(attempts=1, status=299, provider_id="x" * 255, at=1.5),
    ],
    ids=["usual", "extreme", "long"],
)
async def test_repeat_knows_how_the_first_was_accepted(clock: Clock, accepted: Accepted) -> None:
    """Whoever sends an id again is told what became of the first, each time."""
    deduplicator = Deduplicator(heartbeat_seconds=10, clock=clock)
    verdict = await claim(deduplicator, NAMED, redelivered=False)
    assert isinstance(verdict, New)
    deduplicator.settle(verdict.in_flight, accepted, acked=True)

    assert [await claim(deduplicator, NAMED, redelivered=False) for _ in range(2)] == [
        Repeat(accepted)
    ] * 2


async def test_same_delivery_again_is_not_answered(deduplicator: Book) -> None:
    """A delivery whose ack was lost has had its answer; one that is sent again then has not."""
    await done(deduplicator, NAMED, acked=False)

    assert await deduplicator.take_repeat(NAMED, redelivered=False) == ACCEPTED
    assert await deduplicator.take_repeat(NAMED, redelivered=True) is None
    assert await deduplicator.take_repeat(NAMED, redelivered=True) == ACCEPTED


@pytest.mark.parametrize("redelivered", [False, True], ids=["new", "from another worker"])
async def test_repeat_during_the_first_is_answered(
    deduplicator: Book, *, redelivered: bool
) -> None:
    """A repeat that waited for the first, whose connection lives, is told what became of it."""
    await deduplicator.take(NAMED, redelivered=False)
    repeat = asyncio.create_task(deduplicator.take_repeat(NAMED, redelivered=redelivered))
    await others_run()
    deduplicator.settle(NAMED, sent=True, acked=True)

    assert await repeat == ACCEPTED


async def test_redelivery_during_the_first_is_not_answered(deduplicator: Book) -> None:
    """The delivery that comes again while it is being sent is answered once, by the first."""
    await deduplicator.take(NAMED, redelivered=False)
    deduplicator.session_lost()
    repeat = asyncio.create_task(deduplicator.take_repeat(NAMED, redelivered=True))
    await others_run()
    deduplicator.settle(NAMED, sent=True, acked=False)

    assert await repeat is None


# --- Sent, without an id -------------------------------------------------------------------------


@pytest.mark.parametrize(("most_unacked", "is_new"), [(1, True), (2, False)])
async def test_only_the_last_acks_are_in_doubt(
    deduplicator: Book, most_unacked: int, *, is_new: bool
) -> None:
    """An ack has been read when the broker has delivered more than the prefetch since."""
    await done(deduplicator, NAMELESS)
    await done(deduplicator, NAMED)
    deduplicator.session_lost(most_unacked=most_unacked)

    assert await deduplicator.take(NAMELESS, redelivered=True) is is_new


@pytest.mark.parametrize(("held", "is_new"), [(0, False), (1, True)])
async def test_what_is_held_is_a_part_of_the_prefetch(
    deduplicator: Book, held: int, *, is_new: bool
) -> None:
    """Of two deliveries at a time of which one is held, one is the last ack that can be lost."""
    await done(deduplicator, NAMELESS)
    await done(deduplicator, identity("m-2"))
    for _ in range(held):
        await deduplicator.take(identity("m-3"), redelivered=False)
    deduplicator.session_lost(most_unacked=2)

    assert await deduplicator.take(NAMELESS, redelivered=True) is is_new


async def test_acks_of_repeats_count_too(deduplicator: Book) -> None:
    """The ack of a repeat is read in its turn, as any other."""
    await done(deduplicator, NAMED)
    await done(deduplicator, NAMELESS)
    assert not await deduplicator.take(NAMED, redelivered=False)
    deduplicator.session_lost(most_unacked=1)

    assert await deduplicator.take(NAMELESS, redelivered=True)


# --- Replaced by a copy --------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("acked", [True, False], ids=["acked", "ack lost"])
async def test_copy_is_taken(deduplicator: Book, one: MessageIdentity, *, acked: bool) -> None:
    """The copy that replaced a delivery is worked on when its time comes."""
    await done(deduplicator, one, sent=False, acked=acked)
    copied = one._replace(copies=one.copies + 1)

    assert await deduplicator.take(copied, redelivered=False)


async def test_copy_of_a_later_publish_is_taken(deduplicator: Book) -> None:
    """Whoever publishes an id again, because it was not sent, has all its tries once more."""
    await done(deduplicator, identity("m-1", copies=1, try_of="1795324586.386"), sent=False)
    await done(deduplicator, identity("m-1"), sent=False)

    assert await deduplicator.take(
        identity("m-1", copies=1, try_of="1795324600.007"), redelivered=False
    )


# --- In flight -----------------------------------------------------------------------------------


@pytest.mark.parametrize("redelivered", [False, True], ids=["new", "from another worker"])
def test_repeat_of_a_message_in_flight_has_to_wait(clock: Clock, *, redelivered: bool) -> None:
    """While the connection of the first lives, another delivery of its message is another one."""
    deduplicator = Deduplicator(heartbeat_seconds=10, clock=clock)
    first = deduplicator.claim(NAMED, redelivered=False)
    assert isinstance(first, New)

    wait = deduplicator.claim(NAMED, redelivered=redelivered)
    assert wait == WaitForOriginal(first.in_flight, is_redelivery=False)
    deduplicator.settle(first.in_flight, ACCEPTED, acked=True)
    assert deduplicator.claim(NAMED, redelivered=False) == Repeat(ACCEPTED)


async def test_redelivery_waits_for_itself_in_any_case(clock: Clock) -> None:
    """The same delivery once more, after a lost connection, has nowhere else to go."""
    deduplicator = Deduplicator(heartbeat_seconds=10, clock=clock)
    first = await claim(deduplicator, NAMED, redelivered=False)
    assert isinstance(first, New)
    deduplicator.session_lost(most_unacked=1)
    again = asyncio.create_task(claim(deduplicator, NAMED, redelivered=True, may_wait=False))
    await others_run()
    assert not again.done()
    deduplicator.settle(first.in_flight, ACCEPTED, acked=False)

    assert await again == Repeat(None)


# --- Decided and not settled ---------------------------------------------------------------------


async def decided(deduplicator: Book, one: MessageIdentity) -> None:
    """Take a delivery, decide about it and give it back unsettled."""
    await deduplicator.take(one, redelivered=False)
    deduplicator.release(one, DECISION)


async def test_what_is_known_of_a_repeat_is_recalled_for_a_repeat(clock: Clock) -> None:
    """The first message and its repeat are equal in all: each goes on with its own."""
    deduplicator = Deduplicator(heartbeat_seconds=10, clock=clock)
    deduplicator.release_repeat(NAMED, DECISION)

    assert deduplicator.take_released(NAMED) is None
    assert deduplicator.take_released_repeat(NAMED, redelivered=False) is None
    assert deduplicator.take_released_repeat(NAMED, redelivered=True) is DECISION
    assert deduplicator.take_released_repeat(NAMED, redelivered=True) is None


# --- Bounds --------------------------------------------------------------------------------------


async def test_oldest_entries_are_forgotten_first(deduplicator: Book) -> None:
    """The deduplicator holds the last messages that were sent, and some more."""
    room = LEAST_OWN + LEAST_OWN // 4
    entries = [
        MessageIdentity(str(number).encode(), has_id=True, copies=0) for number in range(room + 1)
    ]
    for one in entries:
        await done(deduplicator, one)
    known = [
        not await deduplicator.take(one, redelivered=True)
        for one in (entries[0], entries[-LEAST_OWN])
    ]

    assert known == [False, True]


async def test_a_search_for_garbage_has_nothing_to_visit(clock: Clock) -> None:
    """What is remembered of sent messages is no object that could be part of a cycle."""
    deduplicator, count = Deduplicator(heartbeat_seconds=10, clock=clock), 5000
    gc.collect()
    before = len(gc.get_objects())
    for number in range(count):
        one = MessageIdentity(number.to_bytes(16), has_id=bool(number % 2), copies=0)
        verdict = await claim(deduplicator, one, redelivered=False)
        assert isinstance(verdict, New)
        deduplicator.settle(
            verdict.in_flight, ACCEPTED._replace(provider_id=str(uuid.uuid4())), acked=True
        )
    del verdict

    assert len(gc.get_objects()) - before < count / 10


async def _settle_and_lose(clock: Clock, entries: list[MessageIdentity]) -> float:
    """Return the processor's seconds for settling all of these and losing their connection."""
    deduplicator, began = Deduplicator(heartbeat_seconds=10, clock=clock), time.process_time()
    for one in entries:
        verdict = await claim(deduplicator, one, redelivered=False)
        assert isinstance(verdict, New)
        deduplicator.settle(verdict.in_flight, ACCEPTED, acked=True)
    deduplicator.session_lost(most_unacked=len(entries))
    return time.process_time() - began


async def test_equal_messages_cost_no_more_than_others(clock: Clock) -> None:
    """One message that is published ten thousands of times without an id holds nothing up."""
    others = [
        MessageIdentity(number.to_bytes(16), has_id=False, copies=0) for number in range(5_000)
    ]
    equal = [MessageIdentity(b"one", has_id=False, copies=0)] * len(others)

    # The least of three each: a search for garbage may fall into any one.
    runs = [
        (await _settle_and_lose(clock, equal), await _settle_and_lose(clock, others))
        for _ in range(3)
    ]

    assert min(cost for cost, _ in runs) < 5 * min(cost for _, cost in runs)


async def test_oldest_decisions_are_forgotten_first(deduplicator: Book) -> None:
    """The deduplicator holds a fixed number of decisions and forgets the oldest."""
    entries = [
        MessageIdentity(str(number).encode(), has_id=True, copies=0)
        for number in range(MAX_ENTRIES + 1)
    ]
    for one in entries:
        await decided(deduplicator, one)
    known = [deduplicator.recall(one) is not None for one in entries[:2]]

    assert known == [False, True]


# --- A broker that is away -----------------------------------------------------------------------


@pytest.mark.parametrize(("heartbeat", "seconds"), [(10, 40), (60, 185)])
async def test_doubt_about_acks_follows_the_heartbeat(
    clock: Clock, heartbeat: float, seconds: float
) -> None:
    """The slower a dead connection is noticed, the older an ack may be that was lost with it."""
    deduplicator = Deduplicator(heartbeat_seconds=heartbeat, clock=clock)
    verdict = await claim(deduplicator, NAMELESS, redelivered=False)
    assert isinstance(verdict, New)
    deduplicator.settle(verdict.in_flight, ACCEPTED, acked=True)
    clock.now += seconds
    deduplicator.session_lost(most_unacked=1)
    deduplicator.consuming_again()

    assert isinstance(await claim(deduplicator, NAMELESS, redelivered=True), Repeat)
