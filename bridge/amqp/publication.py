"""A message that was written, and the confirm that says whether the broker stored it."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, assert_never

from bridge.errors import Confirm, PublishError, PublishFault, Refusal
from bridge.telemetry.metrics import BridgeMetrics

# Within this many iterations of the event loop, asyncio's or uvloop's, a confirm that has arrived
# is read and handed to whoever waits for it.
READ_ITERATIONS: Final = 4


class Publication:
    """A message that was written; the broker has yet to say whether it stored it."""

    __slots__ = ("_confirm", "_is_counted", "_label", "_metrics", "_routing_key", "_started")

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

    @property
    def is_refused(self) -> bool:
        """Whether the broker has refused it, or its channel has ended: no confirm can come."""
        return self._confirm.done() and self._confirm.result() != "confirmed"

    @property
    def may_be_stored(self) -> bool:
        """Whether the broker may have stored it, as far as is known: it has not refused it."""
        return not self._confirm.done() or self._confirm.result() not in {"nacked", "returned"}

    @property
    def is_stored(self) -> bool:
        """Whether the broker has confirmed it."""
        return self._confirm.done() and self._confirm.result() == "confirmed"

    @property
    def error(self) -> PublishError | None:
        """Why it is not stored; None as long as that is not known, and when it is stored."""
        confirm = self._confirm.result() if self._confirm.done() else "confirmed"
        return None if confirm == "confirmed" else not_stored(confirm, self._routing_key)

    def time_out(self) -> PublishError:
        """Note that its confirm is late: the metric counts it so, whatever the broker says later.

        Returns what `stored` would raise at its deadline.
        """
        self._count("timeout")
        return not_stored("timeout", self._routing_key)

    async def stored(self, deadline: float) -> None:
        """Return when the broker has confirmed it.

        Raises PublishError otherwise, at the latest at the deadline, a time of the event loop.
        After a time-out it may be waited for again. The metric counts it once, by the first result.
        """
        confirm = await _wait(self._confirm, deadline)
        self._count(confirm)
        if confirm != "confirmed":
            raise not_stored(confirm, self._routing_key)

    def when_known(self, notify: Callable[[bool], object]) -> None:
        """Call `notify` with whether it is stored, once the broker has said so or its channel ends.

        That may be long after the deadline.
        """

        def note(confirm: "asyncio.Future[Confirm]") -> None:
            self._count(confirm.result())
            notify(confirm.result() == "confirmed")

        self._confirm.add_done_callback(note)

    def abandon(self) -> None:
        """Stop waiting for its confirm, so that the next message with the same id need not wait."""
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
    """A message that was written on a channel of its own.

    `refusal`: the broker has ended that channel, or its connection, because of it.
    """

    __slots__ = ("refusal",)

    def __init__(
        self,
        metrics: BridgeMetrics,
        exchange_label: str,
        routing_key: str,
        confirm: "asyncio.Future[Confirm]",
        started: float,
    ) -> None:
        super().__init__(metrics, exchange_label, routing_key, confirm, started)
        self.refusal: Refusal | None = None

    @property
    def may_be_stored(self) -> bool:
        """Whether the broker may have stored it: it has not, if it ended the channel for it.

        One that ended the whole connection may have done so for another message.
        """
        is_certain = self.refusal is not None and self.refusal.is_certain
        return not is_certain and super().may_be_stored

    @property
    def confirm(self) -> "asyncio.Future[Confirm]":
        """The confirm, which the task that watches the channel resolves."""
        return self._confirm

    async def stored(self, deadline: float) -> None:
        """Return when the broker has confirmed it, as any other; the error holds the refusal."""
        try:
            await super().stored(deadline)
        except PublishError as error:
            error.refusal = self.refusal
            raise


async def _wait(confirm: "asyncio.Future[Confirm]", deadline: float) -> Confirm:
    """Return a publish's confirm, or `timeout` at the deadline; others may go on waiting for it."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[Confirm] = loop.create_future()

    def pass_on(confirm: "asyncio.Future[Confirm]") -> None:
        resolve(waiter, confirm.result())

    confirm.add_done_callback(pass_on)
    # A timer of its own costs a third of `asyncio.timeout`.
    timer = loop.call_at(deadline, _time_out, waiter)
    try:
        return await waiter
    finally:
        timer.cancel()
        confirm.remove_done_callback(pass_on)


def _time_out(waiter: "asyncio.Future[Confirm]", iterations: int = READ_ITERATIONS) -> None:
    """Resolve as `timeout`, but read what has arrived first: after a stall timers run first."""
    if iterations == 0:
        resolve(waiter, "timeout")
    elif not waiter.done():
        asyncio.get_running_loop().call_soon(_time_out, waiter, iterations - 1)


def resolve(confirm: "asyncio.Future[Confirm]", outcome: Confirm) -> None:
    """Note what is known of a publish, unless it is known already."""
    if not confirm.done():
        confirm.set_result(outcome)


def not_stored(fault: PublishFault, routing_key: str = "") -> PublishError:
    """Make the error of a publish without a confirm; it names the key where that matters."""
    match fault:
        case "returned":
            return PublishError(fault, f"no queue takes it: {routing_key}")
        case "nacked":
            why = "the broker refused to store it: a queue is full, or has no majority"
            return PublishError(fault, why)
        case "timeout":
            return PublishError(fault, "no confirm in time")
        case "error":
            return PublishError(fault, "the connection to the broker ended")
        case _:
            assert_never(fault)
