"""Deliveries for tests without a broker."""

import time
from collections.abc import Callable
from typing import Any, cast

from bridge.amqp.properties import Properties
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import Envelope
from bridge.worker.session import Session


def make_delivery(
    key: str = "m-1",
    *,
    body: bytes = b"",
    properties: Properties | None = None,
    redelivered: bool = False,
    session: object = None,
    queue: str = "q",
    is_urgent: bool = False,
    clock: Callable[[], float] = time.monotonic,
    **envelope: Any,
) -> Delivery:
    """Make a delivery that has just arrived, with this key and these fields of the envelope.

    `session` may be a stand-in, or None if nothing is acked.
    """
    facts = {"message_id": key, "published_at": None, "first_delivered_at": 0.0, **envelope}
    return Delivery(
        body=body,
        properties=properties or Properties(),
        redelivered=redelivered,
        tag=7,
        session=cast("Session", session),
        envelope=Envelope(key=key, **facts),
        queue=queue,
        is_urgent=is_urgent,
        clock=clock,
    )
