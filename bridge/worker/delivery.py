"""One AMQP delivery of a send request, bound to the channel that it came on."""

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

# A delivery that has been held for longer is put off to the ladder, once the wait that it is in has
# ended. The broker's own limit is 30 minutes (consumer_timeout).
MAX_HOLD_SECONDS: Final = 60.0

# What a delivery may wait for here; a POST that is in flight is no wait.
WaitCause = Literal[
    # The same message, which is being worked on.
    "ledger",
    # What the other workers know of a message that comes again.
    "peers",
    # Those before it in the order of its recipient or key.
    "order",
    # Its own time, `not_before`.
    "due",
    # A request fewer in flight.
    "slot",
    # The service, which asked for a wait, or the broker, which stores nothing.
    "pace",
    # The rate limits.
    "rate",
    # Its place as the probe of a pause.
    "probe",
    # The next quick try of a request that never left.
    "retry_in_place",
    # Its next try, where it keeps its place in the order of its key.
    "next_try",
    # Nothing but the spread of messages that failed together.
    "jitter",
    # The confirm of the copy that replaces it, with all tries of that.
    "publish",
]
# The waits during which nothing has been sent or decided.
_BEFORE_SENDING: Final = frozenset[WaitCause | None](
    ("peers", "order", "due", "slot", "pace", "rate", "probe", "next_try")
)
Waits = Callable[[WaitCause], AbstractContextManager[None]]


class Delivery:
    """A message that the broker has given us and that we have not settled.

    `waiting_for` is what it waits for, `waited_seconds` how long it has waited for what. Times are
    of `clock`. `replacement` is the copy that is published and may yet be confirmed. `span` is None
    where spans are not exported. `queue` is the queue that it came from; `is_urgent`: that is the
    urgent queue, so it passes ordinary messages that wait here.
    `is_asked_for`: what the other workers know of it has been asked. `give_slot_back` is set while
    it holds a slot after its answer.
    """

    # No dataclass: where this is compiled, its way of making one would stay Python.
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
        """Whether its session is over, so that the broker delivers the message again."""
        return self.session.is_over or self.session.channel.is_closed

    @property
    def goes_back(self) -> bool:
        """Whether nothing new is to be begun with it, since it is to come again."""
        return self.session.is_leaving or self.is_stale

    @property
    def held_seconds(self) -> float:
        """How long it has been held here."""
        return self.clock() - self.received

    @property
    def trace(self) -> TraceHeaders:
        """The trace headers of what it causes: those of its span, else its publisher's."""
        return self.envelope.trace if self.span is None else self.span.headers

    @property
    def trace_id(self) -> str | None:
        """The trace where more is to be found about it, if it is recorded."""
        return None if self.span is None else self.span.trace_id

    @property
    def may_be_given_back(self) -> bool:
        """Whether it waits, and could as well wait in the queue: nothing has been sent."""
        return self.waiting_for in _BEFORE_SENDING

    @property
    def awaits_first(self) -> bool:
        """Whether the same message is being worked on; this one is acked when that is done."""
        return self.waiting_for == "ledger"

    def free_slot(self) -> None:
        """Give back the slot that it holds, if it does: it is acked, or goes back to the queue."""
        if self.give_slot_back is not None:
            self.give_slot_back()
            self.give_slot_back = None

    def begin_again(self) -> None:
        """Take its times as those of a new delivery, after a try that settled nothing."""
        self.received = self.clock()
        self.waited_seconds = {}

    def waits(self, cause: WaitCause) -> "_Wait":
        """Measure a wait: a `with` block around what is waited for.

        It reads the clock twice, so enter it only where there is something to wait for. In a wait
        within a wait, only the inner one counts.
        """
        return _Wait(self, cause)

    def wait_for(self, cause: WaitCause | None) -> WaitCause | None:
        """Note what it waits for from now on, None for nothing; return what that replaces."""
        now, former = self.clock(), self.waiting_for
        if former is not None:
            waited = self.waited_seconds
            waited[former] = waited.get(former, 0.0) + now - self._waiting_since
        self.waiting_for, self._waiting_since = cause, now
        return former


class _Wait:
    """A `with` block; a generator would cost five times as much."""

    __slots__ = ("_cause", "_delivery", "_outer")

    def __init__(self, delivery: Delivery, cause: WaitCause) -> None:
        self._delivery = delivery
        self._cause = cause
        self._outer: WaitCause | None = None

    def __enter__(self) -> None:
        self._outer = self._delivery.wait_for(self._cause)

    def __exit__(self, *_: object) -> None:
        self._delivery.wait_for(self._outer)
