"""A delivery: whose it is, how long it is held, and what it waits for meanwhile."""

from typing import get_args

import pytest

from bridge.errors import BrokerError
from bridge.worker.delivery import Delivery, WaitCause
from tests.clock import Clock
from tests.deliveries import make_delivery


@pytest.fixture
def delivery(clock: Clock) -> Delivery:
    return make_delivery(clock=clock)


def test_a_delivery_is_held_from_its_coming(delivery: Delivery, clock: Clock) -> None:
    """Its time runs with its clock."""
    clock.now += 2.5

    assert delivery.held_seconds == 2.5


def test_waits_add_up_by_cause(delivery: Delivery, clock: Clock) -> None:
    """Of each cause the total is known, and what lies between the waits is none."""
    waits: list[tuple[WaitCause, float]] = [("slot", 1.0), ("rate", 4.0), ("slot", 0.5)]
    for cause, seconds in waits:
        with delivery.waits(cause):
            clock.now += seconds
        clock.now += 100.0

    assert delivery.waited_seconds == {"slot": 1.5, "rate": 4.0}


def test_in_a_wait_within_a_wait_only_the_inner_one_counts(
    delivery: Delivery, clock: Clock
) -> None:
    """No second counts twice, and the outer wait goes on behind the inner one."""
    with delivery.waits("rate"):
        clock.now += 1.0
        with delivery.waits("slot"):
            clock.now += 10.0
        assert delivery.may_be_given_back
        clock.now += 2.0

    assert delivery.waited_seconds == {"rate": 3.0, "slot": 10.0}
    assert not delivery.may_be_given_back


def test_a_wait_that_fails_is_measured(delivery: Delivery, clock: Clock) -> None:
    """However it ends, it is over then."""

    def fail() -> None:
        with delivery.waits("retry_after"):
            clock.now += 3.0
            raise BrokerError("the channel is gone")

    with pytest.raises(BrokerError):
        fail()
    assert delivery.waited_seconds == {"retry_after": 3.0}
    assert delivery.waiting_for is None


def test_who_waits_for_nothing_has_waited_for_nothing(delivery: Delivery, clock: Clock) -> None:
    """Time alone is no wait."""
    clock.now += 60.0

    assert delivery.waited_seconds == {}
    assert not delivery.may_be_given_back
    assert not delivery.awaits_original


GIVEN_BACK = {
    *("peers", "order", "due", "slot", "retry_after", "broker", "rate", "probe", "next_try")
}


@pytest.mark.parametrize("cause", get_args(WaitCause))
def test_only_what_is_not_sent_may_be_given_back(delivery: Delivery, cause: WaitCause) -> None:
    """Behind a POST, or behind the first with its id, a delivery has to be settled here."""
    with delivery.waits(cause):
        assert delivery.may_be_given_back == (cause in GIVEN_BACK)
        assert delivery.awaits_original == (cause == "original")
    assert not delivery.may_be_given_back
    assert not delivery.awaits_original
