"""Workers on a simulated exchange, on a clock that leaps; each has a deduplicator."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from bridge.amqp.properties import Properties
from bridge.worker.cluster.deduplication import ClusterDeduplicator, RepeatedCopies
from bridge.worker.cluster.membership import Membership, Part
from bridge.worker.cluster.messages import Leave, Message, WorkerState
from bridge.worker.cluster.questions import RedeliveryQuestions
from bridge.worker.deduplicator import (
    Deduplicator,
    InFlight,
    MessageIdentity,
    New,
    Released,
    Verdict,
    WaitForOriginal,
    identity_of,
)
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import COPIES, FIRST_DELIVERED_AT
from bridge.worker.outcomes import Dead, Retried
from bridge.worker.sent_messages import Accepted
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery
from tests.simulation.exchange import Exchange, Member, start

BODY = b'{"to":"+491713920001","from":"Acme","text":"Hi"}'
MOST_SECONDS = 10.0
DELAYS_SECONDS = (5.0, 30.0)
HEARD_AFTER_SECONDS = 0.01
ACCEPTED = Accepted(attempts=1, status=202, provider_id="sms-1", at=1_800_000_000.0)


def kind_of(message: Message) -> str:
    """Name a message: its class, or the copies that a state contains."""
    if isinstance(message, WorkerState):
        told = [name for name in ("repeated", "settled") if getattr(message, name)]
        return told[0] if told else "WorkerState"
    return type(message).__name__


class Consumer:
    """Stands in for a worker's consumer; its session is proved as soon as it `lives_on`."""

    def __init__(self) -> None:
        self.prefetch = 4
        self.renewals = 0
        self.lives_on = asyncio.Event()
        self.lives_on.set()

    def renew(self) -> None:
        self.renewals += 1

    async def prove(self) -> None:
        await self.lives_on.wait()


class Colleague:
    """One worker: its deduplicator, and its messages to its peers."""

    def __init__(self, world: "Team", number: int, window_seconds: float | None) -> None:
        self._world = world
        clock = world.loop.time
        self.membership = Membership("q", is_enabled=True, metrics=world.metrics, clock=clock)
        self.membership.worker_id = self.worker_id = f"{number:016x}"
        self.deduplicator = Deduplicator(
            heartbeat_seconds=10, window_seconds=window_seconds, clock=clock
        )
        self.consumer = Consumer()
        self.lives_on = self.consumer.lives_on
        self.questions = RedeliveryQuestions(
            self.membership,
            self.deduplicator,
            self.consumer,
            SimpleNamespace(sending_prefetch=4),
            most_seconds=MOST_SECONDS,
            delays_seconds=DELAYS_SECONDS,
            metrics=world.metrics,
            clock=clock,
        )
        self.repeated_copies = RepeatedCopies(
            self.membership, self.deduplicator, identity_of=identity_of, clock=clock
        )
        self.may_wait = True
        self.is_frozen = False
        self._taken: dict[MessageIdentity, Released] = {}
        self._deduplication: ClusterDeduplicator | None = None
        parts: list[Part] = [self.questions, self.repeated_copies]
        if window_seconds is not None:
            self._deduplication = ClusterDeduplicator(
                self.membership, self.deduplicator.sent, clock=clock, now=clock
            )
            parts.append(self._deduplication)
        self.member = Member(world.exchange, self.membership, parts, world.metrics)

    def tell(self, message: Message) -> None:
        self.membership.publish(message)

    def fall_silent(self) -> None:
        self.member.fall_silent()

    def come_back(self) -> None:
        self.member.join()

    def end(self) -> None:
        self.tell(Leave())
        asyncio.get_running_loop().call_later(HEARD_AFTER_SECONDS / 2, self.fall_silent)

    # Messages

    def publish_again(self, copy: Delivery) -> None:
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
            delivery.redelivered = self.repeated_copies.note_received(
                identity, says_so=delivery.redelivered
            )
        if delivery.redelivered:
            await self.questions.learn_of(delivery, identity)
        if self._deduplication is not None and not (
            await self._deduplication.until_ended_elsewhere(
                delivery, identity, may_wait=lambda: self.may_wait
            )
        ):
            return WaitForOriginal(None, is_redelivery=False)
        verdict = self.deduplicator.claim(identity, redelivered=delivery.redelivered)
        while isinstance(verdict, WaitForOriginal) and verdict.first is not None:
            verdict = await self.deduplicator.claim_after(
                verdict.first, identity, redelivered=delivery.redelivered
            )
        if isinstance(verdict, New):
            if verdict.released is not None:
                self._taken[identity] = verdict.released
            if self._deduplication is not None:
                self._deduplication.take(identity)
        return verdict

    async def begin(self, delivery: Delivery) -> InFlight:
        verdict = await self.take(delivery)
        assert isinstance(verdict, New)
        return verdict.in_flight

    def settle(self, claim: InFlight, *, sent: bool = True, acked: bool = True) -> None:
        accepted = ACCEPTED._replace(at=self._world.loop.time()) if sent else None
        self.deduplicator.settle(claim, accepted, acked=acked)
        if claim.identity.copies:
            self.repeated_copies.settle(claim.identity)
        if self._deduplication is not None:
            self._deduplication.end(claim.identity, accepted)

    def release(
        self, claim: InFlight, delivery: Delivery, outcome: Retried | Dead | None = None
    ) -> None:
        self.deduplicator.release(claim, Released(delivery.envelope, outcome))
        if self._deduplication is not None:
            self._deduplication.end(claim.identity, None)

    def recall(self, delivery: Delivery) -> Released | None:
        """Return the released state with which a redelivery was taken."""
        return self._taken.pop(identity_of(delivery.envelope, delivery.body), None)

    def lose_connection(self) -> None:
        """Lose the connection on which it consumes, and have another one."""
        self.deduplicator.session_lost(most_unacked=100)
        self.deduplicator.consuming_again()


class Team(LeapingWorld):
    """Several workers, each with a heartbeat."""

    def __init__(self, size: int = 2, *, window_seconds: float | None = None) -> None:
        super().__init__()
        self.exchange = Exchange(self.loop, latency_seconds=HEARD_AFTER_SECONDS, spread=(1, 1))
        self.members: list[Colleague] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._window_seconds = window_seconds
        self.run(self._gather(size))

    async def _gather(self, size: int) -> None:
        for _ in range(size):
            self.hire()
        await asyncio.sleep(3 * HEARD_AFTER_SECONDS)

    def appoint(self) -> Colleague:
        colleague = Colleague(self, len(self.members) + 1, self._window_seconds)
        self.members.append(colleague)
        start(colleague.member.keep_publishing(), self._tasks)
        return colleague

    def hire(self) -> Colleague:
        colleague = self.appoint()
        colleague.come_back()
        return colleague

    @property
    def published(self) -> list[tuple[str, str]]:
        return [(sender, kind_of(message)) for sender, message in self.exchange.published]

    def play(self, story: Coroutine[Any, Any, Any]) -> Any:
        """Run a story to its end, while workers that are up publish their heartbeats."""

        async def all_of_it() -> Any:
            ticking = asyncio.create_task(self._tick())
            try:
                return await story
            finally:
                ticking.cancel()

        return self.run(all_of_it())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1)
            for member in self.members:
                if member.membership.is_up and not member.is_frozen:
                    member.member.cluster.tick()


def team_of(
    size: int, *, window_seconds: float | None = None
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run an async test with a team of so many workers, which is its first argument."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            with closing(Team(size, window_seconds=window_seconds)) as team:
                team.play(test(team, **fixtures))

        # For pytest the team is no fixture.
        signature = inspect.signature(test)
        fixtures = [*signature.parameters.values()][1:]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def message(team: Team, message_id: str | None = "m-1", **envelope: Any) -> Delivery:
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
    return identity_of(delivery.envelope, delivery.body)
