"""The publisher of a soak: every request again until it is confirmed, under one message id.

It uses the AMQP library as any client would, and nothing of the bridge.
"""

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from yarl import URL

from tests.unnamed import NO_ID

MAX_OPEN: Final = 500
TICK_SECONDS: Final = 0.1
CONNECT_SECONDS: Final = 5.0
CONFIRM_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.0
STOP_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.3
HEARTBEAT_SECONDS: Final = 5

# The library raises more than its own classes, and a closing channel cancels what waits on it.
_FAULTS: Final = (Exception, asyncio.CancelledError)


Ids = Literal["on", "half", "off"]


@dataclass(frozen=True, slots=True)
class Request:
    """One message to send; its number is used for no other message.

    Unless it `has_id`, it is published without its `message_id`, which only the books have then.
    """

    message_id: str
    number: str
    text: str
    has_id: bool = True

    def body(self) -> bytes:
        """Return it as the queue wants it."""
        return json.dumps({"to": self.number, "from": "Soak", "text": self.text}).encode()


def plan_requests(count: int, *, seed: int, ids: Ids = "on") -> list[Request]:
    """Make so many requests; with `half` every other one has no id."""
    return [
        Request(
            f"soak-{seed}-{index}",
            f"+9995{index:09d}",
            f"message {index}",
            has_id=ids == "on" or (ids == "half" and index % 2 == 0),
        )
        for index in range(count)
    ]


class Publisher:
    """Publishes in a thread of its own, at a pace that may be changed.

    After a fault it goes on with the next URL. Of what remains it publishes `share` a second, so
    that it never runs out quite, and at least `floor` messages a second.
    """

    def __init__(self, urls: Sequence[str], queue: str, requests: Sequence[Request]) -> None:
        self.share = self.floor = 0.0
        self.published: Counter[str] = Counter()
        self.confirmed: set[str] = set()
        self._urls = itertools.cycle(
            URL(url).update_query(heartbeat=HEARTBEAT_SECONDS, name="soak-publisher")
            for url in urls
        )
        self._queue = queue
        self._requests = requests
        self._begun = 0
        self._channel: AbstractChannel | None = None
        self._connected = asyncio.Event()
        self._broken = asyncio.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)

    @property
    def remaining(self) -> int:
        """How many requests have not been begun."""
        return len(self._requests) - self._begun

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended: everything is confirmed, or it was told to stop."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Begin; nothing is published while the pace is zero."""
        self._thread.start()

    def stop(self) -> None:
        """Give up what is not confirmed yet."""
        self._stopping.set()
        self._thread.join(STOP_SECONDS)

    def _work(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._run())

    async def _run(self) -> None:
        connecting = asyncio.create_task(self._stay_connected())
        publishing = asyncio.create_task(self._publish_all())
        try:
            while not publishing.done() and not self._stopping.is_set():
                await asyncio.wait({publishing}, timeout=TICK_SECONDS)
        finally:
            for task in (publishing, connecting):
                task.cancel()
            await asyncio.gather(publishing, connecting, return_exceptions=True)

    async def _publish_all(self) -> None:
        allowed, last = 0.0, time.monotonic()
        async with asyncio.TaskGroup() as group:
            open_tasks: set[asyncio.Task[None]] = set()
            for request in self._requests:
                while allowed < 1 or len(open_tasks) >= MAX_OPEN:
                    await asyncio.sleep(TICK_SECONDS)
                    now = time.monotonic()
                    # What could not be published in an outage is caught up with, in bounds.
                    pace = max(self.floor, self.share * self.remaining)
                    allowed = min(allowed + (now - last) * pace, MAX_OPEN)
                    last = now
                allowed -= 1
                self._begun += 1
                task = group.create_task(self._publish(request))
                open_tasks.add(task)
                task.add_done_callback(open_tasks.discard)

    async def _publish(self, request: Request) -> None:
        message = aio_pika.Message(
            request.body(),
            message_id=request.message_id if request.has_id else NO_ID,
            content_type="application/json",
            timestamp=time.time(),
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        is_confirmed = False
        while not is_confirmed:
            is_confirmed = await self._is_confirmed(message, request.message_id)
        self.confirmed.add(request.message_id)

    async def _is_confirmed(self, message: aio_pika.Message, message_id: str) -> bool:
        await self._connected.wait()
        channel = self._channel
        if channel is None:
            return False
        self.published[message_id] += 1
        if await self._publish_on(channel, message):
            return True
        # A connection on which anything went wrong is left: a second publish under the same id must
        # not get the answer to the first. Another one may have taken its place.
        if channel is self._channel:
            self._broken.set()
        await asyncio.sleep(AGAIN_SECONDS)
        return False

    async def _publish_on(self, channel: AbstractChannel, message: aio_pika.Message) -> bool:
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await channel.default_exchange.publish(message, self._queue, mandatory=True)
        except _FAULTS:
            _heed_cancellation()
            return False
        return True

    async def _stay_connected(self) -> None:
        while True:
            connection = aio_pika.Connection(next(self._urls))
            try:
                await connection.connect(timeout=CONNECT_SECONDS)
                await self._use(connection)
            except _FAULTS:
                _heed_cancellation()
            finally:
                self._connected.clear()
                self._channel = None
                # Also when it never opened: the library does it later, too late at the end.
                with suppress(*_FAULTS):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await connection.close()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _use(self, connection: AbstractConnection) -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            self._channel = await connection.channel(on_return_raises=True)
        self._broken.clear()
        self._connected.set()
        closed = asyncio.ensure_future(connection.closed())
        broken = asyncio.ensure_future(self._broken.wait())
        try:
            await asyncio.wait({closed, broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            broken.cancel()


def _heed_cancellation() -> None:
    """Go on with our own cancellation, and with no other."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
