"""The worker's own pauses: what waits, what leaves, and what is shown of them."""

from collections.abc import Callable, Iterator

import pytest

from bridge.config import WorkerSettings
from bridge.errors import BrokerError
from bridge.worker.outcomes import Retried
from bridge.worker.pauses import WorkerPauses
from tests.clock import Clock, LeapingWorld
from tests.deliveries import make_delivery
from tests.ears import Ears

FIRST_DELAY = 5.0


class Session:
    """What stands in for a session."""

    is_leaving = False


class World(LeapingWorld):
    """The pauses of one worker."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pauses = WorkerPauses(
            WorkerSettings(queue="q", retry_delays=(FIRST_DELAY, 60)),
            self.metrics,
            clock=self.clock,
        )
        self.report, self.changed = self.pauses.report, self.pauses.wake_up.consumer
        self.delivery = make_delivery(session=Session(), clock=self.loop.time)

    def shown(self, reason: str) -> tuple[float | None, float | None]:
        """Return what the metrics show of a reason: now, and the number of pauses."""
        return self.value("paused", reason=reason), self.value("pauses_total", reason=reason)

    @property
    def reason(self) -> str | None:
        return self.pauses.reason


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_an_operators_pause_is_shown_once(world: World, ears: Ears) -> None:
    """An operator's pause is known, shown, counted and logged, once; and so is its end."""
    pauses = world.pauses
    pauses.operator_resumed()
    pauses.operator_paused()
    pauses.operator_paused()
    assert (world.reason, pauses.is_on, world.shown("operator")) == ("operator", True, (1, 1))

    pauses.operator_resumed()
    assert (world.reason, pauses.is_on, world.shown("operator")) == (None, False, (0, 1))
    assert ears.heard("paused") == [{"reason": "operator"}]
    assert ears.heard("resumed") == [{"reason": "operator"}]


def test_a_message_leaves_in_an_operators_pause(world: World) -> None:
    """The message moves to the first retry queue at once, even if it waits for the broker."""
    pauses = world.pauses
    pauses.block("q.dead", "nacked")
    world.loop.call_later(3, pauses.operator_paused)

    assert world.run(pauses.wait(world.delivery)) == Retried(
        "paused", FIRST_DELAY, "the worker is paused: operator"
    )
    assert world.delivery.waited_seconds == {"broker": pytest.approx(3)}


def test_a_broker_that_stores_nothing_is_shown_once(world: World, ears: Ears) -> None:
    """The pause is known, shown, counted and logged once, with the last copy that was refused."""
    pauses = world.pauses
    pauses.block("q.retry.5s", "timeout")
    pauses.block("q.dead", "nacked")
    (facts,) = world.report.facts()
    assert (facts["queue"], facts["fault"]) == ("q.dead", "nacked")
    assert (world.reason, world.shown("broker_blocked")) == ("broker_blocked", (1, 1))

    pauses.unblock()
    pauses.unblock()
    assert (world.reason, world.shown("broker_blocked")) == (None, (0, 1))
    assert (world.report.unstored, world.report.facts()) == (None, [])
    assert ears.heard("paused") == [
        {"reason": "broker_blocked", "queue": "q.retry.5s", "fault": "timeout"}
    ]
    assert ears.heard("resumed") == [{"reason": "broker_blocked"}]


def test_messages_wait_for_a_broker_that_stores_nothing(world: World) -> None:
    """Messages wait here until the broker stores copies again."""
    world.pauses.block("q.dead", "nacked")
    world.loop.call_later(7, world.pauses.unblock)
    deliveries = [make_delivery(session=Session()) for _ in range(3)]

    assert world.moments(map(world.pauses.wait, deliveries)) == pytest.approx([7, 7, 7])


@pytest.mark.parametrize("ends", ["drain", "session"])
def test_a_waiting_message_goes_back_to_the_queue(world: World, ends: str) -> None:
    """While the worker drains, or its session ends, no message starts."""
    if ends == "drain":
        world.pauses.drain()
    else:
        world.delivery.session.is_leaving = True

    with pytest.raises(BrokerError):
        world.run(world.pauses.wait(world.delivery))
    assert world.pauses.reason is None


def test_each_change_wakes_the_consumer(world: World) -> None:
    """The prefetch is compared again after each change."""
    pauses = world.pauses
    changes: list[Callable[[], None]] = [
        lambda: pauses.block("q.dead", "nacked"),
        pauses.unblock,
        pauses.operator_paused,
        pauses.operator_resumed,
        pauses.drain,
    ]
    for change in changes:
        world.changed.clear()
        change()
        assert world.changed.is_set()


def test_pauses_are_shown_with_their_begin(world: World) -> None:
    """Each pause is listed with its own begin and cause, the oldest first, until it ends."""
    report, clock = world.report, world.clock
    report.begin("insufficient_funds", status=402, code="E7")
    clock.now += 60
    report.begin("operator")
    seen = [(one["reason"], one["since"], one["status"], one["code"]) for one in report.facts()]
    assert seen == [
        ("insufficient_funds", "1970-01-01T00:16:40Z", 402, "E7"),
        ("operator", "1970-01-01T00:17:40Z", None, None),
    ]

    report.end("insufficient_funds")
    assert [one["reason"] for one in report.facts()] == ["operator"]
    assert world.value("paused_timestamp_seconds", reason="insufficient_funds") == 0


def test_one_reason_may_replace_another(world: World, ears: Ears) -> None:
    """A pause that continues for another reason is not told as resumed."""
    report = world.report
    report.begin("outage")
    report.turn("outage")
    report.begin("tls_failed")

    assert (world.shown("outage"), world.shown("tls_failed")) == ((0, 1), (1, 1))
    assert ears.heard("resumed") == []
