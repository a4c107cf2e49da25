"""One delivery on its way from the main queue to the queue of its class, or to its lane."""

import hashlib
from dataclasses import dataclass

from bridge.amqp.properties import Properties
from bridge.worker.copies import sorted_properties
from bridge.worker.delivery import Delivery
from bridge.worker.entry import Entry, entry_of
from bridge.worker.ledger import Claim
from bridge.worker.ordering.turns import Place
from bridge.worker.sorting.targets import Target


@dataclass(slots=True, eq=False)
class Move:
    """A delivery that is being moved; `claim` is None until it is known to be no repeat.

    `place` is that in the line of its key, None where no order is kept.
    """

    delivery: Delivery
    entry: Entry
    target: Target
    place: Place | None = None
    claim: Claim | None = None


def sorting_entry(delivery: Delivery) -> Entry:
    """Make an entry of the sorter's: by a copy's number alone it never takes one for a repeat.

    Somebody may move a message back to the main queue, and a copy has the number that it had.
    """
    entry = entry_of(delivery.envelope, delivery.body)
    # Nor is it an entry of what is sent: workers ask each other for both.
    which = b"sorted %d" % entry.copies
    digest = hashlib.blake2b(entry.message + which, digest_size=len(entry.message)).digest()
    return entry._replace(message=digest, copies=0)


def make_properties(
    delivery: Delivery, max_bytes: int, *, keeps_priority: bool = True
) -> Properties:
    """Make the properties of a delivery's copy; `max_bytes` of them fit into a frame."""
    envelope = delivery.envelope
    if delivery.is_stale:
        # Whoever has it now may have moved it, if this process was frozen for a while.
        envelope = envelope._replace(has_been_copied=True)
    properties = sorted_properties(delivery.properties, envelope, max_bytes=max_bytes)
    if not keeps_priority:
        # RabbitMQ 4 gives out what has a high one before what came earlier.
        properties.priority = None
    return properties
