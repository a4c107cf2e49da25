"""Tracks published messages until the broker confirms them or a deadline passes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Final, Generic, TypeVar, assert_never

from bridge.errors import Confirm, PublishError, PublishFault, Refusal
from bridge.telemetry.metrics import BridgeMetrics

# Iterations of the event loop (asyncio's or uvloop's) within which an arrived confirm is read and
# delivered.
READ_ITERATIONS: Final = 4

KeyT = TypeVar("KeyT")
WaitT = TypeVar("WaitT")


class Publication:
    """A message that was written and awaits its confirm."""

    __slots__ = (
        "_confirm",
        "_is_counted",
        "_label",
        "_metrics",
        "_routing_key",
        "_started",
        "refusal",
    )

    def __init__(
        self,
        metrics: BridgeMetrics,
        exchange_label: str,
        routing_key: str,
        confirm: "asyncio.Future[Confirm]",
        started: float,
    ) -> None:
        self._metrics = metrics
        self._label = exchange_label
        self._routing_key = routing_key
        self._confirm = confirm
        self._started = started
        self._is_counted = False
        self.refusal: Refusal | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the broker refused it or its channel ended, so that no confirm can arrive."""
        return self._confirm.done() and self._confirm.result() != "confirmed"

    @property
    def may_be_stored(self) -> bool:
        """Whether the broker may have stored it; False only if the broker refused it."""
        return not self._confirm.done() or self._confirm.result() not in {"nacked", "returned"}

    @property
    def is_stored(self) -> bool:
        return self._confirm.done() and self._confirm.result() == "confirmed"

    @property
    def error(self) -> PublishError | None:
        """Why it is not stored; None if it is stored, or if the broker has not answered yet."""
        confirm = self._confirm.result() if self._confirm.done() else "confirmed"
        return None if confirm == "confirmed" else publish_error(confirm, self._routing_key)

    def time_out(self) -> PublishError:
        """Count the confirm as late; return the error that `stored` would raise."""
        self._count("timeout")
        return publish_error("timeout", self._routing_key)

    async def stored(self, deadline: float) -> None:
        """Return when the broker has confirmed it.

        Raises PublishError otherwise, at the latest at the deadline, a time of the event loop's
        clock. May be called again after a time-out. The metric counts the first result.
        """
        confirm = await _wait(self._confirm, deadline)
        self._count(confirm)
        if confirm != "confirmed":
            raise publish_error(confirm, self._routing_key)

    def when_known(self, notify: Callable[[bool], object]) -> None:
        """Call `notify(is_stored)` when the broker has answered or the channel has ended.

        That may be long after the deadline.
        """

        def note(confirm: "asyncio.Future[Confirm]") -> None:
            self._count(confirm.result())
            notify(confirm.result() == "confirmed")

        self._confirm.add_done_callback(note)

    def abandon(self) -> None:
        """Stop waiting for the confirm, so that a message with the same id can be written."""
        resolve(self._confirm, "timeout")

    def _count(self, confirm: Confirm) -> None:
        if self._is_counted:
            return
        self._is_counted = True
        self._metrics.published.labels(self._label, confirm).inc()
        if confirm == "confirmed":
            duration = self._metrics.publish_duration.labels(self._label)
            duration.observe(time.perf_counter() - self._started)


class LonePublication(Publication):
    """A message on a channel of its own.

    `refusal` is set if the broker closed that channel, or the connection, because of the message.
    """

    __slots__ = ()

    @property
    def may_be_stored(self) -> bool:
        """Whether the broker may have stored it: not if it closed the channel because of it.

        If the broker closed the whole connection, another message may have been the cause.
        """
        is_certain = self.refusal is not None and self.refusal.is_certain
        return not is_certain and super().may_be_stored

    @property
    def confirm(self) -> "asyncio.Future[Confirm]":
        """The confirm as a future, which the task that watches the channel resolves."""
        return self._confirm

    async def stored(self, deadline: float) -> None:
        """Return when the broker has confirmed it; a PublishError carries the refusal."""
        try:
            await super().stored(deadline)
        except PublishError as error:
            error.refusal = self.refusal
            raise


async def _wait(confirm: "asyncio.Future[Confirm]", deadline: float) -> Confirm:
    """Return the confirm, or `timeout` at the deadline, without cancelling the confirm."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[Confirm] = loop.create_future()

    def pass_on(confirm: "asyncio.Future[Confirm]") -> None:
        resolve(waiter, confirm.result())

    confirm.add_done_callback(pass_on)
    # A plain timer costs a third of `asyncio.timeout`.
    timer = loop.call_at(deadline, _time_out, waiter)
    try:
        return await waiter
    finally:
        timer.cancel()
        confirm.remove_done_callback(pass_on)


def _time_out(waiter: "asyncio.Future[Confirm]", iterations: int = READ_ITERATIONS) -> None:
    """Resolve as `timeout`, but read the socket first: after a stall, timers run before reads."""
    if iterations == 0:
        resolve(waiter, "timeout")
    elif not waiter.done():
        asyncio.get_running_loop().call_soon(_time_out, waiter, iterations - 1)


def resolve(confirm: "asyncio.Future[Confirm]", outcome: Confirm) -> None:
    """Resolve a confirm, unless it is resolved already."""
    if not confirm.done():
        confirm.set_result(outcome)


def publish_error(fault: PublishFault, routing_key: str = "") -> PublishError:
    """Return the error of a publish that was not confirmed."""
    match fault:
        case "returned":
            return PublishError(fault, f"no queue is bound for it: {routing_key}")
        case "nacked":
            why = "the broker refused to store it: a queue is full, or has no majority"
            return PublishError(fault, why)
        case "timeout":
            return PublishError(fault, "no confirm in time")
        case "error":
            return PublishError(fault, "the connection to the broker ended")
        case _:
            assert_never(fault)


class ConfirmDeadlines(Generic[KeyT, WaitT]):
    """Calls `expire(key, wait)` for each wait that is not discarded within `seconds`.

    All waits share one timer, because a timer for each publish costs more than the wait itself.
    `expire` must not raise. Sockets are read before a wait expires, because after a stall timers
    run before reads.
    """

    def __init__(self, seconds: float, expire: Callable[[KeyT, WaitT], object]) -> None:
        self._seconds: Final = seconds
        self._expire = expire
        # Each with its deadline on the event loop's clock, earliest first.
        self._waits: dict[KeyT, tuple[WaitT, float]] = {}
        self._has_timer = False

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._waits)

    def add(self, key: KeyT, wait: WaitT) -> None:
        """Start a wait. Its key must be unused."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        self._waits[key] = (wait, deadline)
        if not self._has_timer:
            self._has_timer = True
            loop.call_at(deadline, self._look, READ_ITERATIONS)

    def discard(self, key: KeyT) -> WaitT | None:
        """End a wait and return it; None if it has already ended or expired."""
        found = self._waits.pop(key, None)
        return None if found is None else found[0]

    def _look(self, iterations: int) -> None:
        """Expire late waits after this many loop iterations, and set the next timer."""
        loop = asyncio.get_running_loop()
        if iterations:
            loop.call_soon(self._look, iterations - 1)
            return
        now = loop.time()
        late = list(takewhile(lambda one: one[1][1] <= now, self._waits.items()))
        for key, _ in late:
            del self._waits[key]
        following = next(iter(self._waits.values()), None)
        self._has_timer = following is not None
        if following is not None:
            loop.call_at(following[1], self._look, READ_ITERATIONS)
        for key, (wait, _) in late:
            self._expire(key, wait)
