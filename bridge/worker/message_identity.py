"""The identity of a message, by which a redelivery or a duplicate is recognised."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Final, NamedTuple

from bridge.amqp.frames import Body
from bridge.config import WorkerSettings
from bridge.worker.envelope import Envelope
from bridge.worker.request import RequestReader, SendRequest

_DIGEST_BYTES: Final = 16


class MessageIdentity(NamedTuple):
    """Which message a delivery carries, and which copy of it.

    `message` is a digest. `has_id`: it is identified by its publisher's id, or by its text.
    `try_of` distinguishes the copies of one publish from those of a later publish of the same
    message.
    """

    message: bytes
    has_id: bool
    copies: int
    try_of: str = ""


IdentityOf = Callable[[Envelope, Body], MessageIdentity]


def identity_function(settings: WorkerSettings, *, short_codes: bool) -> IdentityOf:
    """Return the function that identifies messages: by id and body, or by text and number.

    `short_codes`: whether short codes are valid recipients.
    """
    if settings.deduplicate_by != "text":
        return identity_of
    reader = RequestReader(settings, short_codes=short_codes)

    def by_text(envelope: Envelope, body: Body) -> MessageIdentity:
        with contextlib.suppress(Exception):  # invalid: reported when it is sent
            return identity_of_text(envelope, reader.read(body))
        return identity_of(envelope, body)

    return by_text


def pack_identity(identity: MessageIdentity) -> bytes:
    """Pack an identity into bytes for large maps; equal identities give equal bytes."""
    # `copies` and `try_of` come from headers, which a publisher may have set to anything.
    try_of = identity.try_of.encode("utf-8", "surrogatepass")
    return b"%d %d %d %b%b" % (
        identity.has_id,
        identity.copies,
        len(try_of),
        try_of,
        identity.message,
    )


def unpack_identity(packed: bytes) -> MessageIdentity:
    """Reverse `pack_identity`."""
    has_id, copies, length, rest = packed.split(b" ", 3)
    end = int(length)
    try_of = rest[:end].decode("utf-8", "surrogatepass")
    return MessageIdentity(rest[end:], has_id=has_id == b"1", copies=int(copies), try_of=try_of)


def identity_of(envelope: Envelope, body: Body) -> MessageIdentity:
    """Identify a message by id and body; one id with two bodies names two messages."""
    has_id = envelope.message_id is not None
    name = f"({envelope.message_id!a}, {None if has_id else envelope.published_at!a})"
    digest = hashlib.blake2b(name.encode() + b"\0", digest_size=_DIGEST_BYTES)
    digest.update(body)
    return MessageIdentity(digest.digest(), has_id, envelope.copies, envelope.try_of)


def identity_of_text(envelope: Envelope, request: SendRequest) -> MessageIdentity:
    """Identify a message by recipient, sender, text and extra fields, whatever its id."""
    members = [request.to, request.sender, request.text, request.model_extra]
    written = json.dumps(members, sort_keys=True).encode()
    message = hashlib.blake2b(written, digest_size=_DIGEST_BYTES).digest()
    return MessageIdentity(message, has_id=True, copies=envelope.copies, try_of=envelope.try_of)
