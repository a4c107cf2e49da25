"""Publish one send request, as a publisher would, and wait for its outcome.

While there is no outcome, it looks for the reason: a pause, no worker, an alarm.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from bridge.admin.broker_session import open_session
from bridge.admin.pausing import explain_paused, find_pause
from bridge.admin.worker_status import UNKNOWN, explain_local_pause, read_worker
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
    PublishError,
)
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BridgeError, BrokerError, ConfigError
from bridge.topology.paused_queue import HiddenPauseError
from bridge.topology.queue_sizes import read_queue
from bridge.worker.request import parse_request

PUBLISH_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.1
# The interval and the deadline for finding out why there is no outcome.
LOOK_SECONDS: Final = 2.0


async def send(
    settings: Settings,
    request: dict[str, str | None],
    *,
    is_urgent: bool = False,
    wait_seconds: float | None,
    published: Callable[[str], object],
    waiting: Callable[[str], object] = lambda _why: None,
) -> dict[str, Any] | None:
    """Publish one request and, with `wait_seconds`, return its outcome event.

    The request goes to the urgent queue if `is_urgent`.
    `published` is called with the message id once the broker has confirmed the request; `waiting`
    with each new reason why nothing is sent. Raises InvalidMessageError for a request that the
    worker would refuse, BrokerError if the broker does not take it, and BridgeError if there is no
    outcome within `wait_seconds`.
    """
    body = json.dumps({name: value for name, value in request.items() if value is not None})
    short_codes = settings.sms_api.request.short_codes
    parse_request(body.encode(), settings.worker, short_codes=short_codes)
    queue = settings.worker.urgent_queue if is_urgent else settings.worker.queue
    if queue is None:
        raise ConfigError("--urgent: there is no urgent queue (worker.urgent_queue is null)")
    message_id = str(uuid.uuid4())
    async with open_session(settings) as (connection, channel):
        replies = None if wait_seconds is None else await _open_replies(channel)
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
        published(message_id)
        if replies is None or wait_seconds is None:
            return None
        silence = _Silence(settings, connection, queue)
        with contextlib.suppress(TimeoutError):
            async with Deadline(wait_seconds):
                return await _outcome(replies, silence, waiting)
        await silence.look()
    why = f" ({silence.why})" if silence.why else ""
    raise BridgeError(f"no outcome within {wait_seconds:g} s{why}; the request stays queued")


async def _open_replies(channel: AbstractChannel) -> AbstractQueue:
    try:
        queue = await channel.declare_queue(exclusive=True)
        # Find a missing permission to read before anything is sent.
        await _take_reply(queue)
    except ChannelAccessRefused:
        raise BrokerError(
            "no permission to wait for an outcome, nothing was sent; the user needs to configure "
            "and read queues amq.gen-*; or leave out --wait"
        ) from None
    return queue


async def _outcome(
    replies: AbstractQueue, silence: "_Silence", waiting: Callable[[str], object]
) -> dict[str, Any]:
    look_at = time.monotonic() + LOOK_SECONDS
    while True:
        reply = await _take_reply(replies)
        if reply is not None:
            outcome: dict[str, Any] = json.loads(reply.body)
            return outcome
        if time.monotonic() > look_at:
            if (news := await silence.look()) is not None:
                waiting(news)
            look_at = time.monotonic() + LOOK_SECONDS
        await asyncio.sleep(POLL_SECONDS)


async def _take_reply(replies: AbstractQueue) -> AbstractIncomingMessage | None:
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            return await replies.get(fail=False, no_ack=True, timeout=None)
    except TimeoutError:
        raise BrokerError(
            f"no answer from the broker within {RPC_TIMEOUT_SECONDS:g} s; look at its nodes; a "
            "request whose id was printed stays queued"
        ) from None


class _Silence:
    """Finds out why there is no outcome, as far as the broker and this computer can tell."""

    def __init__(self, settings: Settings, connection: Connection, queue: str) -> None:
        self._settings = settings
        self._queue = queue
        self._connection = connection
        self.why: str | None = None

    async def look(self) -> str | None:
        """Look for the reason, and return it if it has changed."""
        before = self.why
        with contextlib.suppress(TimeoutError):
            async with Deadline(LOOK_SECONDS):
                self.why = await self._find_out()
        return self.why if self.why != before else None

    async def _find_out(self) -> str | None:
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
            why = "start one, or ask one that runs: /readyz says why"
            return f"no worker takes from {self._queue}; {why}"
        # The worker is not paused: the request is in a retry queue, or waits for its turn.
        return None if worker is not None else UNKNOWN


async def _publish(channel: AbstractChannel, message: Message, queue: str) -> None:
    try:
        await channel.default_exchange.publish(message, queue, timeout=PUBLISH_SECONDS)
    except PublishError:
        raise BrokerError(
            f"queue {queue}: there is none; start the worker once, which declares it"
        ) from None
    except TimeoutError:
        raise BrokerError(
            f"queue {queue}: no confirm within {PUBLISH_SECONDS:g} s, as while RabbitMQ has a "
            "memory or disk alarm; `sms-bridge check --online` looks for one; the request "
            f"{message.message_id} may be stored yet, so do not send it again before you know"
        ) from None
    except DeliveryError:
        raise BrokerError(
            f"queue {queue}: not stored, the broker refused it; see whether the queue is full"
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
