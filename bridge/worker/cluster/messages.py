"""What workers of one queue say to each other, as bytes: small JSON messages, each of one kind.

None holds a phone number, a text, a secret or the name of a host. Clocks differ, so that moments
are told in seconds from now. A kind or a fact that is unknown here is one of another version's, and
is ignored.
"""

import secrets
from typing import Annotated, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from bridge.amqp.frames import Body

VERSION: Final = 1
# Larger ones are not read. A frame holds twice as much.
MAX_BYTES: Final = 64 * 1024
_ID_BYTES: Final = 8
_ID: Final = f"^[0-9a-f]{{{2 * _ID_BYTES}}}$"
_MAX_KIND: Final = 64

Beating = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class Facts(BaseModel):
    """What one message says. A subclass is its `kind`, and its fields have bounds."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", hide_input_in_errors=True, defer_build=True
    )

    kind: ClassVar[str]


class Hello(Facts):
    """A worker can hear and be heard from now on; each peer answers with a `Beat` at once.

    It has joined for the so many-th time: its queue is named after that. The next beat follows
    after `beat_seconds`.
    """

    kind = "hello"

    joins: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    beat_seconds: Beating | None = None


class Beat(Facts):
    """A worker is there, and says so again after `beat_seconds` at most.

    `beside`: other facts, by their kind, that it tells with each beat.
    """

    kind = "beat"

    beat_seconds: Beating | None = None
    beside: dict[str, dict[str, JsonValue]] = {}


class Bye(Facts):
    """A worker has settled what it held, and ends."""

    kind = "bye"


class Message(BaseModel):
    """One message; its facts are not validated yet."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", hide_input_in_errors=True, defer_build=True
    )

    v: int = VERSION
    worker_id: Annotated[str, Field(pattern=_ID)]
    kind: Annotated[str, Field(max_length=_MAX_KIND)]
    facts: dict[str, JsonValue]


def new_worker_id() -> str:
    """Make the id by which a process is known to its peers; it tells nothing about it."""
    return secrets.token_hex(_ID_BYTES)


def write_message(worker_id: str, facts: Facts) -> bytes:
    """Write a message."""
    message = Message(worker_id=worker_id, kind=facts.kind, facts=facts.model_dump(mode="json"))
    return message.model_dump_json().encode()


def read_message(body: Body) -> Message | None:
    """Read a message; None for one of another version of the protocol.

    Raises ValueError for what no worker says.
    """
    if len(body) > MAX_BYTES:
        raise ValueError("too large")
    message = Message.model_validate_json(body)
    return message if message.v == VERSION else None
