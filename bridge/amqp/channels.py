"""Channels of a connection: open one, close it, say why it has ended."""

import asyncio
import sys
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
# How long a broker may hold back an ack that it has read: it hands a quorum queue no more than 32
# commands at once, and forgets the others when the channel ends (seen with 3.10.8).
ACKS_HELD_BACK_SECONDS: Final = 0.5
# With these the broker ends the whole connection when it cannot read or process a publish, but also
# for faults of its own.
_PERHAPS_REFUSALS: Final = (
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
# The event loop alone would let go of them. Each ends with its connection.
_closing: Final[set["asyncio.Future[None]"]] = set()


async def open_channel(connection: Connection, *, confirms: bool = False) -> Channel:
    """Open a channel and return aiormq's, which has no objects between us and the frames.

    With `confirms` a publish waits for the broker's confirm and raises when it is returned.
    """
    async with Deadline(RPC_TIMEOUT_SECONDS):
        if connection.transport is None:
            raise BrokerError("the connection closed at once")
        channel = await connection.transport.connection.channel(
            publisher_confirms=confirms, on_return_raises=confirms
        )
    return cast("Channel", channel)


def closed_channel(channel: Channel, use: str) -> BrokerError:
    """Make the error of a channel that has ended, with the broker's own words if it ended it."""
    error = end_of(channel)
    why = f": {describe_end(error)}" if isinstance(error, ChannelClosed) else ""
    return BrokerError(f"the {use} channel was closed{why}")


def end_of(channel: Channel) -> BaseException | None:
    """Return the error with which a channel has ended; None if it is open, or ended without one."""
    closing = channel.closing
    return None if not closing.done() or closing.cancelled() else closing.exception()


def refusal_on(channel: Channel) -> Refusal | None:
    """Say how the broker has refused something that was published on a channel, if it has.

    None if the channel is open, was lost, or ended for a reason that is no message's, such as a
    permission that is missing or a broker that stops.
    """
    error = end_of(channel)
    if error is None or not isinstance(error, (ChannelPreconditionFailed, *_PERHAPS_REFUSALS)):
        return None
    is_certain = isinstance(error, ChannelPreconditionFailed)
    return Refusal(describe_end(error), is_certain)


def max_payload_bytes(channel: Channel) -> int:
    """Return how many bytes the payload of a frame may have: `frame-max` less what is around it."""
    # A broker that sets no limit says 0, from which aiormq computes a negative size.
    return channel.max_content_size if channel.max_content_size > 0 else sys.maxsize


async def close_channel(channel: Channel) -> None:
    """Close a channel; the closing goes on when whoever waits for it is cancelled.

    A close that is cancelled before it is answered is sent again by aiormq. Then RabbitMQ ends the
    whole connection: where there is no channel any more it expects a `channel.open`.
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
        # That it is closed already, or that the connection is gone, concerns nobody.
        closing.exception()


async def wait_for_held_back_acks(last_ack_at: float) -> None:
    """Wait until an ack that the broker has read survives the end of its channel.

    `last_ack_at` is when the last one was written, a time of the event loop.
    """
    seconds = last_ack_at + ACKS_HELD_BACK_SECONDS - asyncio.get_running_loop().time()
    if seconds > 0:
        await asyncio.sleep(seconds)


def heed_cancellation() -> None:
    """Raise CancelledError when this task is cancelled.

    When the connection ends at the same moment, aiormq swallows the cancellation, or replaces it by
    an error of its own. So call this before going on.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def describe_end(error: BaseException) -> str:
    """Say why a connection or a channel has ended."""
    # The broker's own text names queues and arguments, never a message.
    if isinstance(error, BrokerError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "the broker sent nothing for too long"
    text = " ".join(str(part) for part in error.args[:2]) if error.args else ""
    return f"{type(error).__name__} {text}".strip()
