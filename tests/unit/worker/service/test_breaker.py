"""Whether to send at all: Retry-After, outages, pauses, probes.

All run on an event loop whose time leaps to the next timer, so that nobody waits.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from bridge.config import WorkerSettings
from bridge.worker.delivery import MAX_HOLD_SECONDS, Delivery
from bridge.worker.fates import Answer, PauseReason, judge_failure, judge_status
from bridge.worker.outcomes import Dead, Outcome, Retried, Sent
from bridge.worker.request import SendRequest
from bridge.worker.service.breaker import (
    BEHIND_SECONDS,
    PATIENCE_SECONDS,
    CircuitBreaker,
    News,
    WaitHere,
)
from bridge.worker.service.breaker_states import OUTAGE_REQUESTS, ServiceState
from tests.breakers import Alone, Parts, open_breaker
from tests.clock import LeapingWorld
from tests.deliveries import make_delivery
from tests.ears import Ears

OUTAGE_AFTER = 10.0
FIRST_STEP, LAST_STEP = 5.0, 120.0
SETTINGS = WorkerSettings(
    queue="q",
    max_attempts=6,
    max_uncertain_attempts=3,
    retry_delays=(FIRST_STEP, 30.0, LAST_STEP),
)


class World(LeapingWorld):
    """A breaker, its clock, and the metrics that it writes."""

    def breaker(
        self, settings: WorkerSettings = SETTINGS, chance: Callable[[], float] = random.random
    ) -> CircuitBreaker:
        parts = Parts(settings, self.metrics, clock=self.loop.time, chance=chance)
        self.changed = parts.changed
        parts.account(None)
        return parts.breaker

    def turns(self, breaker: CircuitBreaker, number: int, sender: str = "A") -> list[float]:
        """Let deliveries wait for their turn together; return when each one went."""

        async def one() -> None:
            # Of another sender than the messages with doubtful answers.
            key = fresh()
            await until_allowed(breaker, make_delivery(key), request_of(key, sender="B"))
            async with breaker.rates.token(sender, make_delivery().waits) as token:
                token.spend()

        return self.moments(one() for _ in range(number))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def status(code: int, *, wait: float | None = None) -> Answer:
    return judge_status(code, retry_after_seconds=wait)


ACCEPTED = status(200)
FAILED = status(500)
NOT_FOUND = status(404)
FORBIDDEN = status(403)
LOST = judge_failure("answer_timeout")


_serials = itertools.count(1)


def fresh() -> str:
    return f"m{next(_serials)}"


def rule(
    breaker: CircuitBreaker,
    answer: Answer,
    key: str,
    to: str = "",
    sender: str = "A",
    **envelope: Any,
) -> Outcome | None:
    """Send a message, and return what its answer means; `to` is its own number if unnamed."""
    return ruled(breaker, answer, make_delivery(key, **envelope), to, sender)


async def until_allowed(
    breaker: CircuitBreaker, delivery: Delivery, request: SendRequest
) -> Retried | None:
    while (verdict := breaker.admit(delivery, request)) is not None:
        if isinstance(verdict, Retried):
            return verdict
        with delivery.waits(verdict.cause):
            await breaker._wake_up.wait(verdict.seconds)
    return None


def request_of(key: str, to: str = "", sender: str = "A") -> SendRequest:
    """Make a request; `to` is the message's own number if unnamed."""
    return SendRequest.model_construct(to=to or key, sender=sender, text="x")


def ruled(
    breaker: CircuitBreaker,
    answer: Answer,
    delivery: Delivery,
    to: str = "",
    sender: str = "A",
    *,
    began: int | None = None,
) -> Outcome | None:
    """Say what the answer to a delivery means, of a request that begins now or `began` before."""
    key = delivery.envelope.key
    number = breaker.classifier.begin(key) if began is None else began
    request = request_of(key, to, sender)
    answer = classify(breaker, answer, delivery, request, number)
    return breaker.record(answer, delivery, request)


def classify(
    breaker: CircuitBreaker, answer: Answer, delivery: Delivery, request: SendRequest, number: int
) -> Answer:
    envelope = delivery.envelope
    return breaker.classifier.classify(
        answer,
        envelope.key,
        request.to,
        request.sender,
        request_number=number,
        is_known=envelope.put_off_for == "singled_out",
        trip=breaker.trip,
    )


def note(breaker: CircuitBreaker, answer: Answer, times: int = 1) -> None:
    """Have messages that nobody knows answered so, each settled before the next one."""
    for _ in range(times):
        key = fresh()
        rule(breaker, answer, key)
        breaker.give_up_probe(key)


def down(world: World, settings: WorkerSettings = SETTINGS) -> CircuitBreaker:
    breaker = world.breaker(settings)
    world.passes(OUTAGE_AFTER)
    note(breaker, FAILED, 10)
    assert breaker.pause_reason == "outage"
    return breaker


# --- Retry-After ---------------------------------------------------------------------------------


def ask_for_long(breaker: CircuitBreaker, seconds: float) -> None:
    """Have messages to two numbers answered 429 with a wait that nothing can be held for."""
    note(breaker, status(429, wait=seconds), 2)


_429: Final = status(429)
# The answers before each message, and the shortest wait of the last one. The jitter adds a tenth.
WAITS: dict[str, tuple[list[list[Answer]], float]] = {
    "as asked": ([[status(429, wait=30)]], 30),
    "a shorter wait later": ([[status(429, wait=30), status(429, wait=1)]], 30),
    "own back-off": ([[_429]], 1),
    "own back-off doubles": ([[_429]] * 6, 32),
    "own back-off has an end": ([[_429]] * 20, 60),
    "many at once count once": ([[_429] * 50, [_429] * 50], 2),
    "an acceptance resets it": ([[_429]] * 4 + [[ACCEPTED, _429]], 1),
    "zero is no leave to hammer": ([[status(429, wait=0)]] * 6, 32),
}


@pytest.mark.parametrize("chance", [0.0, 1.0])
@pytest.mark.parametrize(("answers", "shortest"), WAITS.values(), ids=WAITS)
def test_wait_after_a_429(
    world: World, answers: list[list[Answer]], shortest: float, chance: float
) -> None:
    """No message goes before the service wants it, and none waits much longer."""
    breaker = world.breaker(chance=itertools.repeat(chance).__next__)
    waits = []
    for some in answers:
        for answer in some:
            note(breaker, answer)
        waits = world.turns(breaker, 20)

    assert waits == pytest.approx([shortest * (1 + chance / 10)] * 20)


def test_wait_is_prolonged_for_those_who_wait(world: World) -> None:
    """Who waits already waits on when the service asks for more."""
    breaker = world.breaker()
    note(breaker, status(429, wait=5))
    world.loop.call_later(3, note, breaker, status(429, wait=20))

    assert world.turns(breaker, 1)[0] >= 23


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (status(426), {"reason": "misconfigured", "status": 426}),
        (
            status(402)._replace(status=200, code="9"),
            {"reason": "insufficient_funds", "status": 200, "code": "9"},
        ),
    ],
    ids=["status", "code"],
)
def test_the_log_says_with_what_answer_a_pause_began(
    world: World, ears: Ears, answer: Answer, line: dict[str, object]
) -> None:
    """The line of a pause has the status and, if there is one, the service's own code."""
    note(world.breaker(), answer)

    assert ears.heard("paused") == [line]


async def admit(
    breaker: CircuitBreaker, key: str = "m", to: str = "", *, attempts: int = 0, **envelope: Any
) -> float | None:
    """Ask whether a message may go; if not, return how long it waits on the ladder."""
    delivery = make_delivery(key, attempts=attempts, **envelope)
    postponed = await until_allowed(breaker, delivery, request_of(key, to))
    return None if postponed is None else postponed.delay_seconds


def is_probe(breaker: CircuitBreaker, key: str) -> bool:
    return breaker.pause_reason is not None and breaker.admits(key)


def test_messages_of_the_only_sender_leave_in_a_wait(world: World) -> None:
    """Messages of other senders stay, and show whether the wait is for all."""
    breaker = world.breaker()
    note(breaker, status(429, wait=20))

    assert world.run(admit(breaker)) == FIRST_STEP
    verdict = breaker.admit(make_delivery("other"), request_of("other", sender="B"))
    assert isinstance(verdict, WaitHere)


def test_nothing_is_held_for_a_long_wait(world: World) -> None:
    """In a wait that is too long to hold anything a message learns when to come again."""
    breaker = world.breaker()
    ask_for_long(breaker, 600)
    before = world.loop.time()

    assert (world.run(admit(breaker)), breaker.probes_wanted) == (LAST_STEP, 0)
    assert world.loop.time() == before


# --- Pauses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [status(401), status(402)._replace(status=200, code="7", by_code=True)],
    ids=["401", "by code"],
)
def test_fault_of_the_setup_may_be_one_messages(world: World, answer: Answer) -> None:
    """A message that gets such an answer again, after another one was taken, holds up no other.

    It goes up the ladder alone, uses up its attempts, and so does another one to its number.
    """
    breaker = world.breaker()
    assert rule(breaker, answer, "own", "bad") is None
    rule(breaker, ACCEPTED, "other")
    close(breaker)
    outcomes = [rule(breaker, answer, key, "bad", attempts=2) for key in ("own", "next", "own")]
    assert [reason(outcome) for outcome in outcomes] == ["singled_out"] * 3
    assert [delay(outcome) for outcome in outcomes] == [120.0] * 3
    assert breaker.pause_reason is None
    last = rule(breaker, answer, "own", "bad", attempts=5)
    assert reason(last) == "exhausted"
    # For a message to another number it is new.
    rule(breaker, answer, "new")
    assert breaker.pause_reason is not None


@pytest.mark.parametrize("code", [407, 302])
def test_some_faults_of_the_setup_are_never_one_messages(world: World, code: int) -> None:
    """What a proxy answers, or another address, speaks of no message, whatever was taken."""
    breaker = world.breaker()
    rule(breaker, status(code), "own")
    rule(breaker, ACCEPTED, "other")
    close(breaker)

    assert rule(breaker, status(code), "own") is None
    assert breaker.pause_reason is not None


def close(breaker: CircuitBreaker) -> None:
    """Close a breaker, as if another worker had found the service well again."""
    breaker.peer_closed()


def reason(outcome: Outcome | None) -> str | None:
    """Return why a message is put off or dead, `held` when it is tried again from here."""
    return "held" if outcome is None else getattr(outcome, "reason", None)


def delay(outcome: Outcome | None) -> float | None:
    """Return how long a message waits on the ladder, None when it does not."""
    return outcome.delay_seconds if isinstance(outcome, Retried) else None


# --- The probe -----------------------------------------------------------------------------------


def paused(world: World, reason: PauseReason = "misconfigured") -> CircuitBreaker:
    breaker = world.breaker()
    open_breaker(breaker, reason)
    return breaker


def claims(
    world: World, breaker: CircuitBreaker, key: str, to: str = "", *, attempts: int = 0
) -> bool:
    """Say whether a message that asks is the probe then; it may go, or waits."""

    async def ask() -> bool:
        asking = asyncio.ensure_future(admit(breaker, key, to, attempts=attempts))
        await asyncio.sleep(0)
        asking.cancel()
        return is_probe(breaker, key)

    found: bool = world.run(ask())
    return found


def fails(breaker: CircuitBreaker, key: str) -> None:
    rule(breaker, FAILED if breaker.pause_reason == "outage" else status(302), key)


def waits_of(
    world: World, breaker: CircuitBreaker, number: int, key: str | None = None
) -> list[float]:
    """Fail with probes, each a message of its own or all the same; return how long each waited."""
    waits = []
    for _ in range(number):
        probe = key or fresh()
        waits.append(world.seconds(admit(breaker, probe)))
        assert is_probe(breaker, probe)
        fails(breaker, probe)
        if key is None:
            breaker.give_up_probe(probe)
    return waits


def fits(waits: list[float], steps: list[float]) -> bool:
    """Say whether waits are these steps, each shortened by a little chance or not."""
    pairs = zip(waits, steps, strict=True)
    return all(step * 0.8 - 0.001 <= wait <= step + 0.001 for wait, step in pairs)


def test_first_message_is_the_probe(world: World) -> None:
    """In a pause the first message that asks is the probe, and stays it."""
    breaker = paused(world)

    assert [claims(world, breaker, key) for key in ("first", "second", "first")] == [
        True,
        False,
        True,
    ]


def test_probe_is_another_message_than_the_last(world: World) -> None:
    """When a probe has failed, another message takes its place, and it goes away itself."""
    breaker = paused(world)
    waits_of(world, breaker, 1, "first")
    wanted = breaker.probes_wanted
    replaced = world.run(_both(breaker, "first", "second"))

    assert (wanted, is_probe(breaker, "second")) == (2, True)
    assert replaced is not None


async def _both(breaker: CircuitBreaker, held: str, comes: str) -> float | None:
    """Let a message come while the last probe is held; return what that one is told."""
    holding = asyncio.ensure_future(admit(breaker, held))
    await asyncio.sleep(0)
    assert await admit(breaker, comes) is None
    return await holding


def test_message_that_began_a_pause_is_held(world: World) -> None:
    """The message whose answer began the pause is tried again after a second, if no other is."""
    breaker = paused(world)

    assert rule(breaker, status(302), "first") is None
    assert rule(breaker, status(302), "second") is not None
    assert fits(waits_of(world, breaker, 3, "first"), [1, 2, 4])


def test_held_message_goes_on_when_the_first_probe_succeeds(world: World) -> None:
    """What was held when a pause began waits for the first probe, not on the ladder."""
    breaker = paused(world)
    world.loop.call_later(1.2, close, breaker)

    async def everybody() -> list[float | None]:
        return await asyncio.gather(*(admit(breaker, fresh()) for _ in range(50)))

    assert world.seconds(everybody()) == pytest.approx(1.2)


def test_held_message_does_not_wait_long(world: World) -> None:
    """When the first probe fails, what was held goes away; later nothing waits at all."""
    breaker = paused(world)
    waits_of(world, breaker, 1)
    claims(world, breaker, "probe")
    waited = world.seconds(admit(breaker, "held"))

    assert waited <= PATIENCE_SECONDS
    assert world.seconds(admit(breaker, "late")) == 0
    assert world.run(admit(breaker, "late")) is not None


@pytest.mark.parametrize("before", [status(302), status(429, wait=900)], ids=["302", "429"])
def test_outage_after_another_pause_is_probed_as_an_outage(world: World, before: Answer) -> None:
    """A pause that turns into an outage is probed at least every 15 s from then on."""
    breaker = world.breaker()
    note(breaker, before)
    world.passes(1000)
    if breaker.pause_reason == "misconfigured":
        waits_of(world, breaker, 8)
    open_breaker(breaker, "outage")

    assert max(waits_of(world, breaker, 3)) <= 15


def test_new_key_ends_the_wait(world: World) -> None:
    """A changed key ends the wait for the next probe."""
    breaker = paused(world)
    waits_of(world, breaker, 8)
    world.loop.call_later(3, breaker.renew_key)

    assert waits_of(world, breaker, 1) == pytest.approx([3])


def test_new_key_while_the_probe_is_under_way(world: World) -> None:
    """A key that changed in the pause, while the old one was being tried, is tried at once."""
    breaker = paused(world)
    waits_of(world, breaker, 8)
    world.run(admit(breaker, "probe"))
    breaker.renew_key()
    fails(breaker, "probe")

    assert waits_of(world, breaker, 1, "probe") == [0]


# --- Outages and the attempts of messages ---------------------------------------------------------

ONE_TRY = SETTINGS.model_copy(update={"max_attempts": 1, "max_uncertain_attempts": 1})


def test_what_has_failed_waits_while_it_looks_like_an_outage(world: World) -> None:
    """After ten failures only messages that have not failed yet find out whether it is one."""
    breaker = world.breaker()
    note(breaker, ACCEPTED)
    note(breaker, FAILED, 10)

    assert breaker.pause_reason is None
    assert world.run(admit(breaker, "new")) is None
    assert world.run(admit(breaker, "failed", attempts=1)) == FIRST_STEP
    note(breaker, ACCEPTED)
    assert world.run(admit(breaker, "failed", attempts=1)) is None


def test_last_try_is_kept_while_others_can_probe(world: World) -> None:
    """A message whose next failure is its end leaves its place to one that has attempts left."""
    breaker = down(world, ONE_TRY)
    claims(world, breaker, "last", attempts=1)
    wanted = breaker.probes_wanted

    assert (wanted, claims(world, breaker, "first")) == (2, True)
    assert not claims(world, breaker, "another last", attempts=1)


def test_an_hour_of_failures_costs_a_handful(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all that is left has one attempt left, an hour's probes are few.

    The random part of their distance is as short as it can be.
    """
    monkeypatch.setattr("random.uniform", lambda least, _: least)
    breaker, dead = down(world), 0
    end = world.loop.time() + 3600
    while world.loop.time() < end:
        key = fresh()
        away = world.run(admit(breaker, key, attempts=5))
        if away is None:
            fails(breaker, key)
            dead += 1
        else:
            world.passes(away)
        breaker.give_up_probe(key)

    assert dead <= 22


def test_a_suspected_outage_holds_a_message_once(world: World) -> None:
    """However long `worker.outage_after` is, a message waits one more step, and no second one."""
    breaker = world.breaker()
    note(breaker, ACCEPTED)
    note(breaker, FAILED, 10)

    assert [world.run(admit(breaker, "m", attempts=1)) for _ in range(3)] == [
        FIRST_STEP,
        None,
        None,
    ]
    assert world.run(admit(breaker, "n", attempts=1, put_off_for="paused")) is None
    # In another one it may wait again.
    note(breaker, ACCEPTED)
    note(breaker, FAILED, 10)
    assert world.run(admit(breaker, "m", attempts=1)) == FIRST_STEP


def test_messages_held_back_are_limited(world: World) -> None:
    """While an outage is suspected, at most 10,000 messages are delayed; the others are sent."""
    breaker, request = world.breaker(), request_of("m")
    note(breaker, FAILED, 10)
    verdicts = [
        breaker.admit(make_delivery(fresh(), attempts=1), request) is None for _ in range(10_001)
    ]

    assert verdicts == [False] * 10_000 + [True]


def test_suspected_outage_is_shown(world: World, ears: Ears) -> None:
    """It is seen in the metrics and told once, until it is refuted or becomes a pause."""
    breaker = world.breaker()
    note(breaker, ACCEPTED)
    note(breaker, FAILED, 9)
    assert not breaker.is_outage_suspected
    note(breaker, FAILED, 5)
    assert (breaker.is_outage_suspected, world.value("outage_suspected")) == (True, 1)
    assert ears.heard("outage_suspected") == [{"failures": OUTAGE_REQUESTS}]

    world.passes(OUTAGE_AFTER)
    note(breaker, FAILED)
    assert (breaker.pause_reason, world.value("outage_suspected")) == ("outage", 0)


# --- Ambiguous answers ----------------------------------------------------------------------------


def test_refusal_that_is_proven_says_so(world: World) -> None:
    """The dead letter tells on what evidence, and the set-up is not suspected any more."""
    breaker = world.breaker()
    rule(breaker, NOT_FOUND, "bad")
    note(breaker, ACCEPTED)

    assert rule(breaker, NOT_FOUND, "bad") == Dead(
        reason="refused",
        detail="the SMS API answered 404, twice, and accepted another message in between",
        status=404,
        counted=True,
    )


def test_nothing_is_refused_in_a_pause(world: World) -> None:
    """While the set-up is in doubt evidence of before convicts nobody."""
    breaker = world.breaker()
    rule(breaker, FORBIDDEN, "bad")
    note(breaker, ACCEPTED)
    note(breaker, FORBIDDEN, 3)

    rule(breaker, FORBIDDEN, "probe")
    assert reason(rule(breaker, FORBIDDEN, "bad")) == "ambiguous"


def test_key_revoked_under_load(world: World) -> None:
    """When fifty requests in flight are answered 403 at once, all are put off and none is dead."""
    breaker = world.breaker()
    note(breaker, ACCEPTED)
    messages = [make_delivery(fresh()) for _ in range(50)]
    late = make_delivery("late")
    began = [breaker.classifier.begin(message.envelope.key) for message in messages]
    late_began = breaker.classifier.begin("late")
    for _ in range(2):
        outcomes = [
            ruled(breaker, FORBIDDEN, message, began=moment)
            for message, moment in zip(messages, began, strict=True)
        ]
        # The one that is held is the probe.
        assert {reason(outcome) for outcome in outcomes} == {"ambiguous", "held"}
        # It was sent before the key was revoked, by a slow backend.
        ruled(breaker, ACCEPTED, late, began=late_began)
        began = [breaker.classifier.begin(message.envelope.key) for message in messages]

    assert breaker.pause_reason == "credentials_rejected"


def test_steps_grow_until_a_pause(world: World) -> None:
    """The steps of the ladder grow with each ambiguous answer; in a pause they do not."""
    breaker = world.breaker()
    outcomes = [rule(breaker, NOT_FOUND, "bad") for _ in range(3)]
    assert [delay(outcome) for outcome in outcomes] == [5, 30, None]

    assert breaker.pause_reason == "misconfigured"
    assert [delay(rule(breaker, NOT_FOUND, "worse")) for _ in range(3)] == [5, 5, 5]


def test_many_messages_to_a_bad_number_are_no_probes(world: World) -> None:
    """Messages to a number that is answered 404 go away at once, and leave the way to others."""
    breaker = world.breaker()
    for key in ("one", "two", "three"):
        rule(breaker, NOT_FOUND, key, "bad")
    claims(world, breaker, "four", to="bad")
    waited = [world.seconds(admit(breaker, fresh(), "bad")) for _ in range(20)]

    assert (waited, breaker.probes_wanted) == ([0] * 20, 2)
    assert claims(world, breaker, "good")


def test_only_a_failed_probe_is_published_as_one(world: World) -> None:
    """The other workers double their wait for each published failure of a probe."""

    class Listening(Alone):
        def publish(self, news: News, state: ServiceState) -> None:  # noqa: ARG002
            heard.append(news)

    heard: list[News] = []
    breaker = Parts(SETTINGS, world.metrics, cluster=Listening(), clock=world.loop.time).breaker
    note(breaker, status(401))
    world.run(admit(breaker, "probe"))
    assert heard == ["opened"]

    rule(breaker, status(401), "probe")
    assert heard == ["opened", "probe_failed"]


# --- Limits of one message, and of one sender -----------------------------------------------------

LIMITED = status(429, wait=20)


def test_limit_of_one_number(world: World) -> None:
    """A message that gets a 429 again while others are taken goes up the ladder alone."""
    breaker = world.breaker()
    assert rule(breaker, LIMITED, "bad") is None
    world.passes(30)
    note(breaker, ACCEPTED, 3)
    again = rule(breaker, LIMITED, "bad")

    assert isinstance(again, Retried)
    assert (again.reason, again.counted, again.delay_seconds) == ("singled_out", True, 30.0)
    # Nobody waits for it, nor for another message to its number.
    assert reason(rule(breaker, LIMITED, "next", "bad")) == "singled_out"
    assert not breaker.retry_after_seconds
    assert reason(rule(breaker, LIMITED, "bad", attempts=5)) == "exhausted"


def test_limit_for_all_after_a_message_was_singled_out(world: World) -> None:
    """A message that was singled out burns no attempt when others get many such answers by now."""
    breaker = world.breaker()
    rule(breaker, LIMITED, "bad")
    note(breaker, ACCEPTED, 20)
    assert reason(rule(breaker, LIMITED, "bad")) == "singled_out"
    note(breaker, status(429), 5)
    outcome = rule(breaker, LIMITED, "bad", put_off_for="singled_out", attempts=1)

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.counted) == ("rate_limited", False)
    assert breaker.retry_after_seconds


def test_limited_message_makes_room_for_others(world: World) -> None:
    """A message that gets a 429 again, with nothing else at hand, is held no more."""
    breaker = world.breaker()
    assert rule(breaker, LIMITED, "bad") is None
    world.passes(30)
    breaker.classifier.expect("other")
    assert rule(breaker, LIMITED, "bad") is None
    breaker.classifier.others.discard("other")
    world.passes(30)
    outcome = rule(breaker, LIMITED, "bad")

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.counted) == ("rate_limited", False)


def sender_wait(world: World, breaker: CircuitBreaker, sender: str) -> float:
    return breaker._sender_waits.seconds_left(sender, now=world.loop.time())


def test_limit_of_one_sender(world: World) -> None:
    """When only other senders' messages are taken, its sender alone waits, not counted."""
    breaker = world.breaker()
    rule(breaker, LIMITED, "first", sender="slow")
    world.passes(30)
    for _ in range(3):
        rule(breaker, ACCEPTED, fresh(), sender="fast")
    outcome = rule(breaker, LIMITED, "second", sender="slow")

    assert isinstance(outcome, Retried)
    assert (outcome.reason, outcome.counted) == ("rate_limited", False)
    assert 20 <= sender_wait(world, breaker, "slow") <= 22
    assert sender_wait(world, breaker, "fast") == 0
    assert not breaker.retry_after_seconds
    # The first message of the sender that is taken ends its wait.
    rule(breaker, ACCEPTED, "third", sender="slow")
    assert breaker._sender_waits.is_empty


def test_a_number_that_is_answered_otherwise_is_not_the_limited_one(world: World) -> None:
    """A limit for all, long after a number that had to wait was refused, is not the number's."""
    breaker = world.breaker()
    rule(breaker, LIMITED, "first", "bad")
    world.passes(30)
    note(breaker, ACCEPTED, 100)
    rule(breaker, status(422), "first", "bad")
    assert breaker.admits_all

    assert rule(breaker, LIMITED, "second", "bad") is None
    assert breaker.retry_after_seconds


def test_code_that_speaks_of_a_sender(world: World) -> None:
    """A code that is known to be about the sender holds that sender at once, longer each time."""
    answer = status(429)._replace(status=400, code="21611", by_code=True, about="sender")
    breaker, waits = world.breaker(), []
    for _ in range(8):
        assert reason(rule(breaker, answer, fresh(), sender="slow")) == "rate_limited"
        waits.append(sender_wait(world, breaker, "slow"))
        world.passes(70)

    assert all(
        step <= wait <= step * 1.1 + 0.001
        for wait, step in zip(waits, [1, 2, 4, 8, 16, 32, 60, 60], strict=True)
    )
    assert not breaker.retry_after_seconds
    assert breaker.pause_reason is None


def test_long_wait_of_one_number_is_checked(world: World) -> None:
    """A long wait that one number is asked for is checked with another one after a second."""
    breaker = world.breaker()
    assert delay(rule(breaker, status(429, wait=900), "bad")) == 120.0
    assert breaker.pause_reason == "rate_limited"
    breaker.end_passed_wait()
    assert breaker.pause_reason == "rate_limited"

    assert 0.8 <= world.seconds(admit(breaker, "good")) <= 1
    rule(breaker, ACCEPTED, "good")
    assert world.value("paused", reason="rate_limited") == 0
    assert reason(rule(breaker, status(429, wait=900), "bad")) == "singled_out"


def test_long_wait_of_one_number_is_kept_when_another_is_asked_for_it(world: World) -> None:
    """When the message that checks it gets a 429 too, the wait is for all."""
    breaker = world.breaker()
    rule(breaker, status(429, wait=600), "bad")
    # It is not asked for the same number before its time.
    assert world.run(admit(breaker, "another", to="bad")) == LAST_STEP
    world.run(admit(breaker, "other"))
    rule(breaker, status(429, wait=600), "other")
    breaker.give_up_probe("other")

    assert breaker.probes_wanted == 0
    assert world.run(admit(breaker, "next")) == LAST_STEP


def test_long_wait_of_one_number_ends_without_another_message(world: World) -> None:
    """Where nothing else is sent, the pause is over when the time has passed."""
    breaker = world.breaker()
    rule(breaker, status(429, wait=600), "bad")
    breaker.give_up_probe("bad")
    world.passes(599)
    breaker.end_passed_wait()
    assert breaker.pause_reason == "rate_limited"

    world.passes(2)
    breaker.end_passed_wait()
    assert breaker.pause_reason is None


def test_limited_message_goes_behind_others(world: World) -> None:
    """After the wait others go first, so that their answers show whether it is for all."""
    breaker, left = world.breaker(), []
    rule(breaker, status(429, wait=5), "bad")

    async def go(key: str) -> None:
        await until_allowed(breaker, make_delivery(key, clock=world.loop.time), request_of(key))
        number = breaker.classifier.begin(key)
        await asyncio.sleep(0.3)
        left.append(key)
        answer = status(429, wait=5) if key == "bad" else ACCEPTED
        delivery = make_delivery(key)
        answer = classify(breaker, answer, delivery, request_of(key), number)
        breaker.record(answer, delivery, request_of(key))

    async def both() -> None:
        await asyncio.gather(go("bad"), go("good"))

    assert world.seconds(both()) < 5.5 + 2 * 0.3 + 0.1
    assert left == ["good", "bad"]
    assert not breaker.retry_after_seconds


def test_limited_message_does_not_wait_for_others_for_long(world: World) -> None:
    """Others that are answered late hold it up for some seconds at most."""
    breaker = world.breaker()
    rule(breaker, status(429, wait=5), "bad")
    breaker.classifier.begin("slow")

    assert world.seconds(admit(breaker, "bad")) <= 5.5 + BEHIND_SECONDS + 0.1


def test_limited_message_goes_first_after_a_minute(world: World) -> None:
    """A message that has been held for more than a minute no longer waits behind others."""
    verdicts = []
    for held_seconds in (60, 61):
        breaker = world.breaker(chance=lambda: 0.0)
        delivery = make_delivery("bad", clock=world.loop.time)
        world.passes(held_seconds - 6)
        rule(breaker, status(429, wait=5), "bad")
        breaker.classifier.begin("slow")
        world.passes(6)
        verdicts.append(breaker.admit(delivery, request_of("bad")))

    assert verdicts == [WaitHere("retry_after", 1.5), None]


def test_limited_message_does_not_wait_through_one_wait_after_the_other(world: World) -> None:
    """Under a limit for all that is never over for long, a message is not held after all others."""
    breaker = world.breaker()
    rule(breaker, status(429, wait=1), "bad")

    async def others() -> None:
        for _ in range(200):
            await asyncio.sleep(1.2)
            note(breaker, status(429, wait=1))
            breaker.classifier.begin(fresh())

    async def both() -> None:
        busy = asyncio.create_task(others())
        delivery = make_delivery("bad", clock=world.loop.time)
        await until_allowed(breaker, delivery, request_of("bad"))
        busy.cancel()

    assert world.seconds(both()) <= MAX_HOLD_SECONDS + 2


def test_other_worker_has_singled_it_out(world: World) -> None:
    """A copy says that another worker has found out: nobody waits here for its first 429."""
    breaker = world.breaker()
    outcome = rule(breaker, LIMITED, "bad", put_off_for="singled_out", attempts=1)

    assert reason(outcome) == "singled_out"
    assert not breaker.retry_after_seconds


def test_nobody_is_singled_out_in_a_pause(world: World) -> None:
    """While the set-up is in doubt what was taken before proves nothing."""
    breaker = world.breaker()
    rule(breaker, LIMITED, "bad")
    note(breaker, ACCEPTED)
    open_breaker(breaker, "misconfigured")

    assert reason(rule(breaker, LIMITED, "bad")) == "rate_limited"


# --- A refusal that nobody knows ------------------------------------------------------------------

UNKNOWN = status(400)._replace(code="4711")


def test_same_unknown_refusal_in_a_row(world: World) -> None:
    """The tenth message that is refused with the same unknown code is put off, and all pauses."""
    breaker = world.breaker()
    outcomes = [rule(breaker, UNKNOWN, fresh()) for _ in range(12)]

    assert [reason(outcome) for outcome in outcomes] == [
        *["refused"] * 9,
        "held",
        *["ambiguous"] * 2,
    ]
    assert breaker.pause_reason == "misconfigured"


@pytest.mark.parametrize(
    "between",
    [ACCEPTED, status(400)._replace(code="4712"), status(400)._replace(code="1", by_code=True)],
    ids=["accepted", "another code", "a known code"],
)
def test_refusals_must_be_in_a_row(world: World, between: Answer) -> None:
    """What shows that the service looks at each message starts the count anew."""
    breaker = world.breaker()
    note(breaker, UNKNOWN, 9)
    note(breaker, between)
    note(breaker, UNKNOWN, 8)

    assert breaker.pause_reason is None


@pytest.mark.parametrize(
    "answer",
    [status(422), UNKNOWN._replace(by_code=True)],
    ids=["422", "a known code"],
)
def test_known_refusals_are_the_messages_own(world: World, answer: Answer) -> None:
    """However many messages get one, they are refused."""
    breaker = world.breaker()

    assert {reason(rule(breaker, answer, fresh())) for _ in range(30)} == {"refused"}


def test_one_message_again_and_again_is_no_row(world: World) -> None:
    """It takes ten messages."""
    breaker = world.breaker()
    for _ in range(30):
        rule(breaker, UNKNOWN, "same")

    assert breaker.pause_reason is None


def test_probe_that_is_refused_so_ends_no_pause(world: World) -> None:
    """Neither here, nor where another worker has begun the pause with the same status."""
    here, elsewhere = world.breaker(), world.breaker()
    note(here, UNKNOWN, 10)
    elsewhere.peer_opened("misconfigured", world.loop.time(), status=400)
    for breaker in (here, elsewhere):
        world.run(admit(breaker, "probe"))
        assert reason(rule(breaker, UNKNOWN, "probe")) == "held"
        assert breaker.pause_reason == "misconfigured"


# --- After an outage -----------------------------------------------------------------------------


def back(world: World) -> CircuitBreaker:
    """Make a breaker that has just come back from an outage."""
    breaker = down(world)
    note(breaker, ACCEPTED)
    return breaker


def test_slow_start(world: World) -> None:
    """After an outage the service is not met by everything at once."""
    breaker = back(world)

    assert sum(when < 1 for when in world.turns(breaker, 100)) <= 25


def test_slow_start_grows_for_those_who_wait(world: World) -> None:
    """Who waits already after an outage goes at the rate that doubles, not at that of its begin."""
    went = world.turns(back(world), 150)

    assert [sum(when < second for when in went) > 10 * 2**second for second in (2, 3)] == [True] * 2
    assert went[-1] < 5


@pytest.mark.parametrize("seconds", [0, 86400 * 30])
def test_quiet_time_after_an_outage(world: World, seconds: float) -> None:
    """However quiet it is after an outage, the next message has its turn."""
    breaker = back(world)
    world.passes(seconds)

    assert world.turns(breaker, 1)[0] <= 1


# --- What an answer means for its delivery --------------------------------------------------------


def closed(world: World) -> CircuitBreaker:
    return world.breaker()


# A breaker, the answer to a message with these attempts, and its outcome: why, whether the attempt
# counts, and whether it may have been sent.
OUTCOMES: dict[str, tuple[Callable[[World], CircuitBreaker], Answer, dict[str, Any], Any]] = {
    "accepted": (closed, ACCEPTED, {}, (Sent, None, None, None)),
    "short 429": (closed, status(429, wait=30), {}, None),
    "long 429": (closed, status(429, wait=120), {}, (Retried, "rate_limited", False, False)),
    "429 in a pause": (paused, status(429, wait=3), {}, (Retried, "rate_limited", False, False)),
    "refused in a pause": (paused, status(400), {}, (Dead, "refused", True, False)),
    "500": (closed, FAILED, {}, (Retried, "uncertain", True, True)),
    "500 in an outage": (down, FAILED, {"attempts": 4}, (Retried, "paused", False, True)),
    "lost in an outage": (down, LOST, {"attempts": 4}, (Retried, "paused", False, True)),
    "503 in an outage": (
        *(down, status(503, wait=1), {"attempts": 5}),
        (Retried, "paused", False, False),
    ),
    "last uncertain attempt in an outage": (
        *(down, FAILED, {"uncertain_attempts": 2}),
        (Dead, "uncertain", True, True),
    ),
}


@pytest.mark.parametrize(
    ("make", "answer", "attempts", "expected"), OUTCOMES.values(), ids=OUTCOMES
)
def test_outcome_of_an_answer(
    world: World,
    make: Callable[[World], CircuitBreaker],
    answer: Answer,
    attempts: dict[str, Any],
    expected: Any,
) -> None:
    """A pause for the service's fault uses up no attempt; a short wait holds the message here."""
    outcome = rule(make(world), answer, "m", **attempts)
    facts = [getattr(outcome, name, None) for name in ("reason", "counted", "uncertain")]

    assert (None if outcome is None else (type(outcome), *facts)) == expected


def test_slow_down_does_not_hold_a_message_for_ever(world: World) -> None:
    """A message that has been held for a minute goes to the ladder, not counted."""
    outcomes = []
    for held_seconds in (MAX_HOLD_SECONDS, MAX_HOLD_SECONDS + 1):
        breaker, delivery = world.breaker(), make_delivery("m", clock=world.loop.time)
        world.passes(held_seconds)
        outcomes.append(ruled(breaker, status(429), delivery))

    assert outcomes == [None, Retried("rate_limited", 5.0, "the SMS API answered 429", status=429)]


def test_slow_down_after_doubts_takes_the_first_step(world: World) -> None:
    """Only ambiguous answers make the step grow, whatever else a message was answered."""
    breaker = world.breaker()
    delivery = make_delivery("m", clock=world.loop.time)
    for _ in range(2):
        ruled(breaker, NOT_FOUND, delivery)
    world.passes(MAX_HOLD_SECONDS + 1)

    assert delay(ruled(breaker, status(429), delivery)) == 5


def test_probe_is_not_held_for_ever(world: World) -> None:
    """A probe that has been held for more than a minute goes to the ladder, not counted."""
    breaker, delivery = paused(world), make_delivery("m", clock=world.loop.time)
    world.passes(MAX_HOLD_SECONDS + 1)

    assert ruled(breaker, status(302), delivery) == Retried(
        "paused", 5.0, "the SMS API answered 302", status=302
    )


@pytest.mark.parametrize(
    ("worker", "message", "ends"),
    [
        ("retry", None, Retried),
        ("park", None, Dead),
        ("retry", "park", Dead),
        ("park", "retry", Retried),
    ],
)
def test_parking(world: World, worker: Any, message: Any, ends: type[Outcome]) -> None:
    """What may have been sent is dead at once where the message, or else the worker, says so."""
    breaker = world.breaker(SETTINGS.model_copy(update={"on_uncertain": worker}))

    assert isinstance(rule(breaker, LOST, "m", on_uncertain=message), ends)


def test_wait_to_probe_is_measured(world: World) -> None:
    """What a message waits for in a pause is the probe; without a pause it waits for nothing."""
    breaker, delivery = world.breaker(), make_delivery("m", clock=world.loop.time)
    world.run(until_allowed(breaker, delivery, request_of("m")))
    assert delivery.waited_seconds == {}

    open_breaker(breaker, "misconfigured")
    waited = world.seconds(until_allowed(breaker, delivery, request_of("m")))
    assert delivery.waited_seconds == {"probe": pytest.approx(waited)}
