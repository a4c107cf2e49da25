"""The queue `<queue>.paused`: while it exists, all workers of the queue are paused.

Operators create it with `sms-bridge pause`. Only its existence counts. The broker keeps that in its
metadata, on every node, so that no reader, no expiry and no delivery limit can end a pause. A
message in the queue, the note, has the start and the reason of the pause; the pause does not depend
on it.
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
    MessageReturnedError,
)
from bridge.amqp.properties import ClientProperties
from bridge.deadline import Deadline
from bridge.errors import BrokerError
from bridge.telemetry.log_format import utc_text

# Each reader gets the note and returns it, which RabbitMQ counts as a delivery. A delivery limit of
# -1 means no limit from version 4 on; before, it allows no redelivery at all.
ARGUMENTS: Final[Mapping[str, str | int]] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": 1_000_000,
    # Probes do not accumulate behind the note: a full queue rejects them, and the note stays.
    "x-max-length": 10,
    "x-overflow": "reject-publish",
}
MAX_REASON_CHARACTERS: Final = 200
# Timeout of `probe`: workers have to notice a pause within two seconds.
PROBE_SECONDS: Final = 0.5
# In milliseconds, as text (AMQP). Removes a probe from a queue that has no note yet.
_PROBE_EXPIRATION: Final = "1"
# The effect of a missing permission on the queue, and the remedy.
HIDDEN: Final = (
    "workers notice `sms-bridge pause` late, or not at all while the broker blocks publishing, and "
    "cannot show its reason"
)
HIDDEN_REMEDY: Final = "grant the permission to read it with rabbitmqctl set_permissions"
_FIRST_YEAR: Final = 1970
# A date, which is not a phone number.
_DATE: Final = re.compile(r"\b20\d\d-(0\d|1[0-2])-([0-2]\d|3[01])\b")
# Seven digits with at most three signs or spaces between two of them. A colon does not match,
# because it separates the digits of a time.
_PHONE_NUMBER: Final = re.compile(r"\d(?:[^\w:]{0,3}\d){6}")
# Without seven digits in a row; those of an address, as in `ip-10-0-12-34`, are separated.
_OPERATOR: Final = re.compile(r"(?!.*[0-9]{7})[A-Za-z0-9_.-]{1,64}@[A-Za-z0-9_.-]{1,64}")


class Note(NamedTuple):
    """An operator's note on a pause: the reason, if any, and the start in unix seconds.

    `by` is the operator's user and host, if they are known: `anna@admin-1`.
    """

    reason: str | None
    since: float
    by: str | None = None

    @property
    def since_text(self) -> str:
        """The start as text: `2030-01-31T03:12:00Z`."""
        return utc_text(self.since)

    def body(self) -> bytes:
        content = {"reason": self.reason, "since": self.since_text, "by": self.by}
        return json.dumps(content).encode()


def paused_queue(queue: str) -> str:
    """Name the queue whose existence pauses the workers of a queue: `sms.outbound.paused`."""
    return f"{queue}.paused"


def checked_reason(text: str) -> str:
    """Check the reason of a pause, and return it without surrounding spaces.

    Raises ValueError that names the fault unless it is one line of at most 200 characters without
    anything like a phone number: it is shown in logs and on health pages.
    """
    reason = text.strip()
    if not reason:
        raise ValueError("is empty; give a reason")
    if len(reason) > MAX_REASON_CHARACTERS:
        raise ValueError(f"has more than {MAX_REASON_CHARACTERS} characters")
    if not reason.isprintable():
        raise ValueError("has to be one line, without control characters")
    if _PHONE_NUMBER.search(_DATE.sub("date", reason)):
        raise ValueError(
            "seems to contain a phone number (7 digits or more); remove it, because the reason "
            "appears in logs"
        )
    return reason


def checked_operator(text: object) -> str | None:
    """Return a user and a host as `user@host`; None if it is anything else, or may be a number."""
    return text if isinstance(text, str) and _OPERATOR.fullmatch(text) else None


def read_body(body: bytes) -> Note | None:
    """Parse a note; return None if it is invalid, or has a reason that `pause` would reject."""
    try:
        content = json.loads(body)
        since = datetime.strptime(content["since"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        reason = content["reason"]
        if since.year < _FIRST_YEAR:
            return None
        return Note(
            None if reason is None else checked_reason(reason),
            since.timestamp(),
            checked_operator(content.get("by")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class HiddenPauseError(BrokerError):
    """The user has no permission on the queue, so the broker does not show whether it exists.

    Since version 4.2.6, RabbitMQ requires a permission for a passive declare.
    """


async def is_paused(connection: Connection, queue: str) -> bool:
    """Return whether the workers of a queue are paused.

    If they are not, RabbitMQ logs an error for each call: call this rarely, otherwise `probe`.
    Raises BrokerError if the state is not known, HiddenPauseError if the user has no permission on
    the queue.
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
        return True  # It exists; another connection uses it exclusively.
    except ChannelAccessRefused:
        why = "the user has no permission on it"
        raise HiddenPauseError(f"queue {name}: it is not known whether it exists: {why}") from None
    except (ChannelClosed, TimeoutError) as error:
        why = type(error).__name__
        raise BrokerError(f"queue {name}: it is not known whether it exists: {why}") from None
    return True


async def probe(connection: Connection, queue: str) -> bool | None:
    """Find out by a publish whether the queue exists; return None if that is not known.

    Needs only the permission to publish to queues, and leaves no line in the broker's log. If the
    queue does not exist, the mandatory message is returned. If it does, the message expires once it
    is first in the queue, or a full queue rejects it. Use a connection that publishes, because an
    alarm of the broker blocks it.
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
            except MessageReturnedError:
                exists = False
            except DeliveryError:
                exists = True
            else:
                exists = True
            finally:
                # Also after a timeout: a broker limits the number of channels per connection.
                close_soon(channel)
    except Exception:  # noqa: BLE001  aiormq raises other errors too
        return None
    return exists


async def read_note(connection: Connection, queue: str) -> Note | None:
    """Read an operator's note and return it to the queue; None if it cannot be read now."""
    try:
        async with Deadline(RPC_TIMEOUT_SECONDS):
            channel = await open_channel(connection)
            message = await channel.basic_get(paused_queue(queue))
            # Closing the channel returns the message to the queue.
            await close_channel(channel)
    except (ChannelNotFoundEntity, ChannelAccessRefused, ChannelClosed, TimeoutError):
        return None
    return read_body(bytes(message.body))
