"""The messages that the workers of one queue publish to each other, as JSON.

`State` is what a worker says about itself, in full with each heartbeat and in part when something
changes. `Questions` and `Answers` are about redeliveries, `Report` and `Recent` about duplicates.

No message has a phone number, a text, a secret or the name of a host: messages are named by
digests. Clocks differ, so moments are published in seconds before or after now. Kinds and fields
that are unknown here belong to another version, and are ignored.
"""

import base64
import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    model_validator,
)
from pydantic_core import to_json

from bridge.amqp.frames import Body
from bridge.worker.deduplicator import MessageIdentity
from bridge.worker.fates import DeadReason, PauseReason, RetryReason
from bridge.worker.sent_messages import Accepted

VERSION: Final = 1
# Larger messages are not read. A frame holds twice as much.
MAX_BYTES: Final = 64 * 1024
# How many entries fit into one message in any case.
MAX_QUESTIONS: Final = 256
MAX_ANSWERS: Final = 16
MAX_REPORTED: Final = 400
MAX_DETAIL_CHARACTERS: Final = 500
_DIGEST_BYTES: Final = 16
# The digest, how many attempts, the HTTP status, how long ago in milliseconds.
_RECORD: Final = struct.Struct(f">{_DIGEST_BYTES}sHHI")
# Where the name in a message, which earlier versions know, differs from the field's.
_WIRE_NAMES: Final = {"heartbeat_seconds": "beat_seconds", "released": "kept", "ended": "let_go"}

_Id = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Heartbeat = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Failures = Annotated[int, Field(ge=0, le=2**31)]
# How retry copies write the moment of the first delivery. Anything else may be personal data.
_Moment = Annotated[str, Field(pattern=r"^([0-9]{1,12}\.[0-9]{3})?$")]


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
        defer_build=True,
        populate_by_name=True,
        alias_generator=lambda name: _WIRE_NAMES.get(name, name),
    )


class Message(_Model):
    """Base of everything that is published."""


# The state of a worker


class BreakerState(_Model):
    """A worker's breaker; it is open if there is a `reason`.

    `setup` names the worker's section `sms_api`. `turns`: how often it has given up the probe.
    `failures` counts the willing probes that have failed, and all of them. For `unaccepted_seconds`
    nothing has refuted the pause. For `closed_seconds` the service wants no request.
    """

    setup: _Id
    reason: PauseReason | None
    status: int | None = None
    is_prober: bool = False
    can_probe: bool = False
    turns: _Failures = 0
    failures: tuple[_Failures, _Failures] = (0, 0)
    unaccepted_seconds: _Seconds = 0.0
    closed_seconds: _Seconds = 0.0


class Resumed(_Model):
    """A worker has found out that a pause is over."""

    setup: _Id
    reason: PauseReason


class Consumers(_Model):
    """How many consumers of the queue belong to a worker, as the broker counts."""

    count: Annotated[int, Field(ge=0, le=10_000)]


class Flag(_Model):
    """A fact without details."""


class IdentityFacts(_Model):
    """Which message a delivery is."""

    message: _Digest
    has_id: bool
    copies: int
    try_of: _Moment = ""

    @property
    def identity(self) -> MessageIdentity:
        """The deduplicator's name for it."""
        return MessageIdentity(bytes.fromhex(self.message), self.has_id, self.copies, self.try_of)


class Copies(_Model):
    """Retry copies that may be in the queue twice."""

    entries: Annotated[tuple[IdentityFacts, ...], Field(max_length=MAX_QUESTIONS)]


class State(Message):
    """A worker's state; a field that is None has not changed.

    With `heartbeat_seconds` it is a heartbeat, and the next one follows after that time at most.
    `leaving`: the worker sends nothing new. Of `settled` copies one is sent or replaced; of
    `repeated` ones not yet.
    """

    heartbeat_seconds: _Heartbeat | None = None
    breaker: BreakerState | None = None
    resumed: Resumed | None = None
    consumers: Consumers | None = None
    leaving: Flag | None = None
    repeated: Copies | None = None
    settled: Copies | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, facts: dict[str, object]) -> dict[str, object]:
        beside = facts.get("beside")
        return {**facts, **beside} if isinstance(beside, dict) else facts


class Join(Message):
    """A worker can receive and publish from now on; each peer answers with its `State` at once.

    The worker's queue is named after the number of its `joins`.
    """

    joins: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    heartbeat_seconds: _Heartbeat | None = None


class Leave(Message):
    """A worker has settled its messages, and ends."""


# Redeliveries

# What is known of a redelivery: nothing; it is in flight; it is to be acked only; it went back to
# the queue unsettled.
Knowledge = Literal["unknown", "busy", "done", "kept"]


class Question(IdentityFacts):
    """One redelivery; its `number` tells it from all others of the asking worker."""

    number: _Count


class Questions(Message):
    """All peers answer."""

    questions: Annotated[tuple[Question, ...], Field(max_length=MAX_QUESTIONS)]


class ReleasedOutcome(_Model):
    """A decision that has still to be carried out; see `Retried` and `Dead`."""

    is_dead: bool
    reason: RetryReason | DeadReason
    delay_seconds: Annotated[float, Field(ge=0)] = 0
    detail: Annotated[str, Field(max_length=MAX_DETAIL_CHARACTERS)] = ""
    status: int | None = None
    burned: bool = False
    uncertain: bool = False
    code: Annotated[str, Field(max_length=64)] | None = None
    meaning: Annotated[str, Field(max_length=MAX_DETAIL_CHARACTERS)] | None = None


class ReleasedFacts(_Model):
    """How a delivery goes on that went back to the queue unsettled.

    `key`: the idempotency key that was made for it, if its publisher gave it no id.
    """

    key: _Digest | None = None
    first_delivered_seconds_ago: Annotated[float, Field(ge=0)]
    expires_in_seconds: float | None = None
    turn_in_seconds: float | None = None
    has_been_copied: bool = False
    attempts: _Count = 0
    uncertain_attempts: _Count = 0
    outcome: ReleasedOutcome | None = None


class Answer(_Model):
    """What the answering worker knows of the redelivery with this number."""

    number: _Count
    knows: Knowledge
    released: ReleasedFacts | None = None


class Answers(Message):
    """Answers to one worker's questions; all others ignore them."""

    to: str
    answers: Annotated[tuple[Answer, ...], Field(max_length=MAX_ANSWERS)]


# Duplicates


def _packed(size_bytes: int) -> BeforeValidator:
    """Make the type of up to `MAX_REPORTED` pieces of one size, which travel as base64."""

    def read(value: object) -> bytes:
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise ValueError("must be base64")  # noqa: TRY004  pydantic heeds no TypeError
        packed = base64.b64decode(value, validate=True)
        if len(packed) % size_bytes or len(packed) > MAX_REPORTED * size_bytes:
            raise ValueError("must be whole pieces, and not too many")
        return packed

    return BeforeValidator(read)


_AS_BASE64: Final = PlainSerializer(lambda packed: base64.b64encode(packed).decode())
_Digests = Annotated[bytes, _packed(_DIGEST_BYTES), _AS_BASE64]
_Records = Annotated[bytes, _packed(_RECORD.size), _AS_BASE64]


class Report(Message):
    """The messages that a worker has taken, sent, and settled otherwise or released (`ended`).

    `asked`: the messages that it waits for; a peer that has or has sent one reports it again.
    """

    taken: _Digests = b""
    sent: _Records = b""
    ended: _Digests = b""
    asked: _Digests = b""


class RecentQuestion(Message):
    """A worker asks one peer for the messages that were sent lately, by any worker.

    `joins` names its queue, as in `Join`.
    """

    to: str
    joins: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Recent(Message):
    """A part of the answer, the newest first; all others ignore it.

    Without messages it ends the answer; `is_last` unless another peer may know more.
    """

    to: str
    sent: _Records = b""
    is_last: bool = False


def write_digests(digests: Iterable[bytes]) -> bytes:
    """Pack digests."""
    return b"".join(digests)


def read_digests(packed: bytes) -> Iterator[bytes]:
    """Unpack digests."""
    for at in range(0, len(packed), _DIGEST_BYTES):
        yield packed[at : at + _DIGEST_BYTES]


def write_records(sent: Iterable[tuple[bytes, Accepted]], *, now: float) -> bytes:
    """Pack how messages were accepted; `now` is in unix seconds.

    The provider's id is left out: a service may choose one that is a phone number.
    """
    return b"".join(
        _RECORD.pack(
            digest,
            min(accepted.attempts, 0xFFFF),
            accepted.status,
            min(round(max(0.0, now - accepted.at) * 1000), 0xFFFFFFFF),
        )
        for digest, accepted in sent
    )


def read_records(packed: bytes) -> Iterator[tuple[bytes, int, int, float]]:
    """Unpack how messages were accepted: digest, attempts, status, age in seconds."""
    for digest, attempts, status, milliseconds in _RECORD.iter_unpack(packed):
        yield digest, attempts, status, milliseconds / 1000


# Reading and writing

_KINDS: Final[dict[str, type[Message]]] = {
    "hello": Join,
    "beat": State,
    "bye": Leave,
    "held?": Questions,
    "held": Answers,
    "report": Report,
    "recent?": RecentQuestion,
    "recent": Recent,
}
_KIND_OF: Final = {model: kind for kind, model in _KINDS.items()}


class _Envelope(_Model):
    v: int
    worker_id: _Id
    kind: Annotated[str, Field(max_length=64)]
    facts: dict[str, JsonValue]


def facts_of(identity: MessageIdentity) -> IdentityFacts | None:
    """Write which message an identity is; None if that might publish personal data."""
    try:
        return IdentityFacts(
            message=identity.message.hex(),
            has_id=identity.has_id,
            copies=identity.copies,
            try_of=identity.try_of,
        )
    except ValueError:
        return None


def write_message(worker_id: str, message: Message) -> bytes:
    """Write a message."""
    facts = message.model_dump(mode="json", by_alias=True)
    if isinstance(message, State):
        seconds = facts.pop("beat_seconds")
        changed = {name: value for name, value in facts.items() if value is not None}
        facts = {"beat_seconds": seconds, "beside": changed}
    kind = _KIND_OF[type(message)]
    return to_json({"v": VERSION, "worker_id": worker_id, "kind": kind, "facts": facts})


def read_message(body: Body) -> tuple[str, Message] | None:
    """Read a message and the id of its worker; None if it is of another version.

    Raises ValueError for anything that no worker writes.
    """
    if len(body) > MAX_BYTES:
        raise ValueError("too large")
    envelope = _Envelope.model_validate_json(body)
    kind, facts = envelope.kind, envelope.facts
    if kind in State.model_fields:
        # An earlier version publishes each change as a kind of its own.
        kind, facts = "beat", {kind: facts}
    model = _KINDS.get(kind)
    if model is None or envelope.v != VERSION:
        return None
    return envelope.worker_id, model.model_validate(facts)
