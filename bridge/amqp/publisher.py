"""Publishes messages and waits for the broker's confirm."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final, NoReturn

from bridge.amqp.channels import (
    close_soon,
    closed_channel,
    describe_end,
    end_of,
    heed_cancellation,
    open_channel,
    refusal_on,
)
from bridge.amqp.client import Channel, ChannelAccessRefused, ChannelNotFoundEntity, Connection
from bridge.amqp.frames import (
    CONTENT_HEADER_START,
    FRAME_OVERHEAD_BYTES,
    LARGE_BODY_BYTES,
    Body,
    Progress,
)
from bridge.amqp.majority import Patience
from bridge.amqp.properties import Properties
from bridge.amqp.publication import LonePublication, Publication, publish_error, resolve
from bridge.amqp.wire import PublishingChannel
from bridge.errors import BrokerError, Confirm, ExchangeRefusedError, PublishError, Refusal
from bridge.telemetry.logs import Log
from bridge.telemetry.metrics import BridgeMetrics

log = Log(__name__)

# Limit of unconfirmed publishes. Each keeps its body in memory.
MAX_UNCONFIRMED: Final = 4096
# Used while there is no connection: RabbitMQ's default `frame_max` of 128 KiB, less the bytes
# around the properties.
USUAL_PROPERTIES_BYTES: Final = 128 * 1024 - FRAME_OVERHEAD_BYTES - CONTENT_HEADER_START.size
# Limit of written bytes that the broker has not read, abandoned publishes included. If the broker
# hangs, no other limit applies to them.
MAX_UNWRITTEN_BYTES: Final = 64 * 1024 * 1024
# Added to the deadline for each byte of a large body: one second per MiB.
SECONDS_PER_BYTE: Final = 1 / (1024 * 1024)
# A channel without any confirm so far is replaced if the broker has read a publish and not
# confirmed it for this long, or has refused every publish for this long. Such a channel may be
# waiting for a queue's former leader, which has died or hangs. RabbitMQ waits as long as connecting
# to that node takes, 7 s and more, although the queue has a new leader (seen with 3.10.8 and
# 4.0.5).
FIRST_CONFIRM_SECONDS: Final = 2.0
# The limit doubles each time it is exceeded, up to this.
MAX_FIRST_CONFIRM_SECONDS: Final = 80.0
# A channel with earlier confirms is kept for longer, because RabbitMQ itself passes its unconfirmed
# publishes to the next leader (seen up to 9 s after the old one hung). A new channel would be
# opened before that leader is elected, and would wait for the old one.
OVERDUE_SECONDS: Final = 16.0
LOOK_SECONDS: Final = 0.5
# Limit of publishes on channels of their own. Most have a large body.
MAX_ALONE: Final = 16
# After a failed publish, how long to wait for the broker to close the channel and state the reason.
REASON_SECONDS: Final = 1.0
# Pause before a refused optional exchange is tried again. It is longer after a missing permission,
# because the broker logs an error for each publish. A missing exchange may be declared at any time.
FORBIDDEN_SECONDS: Final = 60.0
MISSING_SECONDS: Final = 5.0


class ConfirmedChannel:
    """A channel with confirms, which is replaced if its confirms are overdue.

    If the node has answered no publish for `leave_after_seconds`, the connection ends, because the
    node may be cut off from its cluster.
    """

    def __init__(self, *, leave_after_seconds: float = math.inf) -> None:
        self._patience = Patience(leave_after_seconds)
        self.channel: PublishingChannel | None = None
        self.connection: Connection | None = None
        self.opened = asyncio.Event()
        # Why the broker refuses the exchange at the moment; only an optional one can be refused.
        self.refused_because: str | None = None
        # Number of channels that the broker closed because of a message. Every message that was in
        # flight then is suspect, and must be published on a channel of its own.
        self.refusals = 0
        # Time limit for the first confirm of a channel; grows while none arrives.
        self._first_confirm_seconds = FIRST_CONFIRM_SECONDS

    async def serve(self, connection: Connection) -> None:
        """Keep a channel open until the broker or the connection ends it; then raise."""
        # Reset, because the new connection may be to another node.
        self._first_confirm_seconds = FIRST_CONFIRM_SECONDS
        silent_seconds = 0.0
        while True:
            channel = await open_channel(connection, confirms=True)
            with connection.wire.publishing(channel) as publishing:
                self.channel, self.connection = publishing, connection
                self.opened.set()
                try:
                    seconds, silent_seconds = await self._until_overdue(
                        channel, publishing, silent_seconds
                    )
                finally:
                    # Must come before the publishes in flight fail because their channel has ended.
                    self._note_end(channel)
                    self.opened.clear()
                    self.channel = self.connection = None
            if channel.is_closed:
                raise closed_channel(channel, "publishing")
            log.warning("confirms_overdue", seconds=seconds)
            # Do not wait: a channel that waits for a leader does not answer its close either.
            close_soon(channel)
            if silent_seconds >= self._patience.seconds:
                self._patience.note_left()
                raise BrokerError(f"the node has answered no publish for {silent_seconds:.0f} s")

    def _note_end(self, channel: Channel) -> None:
        self.refusals += refusal_on(channel) is not None

    async def _until_overdue(
        self, channel: Channel, publishing: PublishingChannel, silent_before: float
    ) -> tuple[float, float]:
        """Return when the channel ends or its confirms are overdue.

        Returns the time limit that was exceeded, and for how long the node has answered no publish,
        in seconds; both are 0 if the channel ended. `silent_before` is how long it had answered
        none before this channel.
        """
        loop = asyncio.get_running_loop()
        before, since = publishing.progress, loop.time()
        answers, answered_at = 0, since
        # Read once, because aiormq makes a new future each time and keeps it until the channel
        # ends.
        closing = channel.closing
        while not closing.done():
            await asyncio.wait({closing}, timeout=LOOK_SECONDS)
            now = publishing.progress
            if now.confirmed + now.nacked > answers:
                answers, answered_at, silent_before = now.confirmed + now.nacked, loop.time(), 0.0
            is_unread = publishing.is_blocked or publishing.unwritten_bytes > 0
            if is_unread or not _is_stuck(before, now):
                before, since = now, loop.time()
                answered_at = since
                continue
            first = self._first_confirm_seconds
            limit = OVERDUE_SECONDS if now.confirmed else first
            seconds, silent_seconds = loop.time() - since, silent_before + loop.time() - answered_at
            if seconds >= limit or silent_seconds >= self._patience.seconds:
                longer = FIRST_CONFIRM_SECONDS if now.confirmed else 2 * first
                self._first_confirm_seconds = min(longer, MAX_FIRST_CONFIRM_SECONDS)
                return min(limit, math.ceil(seconds)), silent_seconds
        return 0.0, 0.0

    async def room_for(self, message_id: str | None, deadline: float) -> PublishingChannel:
        """Return the channel once it can take a message with this id; else raise PublishError."""
        channel = self.channel
        if channel is not None:
            _check_room(channel)
        if channel is None or channel.awaited(message_id) is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    channel = await self._wait_for_channel(message_id)
            except TimeoutError:
                raise publish_error("timeout") from None
            if channel is None:
                raise publish_error("error")
            _check_room(channel)
        if asyncio.get_running_loop().time() >= deadline:
            raise publish_error("timeout")
        return channel

    async def _wait_for_channel(self, message_id: str | None) -> PublishingChannel | None:
        """Return the channel when it is open and no other message with this id is in flight.

        Returns None if the channel opened and ended again before this task ran.
        """
        await self.opened.wait()
        while (channel := self.channel) is not None:
            if (earlier := channel.awaited(message_id)) is None:
                break
            await asyncio.wait({earlier})
            await self.opened.wait()
        return channel


class OptionalExchange(ConfirmedChannel):
    """The channel of an exchange that is not essential to its role.

    If the exchange is missing, or the user may not publish to it, the broker closes the channel.
    Publishes to the exchange then fail immediately until it is tried again, after `MISSING_SECONDS`
    or `FORBIDDEN_SECONDS`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.missing = asyncio.Event()
        self._logged_because: str | None = None
        self._wait_seconds = MISSING_SECONDS

    async def keep_serving(self, connection: Connection) -> NoReturn:
        """Keep a channel open for as long as the connection lasts; reopen it whenever it ends."""
        while True:
            self.refused_because, self._wait_seconds = None, MISSING_SECONDS
            self.missing.clear()
            try:
                await self.serve(connection)
            except Exception as error:  # noqa: BLE001  aiormq raises other errors too
                heed_cancellation()
                log.debug("optional_channel_ended", why=describe_end(error))
            await asyncio.sleep(self._wait_seconds)

    def _note_end(self, channel: Channel) -> None:
        error = end_of(channel)
        if not isinstance(error, (ChannelAccessRefused, ChannelNotFoundEntity)):
            return
        self.refused_because = why = describe_end(error)
        if isinstance(error, ChannelNotFoundEntity):
            self.missing.set()
            remedy = "declare it"
        else:
            self._wait_seconds = FORBIDDEN_SECONDS
            remedy = "grant the user permission to write to it with rabbitmqctl set_permissions"
        if why != self._logged_because:
            self._logged_because = why
            remedy = f"messages published to it are lost; {remedy}"
            log.warning("exchange_refused", exchange=self.name, why=why, remedy=remedy)

    async def room_for(self, message_id: str | None, deadline: float) -> PublishingChannel:
        """Return the channel; raise ExchangeRefusedError if the exchange is refused."""
        if self.refused_because is not None:
            raise ExchangeRefusedError("error", self.refused_because)
        return await super().room_for(message_id, deadline)


class Publisher:
    """Publishes mandatory, confirmed messages on a connection without consumers.

    A resource alarm of the broker blocks publishing connections entirely, which would also block
    acks. The `optional_exchange` has a channel of its own, so that a refusal there does not affect
    other messages.
    """

    def __init__(
        self,
        metrics: BridgeMetrics,
        *,
        timeout_seconds: float,
        leave_after_seconds: float = math.inf,
        optional_exchange: str | None = None,
    ) -> None:
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._main = ConfirmedChannel(leave_after_seconds=leave_after_seconds)
        self._optional = None if optional_exchange is None else OptionalExchange(optional_exchange)
        # Set while the optional exchange is missing.
        self.exchange_missing = (
            asyncio.Event() if self._optional is None else self._optional.missing
        )
        self._large = asyncio.Lock()
        self._alone: set[asyncio.Task[None]] = set()
        # Bodies of at least this size are published on channels of their own. If the broker refuses
        # a body, the limit drops to the size of that body: on the shared channel, another such body
        # would end the channel and all publishes in flight.
        self._alone_from = LARGE_BODY_BYTES + 1

    async def serve(self, connection: Connection) -> None:
        """Publish on this connection until its channel ends. Called by `Link.run`."""
        if self._optional is None:
            await self._main.serve(connection)
            return
        optional = asyncio.create_task(self._optional.keep_serving(connection))
        try:
            await self._main.serve(connection)
        finally:
            optional.cancel()
            await asyncio.gather(optional, return_exceptions=True)

    @property
    def refusals(self) -> int:
        """Number of channels that the broker closed because of a message."""
        return self._main.refusals

    @property
    def max_properties_bytes(self) -> int:
        """Largest properties in bytes that fit a frame; a default while there is no connection."""
        channel = self._main.channel
        return USUAL_PROPERTIES_BYTES if channel is None else channel.max_properties_bytes

    @property
    def is_blocked(self) -> bool:
        """Whether the broker accepts no publishes now (a memory or disk alarm)."""
        channel = self._main.channel
        return channel is not None and channel.is_blocked

    @property
    def unconfirmed(self) -> int:
        open_channels = (one.channel for one in (self._main, self._optional) if one is not None)
        return sum(channel.unconfirmed for channel in open_channels if channel is not None)

    def _channel_for(self, exchange: str) -> ConfirmedChannel:
        optional = self._optional
        return self._main if optional is None or exchange != optional.name else optional

    async def publish(
        self,
        body: Body,
        *,
        exchange: str,
        routing_key: str,
        properties: Properties,
    ) -> None:
        """Publish a message and return when the broker has confirmed it.

        Raises PublishError after the timeout, or at once if the broker blocks, does not read, or
        too many publishes are unconfirmed. After a time-out the message may be stored nevertheless;
        a caller that must not publish twice uses `write`. Raises ExchangeRefusedError if the broker
        refuses the optional exchange.
        """
        try:
            async with self.deadline_for(body) as deadline:
                publication = await self.write(
                    body,
                    exchange=exchange,
                    routing_key=routing_key,
                    properties=properties,
                    deadline=deadline,
                )
                try:
                    await publication.stored(deadline)
                finally:
                    publication.abandon()
        except PublishError as error:
            why = self._channel_for(exchange).refused_because
            if why is None:
                raise
            raise ExchangeRefusedError(error.fault, why) from None

    @asynccontextmanager
    async def deadline_for(self, body: Body, *, alone: bool = False) -> AsyncIterator[float]:
        """Yield the deadline for publishing a body, a time of the event loop's clock.

        Bodies over 1 MiB are published one at a time, because unread bytes use memory, and get one
        more second for each MiB. A publish `alone` is treated in the same way.
        """
        loop, seconds = asyncio.get_running_loop(), self._timeout_seconds
        if len(body) <= LARGE_BODY_BYTES and not alone:
            yield loop.time() + seconds
            return
        async with self._large:
            yield loop.time() + seconds + len(body) * SECONDS_PER_BYTE

    async def write(
        self,
        body: Body,
        *,
        exchange: str,
        routing_key: str,
        properties: Properties,
        deadline: float,
    ) -> Publication:
        """Write a message, and return the `Publication` that awaits its confirm.

        Nothing is written after `deadline`, a time of the event loop's clock. Raises PublishError,
        as `publish` does, if nothing was written.
        """
        started = time.perf_counter()
        label = exchange or "default"
        try:
            channels = self._channel_for(exchange)
            channel = await channels.room_for(properties.message_id, deadline)
            confirm = channel.publish(
                body, exchange=exchange, routing_key=routing_key, properties=properties
            )
        except ValueError:
            self._metrics.published.labels(label, "error").inc()
            raise _does_not_fit() from None
        except PublishError as error:
            self._metrics.published.labels(label, error.fault).inc()
            raise
        return Publication(self._metrics, label, routing_key, confirm, started)

    def goes_alone(self, body: Body) -> bool:
        """Whether a body is too large for `write`, so that `write_alone` must publish it."""
        return len(body) >= self._alone_from

    async def write_alone(
        self, body: Body, *, routing_key: str, properties: Properties, deadline: float
    ) -> LonePublication:
        """Write a message to a queue on a channel of its own.

        If the broker then closes that channel, it has refused this message and no other.
        """
        started = time.perf_counter()
        confirm: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
        publication = LonePublication(self._metrics, "default", routing_key, confirm, started)
        try:
            channel, connection = await self._channel_of_its_own(deadline)
        except PublishError as error:
            self._metrics.published.labels("default", error.fault).inc()
            raise
        with ExitStack() as stack:
            stack.callback(_close_unless_closed, channel)
            publishing = stack.enter_context(connection.wire.publishing(channel))
            try:
                answer = publishing.publish(
                    body, exchange="", routing_key=routing_key, properties=properties
                )
            except ValueError:
                self._metrics.published.labels("default", "error").inc()
                raise _does_not_fit() from None
            watching = self._watch(
                publication, channel, publishing, answer, stack.pop_all(), len(body)
            )
            task = asyncio.create_task(watching)
        self._alone.add(task)
        task.add_done_callback(self._alone.discard)
        return publication

    async def _channel_of_its_own(self, deadline: float) -> tuple[Channel, Connection]:
        await self._main.room_for(None, deadline)
        connection = self._main.connection
        if connection is None or len(self._alone) >= MAX_ALONE:
            raise publish_error("error")
        try:
            async with asyncio.timeout_at(deadline):
                return await open_channel(connection, confirms=True), connection
        except TimeoutError:
            raise publish_error("timeout") from None
        except Exception as error:  # noqa: BLE001  aiormq raises other errors too
            log.debug("no_channel", error=type(error).__name__)
            raise publish_error("error") from None

    async def _watch(
        self,
        publication: LonePublication,
        channel: Channel,
        publishing: PublishingChannel,
        answer: "asyncio.Future[Confirm]",
        stack: ExitStack,
        size: int,
    ) -> None:
        """Await the broker's answer to a message on a channel of its own, and resolve its confirm.

        Stops waiting when the confirm is overdue, as in `serve`. `size` is the size of the body.
        """
        closing = channel.closing
        try:
            with stack:
                await self._until_known(publishing, {answer, closing, publication.confirm})
                if answer.done() and answer.result() == "error":
                    await asyncio.wait({closing}, timeout=REASON_SECONDS)
            publication.refusal = refusal = refusal_on(channel)
            if refusal is not None and refusal.is_certain:
                self._alone_from = min(self._alone_from, size)
            elif answer.done() and answer.result() == "confirmed":
                self._alone_from = min(max(self._alone_from, size + 1), LARGE_BODY_BYTES + 1)
            resolve(publication.confirm, answer.result() if answer.done() else "error")
        finally:
            resolve(publication.confirm, "error")

    async def _until_known(
        self, publishing: PublishingChannel, ends: set["asyncio.Future[Any]"]
    ) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while loop.time() - since < OVERDUE_SECONDS:
            done, _ = await asyncio.wait(
                ends, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            if publishing.is_blocked or publishing.unwritten_bytes > 0:
                since = loop.time()

    def write_at_once(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> Publication | None:
        """Write a message if there is room for it now; otherwise return None: use `write`."""
        channel = self._main.channel
        if channel is None or self.goes_alone(body):
            return None
        if channel.awaited(properties.message_id) is not None:
            return None
        started = time.perf_counter()
        try:
            _check_room(channel)
            confirm = channel.publish(
                body, exchange=exchange, routing_key=routing_key, properties=properties
            )
        except (PublishError, ValueError):
            return None
        return Publication(self._metrics, exchange or "default", routing_key, confirm, started)

    def abandon(self, message_id: str) -> None:
        """Stop waiting for the message in flight with this id, so that it can be written again."""
        channel = self._main.channel
        confirm = None if channel is None else channel.awaited(message_id)
        if confirm is not None:
            resolve(confirm, "timeout")


def _does_not_fit() -> PublishError:
    why = "a name or a property does not fit AMQP"
    return PublishError("error", why, refusal=Refusal(why, is_certain=True))


def _close_unless_closed(channel: Channel) -> None:
    # Closing a channel that the broker has closed would end the whole connection.
    if not channel.is_closed:
        close_soon(channel)


def _is_stuck(before: Progress, now: Progress) -> bool:
    """Whether the oldest publish is still unanswered, or all answered since were refused."""
    is_unanswered = now.oldest is not None and now.oldest == before.oldest
    is_refused = now.nacked > before.nacked and now.confirmed == before.confirmed
    return is_unanswered or is_refused


def _check_room(channel: PublishingChannel) -> None:
    """Raise PublishError if no publish may be written now."""
    if channel.is_blocked:
        raise PublishError("timeout", "the broker blocks publishing (memory or disk alarm)")
    if channel.unconfirmed >= MAX_UNCONFIRMED:
        raise PublishError("error", f"{MAX_UNCONFIRMED} publishes wait for their confirm")
    if channel.unwritten_bytes >= MAX_UNWRITTEN_BYTES:
        raise PublishError("timeout", "the broker does not read from the connection")
