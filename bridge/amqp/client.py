"""Re-exports the names of aio-pika and aiormq that the bridge uses.

Apart from `wire`, no other module imports the two libraries.
"""

import asyncio
from typing import Any, Final

import aio_pika
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aiormq import Channel
from aiormq.abc import ConsumerCallback, DeliveredMessage
from aiormq.base import FutureStore
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotAllowed,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    DeliveryError,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from aiormq.exceptions import (
    PublishError as MessageReturnedError,
)

from bridge.amqp.wire import Wire
from bridge.telemetry.logs import Log

__all__ = [
    "AMQPError",
    "AbstractChannel",
    "AbstractIncomingMessage",
    "AbstractQueue",
    "AuthenticationError",
    "Channel",
    "ChannelAccessRefused",
    "ChannelClosed",
    "ChannelInvalidStateError",
    "ChannelLockedResource",
    "ChannelNotFoundEntity",
    "ChannelPreconditionFailed",
    "Connection",
    "ConnectionFrameError",
    "ConnectionInternalError",
    "ConnectionNotAllowed",
    "ConnectionNotImplemented",
    "ConnectionSyntaxError",
    "ConnectionUnexpectedFrame",
    "ConsumerCallback",
    "DeliveredMessage",
    "DeliveryError",
    "DeliveryMode",
    "InvalidFrameError",
    "Message",
    "MessageReturnedError",
    "ProbableAuthenticationError",
]


class Connection(aio_pika.Connection):
    """An aio-pika connection with its `Wire`, which carries messages; made by `open_connection`."""

    wire: Wire


log = Log(__name__)

_create_task: Final[Any] = FutureStore.create_task


def _create_heard_task(store: FutureStore, coroutine: Any) -> Any:  # noqa: ANN401
    """Create a task as aiormq does, and retrieve its exception when it ends.

    Nothing awaits the reader task of a channel. If a slow broker does not answer a close in time,
    asyncio would report the task's exception as unhandled. Users of the channel notice its end
    without this exception.
    """
    task = _create_task(store, coroutine)
    task.add_done_callback(_hear)
    return task


def _hear(task: "asyncio.Task[object]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.debug("library_task_failed", error=type(error).__name__)


FutureStore.create_task = _create_heard_task  # type: ignore[assignment,method-assign]
