"""The wire that uses aiormq's documented methods for deliveries, acks, publishes and confirms.

It is there for the day on which a new version of a client library breaks `StreamWire`:
`SMS_BRIDGE_WIRE=plain` in the environment of a process chooses it. The same holds on it: an ack is
sent last and once, a publish is mandatory and confirmed. What is weaker:

- speed: a publish with its confirm takes ten times the CPU time, a delivery with its ack eight
  times (103 µs for 10, 66 µs for 8; `python -m bench.wires`), a message through the worker
  1.8 times: 1.26 times the bare loop's messages per CPU second for 2.26, so that
  `SMS_BRIDGE_WIRE=plain make bench-guard` fails;
- memory: aiormq reads whatever the broker sends, so only the prefetch bounds the bodies that are
  held, and it shrinks only once the first large ones have arrived; and a publish holds its body
  three times until its confirm, so that a third as many bytes may be unconfirmed;
- addresses: the event loop tries those of a name one after another, without a race;
- error texts: a refused virtual host comes without the broker's explanation, another program at the
  port shows as `refused` or `timeout`, and an alarm is noticed up to a second late, without its
  reason;
- faults: a broker that is silent is left after three heartbeats and three seconds, not after two,
  and a channel whose publishes it never confirms is not replaced;
- message ids: a message without one is published with an id that is made up, to recognise its
  return by.
"""

import asyncio
import functools
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

from bridge.amqp.channels import max_payload_bytes
from bridge.amqp.client import (
    Channel,
    Connection,
    ConsumerCallback,
    DeliveredMessage,
    DeliveryError,
    PublishError,
)
from bridge.amqp.field_values import encode_short_string
from bridge.amqp.frames import CONTENT_HEADER_START, content_header, is_mandatory
from bridge.amqp.properties import Properties, for_client, of_client
from bridge.amqp.wire import NO_HANDLERS, Body, DeliveryHandler
from bridge.errors import Confirm
from bridge.telemetry.logs import Log

log = Log(__name__)

# A body is held until its confirm as it was given and cut into frames, and the frames once more in
# the buffer of the socket until the broker reads them.
BODY_COPIES: Final = 3
# aiormq has no callback for an alarm, so its state is polled this often.
LOOK_SECONDS: Final = 1.0


class PlainWire:
    """The messages of one connection, as aiormq hands them over and takes them."""

    # aiormq reads whatever comes, and sees by itself whether the broker lives, if later than we.
    is_reading: Final = True
    silent_seconds: Final = 0.0
    # Why a connection did not open, aiormq says only in the exception that it raises.
    foreign: Final = b""
    closed: Final = None
    is_open: Final = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._acks: deque[tuple[Channel, int]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def name(self) -> Literal["plain"]:
        """Which wire it is."""
        return "plain"

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages on this connection (a memory or disk alarm)."""
        transport = self._connection.transport
        return transport is not None and _would_wait(transport.ready())

    def on_blocked(self, notify: Callable[[str | None], object]) -> None:
        """Call `notify` within a second of an alarm, and again with None when it is over."""
        self._look(notify, was_blocked=False)

    def _look(self, notify: Callable[[str | None], object], *, was_blocked: bool) -> None:
        if self._connection.is_closed:
            return
        is_blocked = self.is_blocked
        if is_blocked is not was_blocked:
            notify("a memory or disk alarm" if is_blocked else None)
        look = functools.partial(self._look, notify, was_blocked=is_blocked)
        asyncio.get_running_loop().call_later(LOOK_SECONDS, look)

    @contextmanager
    def deliveries(
        self,
        channel: Channel,
        take: DeliveryHandler,
        by_tag: Mapping[bytes, DeliveryHandler] = NO_HANDLERS,
    ) -> Iterator[ConsumerCallback]:
        """Hand what is delivered on a channel to `take`, in the order of the deliveries.

        The channel ends when `take` raises.
        """
        is_over = False

        async def on_delivery(message: DeliveredMessage) -> None:
            # Nothing that arrives after the block is acked: the broker delivers it again.
            if is_over:
                return
            properties = of_client(message.header.properties)
            hand_on = by_tag.get((message.consumer_tag or "").encode(), take)
            try:
                hand_on(
                    message.delivery_tag or 0,
                    bool(message.redelivered),
                    properties,
                    message.body,
                )
            except Exception as error:
                # In a task of its own: a closing channel cancels what runs on it, this too.
                self._ending = asyncio.create_task(channel.close(error))
                raise

        try:
            yield on_delivery
        finally:
            is_over = True
            if self._sending is not None:
                self._sending.cancel()

    def ack(self, channel: Channel, delivery_tag: int) -> None:
        """Send the ack of a delivery, behind those before it."""
        self._acks.append((channel, delivery_tag))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_acks())

    async def _send_acks(self) -> None:
        while self._acks:
            channel, delivery_tag = self._acks.popleft()
            try:
                await channel.basic_ack(delivery_tag, wait=False)
            except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                # The channel is closed, and the broker delivers the message again.
                log.debug("ack_not_sent", error=type(error).__name__)

    async def acks_read(self, channel: Channel) -> None:
        """Return when the broker has read every ack that was sent on a channel."""
        if self._sending is not None:
            await asyncio.wait({self._sending})
        await channel.basic_qos(prefetch_count=1)

    @contextmanager
    def publishing(self, channel: Channel) -> Iterator["PlainPublishing"]:
        """Publish on a channel with confirms."""
        publishing = PlainPublishing(self, channel)
        try:
            yield publishing
        finally:
            publishing.close()

    def set_reading(self, *, enabled: bool) -> None:
        """Do nothing: aiormq reads whatever comes."""

    def abort(self) -> None:
        """Do nothing: aiormq ends a connection that is silent."""

    def keep_alive(self) -> None:
        """Do nothing: aiormq sees by itself whether the broker lives."""


class PlainPublishing:
    """A channel whose publishes aiormq sends, each in a task that waits for its confirm."""

    # aiormq does not tell which of them the broker has read.
    progress: Final = None

    def __init__(self, wire: PlainWire, channel: Channel) -> None:
        self._wire = wire
        self._channel = channel
        self._max_payload_bytes = max_payload_bytes(channel)
        self._by_id: dict[str, asyncio.Future[Confirm]] = {}
        self._unconfirmed: set[asyncio.Task[None]] = set()
        self._unconfirmed_bytes = 0

    @property
    def is_blocked(self) -> bool:
        """Whether the broker takes no messages now (a memory or disk alarm)."""
        return self._wire.is_blocked

    @property
    def unconfirmed(self) -> int:
        """How many publishes have no confirm yet, abandoned ones included."""
        return len(self._unconfirmed)

    @property
    def unwritten_bytes(self) -> int:
        """How many bytes unconfirmed bodies hold: the broker may not have read any of them."""
        return self._unconfirmed_bytes

    @property
    def max_properties_bytes(self) -> int:
        """How many bytes of properties fit into a frame: a content header cannot be split."""
        return self._max_payload_bytes - CONTENT_HEADER_START.size

    def awaited(self, message_id: str | None) -> "asyncio.Future[Confirm] | None":
        """Return the confirm of the message in flight that has this id, or None.

        Messages without an id never collide: each is published with its own.
        """
        return self._by_id.get(message_id or "")

    def publish(
        self, body: Body, *, exchange: str, routing_key: str, properties: Properties
    ) -> "asyncio.Future[Confirm]":
        """Send a mandatory message after those before it, and return its confirm as a future.

        Raises ValueError when the exchange, the routing key or the properties do not fit AMQP.
        """
        for name in (exchange, routing_key):
            encode_short_string(name)
        message_id = properties.message_id
        if not message_id:
            # aiormq would make one up behind the check, and write it into the object it is given.
            properties = properties.copy()
            properties.message_id = uuid.uuid4().hex
        content_header(len(body), properties, self._max_payload_bytes)
        confirm: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
        if message_id:
            self._by_id[message_id] = confirm
            confirm.add_done_callback(functools.partial(self._forget_id, message_id))
        send = functools.partial(
            self._channel.basic_publish,
            bytes(body),
            exchange=exchange,
            routing_key=routing_key,
            properties=for_client(properties),
            mandatory=is_mandatory(exchange, routing_key),
            wait=False,
        )
        task = asyncio.create_task(_follow(send, confirm))
        held_bytes = BODY_COPIES * len(body)
        self._unconfirmed.add(task)
        self._unconfirmed_bytes += held_bytes
        task.add_done_callback(functools.partial(self._forget, confirm, held_bytes))
        return confirm

    def close(self) -> None:
        """Resolve every open confirm as `error`: the channel has ended, and none can come."""
        for task in self._unconfirmed:
            task.cancel()

    def _forget(
        self, confirm: "asyncio.Future[Confirm]", held_bytes: int, task: "asyncio.Task[None]"
    ) -> None:
        # A task that was cancelled before it began has not resolved its confirm.
        _resolve(confirm, "error")
        self._unconfirmed.remove(task)
        self._unconfirmed_bytes -= held_bytes

    def _forget_id(self, message_id: str, confirm: "asyncio.Future[Confirm]") -> None:
        if self._by_id.get(message_id) is confirm:
            del self._by_id[message_id]


async def _follow(
    send: Callable[[], Awaitable[object]], confirm: "asyncio.Future[Confirm]"
) -> None:
    """Resolve a publish's confirm; it is `error` unless the broker itself decided."""
    outcome: Confirm = "error"
    try:
        await send()
        outcome = "confirmed"
    except PublishError:
        outcome = "returned"
    except DeliveryError:
        outcome = "nacked"
    except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
        log.debug("publish_not_confirmed", error=type(error).__name__)
    finally:
        _resolve(confirm, outcome)


def _resolve(confirm: "asyncio.Future[Confirm]", outcome: Confirm) -> None:
    if not confirm.done():
        confirm.set_result(outcome)


def _would_wait(ready: Awaitable[object]) -> bool:
    """Whether awaiting `ready` would block: take its first step, and see whether it ends."""
    step = ready.__await__()
    try:
        next(step)
    except StopIteration:
        return False
    finally:
        step.close()
    return True
