"""The path of a delivery through a worker: identified, sent, replaced, acked, announced, in order.

All run on an event loop whose time leaps to the next timer. The publisher, the session and the
service are stand-ins; what is between them is the real worker.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from bridge.amqp.properties import Properties
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.config import Settings, WorkerSettings
from bridge.topology.upkeep import Upkeep
from bridge.worker.cluster.joint_pause import JointPause
from bridge.worker.cluster.membership import Membership
from bridge.worker.delivery import Delivery
from bridge.worker.fates import Answer, judge_status
from bridge.worker.request import SendRequest
from bridge.worker.worker import Worker
from tests.breakers import Parts, open_breaker
from tests.clock import LeapingWorld, in_world
from tests.deliveries import make_delivery
from tests.ears import Ears
from tests.unit.worker.stand_ins import Broker, Channel, Fault

BODY = b'{"to":"+491713920001","from":"Acme","text":"Hi"}'
ACCEPTED = judge_status(202, retry_after_seconds=None)


class Story(Broker):
    """A publisher that tells what was written where."""

    def __init__(self, loop: asyncio.AbstractEventLoop, told: list[str]) -> None:
        super().__init__(loop)
        self._told = told

    async def write(self, body: bytes, *, routing_key: str, **facts: Any) -> Publication:
        self._told.append(f"publish to {routing_key}")
        return await super().write(body, routing_key=routing_key, **facts)


class Connection(Channel):
    """A session that tells of its acks."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told
        self.most_unacked = 10

    def ack(self, tag: int) -> bool:
        self._told.append("ack")
        return super().ack(tag)


class Service:
    """What stands in for the sender, and tells of each request."""

    def __init__(self, told: list[str]) -> None:
        self._told = told
        self.latency_seconds = 1.0
        self.answers: list[Answer | Exception] = []

    async def send(self, _request: SendRequest, _delivery: Delivery) -> Answer:
        self._told.append("post")
        await asyncio.sleep(self.latency_seconds)
        answer = self.answers.pop(0) if self.answers else ACCEPTED
        if isinstance(answer, Exception):
            raise answer
        return answer


class FixedTopology:
    """What stands in for the upkeep of a topology that is as it should be."""

    is_usable = True


class World(LeapingWorld):
    """A worker, and what is told of it."""

    def __init__(self, **own: Any) -> None:
        super().__init__()
        self.told: list[str] = []
        self.broker = Story(self.loop, self.told)
        self.service = Service(self.told)
        self.connection = Connection(self.told)
        settings = Settings(worker=WorkerSettings(queue="q", **own))
        parts = Parts(settings.worker, self.metrics, clock=self.loop.time)
        self.breaker, self.pauses = parts.breaker, parts.pauses
        self.worker = Worker(
            settings,
            account=parts.account(self.service),
            pauses=parts.pauses,
            spans=None,
            publisher=cast("Publisher", self.broker),
            upkeep=cast("Upkeep", FixedTopology()),
            joint_pause=JointPause(
                Membership("q", is_enabled=False, metrics=self.metrics, clock=self.loop.time),
                setup=lambda: "0" * 16,
                turn_seconds=5,
            ),
            metrics=self.metrics,
        )

    def take(
        self,
        *,
        body: bytes = BODY,
        redelivered: bool = False,
        reply_to: str | None = None,
        message_id: str = "m-1",
    ) -> "asyncio.Task[object]":
        """Have the broker deliver a message (a look inside: the consumer calls this)."""
        before = set(self.worker._dispatcher._tasks)
        self.worker._dispatcher.start(
            make_delivery(
                message_id,
                body=body,
                properties=Properties(message_id=message_id, reply_to=reply_to),
                redelivered=redelivered,
                session=self.connection,
                clock=self.loop.time,
            )
        )
        (task,) = set(self.worker._dispatcher._tasks) - before
        return task

    def lose_connection(self) -> None:
        """Have the session end, as the consumer tells of it, and begin anew with the next one."""
        self.connection.is_over = True
        self.worker.session_over(self.connection.most_unacked)
        self.connection = Connection(self.told)
        self.worker.consumer_registered()

    def settle(self, **facts: Any) -> list[str]:
        """Take a delivery, and return all that was told when it has its end."""

        async def process() -> None:
            await self.take(**facts)

        self.run(process())
        return self.told


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World()) as made:
        yield made


CONFLICT = judge_status(409, retry_after_seconds=None)


@pytest.mark.parametrize(
    ("answer", "faults", "facts", "story"),
    [
        (ACCEPTED, [], {"reply_to": "answers"}, ["post", "ack", "publish to answers"]),
        (CONFLICT, ["nacked"], {}, ["post", *["publish to q.retry.5s"] * 2, "ack"]),
        (ACCEPTED, [], {"body": b"{}"}, ["publish to q.dead", "ack"]),
        (RuntimeError("a bug"), [], {}, ["post", "publish to q.dead", "ack"]),
    ],
    ids=["sent", "retried", "invalid", "bug"],
)
def test_the_ack_comes_after_the_confirm(
    world: World,
    ears: Ears,
    answer: Answer | Exception,
    faults: list[Fault],
    facts: dict[str, Any],
    story: list[str],
) -> None:
    """However often publishing the copy fails; the outcome event is published last."""
    world.service.answers = [answer]
    world.broker.faults = faults

    assert world.settle(**facts) == story
    assert len(ears.heard("internal_error")) == isinstance(answer, RuntimeError)


@pytest.mark.parametrize(
    ("concurrency", "status", "on_uncertain", "story"),
    [
        (1, 202, "retry", ["post", "ack", "post", "ack"]),
        (1, 500, "park", ["post", "publish to q.dead", "ack", "post", "ack"]),
        (1, 500, "retry", ["post", "post", "publish to q.retry.5s", "ack", "ack"]),
        (1, 400, "retry", ["post", "publish to q.dead", "post", "ack", "ack"]),
        ("auto", 500, "park", ["post", "publish to q.dead", "post", "ack", "ack"]),
    ],
)
def test_what_may_have_been_sent_counts_as_in_flight_until_its_ack(
    concurrency: int | str, status: int, on_uncertain: str, story: list[str]
) -> None:
    """Else a worker that is killed could leave more of it unacked than requests may be in flight.

    What was surely not sent, or is sent again, makes room for the next one with its answer; so does
    everything where the limit follows the service.
    """

    async def both(world: World) -> None:
        sent = asyncio.gather(world.take(), world.take(message_id="m-2"))
        # Longer than the second POST takes.
        await asyncio.sleep(5)
        for confirm in world.broker.pending:
            confirm.set_result("confirmed")
        await sent

    settings: dict[str, Any] = {"concurrency": concurrency, "max_concurrency": 1}
    with closing(World(**settings, on_uncertain=on_uncertain)) as world:
        world.service.answers = [judge_status(status, retry_after_seconds=None)]
        world.broker.faults = ["late"]
        world.run(both(world))

        assert world.told == story


def test_the_next_is_posted_after_an_ack_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes in the turn of the event loop at whose end the ack leaves."""

    async def both(world: World) -> None:
        answered = world.loop.create_future()

        async def send(_request: SendRequest, _delivery: Delivery) -> Answer:
            world.told.append("post")
            await answered
            return ACCEPTED

        def ack(_tag: int, **_: bool) -> bool:
            world.loop.call_soon(world.told.append, "ack")
            return True

        monkeypatch.setattr(world.service, "send", send)
        monkeypatch.setattr(world.connection, "ack", ack)
        first = world.take()
        await asyncio.sleep(1)
        answered.set_result(None)
        await asyncio.gather(first, world.take(message_id="m-2"))
        await asyncio.sleep(1)

    with closing(World(concurrency=1)) as world:
        world.run(both(world))

        assert world.told == ["post", "ack", "post", "ack"]


@pytest.mark.parametrize("where", ["before the ack", "at the ack"])
def test_bug_at_the_end_keeps_no_slot(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The next message has it, though this one is not acked; its redelivery is not posted."""
    with closing(World(concurrency=1, on_uncertain="park")) as world:
        with monkeypatch.context() as patched:
            if where == "at the ack":
                patched.setattr(world.connection, "ack", None)
            else:
                world.service.answers = [judge_status(500, retry_after_seconds=None)]
                patched.setattr(world.broker, "deadline_for", None)
            assert world.settle() == ["post"]
        world.told.clear()

        assert world.settle(message_id="m-2") == ["post", "ack"]
        world.lose_connection()
        world.told.clear()
        story = ["ack"] if where == "at the ack" else ["publish to q.dead", "ack"]
        assert world.settle(redelivered=True) == story


@pytest.mark.parametrize("redelivered", [False, True])
@pytest.mark.parametrize("ordering", ["none", "recipient"])
def test_bug_in_the_identification_makes_a_dead_letter(
    monkeypatch: pytest.MonkeyPatch, ears: Ears, ordering: str, *, redelivered: bool
) -> None:
    """It is not posted; if it was redelivered, it counts as one that may have been sent."""
    with closing(World(ordering=ordering)) as world:
        monkeypatch.setattr(world.worker._identification, "_identity_of", None)
        story = world.settle(redelivered=redelivered, reply_to="answers")

        assert story == ["publish to q.dead", "ack", "publish to answers"]
        dead = world.broker.published[0]
        assert dead.header("sms-bridge-reason") == "internal_error"
        assert dead.header("sms-bridge-uncertain-attempts") == int(redelivered)
        assert len(ears.heard("internal_error")) == 1


@pytest.mark.parametrize("part", ["report", "event"])
def test_bug_after_the_ack_is_only_logged(
    world: World, monkeypatch: pytest.MonkeyPatch, ears: Ears, part: str
) -> None:
    """The message is settled: its repeat is not posted, and nothing counts it as released."""
    if part == "report":
        monkeypatch.delitem(world.worker._settler._attempts, "sent")
    else:
        monkeypatch.setattr(world.broker, "publish", None)
    assert world.settle(reply_to="answers")[:2] == ["post", "ack"]
    assert len(ears.heard("internal_error")) == 1
    monkeypatch.undo()
    world.told.clear()

    assert world.settle(redelivered=True) == ["ack"]
    assert "released" not in {line["outcome"] for line in ears.heard("delivery")}


def test_bug_before_the_ack_sends_nothing_again(
    world: World, monkeypatch: pytest.MonkeyPatch, ears: Ears
) -> None:
    """What was decided is settled when the message is redelivered; till then it is unacked."""
    world.service.answers = [CONFLICT]
    with monkeypatch.context() as patched:
        patched.setattr(world.broker, "deadline_for", None)
        assert world.settle() == ["post"]
    (line,) = ears.heard("delivery")
    assert (line["outcome"], line["reason"]) == ("released", "internal_error")
    world.told.clear()
    world.lose_connection()

    assert world.settle(redelivered=True) == ["publish to q.retry.5s", "ack"]


@in_world
async def test_lost_connection_is_the_reason_of_what_it_releases(world: World, ears: Ears) -> None:
    world.pauses.block("q.dead", "nacked")
    waiting = world.take()
    await asyncio.sleep(1)
    world.lose_connection()
    await waiting

    (line,) = ears.heard("delivery")
    assert (line["outcome"], line["reason"]) == ("released", "connection_lost")


def test_bug_after_the_answer_keeps_no_slot(ears: Ears) -> None:
    """The next message has it. The dead letter counts as one that may have been sent."""
    odd: dict[str, Any] = {"retry_after_seconds": "soon"}
    with closing(World(concurrency=1)) as world:
        world.service.answers = [judge_status(500, retry_after_seconds=None)._replace(**odd)]
        assert world.settle() == ["post", "publish to q.dead", "ack"]
        assert len(ears.heard("internal_error")) == 1
        assert world.broker.published[0].header("sms-bridge-uncertain-attempts") == 1
        world.told.clear()

        assert world.settle(message_id="m-2") == ["post", "ack"]


@in_world
async def test_repeat_waits_for_the_first(world: World, ears: Ears) -> None:
    """A repeat that comes while the first is in flight is settled after it, its wait measured."""
    await asyncio.wait([world.take(), world.take(reply_to="second")])

    assert world.told == ["post", "ack", "ack", "publish to second"]
    waits = [line.get("waited_seconds") for line in ears.heard("delivery")]
    assert waits == [None, {"original": 1.0}]


@in_world
async def test_repeat_in_a_pause_does_not_wait(world: World) -> None:
    """In a pause a repeat goes to the ladder, and leaves its place to one that may end it."""
    world.service.answers = [judge_status(401, retry_after_seconds=None)]
    first = world.take()
    await asyncio.sleep(1.1)
    assert world.breaker.pause_reason == "credentials_rejected"
    await world.take()
    assert not first.done()
    await first

    assert world.told == ["post", "publish to q.retry.5s", "ack", "post", "ack"]


@in_world
async def test_copy_of_a_repeat_is_kept_for_the_redelivery(world: World) -> None:
    """A repeat that is put off has one copy, though its confirm outlives the connection."""
    refused = judge_status(401, retry_after_seconds=None)
    world.service.answers = [refused] * 9
    first = world.take()
    await asyncio.sleep(1.1)
    world.broker.faults = ["late"]
    repeat = world.take()
    await asyncio.sleep(1)
    world.lose_connection()
    await asyncio.wait([first, repeat])
    world.told.clear()
    first = world.take(redelivered=True)
    repeat = world.take(redelivered=True)
    await asyncio.sleep(1)
    world.broker.pending.pop().set_result("confirmed")
    await repeat
    assert not first.done()
    assert world.connection.acked
    world.service.answers.clear()
    await first

    assert world.broker.written == 1


@in_world
async def test_outcome_is_kept_for_the_redelivery(world: World) -> None:
    """What was answered, but could not be written down, is written down when it comes again."""
    world.service.answers = [judge_status(409, retry_after_seconds=None)]
    world.broker.faults = ["nacked"] * 9
    first = world.take()
    await asyncio.sleep(5)
    world.lose_connection()
    await first
    assert "ack" not in world.told
    world.broker.faults.clear()
    world.told.clear()
    await world.take(redelivered=True)

    assert world.told == ["publish to q.retry.5s", "ack"]


@in_world
async def test_what_waits_goes_back_when_the_worker_stops(world: World) -> None:
    """A drain gives back what waits, finishes what is in flight, and takes nothing new."""
    in_flight = world.take()
    await asyncio.sleep(0.5)
    open_breaker(world.breaker, "misconfigured")
    waiting = world.take(body=BODY.replace(b"Hi", b"Ho"))
    await asyncio.sleep(0.1)
    await world.worker.drain(5.0)
    assert in_flight.done()
    assert waiting.done()

    assert world.told == ["post", "ack"]
    assert (
        world.value("messages_processed_total", queue="q", outcome="released", reason="stopped")
        == 1
    )
