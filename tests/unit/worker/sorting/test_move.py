"""One delivery on its way: which entry it has, and when its copy is marked."""

from bridge.worker.entry import entry_of
from bridge.worker.envelope import REPEATED
from bridge.worker.sorting.move import make_properties, sorting_entry
from tests.deliveries import make_delivery
from tests.unit.worker.stand_ins import Channel


def test_the_entry_is_none_of_what_is_sent() -> None:
    """Workers ask each other for both, and what is sorted is not sent."""
    delivery = make_delivery(body=b"body")
    sent = entry_of(delivery.envelope, delivery.body)

    assert sorting_entry(delivery) != sent
    assert sorting_entry(delivery).message != sent.message


def test_each_copy_has_an_entry_of_its_own() -> None:
    """A retry is sorted again, and is no repeat of the message that it replaces."""
    first, copy = (sorting_entry(make_delivery(body=b"body", copies=n)) for n in (0, 1))

    assert first.message != copy.message
    assert first == sorting_entry(make_delivery(body=b"body"))


def test_a_copy_that_another_worker_may_have_made_is_marked() -> None:
    """As when this process was frozen, so that its delivery has gone to somebody else."""
    session = Channel()
    delivery = make_delivery(session=session)
    before = make_properties(delivery, 4096)
    session.is_over = True
    after = make_properties(delivery, 4096)

    assert REPEATED not in (before.headers or {})
    assert REPEATED in (after.headers or {})
