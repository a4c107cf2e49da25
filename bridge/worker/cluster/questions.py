"""Questions and answers of workers about redeliveries: which message, and what became of it.

A message is named by its identity, a digest of its id and body; neither of them is published.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from bridge.amqp.properties import Properties
from bridge.errors import InvalidMessageError
from bridge.worker.cluster.messages import Facts
from bridge.worker.deduplicator import Released
from bridge.worker.envelope import Envelope, read_envelope
from bridge.worker.fates import DeadReason, RetryReason
from bridge.worker.message_identity import MessageIdentity
from bridge.worker.outcomes import Dead, Outcome, Retried

# So many fit into a message in any case.
MAX_QUESTIONS: Final = 256
MAX_ANSWERS: Final = 16
_MAX_DETAIL_CHARACTERS: Final = 500
# How our copies write the moment of the first delivery. What else stands there was not written by
# us, and might be anything.
_MOMENT: Final = r"^([0-9]{1,12}\.[0-9]{3})?$"

# What a retry and a dead letter both have, besides their detail.
_SHARED: Final = ("reason", "status", "burned", "uncertain", "code", "meaning")

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
# What is known of a redelivery: nothing; it is being worked on; it is to be acked only; it went
# back to the queue unsettled.
Knowledge = Literal["unknown", "busy", "done", "kept"]


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", hide_input_in_errors=True, defer_build=True
    )


class IdentityFacts(_Part):
    """Which message a delivery is, in the deduplicator's terms."""

    message: _Digest
    has_id: bool
    copies: int
    try_of: Annotated[str, Field(pattern=_MOMENT)] = ""

    @property
    def identity(self) -> MessageIdentity:
        """What the deduplicator knows it by."""
        return MessageIdentity(bytes.fromhex(self.message), self.has_id, self.copies, self.try_of)


class Question(IdentityFacts):
    """One redelivery; its `number` tells it from all others of the asker."""

    number: _Count


class Questions(Facts):
    """What a worker asks; all peers answer."""

    kind: ClassVar[str] = "held?"

    questions: Annotated[tuple[Question, ...], Field(max_length=MAX_QUESTIONS)]


class ReleasedOutcome(_Part):
    """A decision that has still to be carried out; see `Retried` and `Dead`."""

    is_dead: bool
    reason: RetryReason | DeadReason
    delay_seconds: Annotated[float, Field(ge=0)] = 0
    detail: Annotated[str, Field(max_length=_MAX_DETAIL_CHARACTERS)] = ""
    status: int | None = None
    burned: bool = False
    uncertain: bool = False
    code: Annotated[str, Field(max_length=64)] | None = None
    meaning: Annotated[str, Field(max_length=_MAX_DETAIL_CHARACTERS)] | None = None


class ReleasedFacts(_Part):
    """How a delivery goes on that went back unsettled: its age, its turn, what was decided.

    `key`: the idempotency key that was made for it, if its publisher gave it no id.
    """

    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    first_delivered_seconds_ago: Annotated[float, Field(ge=0)]
    expires_in_seconds: float | None = None
    turn_in_seconds: float | None = None
    has_been_copied: bool = False
    attempts: _Count = 0
    uncertain_attempts: _Count = 0
    outcome: ReleasedOutcome | None = None


class Answer(_Part):
    """What the answering worker knows of the redelivery with this number."""

    number: _Count
    knows: Knowledge
    kept: ReleasedFacts | None = None


class Answers(Facts):
    """Answers to one worker's questions; all others ignore them."""

    kind: ClassVar[str] = "held"

    to: str
    answers: Annotated[tuple[Answer, ...], Field(max_length=MAX_ANSWERS)]


def question_of(number: int, identity: MessageIdentity) -> Question | None:
    """Ask about an identity; None where that would tell what is not ours to tell."""
    facts = facts_of(identity)
    return None if facts is None else Question(number=number, **facts.model_dump())


def facts_of(identity: MessageIdentity) -> IdentityFacts | None:
    """Write which message an identity is; None where that would tell what is not ours to tell."""
    try:
        return IdentityFacts(
            message=identity.message.hex(),
            has_id=identity.has_id,
            copies=identity.copies,
            try_of=identity.try_of,
        )
    except ValueError:
        return None


def write_released(kept: Released, *, now: float) -> ReleasedFacts:
    """Say how a delivery goes on; `now` is in unix seconds."""
    envelope = kept.envelope
    return ReleasedFacts(
        key=envelope.key if envelope.message_id is None else None,
        first_delivered_seconds_ago=max(0.0, now - envelope.first_delivered_at),
        expires_in_seconds=None if envelope.expires_at is None else envelope.expires_at - now,
        turn_in_seconds=None if envelope.turn_at is None else envelope.turn_at - now,
        has_been_copied=envelope.has_been_copied
        or (kept.replacement is not None and kept.replacement.may_be_stored),
        attempts=envelope.attempts,
        uncertain_attempts=envelope.uncertain_attempts,
        outcome=_write_outcome(kept.outcome),
    )


def read_released(
    facts: ReleasedFacts,
    properties: Properties,
    envelope: Envelope,
    *,
    delays_seconds: Sequence[float],
    now: float,
) -> Released:
    """Have a delivery go on as a peer says; `delays_seconds` are the steps of the ladder here."""
    bare = envelope._replace(
        key=facts.key or envelope.key,
        first_delivered_at=now - facts.first_delivered_seconds_ago,
        expires_at=None if facts.expires_in_seconds is None else now + facts.expires_in_seconds,
        attempts=facts.attempts,
        uncertain_attempts=facts.uncertain_attempts,
    )
    try:
        envelope = read_envelope(properties, bare)
    except InvalidMessageError:
        envelope = bare
    envelope = envelope._replace(has_been_copied=facts.has_been_copied)
    if facts.turn_in_seconds is not None:
        envelope = envelope._replace(turn_at=now + facts.turn_in_seconds)
    outcome = None if facts.outcome is None else _read_outcome(facts.outcome, delays_seconds)
    return Released(envelope, outcome)


def _write_outcome(outcome: Outcome | None) -> ReleasedOutcome | None:
    if not isinstance(outcome, Retried | Dead):
        return None
    return ReleasedOutcome(
        is_dead=isinstance(outcome, Dead),
        delay_seconds=outcome.delay_seconds if isinstance(outcome, Retried) else 0,
        detail=outcome.detail[:_MAX_DETAIL_CHARACTERS],
        **{name: getattr(outcome, name) for name in _SHARED},
    )


def _read_outcome(told: ReleasedOutcome, delays_seconds: Sequence[float]) -> Outcome:
    shared: dict[str, Any] = {name: getattr(told, name) for name in (*_SHARED, "detail")}
    if told.is_dead:
        return Dead(**shared)
    fitting = (step for step in delays_seconds if step >= told.delay_seconds)
    return Retried(delay_seconds=min(fitting, default=delays_seconds[-1]), **shared)
