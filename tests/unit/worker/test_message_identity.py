"""Which message a delivery is: by its id and body, or by what is to be sent to whom."""

import json

import pytest

from bridge.config import WorkerSettings
from bridge.worker.envelope import Envelope
from bridge.worker.message_identity import (
    MessageIdentity,
    identity_function,
    identity_of,
    identity_of_text,
    pack_identity,
    unpack_identity,
)
from bridge.worker.request import OpenSendRequest, SendRequest

MEMBERS = {"to": "+491713920001", "from": "Acme", "text": "Hi"}


def envelope(message_id: str | None, *, published_at: float | None = None) -> Envelope:
    """Make what a message says beside its body."""
    return Envelope(
        key="k", message_id=message_id, published_at=published_at, first_delivered_at=0.0
    )


def by_text(message_id: str | None = None, **changed: str) -> MessageIdentity:
    """Name a message by its text."""
    request: SendRequest = OpenSendRequest.model_validate(MEMBERS | changed)
    return identity_of_text(envelope(message_id), request)


def test_an_id_with_its_body_names_a_message() -> None:
    """The same id with another body is another message; without an id it is not named."""
    first = identity_of(envelope("a"), b"1")

    assert first == identity_of(envelope("a"), b"1")
    assert first.message not in {
        identity.message
        for identity in (
            identity_of(envelope("a"), b"2"),
            identity_of(envelope("b"), b"1"),
            identity_of(envelope(None), b"1"),
        )
    }
    assert (first.has_id, identity_of(envelope(None), b"1").has_id) == (True, False)


def test_when_it_was_published_matters_without_an_id() -> None:
    """A publisher that repeats an id means the same message, whenever it says so."""
    moments = (None, 1.0, 2.0)
    named = {identity_of(envelope("a", published_at=at), b"1") for at in moments}
    unnamed = {identity_of(envelope(None, published_at=at), b"1") for at in moments}

    assert (len(named), len(unnamed)) == (1, 3)


def test_copies_are_the_same_message() -> None:
    """All copies of a message are one message, and each has its own identity."""
    first = identity_of(envelope("a"), b"1")
    copy = identity_of(envelope("a")._replace(copies=1), b"1")

    assert first != copy
    assert first.message == copy.message


def test_equal_texts_are_one_message_whatever_their_ids() -> None:
    """By its text a message without an id is as good as named."""
    assert by_text("a") == by_text("b") == by_text(None)
    assert by_text().has_id


def test_equal_texts_to_a_short_code_are_one_message() -> None:
    """Where the service sends to short codes."""
    settings = WorkerSettings.model_validate({"deduplicate": "1h", "deduplicate_by": "text"})
    body = json.dumps(MEMBERS | {"to": "12345"}).encode()
    find_identity = identity_function(settings, short_codes=True)

    assert find_identity(envelope("a"), body).message == find_identity(envelope("b"), body).message


@pytest.mark.parametrize("member", ["to", "from", "text", "reference"])
def test_another_member_is_another_message(member: str) -> None:
    """Number, sender, text, and what is forwarded beside them, all have to be equal."""
    assert by_text().message != by_text(**{member: "+491713920002"}).message


@pytest.mark.parametrize(
    "identity",
    [
        MessageIdentity(b"1234567890abcdef", has_id=True, copies=0),
        MessageIdentity(b" 1 2 3\0\xff", has_id=False, copies=3, try_of="2026-01-01T09:00:00.000"),
        MessageIdentity(b"", has_id=True, copies=-(2**63), try_of=" \udcff\0 ä"),
        MessageIdentity(b"x", has_id=False, copies=2**64, try_of="1 x"),
    ],
)
def test_an_entry_is_the_same_as_bytes(identity: MessageIdentity) -> None:
    """Whatever a publisher has written into the headers of copies."""
    assert unpack_identity(pack_identity(identity)) == identity


def test_what_differs_differs_as_bytes() -> None:
    """No two entries are one where they are remembered as bytes."""
    entries = {
        MessageIdentity(message, has_id, copies, try_of)
        for message in (b"a", b"1 a", b"")
        for has_id in (True, False)
        for copies in (0, 1, 11)
        for try_of in ("", "1", "a", "1 a")
    }

    assert len({pack_identity(identity) for identity in entries}) == len(entries)
