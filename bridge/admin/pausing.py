"""Pause and resume every worker of a queue, and find the operator's pause."""

import asyncio
import contextlib
import getpass
import os
import socket
import time
from typing import Final, NamedTuple

from pydantic import SecretStr

from bridge.admin.broker_session import open_session
from bridge.amqp.channels import RPC_TIMEOUT_SECONDS, close_channel, open_channel
from bridge.amqp.client import (
    AbstractChannel,
    AMQPError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelPreconditionFailed,
    Connection,
    DeliveryMode,
    Message,
)
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.topology.paused_queue import (
    ARGUMENTS,
    HiddenPauseError,
    Note,
    checked_operator,
    is_paused,
    paused_queue,
    probe,
    read_note,
)

# The deadline for the note; the pause itself is already on.
NOTE_SECONDS: Final = 5.0
# While somebody else reads the note, the queue seems empty for a moment.
READ_TRIES: Final = 5
READ_SECONDS: Final = 1.0
READ_AGAIN_SECONDS: Final = 0.1


class Paused(NamedTuple):
    """A pause. `is_new`: this call began it. `note` is None if it cannot be read."""

    note: Note | None
    is_new: bool = False


async def pause(settings: Settings, reason: str | None) -> Paused:
    """Pause every worker of `worker.queue`; an existing pause keeps its note.

    `reason` has passed `checked_reason`. Raises BrokerError if the broker refuses.
    """
    queue, note = settings.worker.queue, Note(reason, time.time(), this_operator())
    async with open_session(settings) as (connection, channel):
        try:
            before = await find_pause(connection, queue)
        except HiddenPauseError:
            before = None  # `_make` reports the missing permission.
        if before is not None and before.note is not None:
            return before
        if before is None:
            await _make(connection, paused_queue(queue))
        # From here on an alarm of the broker may block this connection.
        is_left = await _leave(channel, queue, note)
        # Another `pause` may have left its note first. Without permission to read, ours counts.
        kept = (await _read_note(connection, queue) or note) if is_left else None
        return Paused(kept, is_new=before is None)


def this_operator() -> str | None:
    """Return the user and the host of this command, if both are plain names."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        user = f"uid-{os.getuid()}"
    return checked_operator(f"{user}@{socket.gethostname()}")


async def resume(settings: Settings) -> bool:
    """Resume the workers; return False if they were not paused. Raises BrokerError as `pause` does.

    Asks all brokers of `rabbitmq.url` at once, because a node that rejoins after a partition does
    not know of the pause for some seconds. The first that knows of it ends it.
    """
    at_each = [asyncio.ensure_future(_resume_at(settings, url)) for url in settings.rabbitmq.url]
    faults = list[BrokerError]()
    try:
        for resumed in asyncio.as_completed(at_each):
            try:
                if await resumed:
                    return True
            except BrokerError as error:
                faults.append(error)
    finally:
        for one in at_each:
            one.cancel()
        await asyncio.gather(*at_each, return_exceptions=True)
    if len(faults) == len(at_each):
        raise BrokerError("; ".join(str(fault) for fault in faults))
    return False


async def _resume_at(settings: Settings, url: SecretStr) -> bool:
    """End the pause at one broker; return False if it knows of none."""
    rabbitmq = settings.rabbitmq.model_copy(update={"url": (url,)})
    queue = settings.worker.queue
    async with open_session(settings.model_copy(update={"rabbitmq": rabbitmq})) as (connection, _):
        name = paused_queue(queue)
        try:
            if not await is_paused(connection, queue):
                return False
        except HiddenPauseError:
            raise BrokerError(_refused(name, "delete")) from None
        try:
            async with Deadline(RPC_TIMEOUT_SECONDS):
                channel = await open_channel(connection)
                await channel.queue_delete(name)
                await close_channel(channel)
        except ChannelAccessRefused:
            raise BrokerError(_refused(name, "delete")) from None
        except TimeoutError:
            raise BrokerError(
                f"queue {name}: no answer; look at its nodes, and run this again to delete it"
            ) from None
        return True


async def find_pause(
    connection: Connection, queue: str, *, publishing: Connection | None = None
) -> Paused | None:
    """Return the operator's pause of a queue, or None; raise BrokerError if that is unknown.

    With `publishing`, a connection for a probe, the broker logs no error. Raises HiddenPauseError
    if the broker does not tell this user.
    """
    exists = None if publishing is None else await probe(publishing, queue)
    if exists is False:
        return None
    try:
        if not await is_paused(connection, queue):
            return None
    except HiddenPauseError:
        if exists is None:
            raise
        return Paused(None)
    return Paused(await _read_note(connection, queue))


def explain_paused(queue: str, paused: Paused) -> tuple[str, str]:
    """Return the text about an operator's pause (operator, start, reason), and the remedy."""
    note = paused.note
    operator = "an operator" if note is None or note.by is None else note.by
    text = f"{operator} has paused every worker of {queue}"
    if note is not None:
        text += f" since {note.since_text}"
        text += f": {note.reason}" if note.reason is not None else ""
    return text, "`sms-bridge resume` ends it"


async def _read_note(connection: Connection, queue: str) -> Note | None:
    for _ in range(READ_TRIES):
        with contextlib.suppress(TimeoutError):
            async with Deadline(READ_SECONDS):
                if (note := await read_note(connection, queue)) is not None:
                    return note
        await asyncio.sleep(READ_AGAIN_SECONDS)
    return None


async def _make(connection: Connection, name: str) -> None:
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            await channel.queue_declare(name, durable=True, arguments={**ARGUMENTS})
            await close_channel(channel)
    except (ChannelPreconditionFailed, ChannelLockedResource):
        pass  # Somebody has just created it with other arguments; its existence is the pause.
    except ChannelAccessRefused:
        raise BrokerError(_refused(name, "create")) from None
    except TimeoutError:
        raise BrokerError(f"queue {name}: no answer; run this again to create it") from None


async def _leave(channel: AbstractChannel, queue: str, note: Note) -> bool:
    """Publish the note, and return whether it is stored; the pause does not depend on it."""
    message = Message(
        note.body(), content_type="application/json", delivery_mode=DeliveryMode.PERSISTENT
    )
    try:
        await channel.default_exchange.publish(message, paused_queue(queue), timeout=NOTE_SECONDS)
    except (AMQPError, TimeoutError):
        return False
    return True


def _refused(name: str, what: str) -> str:
    return (
        f"queue {name}: no permission to {what} it; grant the user to configure it (rabbitmqctl "
        f"set_permissions), or {what} it as another user, for example on the management page: no "
        "worker sends while a durable quorum queue of this name exists"
    )
