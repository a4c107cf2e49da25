"""Questions and answers as they are written: nothing personal in them, and none too large."""

import pytest

from bridge.worker.cluster.messages import MAX_BYTES, write_message
from bridge.worker.cluster.questions import (
    MAX_ANSWERS,
    MAX_QUESTIONS,
    Answer,
    Answers,
    Questions,
    ReleasedFacts,
    question_of,
    write_released,
)
from bridge.worker.deduplicator import Released
from bridge.worker.envelope import Envelope
from bridge.worker.message_identity import MessageIdentity, identity_of
from bridge.worker.outcomes import Dead

NUMBER = "+491713920001"
WORKER = "0" * 16
LARGEST = 2**63 - 1


def test_a_question_names_a_message_by_its_digest() -> None:
    """Neither the id nor anything of the body is told, and the identity is the same again."""
    envelope = Envelope(
        key=NUMBER, message_id=NUMBER, published_at=None, first_delivered_at=0.0, copies=1
    )
    asked = identity_of(envelope._replace(try_of="1800000000.123"), NUMBER.encode())
    question = question_of(7, asked)

    assert question is not None
    assert question.identity == asked
    written = write_message(WORKER, Questions(questions=(question,)))
    assert NUMBER[1:].encode() not in written


@pytest.mark.parametrize("try_of", [NUMBER, "Hi", "1800000000", "1800000000.1234", "a.123"])
def test_what_we_did_not_write_is_not_told(try_of: str) -> None:
    """A header that should hold a moment, and that somebody else has filled, is not passed on."""
    assert question_of(0, MessageIdentity(b"0" * 16, has_id=True, copies=1, try_of=try_of)) is None


def test_an_id_is_not_told() -> None:
    """Only a key that this bridge has made goes to the next worker."""
    envelope = Envelope(key=NUMBER, message_id=NUMBER, published_at=None, first_delivered_at=0.0)
    written = write_released(Released(envelope, None), now=1.0)

    assert written.key is None
    assert NUMBER not in written.model_dump_json()


def test_the_largest_messages_fit() -> None:
    """As many questions, or answers, as go into one message are no more than is read."""
    question = question_of(
        LARGEST, MessageIdentity(b"0" * 16, has_id=False, copies=LARGEST, try_of="1" * 12 + ".000")
    )
    assert question is not None
    outcome = Dead(
        reason="internal_error",
        detail="\U0001f600" * 500,
        status=599,
        burned=False,
        uncertain=False,
        code="c" * 64,
        meaning="m" * 100,
    )
    envelope = Envelope(
        key="f" * 32,
        message_id=None,
        published_at=None,
        first_delivered_at=-1.0 / 3,
        expires_at=1e9 / 3,
        turn_at=1e9 / 3,
    )
    kept = write_released(Released(envelope, outcome), now=1e9 / 7)
    assert isinstance(kept, ReleasedFacts)
    answer = Answer(number=LARGEST, knows="unknown", kept=kept)

    assert len(write_message(WORKER, Questions(questions=(question,) * MAX_QUESTIONS))) < MAX_BYTES
    answers = Answers(to=WORKER, answers=(answer,) * MAX_ANSWERS)
    assert len(write_message(WORKER, answers)) < MAX_BYTES
