"""What happens to the circuit breaker, and what a transition asks for: events and effects.

`breaker_states` turns an event into a new state and effects; `CircuitBreaker` performs the effects.
"""

from enum import Enum, IntEnum
from typing import NamedTuple

from bridge.errors import PublishFault
from bridge.worker.fates import Answer, PauseReason


class Rank(IntEnum):
    """How good a probe is; a better one, with a lower rank, replaces another.

    RELUCTANT: its failure would say nothing new, because the message or another one to its number
    got an ambiguous status, or would make it a dead letter. TRIED: the last probe, held.
    """

    WILLING = 0
    RELUCTANT = 1
    TRIED = 2
    NOBODY = 3


class Unstored(NamedTuple):
    """The queue for which the broker does not store a copy, and how it refuses."""

    queue: str
    fault: PublishFault


class Answered(NamedTuple):
    """The service answered a request, and the classifier has said whose fault the answer shows.

    `is_refused_in_a_row`: message after message got the same unknown refusal.
    """

    answer: Answer
    key: str
    recipient: str
    is_refused_in_a_row: bool = False


class OutageChecked(NamedTuple):
    """A message is about to go: an outage may have lasted for long enough by now."""


class WaitChecked(NamedTuple):
    """The worker is about to take messages: a long wait may be over by now."""

    is_probed_elsewhere: bool


class ProbeOffered(NamedTuple):
    """A message could be the probe."""

    key: str
    rank: Rank
    is_probed_elsewhere: bool


class ProbeHeld(NamedTuple):
    """A message whose answer shows the fault is held, and is the probe if there is no other."""

    key: str
    is_probed_elsewhere: bool


class ProbeLeft(NamedTuple):
    """The probe is posted: a new API key has had its try."""


class ProbeGivenUp(NamedTuple):
    """A message has its outcome, or goes back to the queue, and is the probe no longer."""

    key: str


class MadeRoom(NamedTuple):
    """A message leaves for a retry queue, so that messages of other senders come to the front."""


class KeyRenewed(NamedTuple):
    """The API key has changed."""


class PeerOpened(NamedTuple):
    """Another worker has opened its breaker; `failures`: see `Open.failures`."""

    reason: PauseReason
    unaccepted_since: float
    status: int | None = None
    failures: tuple[int, int] = (0, 0)


class PeerClosed(NamedTuple):
    """Another worker has found out that the service takes messages again."""


class PeerAskedToWait(NamedTuple):
    """The service has asked another worker for a wait."""

    seconds: float


class OperatorPaused(NamedTuple):
    """An operator wants nothing to be sent."""


class OperatorResumed(NamedTuple):
    """The operator's pause is over."""


class BrokerBlocked(NamedTuple):
    """The broker does not store a copy."""

    unstored: Unstored


class BrokerUnblocked(NamedTuple):
    """The broker has stored a copy again."""


Event = (
    Answered
    | OutageChecked
    | WaitChecked
    | ProbeOffered
    | ProbeHeld
    | ProbeLeft
    | ProbeGivenUp
    | MadeRoom
    | KeyRenewed
    | PeerOpened
    | PeerClosed
    | PeerAskedToWait
    | OperatorPaused
    | OperatorResumed
    | BrokerBlocked
    | BrokerUnblocked
)


# Effects


class Do(Enum):
    """An effect without data."""

    # More or fewer messages may be taken, or waiting messages have to look again.
    WAKE = "wake"
    START_SLOWLY = "start slowly"
    LOG_SUSPICION = "log suspicion"
    # For the other workers.
    PUBLISH_OPEN = "publish open"
    PUBLISH_PROBE_FAILED = "publish probe failed"
    PUBLISH_RETRY_AFTER = "publish retry after"


class PauseBegan(NamedTuple):
    """A pause begins; `status` and `code` are the API's, `unstored` is the broker's refusal."""

    reason: PauseReason
    status: int | None = None
    code: str | None = None
    unstored: Unstored | None = None


class PauseRefused(NamedTuple):
    """In a pause that is on, the broker refuses another copy."""

    unstored: Unstored


class PauseTurned(NamedTuple):
    """A pause goes on for another reason, which begins next."""

    reason: PauseReason


class PauseEnded(NamedTuple):
    """A pause is over; `is_found_here`: this worker has found that out, and tells the others."""

    reason: PauseReason
    is_found_here: bool = False


Effect = Do | PauseBegan | PauseRefused | PauseTurned | PauseEnded
