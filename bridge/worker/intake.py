"""From what the wire hands over to a delivery: what is suspicious about it, how much is held."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.wire import Wire
from bridge.telemetry.logs import Log
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import DELIVERY_COUNT, REPEATED, bare_envelope
from bridge.worker.session import Session

log = Log(__name__)

# When more sessions in a row end without a delivery, a message is suspected of ending them.
POISON_SESSIONS: Final = 3
# A message that was delivered this often before is logged at each delivery.
WARN_FROM_COUNT: Final = 4
# When the bodies that are held have more bytes than this, nothing more is read; the one that is
# being read comes on top.
MAX_HELD_BYTES: Final = 32 * 1024 * 1024


class Intake:
    """Makes deliveries, and has the wire read while there is room for what it brings.

    `name` stands for the queues in the log. `poison_suspected` is given 1 while a message is
    suspected, else 0. `changed` is set when the wire reads again, or no more. Call `let_go` for
    each delivery at its end.
    """

    def __init__(
        self, name: str, *, poison_suspected: Callable[[float], None], changed: asyncio.Event
    ) -> None:
        self._name = name
        self._poison_suspected = poison_suspected
        self._changed = changed
        self._empty_sessions = 0
        self._held_bytes = 0
        self._wire: Wire | None = None

    def begin(self, wire: Wire) -> None:
        """Note that a session begins; call `end` at its end."""
        # A message that the client cannot decode ends each connection before it is handed on.
        self._empty_sessions += 1
        if self._empty_sessions > POISON_SESSIONS:
            self._poison_suspected(1)
            log.warning("protocol_poison_suspected", queue=self._name)
        self._wire = wire
        self._regulate()

    def end(self) -> None:
        """Note that the session is over."""
        self._wire = None

    def refuse(self) -> None:
        """Note that the broker has refused to deliver, for which it is no message's fault."""
        self._empty_sessions = 0
        self._poison_suspected(0)

    def make(
        self,
        session: Session,
        tag: int,
        properties: Properties,
        body: Body,
        *,
        redelivered: bool,
        queue: str,
        is_urgent: bool,
    ) -> Delivery:
        """Make a delivery of what has come from a queue."""
        if self._empty_sessions:
            self._empty_sessions = 0
            self._poison_suspected(0)
        session.note_delivery(queue)
        headers = properties.headers or {}
        delivery = Delivery(
            body=body,
            properties=properties,
            # Of a copy that is there twice, the second may come for the first time.
            redelivered=redelivered or REPEATED in headers,
            tag=tag,
            session=session,
            envelope=bare_envelope(properties, now=time.time()),
            queue=queue,
            is_urgent=is_urgent,
        )
        _warn_of_count(delivery, headers.get(DELIVERY_COUNT, 0))
        self._held_bytes += len(body)
        if self._held_bytes > MAX_HELD_BYTES:
            self._regulate()
        return delivery

    def let_go(self, delivery: Delivery) -> None:
        """Note that a delivery is held no more."""
        self._held_bytes -= len(delivery.body)
        self._regulate()

    def _regulate(self) -> None:
        if self._wire is None:
            return
        has_room = self._held_bytes <= MAX_HELD_BYTES
        if has_room is not self._wire.is_reading:
            self._wire.set_reading(enabled=has_room)
            self._changed.set()


def _warn_of_count(delivery: Delivery, count: object) -> None:
    # A quorum queue drops a message whose delivery count exceeds its limit, by default 20 since
    # RabbitMQ 4.0.
    if isinstance(count, int) and count >= WARN_FROM_COUNT:
        log.warning("delivered_often", message_id=delivery.envelope.key, before=count)
