"""Workers that hear each other without a broker, on a clock that leaps; each has a deduplicator."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from bridge.amqp.properties import Properties
from bridge.worker.cluster.answering import Answerer
from bridge.worker.cluster.asking import Asker
from bridge.worker.cluster.beats import REMEMBERED
from bridge.worker.cluster.deduplication import ClusterDeduplicator
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Beat, Bye, Facts, Hello, read_message, write_message
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.cluster.roster import Roster
from bridge.worker.deduplicator import Deduplicator, InFlight, New, Released, Verdict, Wait
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import COPIES, FIRST_DELIVERED_AT
from bridge.worker.message_identity import MessageIdentity, identity_of
from bridge.worker.outcomes import Outcome
from bridge.worker.sent_messages import Accepted
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery

BODY = b'{"to":"+491713920001","from":"Acme","text":"Hi"}'
MOST_SECONDS = 10.0
DELAYS_SECONDS = (5.0, 30.0)
HEARD_AFTER_SECONDS = 0.01
ACCEPTED = Accepted(attempts=1, status=202, provider_id="sms-1", at=1_800_000_000.0)


class Fanout:
    """What stands in for the exchange: hands each message to all that are on it."""

    def __init__(self) -> None:
        self.members: list[Colleague] = []
        self.said: list[tuple[str, str]] = []
        self.loses: Callable[[str, str], bool] = lambda _sender, _kind: False

    def say(self, sender: "Colleague", facts: Facts) -> None:
        """Deliver a message to all others a moment later, unless it is to be lost."""
        self.said.append((sender.worker_id, facts.kind))
        if not self.loses(sender.worker_id, facts.kind):
            body = write_message(sender.worker_id, facts)
            asyncio.get_running_loop().call_later(HEARD_AFTER_SECONDS, self._deliver, sender, body)

    def _deliver(self, sender: "Colleague", body: bytes) -> None:
        for member in self.members:
            if member is not sender and member.is_up:
                member.hear(body)


class Colleague:
    """One worker: its deduplicator, its questions and answers, and a stand-in for its `Peers`."""

    def __init__(self, world: "Team", number: int, window_seconds: float | None) -> None:
        self.worker_id = f"{number:016x}"
        self.is_up = True
        self.joins = 1
        self._world = world
        clock = world.loop.time
        self.roster = Roster(clock=clock)
        self.roster.resume()
        self.deduplicator = Deduplicator(
            heartbeat_seconds=10, window_seconds=window_seconds, clock=clock
        )
        self._hearers: dict[str, list[tuple[type[Facts], Callable[[str, Any], None]]]] = {}
        self._each_second: list[Callable[[], None]] = []
        self._when_heard: list[Callable[[], None]] = []
        self.lives_on = asyncio.Event()
        self.lives_on.set()
        self.changes = 0
        self.asker = Asker(
            cast("Peers", self),
            self.deduplicator,
            most_seconds=MOST_SECONDS,
            delays_seconds=DELAYS_SECONDS,
            on_change=self._count,
            metrics=world.metrics,
            clock=clock,
        )
        self.answerer = Answerer(
            cast("Peers", self),
            self.deduplicator,
            is_asking=self.asker.is_asking,
            prove_session=self._prove,
            clock=clock,
        )
        self.repeated_copies = RepeatedCopies(
            cast("Peers", self), self.deduplicator, identity_of=identity_of, clock=clock
        )
        self.may_wait = True
        self._taken: dict[MessageIdentity, Released] = {}
        self._deduplication: ClusterDeduplicator | None = None
        if window_seconds is not None:
            peers = cast("Peers", self)
            self._deduplication = ClusterDeduplicator(
                peers, self.deduplicator.sent, clock=clock, now=clock
            )

    @property
    def expects_answers(self) -> bool:
        """Whether anybody was heard in the last minute."""
        return bool(self.roster.others(REMEMBERED))

    def tell(self, facts: Facts) -> None:
        """Say something to the others."""
        if self.is_up:
            self._world.fanout.say(self, facts)

    def on(self, facts: type[Facts], hear: Callable[[str, Any], None]) -> None:
        """Register what hears a kind."""
        self._hearers.setdefault(facts.kind, []).append((facts, hear))

    def each_second(self, look: Callable[[], None]) -> None:
        """Register what looks after something each second."""
        self._each_second.append(look)

    def when_heard(self, tell: Callable[[], None]) -> None:
        """Register what tells what the others have missed."""
        self._when_heard.append(tell)

    def beat(self) -> None:
        """Say that it is there."""
        for look in self._each_second:
            look()
        self.tell(Beat())
        self.roster.tidy()

    def hear(self, body: bytes) -> None:
        """Hear what was said."""
        message = read_message(body)
        assert message is not None
        if message.kind == Bye.kind:
            self.roster.leave(message.worker_id)
        else:
            self.roster.note(message.worker_id)
        for model, hear in self._hearers.get(message.kind, []):
            hear(message.worker_id, model.model_validate(message.facts))

    def fall_silent(self) -> None:
        """Neither hear nor be heard."""
        self.is_up = False

    def come_back(self) -> None:
        """Hear and be heard again, and say so."""
        self.is_up = True
        self.joins += 1
        self.tell(Hello())
        for tell in self._when_heard:
            tell()

    def end(self) -> None:
        """Stop in good order, and be asked no more."""
        self.tell(Bye())
        self.is_up = False

    # What it does with messages

    def publish_again(self, copy: Delivery) -> None:
        """Publish a copy that may be there twice."""
        headers: dict[str, Any] = {
            COPIES: copy.envelope.copies,
            FIRST_DELIVERED_AT: copy.envelope.try_of,
        }
        properties = Properties(message_id=copy.envelope.message_id, headers=headers)
        self.repeated_copies.note_published(properties, copy.body)

    async def take(self, delivery: Delivery) -> Verdict:
        """Take a delivery as the worker does, up to its verdict."""
        identity = identity_of(delivery.envelope, delivery.body)
        if identity.copies:
            delivery.redelivered = self.repeated_copies.may_be_one(
                identity, says_so=delivery.redelivered
            )
        if delivery.redelivered:
            await self.asker.learn_of(delivery, identity)
        if self._deduplication is not None and not (
            await self._deduplication.until_ended_elsewhere(
                delivery, identity, may_wait=lambda: self.may_wait
            )
        ):
            return Wait(None, is_redelivery=False)
        verdict = self.deduplicator.identify(identity, redelivered=delivery.redelivered)
        while isinstance(verdict, Wait) and verdict.first is not None:
            verdict = await self.deduplicator.identify_after(
                verdict.first, identity, redelivered=delivery.redelivered
            )
        if isinstance(verdict, New):
            if verdict.released is not None:
                self._taken[identity] = verdict.released
            if self._deduplication is not None:
                self._deduplication.take(identity)
        return verdict

    async def begin(self, delivery: Delivery) -> InFlight:
        """Take a delivery that is no repeat."""
        verdict = await self.take(delivery)
        assert isinstance(verdict, New)
        return verdict.in_flight

    def settle(self, claim: InFlight, *, sent: bool = True, acked: bool = True) -> None:
        """Settle what was taken."""
        accepted = ACCEPTED._replace(at=self._world.loop.time()) if sent else None
        self.deduplicator.settle(claim, accepted, acked=acked)
        self.repeated_copies.settle(claim.identity, is_sent=sent)
        if self._deduplication is not None:
            self._deduplication.end(claim.identity, accepted)

    def release(self, claim: InFlight, delivery: Delivery, outcome: Outcome | None = None) -> None:
        """Give back what was taken."""
        self.deduplicator.release(claim, Released(delivery.envelope, outcome))
        if self._deduplication is not None:
            self._deduplication.end(claim.identity, None)

    def recall(self, delivery: Delivery) -> Released | None:
        """Return how a redelivery that was taken goes on."""
        return self._taken.pop(identity_of(delivery.envelope, delivery.body), None)

    def lose_connection(self) -> None:
        """Lose the connection on which it consumes, and have another one."""
        self.deduplicator.connection_lost(most_unacked=100)
        self.deduplicator.consuming_again()

    def _count(self) -> None:
        self.changes += 1

    async def _prove(self) -> None:
        await self.lives_on.wait()


class Team(LeapingWorld):
    """Several workers, each of which says once a second that it is there."""

    def __init__(self, size: int = 2, *, window_seconds: float | None = None) -> None:
        super().__init__()
        self.fanout = Fanout()
        self._window_seconds = window_seconds
        self.run(self._gather(size))

    async def _gather(self, size: int) -> None:
        for _ in range(size):
            self.hire()
        await asyncio.sleep(2 * HEARD_AFTER_SECONDS)

    def hire(self) -> Colleague:
        """Have one more worker join."""
        members = self.fanout.members
        members.append(Colleague(self, len(members) + 1, self._window_seconds))
        for member in members:
            member.tell(Hello())
        return members[-1]

    @property
    def members(self) -> list[Colleague]:
        """All of them."""
        return self.fanout.members

    def play(self, story: Coroutine[Any, Any, Any]) -> Any:
        """Run a story to its end, while those that are up say that they are there."""

        async def all_of_it() -> Any:
            beating = asyncio.create_task(self._beat())
            try:
                return await story
            finally:
                beating.cancel()

        return self.run(all_of_it())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1)
            for member in self.members:
                member.beat()


def message(team: Team, message_id: str | None = "m-1", **envelope: Any) -> Delivery:
    """Make the first delivery of a message."""
    return make_delivery(
        message_id or "c" * 32, body=BODY, clock=team.loop.time, message_id=message_id, **envelope
    )


def again(team: Team, delivery: Delivery, *, key: str | None = None) -> Delivery:
    """Make another delivery of the same message; without an id it has a new key."""
    envelope = delivery.envelope
    return make_delivery(
        key or envelope.key,
        body=bytes(delivery.body),
        properties=delivery.properties,
        redelivered=True,
        clock=team.loop.time,
        message_id=envelope.message_id,
        published_at=envelope.published_at,
        copies=envelope.copies,
        try_of=envelope.try_of,
    )


def identity(delivery: Delivery) -> MessageIdentity:
    """Return which message a delivery is."""
    return identity_of(delivery.envelope, delivery.body)
