"""Opens and closes AMQP channels, and describes why one was closed."""

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

# Timeout of the broker's answer to an AMQP method.
RPC_TIMEOUT_SECONDS: Final = 10.0
# Longest time that the broker delays an ack that it has read. It sends at most 32 commands at once
# to a quorum queue; if the channel ends, the others are lost (seen with 3.10.8).
ACKS_HELD_BACK_SECONDS: Final = 0.5
# The broker closes the connection with one of these if it cannot parse or process a publish, but
# also after internal faults of its own.
_PERHAPS_REFUSALS: Final = (
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
# Keeps each task alive until its connection ends: the event loop has only weak references.
_closing: Final[set["asyncio.Future[None]"]] = set()


async def open_channel(connection: Connection, *, confirms: bool = False) -> Channel:
    """Open an aiormq channel, on which `Wire` can read and write frames past aiormq.

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
    """Return the error for a closed channel, with the broker's reason if the broker closed it."""
    error = end_of(channel)
    why = f": {describe_end(error)}" if isinstance(error, ChannelClosed) else ""
    return BrokerError(f"the {use} channel was closed{why}")


def end_of(channel: Channel) -> BaseException | None:
    """Return the error that ended a channel; None if it is open or was closed without an error."""
    closing = channel.closing
    return None if not closing.done() or closing.cancelled() else closing.exception()


def refusal_on(channel: Channel) -> Refusal | None:
    """Return the refusal if the broker closed a channel because of a published message, else None.

    None includes channels that are open, were lost, or ended for another reason, such as a missing
    permission or a broker shutdown.
    """
    error = end_of(channel)
    if error is None or not isinstance(error, (ChannelPreconditionFailed, *_PERHAPS_REFUSALS)):
        return None
    is_certain = isinstance(error, ChannelPreconditionFailed)
    return Refusal(describe_end(error), is_certain)


async def close_channel(channel: Channel) -> None:
    """Close a channel, even if the caller is cancelled meanwhile.

    If a close is cancelled before the broker answers, aiormq sends it again. RabbitMQ then closes
    the whole connection, because it accepts only `channel.open` on a closed channel.
    """
    await asyncio.shield(channel.close())
    heed_cancellation()


def close_soon(channel: Channel) -> None:
    closing = asyncio.ensure_future(channel.close())
    _closing.add(closing)
    closing.add_done_callback(_let_go)


def _let_go(closing: "asyncio.Future[None]") -> None:
    _closing.discard(closing)
    if not closing.cancelled():
        # Retrieve the exception, so that asyncio does not log it: the channel was closed already.
        closing.exception()


async def wait_for_held_back_acks(last_ack_at: float) -> None:
    """Wait until closing a channel can no longer lose its last ack.

    `last_ack_at` is the event loop time at which that ack was written.
    """
    seconds = last_ack_at + ACKS_HELD_BACK_SECONDS - asyncio.get_running_loop().time()
    if seconds > 0:
        await asyncio.sleep(seconds)


def heed_cancellation() -> None:
    """Raise CancelledError if this task has been cancelled.

    Call this after awaiting aiormq: if the connection ends at the same moment, aiormq swallows the
    cancellation or replaces it by an error of its own.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def describe_end(error: BaseException) -> str:
    """Describe why a connection or a channel ended."""
    # The broker's text names queues and arguments, and never quotes a message.
    if isinstance(error, BrokerError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "the broker sent nothing for too long"
    text = " ".join(str(part) for part in error.args[:2]) if error.args else ""
    return f"{type(error).__name__} {text}".strip()
