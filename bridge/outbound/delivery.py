"""One AMQP delivery of a send request, bound to the channel that it came on."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Literal

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS
from bridge.amqp.client import Channel
from bridge.amqp.properties import Properties
from bridge.amqp.publication import Publication
from bridge.amqp.wire import Body, Wire
from bridge.outbound.envelope import Envelope
from bridge.tracing.spans import Span
from bridge.tracing.trace_headers import TraceHeaders

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
    # Its next try, where it keeps its place in its lane.
    "retry_in_lane",
    # Nothing but the spread of messages that failed together.
    "jitter",
    # The confirm of the copy that replaces it, with all tries of that.
    "publish",
]
# The waits during which nothing has been sent or decided.
_BEFORE_SENDING: Final = frozenset[WaitCause | None](
    ("peers", "order", "due", "slot", "pace", "rate", "probe", "retry_in_lane")
)
Waits = Callable[[WaitCause], AbstractContextManager[None]]


class Session:
    """One stretch of consuming on one channel; over when nothing can be acked on it any more.

    `most_unacked`: how many deliveries the broker may have made on it before it reads an ack.
    `last_ack_at` is a time of the event loop. `is_leaving`: nothing new of it is begun, so that it
    can end.
    """

    def __init__(self, channel: Channel, wire: Wire) -> None:
        self.channel = channel
        self.wire = wire
        self.has_failed = False
        self.is_leaving = False
        self.last_ack_at = -math.inf
        self.most_unacked = 0
        self.over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be acked on it any more."""
        return self.over.is_set()

    def ack(self, tag: int, *, multiple: bool = False) -> bool:
        """Write an ack, or return False: the broker delivers the message again.

        `multiple`: it is the ack of all deliveries of the session before this one as well.
        """
        if self.is_over or self.channel.is_closed:
            return False
        self.last_ack_at = asyncio.get_running_loop().time()
        self.wire.ack(self.channel, tag, multiple=multiple)
        return True

    async def until_heard_from(self, *, changed: asyncio.Event) -> None:
        """Return when the broker has answered on it, so has read every ack, or it is over.

        Without an answer in time it `has_failed`, and `changed` is set: whoever consumes ends it.
        """
        # In a task of its own: a closing channel cancels what waits on it.
        answer = asyncio.ensure_future(self.wire.acks_read(self.channel))
        try:
            await asyncio.wait({answer}, timeout=RPC_TIMEOUT_SECONDS)
        finally:
            answer.cancel()
        if not answer.done() or answer.cancelled() or answer.exception() is not None:
            self.has_failed = True
            changed.set()
            await self.over.wait()


@dataclass(slots=True, eq=False)
class Delivery:
    """A message that the broker has given us and that we have not settled.

    `waiting_for` is what it waits for, `waited_seconds` how long it has waited for what. Times are
    of `clock`. `replacement` is the copy that is published and may yet be confirmed. `span` is None
    where spans are not exported. `is_urgent`: it passes others that wait here.
    `is_asked_for`: what the other workers know of it has been asked.
    """

    body: Body
    properties: Properties
    redelivered: bool
    tag: int
    session: Session
    envelope: Envelope
    clock: Callable[[], float] = time.monotonic
    received: float = field(default_factory=time.monotonic)
    waiting_for: WaitCause | None = None
    replacement: Publication | None = None
    waited_seconds: dict[WaitCause, float] = field(default_factory=dict)
    span: Span | None = None
    is_urgent: bool = False
    is_asked_for: bool = False
    _waiting_since: float = 0.0

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
