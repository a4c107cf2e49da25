"""Publish one send request, like any publisher, and wait for its outcome.

While there is no outcome, look for the reason: a pause, no worker, an alarm.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

from bridge.admin.admin_port_client import UNKNOWN, explain_local_pause, read_worker
from bridge.admin.broker_session import open_session
from bridge.admin.pausing import explain_paused, find_pause
from bridge.amqp.channels import RPC_TIMEOUT_SECONDS
from bridge.amqp.client import (
    AbstractChannel,
    AbstractIncomingMessage,
    AbstractQueue,
    AMQPError,
    ChannelAccessRefused,
    Connection,
    DeliveryError,
    DeliveryMode,
    Message,
    MessageReturnedError,
)
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BridgeError, BrokerError, ConfigError
from bridge.topology.paused_queue import HiddenPauseError
from bridge.topology.queue_sizes import read_queue
from bridge.worker.request import parse_request

PUBLISH_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.1
# The interval and the deadline of the search for the reason why there is no outcome.
LOOK_SECONDS: Final = 2.0


class SentRequest:
    """A request that the broker has stored; `wait` sets its `outcome`."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        queue: str,
        replies: AbstractQueue | None,
        message_id: str,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._queue = queue
        self._replies = replies
        self.message_id = message_id
        self.outcome: dict[str, Any] | None = None

    async def wait(self, seconds: float) -> AsyncIterator[str]:
        """Wait for the outcome; yield each new reason for the delay.

        Raises BridgeError if there is no outcome in time.
        """
        loop = asyncio.get_running_loop()
        why: str | None = None
        ends_at, look_at = loop.time() + seconds, loop.time() + LOOK_SECONDS
        while (reply := await self._reply_until(ends_at)) is None:
            now = loop.time()
            if now < min(look_at, ends_at):
                await asyncio.sleep(POLL_SECONDS)
                continue
            left, before = ends_at - now, why
            # The previous reason stays if there is no answer in time.
            with contextlib.suppress(TimeoutError):
                async with Deadline(min(left, LOOK_SECONDS) if left > 0 else LOOK_SECONDS):
                    why = await self._find_reason()
            if left <= 0:
                told = f" ({why})" if why else ""
                raise BridgeError(
                    f"no outcome within {seconds:g} s{told}; the request stays queued"
                )
            if why is not None and why != before:
                yield why
            look_at = loop.time() + LOOK_SECONDS
        self.outcome = json.loads(reply.body)

    async def _reply_until(self, ends_at: float) -> AbstractIncomingMessage | None:
        left = ends_at - asyncio.get_running_loop().time()
        if self._replies is None or left <= 0:
            return None
        with contextlib.suppress(TimeoutError):
            async with Deadline(left):
                return await _take_reply(self._replies)
        return None

    async def _find_reason(self) -> str | None:
        queue = self._settings.worker.queue
        with contextlib.suppress(HiddenPauseError):
            paused = await find_pause(self._connection, queue, publishing=self._connection)
            if paused is not None:
                return "; ".join(explain_paused(queue, paused))
        worker = await read_worker(self._settings)
        if worker is not None and (pause := worker.deciding_pause) is not None:
            return "; ".join(explain_local_pause(pause))
        sizes = await read_queue(self._connection, self._queue)
        if sizes is not None and not sizes.consumers:
            why = "start one; if one is running, its /readyz says why"
            return f"no worker takes from {self._queue}; {why}"
        # If the worker is not paused, the request waits for a retry or for its turn.
        return None if worker is not None else UNKNOWN


@asynccontextmanager
async def send_request(
    settings: Settings,
    request: dict[str, str | None],
    *,
    is_urgent: bool = False,
    wants_outcome: bool = False,
) -> AsyncIterator[SentRequest]:
    """Publish one request; within the block its outcome can be waited for.

    Raises InvalidMessageError if the worker would refuse the request, BrokerError if the broker
    does not store it.
    """
    body = json.dumps({name: value for name, value in request.items() if value is not None})
    short_codes = settings.sms_api.request.short_codes
    parse_request(body.encode(), settings.worker, short_codes=short_codes)
    queue = settings.worker.urgent_queue if is_urgent else settings.worker.queue
    if queue is None:
        raise ConfigError("--urgent: there is no urgent queue (worker.urgent_queue is null)")
    message_id = str(uuid.uuid4())
    async with open_session(settings) as (connection, channel):
        replies = await _open_replies(channel) if wants_outcome else None
        message = Message(
            body.encode(),
            content_type="application/json",
            delivery_mode=DeliveryMode.PERSISTENT,
            message_id=message_id,
            timestamp=datetime.now(UTC),
            reply_to=None if replies is None else replies.name,
            correlation_id=message_id,
        )
        await _publish(channel, message, queue)
        yield SentRequest(settings, connection, queue, replies, message_id)


async def _open_replies(channel: AbstractChannel) -> AbstractQueue:
    try:
        queue = await channel.declare_queue(exclusive=True)
        # A missing permission to read shows here, before anything is sent.
        await _take_reply(queue)
    except ChannelAccessRefused:
        raise BrokerError(
            "no permission to wait for an outcome; nothing was sent; the user needs to configure "
            "and read queues amq.gen-*; without that, leave out --wait"
        ) from None
    return queue


async def _take_reply(replies: AbstractQueue) -> AbstractIncomingMessage | None:
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            return await replies.get(fail=False, no_ack=True, timeout=None)
    except TimeoutError:
        raise BrokerError(
            f"no answer from the broker within {RPC_TIMEOUT_SECONDS:g} s; look at its nodes; a "
            "request whose id was printed stays queued"
        ) from None


async def _publish(channel: AbstractChannel, message: Message, queue: str) -> None:
    try:
        await channel.default_exchange.publish(message, queue, timeout=PUBLISH_SECONDS)
    except MessageReturnedError:
        raise BrokerError(
            f"queue {queue}: does not exist; start a worker once, which declares it"
        ) from None
    except TimeoutError:
        raise BrokerError(
            f"queue {queue}: no confirm within {PUBLISH_SECONDS:g} s, as during a memory or disk "
            "alarm of RabbitMQ; `sms-bridge check --online` looks for one; the request "
            f"{message.message_id} may still be stored, so do not send it again until you know"
        ) from None
    except DeliveryError:
        raise BrokerError(
            f"queue {queue}: the broker refused the request; check whether the queue is full"
        ) from None
    except ChannelAccessRefused:
        raise BrokerError(
            f"queue {queue}: no permission to publish, nothing was stored; the user needs to write "
            "amq.default"
        ) from None
    except AMQPError as error:
        raise BrokerError(
            f"queue {queue}: not confirmed ({type(error).__name__}); see the broker's log; "
            f"the request {message.message_id} may be stored"
        ) from None
