"""Messages as they are written: what is read, ignored and refused, and that none is personal."""

import json
import secrets

import pytest

from bridge.worker.cluster.messages import (
    MAX_ANSWERS,
    MAX_BYTES,
    MAX_QUESTIONS,
    MAX_REPORTED,
    Answers,
    BreakerState,
    Consumers,
    CopyList,
    Flag,
    IdentityFacts,
    Join,
    Leave,
    Message,
    PeerAnswer,
    Question,
    Questions,
    Recent,
    RecentQuestion,
    Report,
    Resumed,
    WorkerState,
    facts_of,
    read_digests,
    read_message,
    read_records,
    write_digests,
    write_message,
    write_records,
)
from bridge.worker.cluster.questions import write_released
from bridge.worker.deduplicator import MessageIdentity, Released, identity_of
from bridge.worker.envelope import Envelope
from bridge.worker.outcomes import Dead
from bridge.worker.sent_messages import Accepted

WORKER = "0123456789abcdef"
NUMBER = "+491713920001"
LARGEST = 2**63 - 1
NOW = 1_800_000_000.0
DIGESTS = [secrets.token_bytes(16) for _ in range(MAX_REPORTED)]
ACCEPTED = Accepted(attempts=2, status=202, provider_id=NUMBER, at=NOW - 1.5)
LARGE_IDENTITY = IdentityFacts(
    message="f" * 32, has_id=False, copies=LARGEST, try_of="1" * 12 + ".000"
)


def written(**changed: object) -> bytes:
    message = {"v": 1, "worker_id": WORKER, "kind": "Join", "facts": {}}
    return json.dumps(message | changed).encode()


@pytest.mark.parametrize(
    "message",
    [
        Join(joins=2, heartbeat_seconds=1),
        Leave(),
        pytest.param(WorkerState(), id="nothing new"),
        WorkerState(
            heartbeat_seconds=7,
            breaker=BreakerState(setup=WORKER, reason="outage", is_prober=True, failures=(1, 2)),
            resumed=Resumed(setup=WORKER, reason="outage"),
            consumers=Consumers(count=3),
            leaving=Flag(),
            repeated=CopyList(entries=(LARGE_IDENTITY,)),
            settled=CopyList(entries=(LARGE_IDENTITY,)),
        ),
        Questions(questions=(Question(number=1, **LARGE_IDENTITY.model_dump()),)),
        Answers(to=WORKER, answers=(PeerAnswer(number=1, knows="busy"),)),
        RecentQuestion(to=WORKER, joins=1),
        Recent(to=WORKER, sent=write_records([(DIGESTS[0], ACCEPTED)], now=NOW), is_last=True),
        Report(taken=write_digests(DIGESTS[:2]), ended=write_digests(DIGESTS[2:])),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_written_is_read(message: Message) -> None:
    assert read_message(write_message(WORKER, message)) == (WORKER, message)


def test_facts_of_a_later_version_are_ignored() -> None:
    """In a rolling upgrade a message may have members and facts that this version does not know."""
    body = written(facts={"joins": 2, "heartbeat_seconds": 1, "new": 1}, also="new")
    assert read_message(body) == (WORKER, Join(joins=2, heartbeat_seconds=1))


@pytest.mark.parametrize("body", [written(v=2), written(kind="new")])
def test_another_version_is_ignored(body: bytes) -> None:
    assert read_message(body) is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"{}", id="no members"),
        pytest.param(b"[" * 5000, id="deep"),
        pytest.param(written(v="new"), id="version"),
        pytest.param(written(worker_id=WORKER[1:]), id="short id"),
        pytest.param(written(worker_id=WORKER + "\n"), id="long id"),
        pytest.param(written(worker_id="host.example.com"), id="no id"),
        pytest.param(written(kind=None), id="no kind"),
        pytest.param(written(kind="k" * 65), id="long kind"),
        pytest.param(written(facts=[]), id="no facts"),
        pytest.param(written(facts={"long": "x" * MAX_BYTES}), id="large"),
        *(
            pytest.param(written(kind=kind, facts={"to": "a", "sent": sent}), id=f"{kind} {name}")
            for kind in ("Report", "Recent")
            for name, sent in {
                "number": 1,
                "no base64": "!",
                "a part": "AAAA",
                "too many": "A" * 32 * (MAX_REPORTED + 1),
            }.items()
        ),
    ],
)
def test_what_no_worker_writes_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"validation error|too large"):
        read_message(body)


# Personal data


def test_a_message_is_named_by_its_digest() -> None:
    """Neither the id nor anything of the body is published, and the identity is the same again."""
    envelope = Envelope(
        key=NUMBER, message_id=NUMBER, published_at=None, first_delivered_at=0.0, copies=1
    )
    asked = identity_of(envelope._replace(try_of="1800000000.123"), NUMBER.encode())
    facts = facts_of(asked)

    assert facts is not None
    assert facts.identity == asked
    assert NUMBER[1:] not in facts.model_dump_json()


@pytest.mark.parametrize("try_of", [NUMBER, "Hi", "1800000000", "1800000000.1234", "a.123"])
def test_a_header_of_somebody_else_is_not_published(try_of: str) -> None:
    assert facts_of(MessageIdentity(b"0" * 16, has_id=True, copies=1, try_of=try_of)) is None


def test_ids_are_not_published() -> None:
    """Only a key that the bridge has made goes to the next worker, and no id of a provider's."""
    envelope = Envelope(key=NUMBER, message_id=NUMBER, published_at=None, first_delivered_at=0.0)
    released = write_released(Released(envelope, None), now=1.0)
    report = Report(sent=write_records([(DIGESTS[0], ACCEPTED)], now=NOW))

    assert released.key is None
    assert NUMBER not in released.model_dump_json() + report.model_dump_json()


# Sizes


@pytest.mark.parametrize("age_seconds", [-5.0, 1e9], ids=["ahead", "ages"])
def test_numbers_that_do_not_fit_are_the_nearest_that_do(age_seconds: float) -> None:
    """A clock that was set, or attempts without end, break no report."""
    accepted = ACCEPTED._replace(attempts=2**40, at=NOW - age_seconds)
    packed = write_records([(DIGESTS[0], accepted)], now=NOW)
    ((_, attempts, _, age),) = read_records(packed)

    assert list(read_digests(write_digests(DIGESTS))) == DIGESTS
    assert attempts == 0xFFFF
    assert age == pytest.approx(min(max(0.0, age_seconds), 2**32 / 1000), abs=0.01)


def test_the_largest_messages_fit() -> None:
    """As many entries as go into one message are no more than is read."""
    outcome = Dead(
        reason="internal_error",
        detail="\U0001f600" * 500,
        status=599,
        counted=False,
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
        scheduled_at=1e9 / 3,
    )
    released = write_released(Released(envelope, outcome), now=1e9 / 7)
    answer = PeerAnswer(number=LARGEST, knows="unknown", released=released)
    question = Question(number=LARGEST, **LARGE_IDENTITY.model_dump())
    digests = write_digests(DIGESTS)
    sent = write_records([(digest, ACCEPTED) for digest in DIGESTS], now=NOW)

    for message in (
        Questions(questions=(question,) * MAX_QUESTIONS),
        Answers(to=WORKER, answers=(answer,) * MAX_ANSWERS),
        WorkerState(settled=CopyList(entries=(LARGE_IDENTITY,) * MAX_QUESTIONS)),
        Report(taken=digests, sent=sent, ended=digests, asked=digests),
    ):
        assert len(write_message(WORKER, message)) < MAX_BYTES
