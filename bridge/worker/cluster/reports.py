"""What workers report to each other of the messages that they take and send, as digests.

A batch is one text, so that what it costs to write and to hear hardly grows with each message. A
provider's id is not told: a service may choose one that is a phone number.
"""

import base64
import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, PlainSerializer

from bridge.worker.cluster.messages import Facts
from bridge.worker.sent_messages import Accepted

# So many of each kind fit into a message in any case.
MAX_REPORTED: Final = 400
_DIGEST_BYTES: Final = 16
# The digest, how many attempts, the HTTP status, how long ago in milliseconds.
_RECORD: Final = struct.Struct(f">{_DIGEST_BYTES}sHHI")


def _packed_in(size_bytes: int) -> BeforeValidator:
    """Read base64 of at most `MAX_REPORTED` pieces of one size."""

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


def _write(packed: bytes) -> str:
    return base64.b64encode(packed).decode()


_Digests = Annotated[bytes, _packed_in(_DIGEST_BYTES), PlainSerializer(_write)]
_Records = Annotated[bytes, _packed_in(_RECORD.size), PlainSerializer(_write)]


class Report(Facts):
    """What one worker has taken, what it has sent, and what it has settled in another way or lost.

    `asked`: what the worker waits for; who has it, or has sent it, reports so again.
    """

    kind: ClassVar[str] = "report"

    taken: _Digests = b""
    sent: _Records = b""
    let_go: _Digests = b""
    asked: _Digests = b""


class RecentQuestion(Facts):
    """A worker asks one peer for what was sent lately, by whomever."""

    kind: ClassVar[str] = "recent?"

    to: str


class Recent(Facts):
    """A part of the answer, the newest first; all others ignore it."""

    kind: ClassVar[str] = "recent"

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
    """Pack how messages were accepted; `now` is in unix seconds."""
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
