"""The mark on the broker by which people stop every worker of a queue: the queue `<queue>.paused`.

While it exists, nothing is sent. That it exists is all that counts: it is in the broker's own
metadata, on every node, so that no look at it, no expiry and no limit of deliveries can end a
pause. A message in it, the note, says since when and what for; without it the pause is the same.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    close_channel,
    close_soon,
    open_channel,
)
from bridge.amqp.client import (
    ChannelAccessRefused,
    ChannelClosed,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    Connection,
    DeliveryError,
    PublishError,
)
from bridge.amqp.properties import ClientProperties
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.log_format import utc_text

# Each reader takes the note and gives it back, which RabbitMQ counts. -1 stands for no limit from
# version 4 on, and for none at all before it.
ARGUMENTS: Final[Mapping[str, str | int]] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": 1_000_000,
    # Probes do not pile up behind the note: a full queue refuses them, and the note stays.
    "x-max-length": 10,
    "x-overflow": "reject-publish",
}
MAX_REASON_CHARACTERS: Final = 200
# How long `probe` waits: a pause is to be seen within two seconds.
PROBE_SECONDS: Final = 0.5
# In milliseconds, as AMQP has it. What a probe leaves in a queue that is just being made.
_PROBE_EXPIRATION: Final = "1"
# What a missing permission on the queue costs, and what to do.
HIDDEN: Final = (
    "`sms-bridge pause` stops a worker later than else, not at all while the broker takes no "
    "publishes, and nobody is told what a pause is for"
)
HIDDEN_REMEDY: Final = "grant the permission to read it with rabbitmqctl set_permissions"
_FIRST_YEAR: Final = 1970
# A date, which is no number of anybody's.
_DATE: Final = re.compile(r"\b20\d\d-(0\d|1[0-2])-([0-2]\d|3[01])\b")
# Seven digits with no more than a few signs between them. A colon parts the digits of a time.
_PHONE_NUMBER: Final = re.compile(r"\d(?:[^\w:]{0,3}\d){6}")


class Note(NamedTuple):
    """What an operator has left: the reason, if one was given, and when, in unix seconds."""

    reason: str | None
    since: float

    @property
    def since_text(self) -> str:
        """When, for people and programs: `2030-01-31T03:12:00Z`."""
        return utc_text(self.since)

    def body(self) -> bytes:
        """Write it as the body of the message."""
        return json.dumps({"reason": self.reason, "since": self.since_text}).encode()


def paused_queue(queue: str) -> str:
    """Name the queue whose existence stops the workers of a queue: `sms.outbound.paused`."""
    return f"{queue}.paused"


def checked_reason(text: str) -> str:
    """Return an operator's words without spaces around them.

    Raises ValueError, which says what is wrong, for anything but one line of at most 200 characters
    in which nothing looks like a phone number: it is shown in logs and on health pages.
    """
    reason = text.strip()
    if not reason:
        raise ValueError("is empty; say what for")
    if len(reason) > MAX_REASON_CHARACTERS:
        raise ValueError(f"has more than {MAX_REASON_CHARACTERS} characters")
    if not reason.isprintable():
        raise ValueError("has to be one line, without control characters")
    if _PHONE_NUMBER.search(_DATE.sub("date", reason)):
        raise ValueError(
            "looks as if it held a phone number (7 digits or more); it is shown in logs, so write "
            "it without"
        )
    return reason


def read_body(body: bytes) -> Note | None:
    """Read a note; None for what `pause` did not write, such as words that it would refuse."""
    try:
        content = json.loads(body)
        since = datetime.strptime(content["since"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        reason = content["reason"]
        if since.year < _FIRST_YEAR:
            return None
        return Note(None if reason is None else checked_reason(reason), since.timestamp())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class HiddenPauseError(BrokerError):
    """The user has no permission on the queue, so the broker does not say whether it exists.

    RabbitMQ asks for one to declare passively since version 4.2.6.
    """


async def is_paused(connection: Connection, queue: str) -> bool:
    """Ask whether the workers of a queue are to stop.

    RabbitMQ writes an error into its log each time that they are not: ask seldom, and `probe`
    otherwise. Raises BrokerError when it is not known, HiddenPauseError when the user may not know.
    """
    name = paused_queue(queue)
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            await channel.queue_declare(name, passive=True)
            await close_channel(channel)
    except ChannelNotFoundEntity:
        return False
    except ChannelLockedResource:
        return True  # It exists, whoever has it for himself.
    except ChannelAccessRefused:
        why = "the user has no permission on it"
        raise HiddenPauseError(f"queue {name}: not known if it exists: {why}") from None
    except (ChannelClosed, TimeoutError) as error:
        why = type(error).__name__
        raise BrokerError(f"queue {name}: not known if it exists: {why}") from None
    return True


async def probe(connection: Connection, queue: str) -> bool | None:
    """Find out whether the queue exists by a publish to it; None if that is not known.

    Needs no permission but to publish to queues, and leaves no line in the broker's log. A
    mandatory publish that no queue takes comes back. In the queue it expires once it is the first,
    and a full queue refuses it. On a connection that publishes: an alarm of the broker blocks it.
    """
    if connection.wire.is_blocked:
        return None
    properties = ClientProperties(expiration=_PROBE_EXPIRATION)
    try:
        async with Deadline(PROBE_SECONDS):
            channel = await open_channel(connection, confirms=True)
            try:
                await channel.basic_publish(
                    b"", routing_key=paused_queue(queue), properties=properties, mandatory=True
                )
            except PublishError:
                exists = False
            except DeliveryError:
                exists = True
            else:
                exists = True
            finally:
                # Also when it takes too long: a broker allows only so many on a connection.
                close_soon(channel)
    except Exception:  # noqa: BLE001  aiormq raises more than its own classes
        return None
    return exists


async def read_note(connection: Connection, queue: str) -> Note | None:
    """Read what an operator has left, and put it back; None where it cannot be read now."""
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            message = await channel.basic_get(paused_queue(queue))
            # Closing the channel gives it back.
            await close_channel(channel)
    except (ChannelNotFoundEntity, ChannelAccessRefused, ChannelClosed, TimeoutError):
        return None
    return read_body(bytes(message.body))
