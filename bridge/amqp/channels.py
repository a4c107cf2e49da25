"""Opens and closes channels, and describes why one ended."""

import asyncio
from typing import Final, cast

from bridge.amqp.client import (
    Channel,
    ChannelClosed,
    ChannelPreconditionFailed,
    Connection,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
from bridge.deadline import Deadline
from bridge.errors import BrokerError, Refusal

# How long the broker may take to answer a method.
RPC_TIMEOUT_SECONDS: Final = 10.0
# How long the broker may hold back an ack that it has read. It passes at most 32 commands at once
# to a quorum queue, and forgets the others when the channel ends (seen with 3.10.8).
ACKS_HELD_BACK_SECONDS: Final = 0.5
# The broker closes the connection with these if it cannot read or process a publish, but also
# because of faults of its own.
_PERHAPS_REFUSALS: Final = (
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
# Strong references, which the event loop does not keep. Each task ends with its connection.
_closing: Final[set["asyncio.Future[None]"]] = set()


async def open_channel(connection: Connection, *, confirms: bool = False) -> Channel:
    """Open a channel of aiormq, whose frames `Wire` can bypass.

    With `confirms` the broker confirms each publish.
    """
    async with Deadline(RPC_TIMEOUT_SECONDS):
        if connection.transport is None:
            raise BrokerError("the connection closed at once")
        channel = await connection.transport.connection.channel(
            publisher_confirms=confirms, on_return_raises=confirms
        )
    return cast("Channel", channel)


def closed_channel(channel: Channel, use: str) -> BrokerError:
    """Return the error for a channel that has ended, with the broker's reason if it closed it."""
    error = end_of(channel)
    why = f": {describe_end(error)}" if isinstance(error, ChannelClosed) else ""
    return BrokerError(f"the {use} channel was closed{why}")


def end_of(channel: Channel) -> BaseException | None:
    """Return the error with which a channel has ended; None if it is open, or ended without one."""
    closing = channel.closing
    return None if not closing.done() or closing.cancelled() else closing.exception()


def refusal_on(channel: Channel) -> Refusal | None:
    """Return how the broker refused a message published on a channel.

    None if the channel is open, was lost, or ended for a reason that no message caused, such as a
    missing permission or a broker shutdown.
    """
    error = end_of(channel)
    if error is None or not isinstance(error, (ChannelPreconditionFailed, *_PERHAPS_REFUSALS)):
        return None
    is_certain = isinstance(error, ChannelPreconditionFailed)
    return Refusal(describe_end(error), is_certain)


async def close_channel(channel: Channel) -> None:
    """Close a channel, even if the caller is cancelled meanwhile.

    aiormq repeats a close that is cancelled before its answer. RabbitMQ then closes the connection,
    because it expects a `channel.open` on a channel that is closed.
    """
    await asyncio.shield(channel.close())
    heed_cancellation()


def close_soon(channel: Channel) -> None:
    """Close a channel without waiting for it."""
    closing = asyncio.ensure_future(channel.close())
    _closing.add(closing)
    closing.add_done_callback(_let_go)


def _let_go(closing: "asyncio.Future[None]") -> None:
    _closing.discard(closing)
    if not closing.cancelled():
        # Retrieve the exception, so that asyncio does not log it: the channel was closed already.
        closing.exception()


async def wait_for_held_back_acks(last_ack_at: float) -> None:
    """Wait until the last ack survives the end of its channel.

    `last_ack_at` is when it was written, a time of the event loop's clock.
    """
    seconds = last_ack_at + ACKS_HELD_BACK_SECONDS - asyncio.get_running_loop().time()
    if seconds > 0:
        await asyncio.sleep(seconds)


def heed_cancellation() -> None:
    """Raise CancelledError if this task has been cancelled.

    Call this after a method of aiormq: if the connection ends at the same moment, aiormq swallows
    the cancellation or replaces it by an error of its own.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def describe_end(error: BaseException) -> str:
    """Describe why a connection or a channel ended."""
    # The broker's own text names queues and arguments, never a message.
    if isinstance(error, BrokerError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "the broker sent nothing for too long"
    text = " ".join(str(part) for part in error.args[:2]) if error.args else ""
    return f"{type(error).__name__} {text}".strip()
