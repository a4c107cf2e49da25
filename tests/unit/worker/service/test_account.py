"""One delivery's way to its outcome: what it waits for, in what order, and what it gives back.

Capacity, circuit breaker and rate limits are the real ones; the service is a script. All run on an
event loop whose time leaps to the next timer.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from bridge.config import RateLimitSettings, WorkerSettings
from bridge.errors import BrokerError
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery
from bridge.worker.fates import Answer, judge_status
from bridge.worker.outcomes import Dead, Outcome, Retried, Sent
from bridge.worker.pipeline import post_when_allowed
from bridge.worker.request import SendRequest
from tests.breakers import Parts, open_breaker
from tests.clock import LeapingWorld, in_world
from tests.deliveries import make_delivery

LATENCY_SECONDS = 2.0


def status(code: int, *, wait: float | None = None) -> Answer:
    return judge_status(code, retry_after_seconds=wait)


ACCEPTED = status(202)


class Session:
    """What stands in for a session and its channel."""

    is_over = False
    is_closed = False
    is_leaving = False
    is_in_doubt = False

    def __init__(self) -> None:
        self.is_heard_from = asyncio.Event()

    @property
    def channel(self) -> "Session":
        return self

    async def until_heard_from(self, *, changed: asyncio.Event) -> None:
        """Return when the broker is heard from, or the session is over."""
        assert not changed.is_set()
        await self.is_heard_from.wait()


class Service:
    """What stands in for the sender: answers as it is told, else accepts, after its latency."""

    def __init__(self) -> None:
        self.latency_seconds = LATENCY_SECONDS
        self.script: dict[str, list[Answer | Exception]] = {}
        self.posts: list[tuple[float, str]] = []

    async def send(self, _: SendRequest, delivery: Delivery) -> Answer:
        key = delivery.envelope.key
        self.posts.append((asyncio.get_running_loop().time(), key))
        script = self.script.get(key)
        await asyncio.sleep(self.latency_seconds)
        answer = script.pop(0) if script else ACCEPTED
        if isinstance(answer, Exception):
            raise answer
        return answer


class World(LeapingWorld):
    """An account in front of a service; `began` is the moment at which it was made."""

    def __init__(self, limit: RateLimitSettings | None = None, **settings: Any) -> None:
        super().__init__()
        self.began = self.loop.time()
        self.service = Service()
        self.session = Session()
        worker = WorkerSettings(queue="q", rate_limit=limit or RateLimitSettings(), **settings)
        parts = Parts(worker, self.metrics, clock=self.loop.time)
        self.changed = parts.changed
        self.breaker, self.pauses, self.capacity = parts.breaker, parts.pauses, parts.capacity
        self.account = parts.account(self.service, now=self.loop.time)

    def delivery(self, key: str, **envelope: Any) -> Delivery:
        envelope = {"first_delivered_at": self.loop.time(), **envelope}
        return make_delivery(key, session=self.session, clock=self.loop.time, **envelope)

    async def outcome_of(self, delivery: Delivery, to: str | None = None) -> Outcome:
        """Dispatch a delivery; unless it is said its message goes to a number of its own."""
        request = SendRequest.model_construct(to=to or delivery.envelope.key, sender="A", text="x")
        outcome = await post_when_allowed(self.account, self.pauses, delivery, request)
        delivery.free_slot()
        return outcome

    def start(self, delivery: Delivery, to: str | None = None) -> "asyncio.Task[Outcome]":
        """Dispatch a delivery in a task of its own, as the worker does."""
        return self.loop.create_task(self.outcome_of(delivery, to))

    def all_of(self, *deliveries: Delivery, to: str | None = None) -> list[Outcome]:
        """Dispatch deliveries that came together, and return the outcomes."""

        async def everyone() -> list[Outcome]:
            return await asyncio.gather(*(self.start(delivery, to) for delivery in deliveries))

        outcomes: list[Outcome] = self.run(everyone())
        return outcomes

    def one(self, key: str, **envelope: Any) -> Outcome:
        return self.all_of(self.delivery(key, **envelope))[0]

    def at(self, seconds: float, what: Any, *args: Any) -> None:
        self.loop.call_at(self.began + seconds, what, *args)

    @property
    def posts(self) -> list[tuple[float, str]]:
        """Say which message was posted how long after the begin."""
        return [(at - self.began, key) for at, key in self.service.posts]


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World(concurrency=1)) as made:
        yield made


@pytest.fixture
def limited() -> Iterator[World]:
    """Give an account that may post once in ten seconds, with slots for all."""
    with closing(World(RateLimitSettings(per_second=0.1, burst=1))) as made:
        yield made


# --- One after the other --------------------------------------------------------------------------


def test_accepted(world: World) -> None:
    """A message that the service accepts is sent, and counted as such."""
    passed = world.loop.time()

    assert world.one("m", published_at=passed - 7) == Sent(status=202)
    assert world.value("segments_total", encoding="gsm7") == 1
    assert world.value("acceptance_latency_seconds_sum", queue="q") == 7 + LATENCY_SECONDS
    assert world.value("last_sent_message_timestamp_seconds", queue="q") is None
    assert world.value("last_sent_timestamp_seconds", queue="q") == passed + LATENCY_SECONDS


def test_each_wait_has_its_cause_and_they_add_up() -> None:
    """A message waits for its time, a token and the broker, one after the other."""
    limit = RateLimitSettings(per_second=0.1, burst=1)
    with closing(World(limit)) as world:
        second = world.delivery("second", not_before=world.began + 4)
        # The first has its answer at 2; the token comes at 10, while the broker stores nothing.
        world.at(9, lambda: world.pauses.block("sms.outbound.dead", "nacked"))
        world.at(13, world.pauses.unblock)
        world.all_of(world.delivery("first"), second, to="same")

        waited = second.waited_seconds
        assert list(waited) == ["due", "rate", "broker"]
        assert waited == pytest.approx({"due": 4, "rate": 6, "broker": 3})
        assert sum(waited.values()) + LATENCY_SECONDS == pytest.approx(second.held_seconds)


def test_one_more_waits_for_a_slot(world: World) -> None:
    """Each message has a slot for as long as its request is in flight, in the order they came."""
    first, second, third = (world.delivery(key) for key in ("first", "second", "third"))
    world.all_of(first, second, third)

    assert world.posts == [(0, "first"), (2, "second"), (4, "third")]
    assert [each.waited_seconds for each in (first, second, third)] == [
        {},
        {"slot": 2},
        {"slot": 4},
    ]


def test_next_one_in_line_does_not_wait_for_the_answer(limited: World) -> None:
    """The rate limit holds when requests go, however long they are in flight."""
    limited.service.latency_seconds = 30
    limited.all_of(limited.delivery("first"), limited.delivery("second"))

    assert limited.posts == [(0, "first"), (pytest.approx(10), "second")]


def test_first_of_the_line_keeps_it_while_it_waits_for_a_slot() -> None:
    """However long a slot is waited for, no tokens gather behind the one that has its own."""
    with closing(World(RateLimitSettings(per_second=1, burst=1), concurrency=1)) as world:
        world.service.latency_seconds = 5
        world.all_of(*(world.delivery(key) for key in "abc"))

        assert world.posts == [(0, "a"), (5, "b"), (pytest.approx(10), "c")]


# --- Its time -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published_at", "why"),
    [
        (None, "counted from its first delivery: it has no timestamp"),
        (7200.0, "counted from its first delivery: its timestamp lies in the future"),
        (-400 * 86_400.0, "counted from its timestamp, which lies more than a year back"),
    ],
)
def test_too_old_says_by_what_clock(published_at: float | None, why: str) -> None:
    """The detail tells what is wrong with the timestamp of a message that is too old."""
    with closing(World(max_age=60)) as world:
        first = world.began - 60
        claimed = None if published_at is None else first + published_at
        outcome = world.one("m", published_at=claimed, first_delivered_at=first)

        assert outcome == Dead("expired", f"older than worker.max_age, {why}")


@pytest.mark.parametrize(("ahead", "counted"), [(-30.0, 1), (7200.0, 0), (-1.7e9, 0)])
def test_a_timestamp_that_cannot_be_true_is_no_latency(ahead: float, counted: int) -> None:
    """One of 1970 or of the future enters no histogram."""
    with closing(World()) as world:
        world.one("m", published_at=world.began + ahead)

        count = world.value("acceptance_latency_seconds_count", queue="q")
        assert count == counted


@pytest.mark.parametrize(("seconds", "ends"), [(0, Dead), (1, Sent)])
def test_message_expires_at_its_moment(world: World, seconds: float, ends: type[Outcome]) -> None:
    """A message whose expiry has come is not posted; a second before, it is."""
    assert isinstance(world.one("m", expires_at=world.began + seconds), ends)


def test_expiry_while_it_waits(world: World) -> None:
    """A message that expires while it waits for a slot is not posted, and leaves the slot."""
    late = world.delivery("late", expires_at=world.began + 1)
    outcomes = world.all_of(world.delivery("first"), late, world.delivery("next"))

    assert outcomes[1] == Dead("expired", "its own expiry has passed")
    assert world.posts == [(0, "first"), (2, "next")]


@pytest.mark.parametrize(("seconds", "step"), [(5, 5.0), (50, 30.0), (100, 30.0)])
def test_moment_that_is_far(world: World, seconds: float, step: float) -> None:
    """A message that is not to go for long waits on the ladder, and burns nothing."""
    assert world.one("m", not_before=world.began + seconds) == Retried(
        "not_before", step, "not due yet"
    )


def test_moment_that_is_before_the_first_step_but_far() -> None:
    """Where the ladder begins with long waits, nothing is held for longer than a minute even so."""
    with closing(World(retry_delays=(600.0,))) as world:
        held = world.one("m", not_before=world.began + MAX_HOLD_SECONDS)
        late = world.one("n", not_before=world.loop.time() + MAX_HOLD_SECONDS + 1)

        assert (type(held), late) == (Sent, Retried("not_before", 600.0, "not due yet"))


# --- Pauses ---------------------------------------------------------------------------------------


def test_pause_begins_while_it_waits_for_a_slot(world: World) -> None:
    """When an answer begins a pause, what waits for the slot goes as the probe, not at once."""
    world.service.script["first"] = [status(401)]
    second = world.delivery("second")
    world.all_of(world.delivery("first"), second)

    _, (went, key) = world.posts
    assert (key, list(second.waited_seconds)) == ("second", ["slot", "probe"])
    assert LATENCY_SECONDS + 0.8 <= went <= LATENCY_SECONDS + 1


@in_world
async def test_who_waited_for_the_slot_is_the_probe_before_more_is_taken(world: World) -> None:
    """When a pause begins nothing is taken for a probe, where one that is held is a good one."""
    world.service.script["first"] = [status(401)]

    async def consumer() -> tuple[str | None, int]:
        await world.changed.wait()
        return world.breaker.pause_reason, world.breaker.probes_wanted

    looked = asyncio.create_task(consumer())
    sent = [world.start(world.delivery(key)) for key in ("first", "second")]
    await asyncio.gather(*sent)

    assert await looked == ("credentials_rejected", 0)


def test_what_is_no_probe_goes_away(world: World) -> None:
    """What is held when a pause begins, and is not the probe, goes to the ladder not counted."""
    world.service.script["first"] = [status(401)]
    world.service.script["second"] = [status(401)] * 9
    world.service.latency_seconds = 4
    *_, third = world.all_of(*(world.delivery(key) for key in ("first", "second", "third")))

    assert third == Retried("paused", 5.0, "the worker is paused: credentials_rejected")
    assert "third" not in {key for _, key in world.posts}


def test_probe_gives_its_place_up(world: World) -> None:
    """When the probe has its outcome another message can be the probe."""
    open_breaker(world.breaker, "misconfigured")
    world.service.script["m"] = [httpx.ProtocolError("x")]
    with pytest.raises(httpx.ProtocolError):
        world.one("m")

    assert world.breaker.probes_wanted == 1


@pytest.mark.parametrize("waits_for", ["probe", "retry_after"])
def test_an_operators_pause_ends_a_wait(world: World, waits_for: str) -> None:
    """A message that waits for the service leaves for a retry queue when an operator pauses."""
    if waits_for == "probe":
        world.breaker.peer_opened("misconfigured", world.began, failures=(5, 5))
    else:
        world.breaker.peer_asked_to_wait(30)
    world.at(3, world.pauses.operator_paused)
    delivery = world.delivery("m")

    assert world.all_of(delivery)[0] == Retried("paused", 5.0, "the worker is paused: operator")
    assert delivery.waited_seconds == {waits_for: pytest.approx(3)}
    assert world.posts == []


# --- What the answer means ------------------------------------------------------------------------


def test_slow_down_begins_while_another_waits_for_the_slot(world: World) -> None:
    """Who gets a slot when the service has just asked for a wait gives it back, and waits too."""
    world.service.script["m"] = [status(429, wait=5)]
    slow, other = world.delivery("m"), world.delivery("other")
    world.all_of(slow, other)

    assert min(slow.waited_seconds["retry_after"], other.waited_seconds["retry_after"]) >= 5
    assert [at < LATENCY_SECONDS + 5 for at, _ in world.posts] == [True, False, False]


def test_limit_learns_from_the_answers() -> None:
    """With `worker.concurrency: auto` each answer teaches how many may be in flight."""
    with closing(World(concurrency="auto")) as world:
        before = world.capacity.limit
        world.service.script["m"] = [status(503)]
        world.one("m")

        assert world.capacity.limit == before // 2


# --- Rate limits ----------------------------------------------------------------------------------


def test_put_off_to_its_turn() -> None:
    """Who would wait long for its sender's limit is given a time, and waits on the ladder."""
    with closing(World(RateLimitSettings(per_sender=0.1, burst=1))) as world:
        deliveries = [world.delivery(str(number)) for number in range(3)]
        outcomes = world.all_of(*deliveries)

        assert isinstance(outcomes[0], Sent)
        assert [outcome[:2] for outcome in outcomes[1:]] == [("rate_limited", 5.0)] * 2
        turns = [delivery.envelope.scheduled_at for delivery in deliveries]
        assert turns[0] is None
        assert turns[1:] == pytest.approx([world.began + 10, world.began + 20])


def test_turn_that_has_come_is_forgotten() -> None:
    """A message that has had its turn is given another time if it is tried once more."""
    with closing(World(RateLimitSettings(per_sender=1, burst=1))) as world:
        delivery = world.delivery("m", scheduled_at=world.began - 1)
        world.all_of(delivery)

        assert delivery.envelope.scheduled_at is None


# --- What goes back to the queue ------------------------------------------------------------------


def test_stop_while_a_held_delivery_waits(world: World) -> None:
    """A delivery that is to be tried again is not, when the worker stops meanwhile."""
    world.service.script["m"] = [status(429, wait=20)]
    world.at(LATENCY_SECONDS / 2, world.pauses.drain)
    with pytest.raises(BrokerError, match="go back to the queue"):
        world.one("m")

    assert len(world.posts) == 1


def test_channel_that_is_gone_takes_no_outcome(world: World) -> None:
    """What is put off while its channel goes is not replaced: the broker delivers it again."""
    world.session.is_over = True
    with pytest.raises(BrokerError, match="the channel is gone"):
        world.one("m", expires_at=world.began)


def test_nothing_is_posted_for_a_channel_that_is_gone(limited: World) -> None:
    """A delivery whose channel went while it waited is not posted, and its slot and token go on."""
    limited.one("first")

    async def wait() -> None:
        task = limited.start(limited.delivery("m"))
        await asyncio.sleep(1)
        limited.session.is_closed = True
        with pytest.raises(BrokerError, match="the channel is gone"):
            await task
        limited.session.is_closed = False

    limited.run(wait())
    limited.one("next")

    assert limited.posts == [(0, "first"), (pytest.approx(10), "next")]


@pytest.mark.parametrize("is_over", [True, False])
def test_nothing_is_posted_while_the_session_is_in_doubt(world: World, *, is_over: bool) -> None:
    """The broker may have delivered the message to another worker: it is asked first."""
    session = world.session
    session.is_in_doubt = True

    def hear() -> None:
        session.is_in_doubt, session.is_over = False, is_over
        session.is_heard_from.set()

    world.at(5, hear)
    if is_over:
        with pytest.raises(BrokerError, match="the channel is gone"):
            world.one("m")
    else:
        world.one("m")

    assert [number for _, number in world.posts] == ([] if is_over else ["m"])
    assert world.loop.time() - world.began >= 5


@pytest.mark.parametrize("waits_for", ["rate", "slot", "broker"])
def test_cancelled_wait_gives_back_token_and_slot(waits_for: str) -> None:
    """A delivery that is given back while it waits costs those behind it neither token nor slot."""
    with closing(World(RateLimitSettings(per_second=0.1, burst=2), concurrency=1)) as world:
        world.service.latency_seconds = 12
        holder = world.delivery("holder")
        cancelled, behind = world.delivery("cancelled"), world.delivery("behind")

        async def everyone(*deliveries: Delivery) -> None:
            tasks = []
            if waits_for == "rate":
                tasks += [world.start(world.delivery("one more"))]
                await asyncio.sleep(0)
            if waits_for == "broker":
                world.pauses.block("sms.outbound.dead", "nacked")
                world.at(5, world.pauses.unblock)
            else:
                tasks += [world.start(deliveries[0])]
            await asyncio.sleep(0.5)
            given_back = world.start(deliveries[1])
            await asyncio.sleep(0.5)
            assert deliveries[1].may_be_given_back
            tasks += [world.start(deliveries[2])]
            await asyncio.sleep(0.5)
            given_back.cancel()
            await asyncio.wait([*tasks, given_back])
            assert given_back.cancelled()

        world.run(everyone(holder, cancelled, behind))

        assert waits_for in cancelled.waited_seconds
        assert world.posts[-1][1] == "behind"
        expected = {"rate": 24, "slot": 12, "broker": 5}[waits_for]
        assert world.posts[-1][0] == pytest.approx(expected)


@in_world
async def test_cancelled_request_frees_its_slot(world: World) -> None:
    """A delivery that is cut off while its request is in flight leaves the slot to the next one."""
    first = world.start(world.delivery("first"))
    second = world.start(world.delivery("second"))
    await asyncio.sleep(1)
    first.cancel()
    await asyncio.wait([first, second])

    assert world.posts == [(0, "first"), (1, "second")]
