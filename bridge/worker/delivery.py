"""One AMQP delivery of a send request, bound to the channel it arrived on."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Literal

from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.publication import Publication
from bridge.telemetry.trace_context import Span, TraceHeaders
from bridge.worker.envelope import Envelope
from bridge.worker.session import Session

# A delivery that has been here for longer moves to a retry queue when its current wait ends. The
# broker's own limit is 30 minutes (consumer_timeout).
MAX_HOLD_SECONDS: Final = 60.0

# Causes for which a delivery waits in this process; a POST in flight is not a wait.
WaitCause = Literal[
    # The end of the original: an earlier delivery of the same message, in progress here.
    "original",
    # The other workers' answers about a redelivery.
    "peers",
    # Earlier messages with the same ordering key.
    "order",
    # The message's `not_before` time.
    "due",
    # A free slot.
    "slot",
    # The end of a `Retry-After` wait.
    "retry_after",
    # A broker that does not store copies.
    "broker",
    # The rate limits.
    "rate",
    # The open breaker: its probe is not due yet, or the breaker may close soon.
    "probe",
    # The next quick retry of a request that was never sent.
    "retry_in_place",
    # The next attempt, in ordered mode.
    "next_try",
    # Random jitter that spreads messages that failed together.
    "jitter",
    # The confirm of the copy that replaces the message, which may be published several times.
    "publish",
]
# Waits that can be given up, so that the delivery returns to the queue: no request is in flight and
# no copy waits for its confirm. An earlier request may have been posted. The service then refused
# it for now, or its outcome is remembered, as in a wait for `next_try`.
_BETWEEN_REQUESTS: Final = frozenset[WaitCause | None](
    ("peers", "order", "due", "slot", "retry_after", "broker", "rate", "probe", "next_try")
)
Waits = Callable[[WaitCause], AbstractContextManager[None]]


class Delivery:
    """A message that the broker has delivered and that is not settled yet.

    `waiting_for` is the current cause of its wait, `waited_seconds` the time waited so far for each
    cause. Times are those of `clock`. `replacement` is the published copy whose confirm may still
    arrive. `span` is None if spans are not exported. `queue` is the queue it came from; `is_urgent`
    means the urgent queue, whose messages overtake ordinary ones. `is_asked_for`: the other workers
    have been asked about it. `give_slot_back` is set while it keeps its slot after the answer.
    """

    # Not a dataclass: in a compiled module its generated methods would stay interpreted.
    __slots__ = (
        *("_waiting_since", "body", "clock", "envelope", "give_slot_back", "is_asked_for"),
        *("is_urgent", "properties", "queue", "received", "redelivered", "replacement"),
        *("session", "span", "tag", "waited_seconds", "waiting_for"),
    )

    def __init__(  # noqa: PLR0913  the facts of a delivery
        self,
        *,
        body: Body,
        properties: Properties,
        redelivered: bool,
        tag: int,
        session: Session,
        envelope: Envelope,
        queue: str,
        is_urgent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.body = body
        self.properties = properties
        self.redelivered = redelivered
        self.tag = tag
        self.session = session
        self.envelope = envelope
        self.clock = clock
        self.received = clock()
        self.waiting_for: WaitCause | None = None
        self.replacement: Publication | None = None
        self.give_slot_back: Callable[[], None] | None = None
        self.waited_seconds: dict[WaitCause, float] = {}
        self.span: Span | None = None
        self.queue = queue
        self.is_urgent = is_urgent
        self.is_asked_for = False
        self._waiting_since = 0.0

    @property
    def is_stale(self) -> bool:
        """Whether its session is over, so that the broker redelivers the message."""
        return self.session.is_over or self.session.channel.is_closed

    @property
    def goes_back(self) -> bool:
        """Whether it returns to the queue, so that no work on it should start."""
        return self.session.is_leaving or self.is_stale

    @property
    def held_seconds(self) -> float:
        return self.clock() - self.received

    @property
    def trace(self) -> TraceHeaders:
        """Trace headers for everything it causes: those of its span, else its publisher's."""
        return self.envelope.trace if self.span is None else self.span.headers

    @property
    def trace_id(self) -> str | None:
        """The trace it belongs to; None if it is not recorded."""
        return None if self.span is None else self.span.trace_id

    @property
    def may_be_given_back(self) -> bool:
        """Whether it waits with no request in flight, so that it can return to the queue."""
        return self.waiting_for in _BETWEEN_REQUESTS

    @property
    def awaits_original(self) -> bool:
        """Whether it waits for an earlier delivery of the same message, and is acked with it."""
        return self.waiting_for == "original"

    def free_slot(self) -> None:
        """Release its slot, if it still has one: it is acked, or returns to the queue."""
        if self.give_slot_back is not None:
            self.give_slot_back()
            self.give_slot_back = None

    def begin_again(self) -> None:
        """Reset its times to those of a new delivery, after a POST that settled nothing."""
        self.received = self.clock()
        self.waited_seconds = {}

    def waits(self, cause: WaitCause) -> "_Wait":
        """Measure a wait: return a context manager to put around it.

        It reads the clock twice, so use it only if there is something to wait for. In nested waits,
        only the inner one is counted.
        """
        return _Wait(self, cause)

    def set_wait(self, cause: WaitCause | None) -> WaitCause | None:
        """Set the cause of the current wait, None for none; return the previous cause."""
        now, former = self.clock(), self.waiting_for
        if former is not None:
            waited = self.waited_seconds
            waited[former] = waited.get(former, 0.0) + now - self._waiting_since
        self.waiting_for, self._waiting_since = cause, now
        return former


class _Wait:
    """A context manager as a class: a generator would cost five times as much."""

    __slots__ = ("_cause", "_delivery", "_outer")

    def __init__(self, delivery: Delivery, cause: WaitCause) -> None:
        self._delivery = delivery
        self._cause = cause
        self._outer: WaitCause | None = None

    def __enter__(self) -> None:
        self._outer = self._delivery.set_wait(self._cause)

    def __exit__(self, *_: object) -> None:
        self._delivery.set_wait(self._outer)
