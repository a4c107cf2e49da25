"""The messages that the workers of one queue publish to each other, as JSON.

`WorkerState` describes a worker: all of it in a heartbeat, a part of it after a change. `Questions`
and `Answers` are about redeliveries, `Report` and `Recent` about duplicates.

None contains a phone number, a text, a secret or the name of a host; digests identify messages.
Times are relative to now, because clocks differ. Unknown kinds and fields belong to a later
version, and are ignored.
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
)
from pydantic_core import to_json

from bridge.amqp.frames import Body
from bridge.worker.deduplicator import MessageIdentity
from bridge.worker.fates import DeadReason, PauseReason, RetryReason
from bridge.worker.sent_messages import Accepted

VERSION: Final = 1
# Larger messages are not read; a frame can hold twice as much.
MAX_BYTES: Final = 64 * 1024
# This many of the largest entries fit into one message.
MAX_QUESTIONS: Final = 256
MAX_ANSWERS: Final = 16
MAX_REPORTED: Final = 400
MAX_DETAIL_CHARACTERS: Final = 500
_DIGEST_BYTES: Final = 16
# The digest, the number of attempts, the HTTP status, the age in milliseconds.
_RECORD: Final = struct.Struct(f">{_DIGEST_BYTES}sHHI")

_Id = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Heartbeat = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Failures = Annotated[int, Field(ge=0, le=2**31)]
_Joins = Annotated[int, Field(ge=1, lt=2**31)]
# The format in which retry copies write the time of the first delivery. Another value may be
# personal data.
_Moment = Annotated[str, Field(pattern=r"^([0-9]{1,12}\.[0-9]{3})?$")]


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", hide_input_in_errors=True, defer_build=True
    )


class Message(_Model):
    """Base class of the messages."""


# The state of a worker


class BreakerState(_Model):
    """A worker's circuit breaker; open if it has a `reason`.

    `setup` identifies the worker's `sms_api` section. `turns`: how often the worker has given up
    the probe. `failures`: failed probes by willing messages, and by all. `unaccepted_seconds`: time
    without evidence against the pause. `closed_seconds`: time for which the service wants no
    request.
    """

    setup: _Id
    reason: PauseReason | None = None
    status: int | None = None
    is_prober: bool = False
    can_probe: bool = False
    turns: _Failures = 0
    failures: tuple[_Failures, _Failures] = (0, 0)
    unaccepted_seconds: _Seconds = 0.0
    closed_seconds: _Seconds = 0.0


class Resumed(_Model):
    """A pause is over."""

    setup: _Id
    reason: PauseReason


class Consumers(_Model):
    """Number of consumers of the queue that belong to a worker, as the broker counts them."""

    count: Annotated[int, Field(ge=0, le=10_000)]


class Flag(_Model):
    """Set, without details."""


class IdentityFacts(_Model):
    """The identity of a delivery."""

    message: _Digest
    has_id: bool
    copies: int
    try_of: _Moment = ""

    @property
    def identity(self) -> MessageIdentity:
        """The identity as the deduplicator knows it."""
        return MessageIdentity(bytes.fromhex(self.message), self.has_id, self.copies, self.try_of)


class CopyList(_Model):
    """Retry copies that may be in the queue twice."""

    entries: Annotated[tuple[IdentityFacts, ...], Field(max_length=MAX_QUESTIONS)]


class WorkerState(Message):
    """A worker's state; a field that is None has not changed.

    With `heartbeat_seconds` it is a heartbeat, and the next one follows within that time.
    `leaving`: the worker sends nothing new. `repeated`: copies that may be in the queue twice;
    `settled`: those of which one was sent or replaced.
    """

    heartbeat_seconds: _Heartbeat | None = None
    breaker: BreakerState | None = None
    resumed: Resumed | None = None
    consumers: Consumers | None = None
    leaving: Flag | None = None
    repeated: CopyList | None = None
    settled: CopyList | None = None


class Join(Message):
    """A worker has begun to receive; each peer replies with its `WorkerState` at once.

    `joins`, the number of its joins so far, is part of its queue's name.
    """

    joins: _Joins
    heartbeat_seconds: _Heartbeat


class Leave(Message):
    """A worker has settled its messages and ends."""


# Redeliveries

# A worker's record of a redelivery: none; in flight; settled, so only the ack is missing; returned
# to the queue unsettled.
Knowledge = Literal["unknown", "busy", "done", "kept"]


class Question(IdentityFacts):
    """A question about one redelivery; `number` is unique for the asking worker."""

    number: _Count


class Questions(Message):
    """Questions to all peers."""

    questions: Annotated[tuple[Question, ...], Field(max_length=MAX_QUESTIONS)]


class ReleasedOutcome(_Model):
    """A decided outcome whose copy is not published yet; see `Retried` and `Dead`."""

    is_dead: bool
    reason: RetryReason | DeadReason
    delay_seconds: Annotated[float, Field(ge=0)] = 0
    detail: Annotated[str, Field(max_length=MAX_DETAIL_CHARACTERS)] = ""
    status: int | None = None
    counted: bool = False
    uncertain: bool = False
    code: Annotated[str, Field(max_length=64)] | None = None
    meaning: Annotated[str, Field(max_length=MAX_DETAIL_CHARACTERS)] | None = None


class ReleasedFacts(_Model):
    """The state of a delivery that returned to the queue unsettled.

    `key`: the idempotency key made for it, if its publisher set no message id.
    """

    key: _Digest | None = None
    first_delivered_seconds_ago: Annotated[float, Field(ge=0)]
    expires_in_seconds: float | None = None
    scheduled_in_seconds: float | None = None
    has_been_copied: bool = False
    attempts: _Count = 0
    uncertain_attempts: _Count = 0
    outcome: ReleasedOutcome | None = None


class PeerAnswer(_Model):
    """A worker's answer to the question with this number."""

    number: _Count
    knows: Knowledge
    released: ReleasedFacts | None = None


class Answers(Message):
    """Answers to one worker's questions."""

    to: str
    answers: Annotated[tuple[PeerAnswer, ...], Field(max_length=MAX_ANSWERS)]


# Duplicates


def _packed(size_bytes: int) -> BeforeValidator:
    """Return the validator of up to `MAX_REPORTED` pieces of one size, encoded as base64."""

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
    """Messages that a worker has begun to process (`taken`), has sent, and did not send (`ended`).

    `asked`: messages that it waits for. A peer that is processing one or has sent it reports it
    again.
    """

    taken: _Digests = b""
    sent: _Records = b""
    ended: _Digests = b""
    asked: _Digests = b""


class RecentQuestion(Message):
    """A question to one peer for the messages that any worker has sent recently.

    `joins` gives the asking worker's queue, as in `Join`.
    """

    to: str
    joins: _Joins


class Recent(Message):
    """A part of the answer, the newest messages first.

    The last part has no messages. `is_last` is False in it if another peer may know more.
    """

    to: str
    sent: _Records = b""
    is_last: bool = False


def write_digests(digests: Iterable[bytes]) -> bytes:
    return b"".join(digests)


def read_digests(packed: bytes) -> Iterator[bytes]:
    for at in range(0, len(packed), _DIGEST_BYTES):
        yield packed[at : at + _DIGEST_BYTES]


def write_records(sent: Iterable[tuple[bytes, Accepted]], *, now: float) -> bytes:
    """Pack acceptances; `now` is in unix seconds.

    The provider's id is left out, because a service may use phone numbers.
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
    """Unpack acceptances: digest, attempts, status, age in seconds."""
    for digest, attempts, status, milliseconds in _RECORD.iter_unpack(packed):
        yield digest, attempts, status, milliseconds / 1000


# Reading and writing

_KINDS: Final[dict[str, type[Message]]] = {
    model.__name__: model
    for model in (Join, WorkerState, Leave, Questions, Answers, Report, RecentQuestion, Recent)
}


class _Envelope(_Model):
    v: int
    worker_id: _Id
    kind: Annotated[str, Field(max_length=64)]
    facts: dict[str, JsonValue]


def facts_of(identity: MessageIdentity) -> IdentityFacts | None:
    """Return an identity as it is published; None if it may contain personal data."""
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
    kind, facts = type(message).__name__, message.model_dump(mode="json", exclude_none=True)
    return to_json({"v": VERSION, "worker_id": worker_id, "kind": kind, "facts": facts})


def read_message(body: Body) -> tuple[str, Message] | None:
    """Decode a message; return it with its worker's id, or None if it is of another version.

    Raises ValueError if no worker can have written it.
    """
    if len(body) > MAX_BYTES:
        raise ValueError("too large")
    envelope = _Envelope.model_validate_json(body)
    model = _KINDS.get(envelope.kind)
    if model is None or envelope.v != VERSION:
        return None
    return envelope.worker_id, model.model_validate(envelope.facts)
