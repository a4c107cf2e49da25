"""Map each answer of the SMS API, and each failed request, to a fate. Pure functions.

| the API's answer                                    | fate      | then                           |
|-----------------------------------------------------|-----------|--------------------------------|
| 2xx                                                 | SENT      | ack                            |
| 400 413 414 415 422 431 451, other 4xx              | REFUSED   | dead letter `refused`          |
| 401 402 407 426 511, 3xx, TLS                       | SETUP     | breaker opens; no attempt is   |
|                                                     |           | counted; the classifier may    |
|                                                     |           | say otherwise for 401 and 402  |
| 403 404 405 410 501 505                             | AMBIGUOUS | retry queue; no attempt is     |
|                                                     |           | counted; the classifier        |
|                                                     |           | decides                        |
| 408 409 421 425                                     | RETRY     | retry queue                    |
| 429                                                 | SLOW_DOWN | the worker waits; no attempt   |
|                                                     |           | is counted; the classifier may |
|                                                     |           | say otherwise                  |
| 503 with Retry-After, 521 523 525 526 530           | RETRY     | retry queue                    |
| other 5xx, any other status                         | UNCERTAIN | a few retries with the same    |
|                                                     |           | idempotency key; or `park`     |
| none; the request was not sent                      | NOT_SENT  | quick retry, then retry queue  |
| none; the request may have arrived                  | UNCERTAIN | as above                       |

`FailureClassifier` may find that a 401, 402, 429 or 503 with Retry-After concerns one message. Then
only that message is retried, and the attempt counts. If the answer concerns one sender, only the
messages of that sender wait.
"""

from enum import Enum
from typing import Final, Literal, NamedTuple, assert_never

from bridge.errors import PostFault

# Do not import settings here: commands show these reasons in their help, which must start fast.


class Fate(Enum):
    """What an answer, or its absence, means for the message."""

    SENT = "sent"
    REFUSED = "refused"
    SETUP = "setup"
    AMBIGUOUS = "ambiguous"
    RETRY = "retry"
    SLOW_DOWN = "slow_down"
    UNCERTAIN = "uncertain"
    NOT_SENT = "not_sent"


PauseReason = Literal[
    "credentials_rejected",
    "insufficient_funds",
    "misconfigured",
    "tls_failed",
    "outage",
    "rate_limited",
    "broker_blocked",
    "operator",
]
Result = Literal[
    "success",
    "rejected",
    "unauthorized",
    "rate_limited",
    "server_error",
    "timeout",
    "connection_error",
    "protocol_error",
]
RetryReason = Literal[
    "rate_limited",
    "server_error",
    "timeout",
    "connection_error",
    "uncertain",
    "paused",
    "ambiguous",
    "singled_out",
    "not_before",
]
# The subject of an answer that does not concern all messages.
About = Literal["message", "sender"]
# Reasons for which a worker turns a message into a dead letter.
WorkersDeadReason = Literal[
    "invalid", "refused", "expired", "exhausted", "uncertain", "internal_error"
]
# `drained`: an operator moved the message there while it waited.
DeadReason = Literal[WorkersDeadReason, "drained"]
# Why a delivery was left to the broker unacked. `stopped`: the worker drains, or the active worker
# of ordered mode stops consuming, for example while an operator pauses it. `copy_refused` and
# `internal_error`: the message stays unacked until its session ends.
ReleaseReason = Literal["stopped", "connection_lost", "copy_refused", "internal_error"]
# How a message ends: the outcome of a delivery that is not retried.
FinalOutcome = Literal["sent", "dead"]
# The outcome of a delivery. `released`: it was left to the broker unacked. `dropped`: a repeat of a
# settled request.
DeliveryOutcome = Literal[FinalOutcome, "retried", "released", "dropped"]


class Answer(NamedTuple):
    """The result of one POST. `detail` is our own text and quotes nothing from the API.

    `code` is the API's own error code, if it gave one: at most 64 visible characters. `by_code`:
    the settings define what that code means. `meaning` is the preset's explanation of it, in our
    words. `in_part`: a part of the text was accepted and another was not, so it must never be sent
    again. `is_page`: the body of an accepting answer is an HTML page. `about`: the answer concerns
    this message or its sender; None if it may concern all.
    """

    fate: Fate
    result: Result
    detail: str
    status: int | None = None
    pause: PauseReason | None = None
    retry_after_seconds: float | None = None
    provider_id: str | None = None
    code: str | None = None
    in_part: bool = False
    by_code: bool = False
    is_page: bool = False
    meaning: str | None = None
    about: About | None = None

    @property
    def counts_as_outage(self) -> bool:
        """Whether the answer suggests an outage of the service: 5xx, time-outs, no connection."""
        if self.about is not None:
            return False
        match self.fate:
            case Fate.SENT | Fate.REFUSED | Fate.SETUP | Fate.AMBIGUOUS | Fate.SLOW_DOWN:
                return False
            case Fate.UNCERTAIN:
                return not self.in_part
            case Fate.NOT_SENT:
                return True
            case Fate.RETRY:
                return self.result == "server_error"
            case _:
                assert_never(self.fate)

    @property
    def may_have_been_sent(self) -> bool:
        """Whether the service has accepted the message, or may have; a redelivery may repeat it."""
        match self.fate:
            case Fate.SENT | Fate.UNCERTAIN:
                return True
            case (
                Fate.REFUSED
                | Fate.SETUP
                | Fate.AMBIGUOUS
                | Fate.RETRY
                | Fate.SLOW_DOWN
                | Fate.NOT_SENT
            ):
                return False
            case _:
                assert_never(self.fate)

    @property
    def ends_pause(self) -> bool:
        """Whether the answer, to a probe, shows that the service processes messages again."""
        match self.fate:
            case Fate.SENT | Fate.REFUSED:
                return True
            case Fate.RETRY:
                return not self.counts_as_outage
            case Fate.UNCERTAIN:
                return self.in_part
            case Fate.SETUP | Fate.AMBIGUOUS | Fate.SLOW_DOWN | Fate.NOT_SENT:
                return False
            case _:
                assert_never(self.fate)

    @property
    def may_be_about_one(self) -> bool:
        """Whether evidence may show that the answer concerns one message or sender, not all."""
        match self.fate:
            case Fate.SLOW_DOWN:
                return True
            case Fate.SETUP:
                return self.by_code or self.status in _SETUP_OR_ONE
            case Fate.RETRY:
                return self.status == 503  # noqa: PLR2004
            case Fate.SENT | Fate.REFUSED | Fate.AMBIGUOUS | Fate.UNCERTAIN | Fate.NOT_SENT:
                return False
            case _:
                assert_never(self.fate)

    @property
    def is_unknown_refusal(self) -> bool:
        """Whether it is a 4xx refusal with a code or status whose meaning is not defined."""
        is_unknown = self.code is not None or self.status not in _SAYS_NO
        return self.fate is Fate.REFUSED and not self.by_code and is_unknown

    @property
    def counts_as_overload(self) -> bool:
        """Whether the service may be overloaded: 429, 503, 504, time-outs."""
        return self.about is None and (self.status in _OVERLOADED or self.result == "timeout")


_OVERLOADED = frozenset({429, 503, 504})
_CREDENTIALS = frozenset({401, 403, 407, 511})
_MISCONFIGURED = frozenset({404, 405, 410, 426, 501, 505})
_SETUP_OR_ONE = frozenset({401, 402})
_SAYS_NO = frozenset({400, 413, 414, 415, 422, 431, 451})
_AMBIGUOUS = frozenset({403, 404, 405, 410, 501, 505})
_RETRY = frozenset({408, 409, 421, 425})
_ORIGIN_NOT_REACHED = frozenset({521, 523, 525, 526, 530})


def judge_status(status: int, *, retry_after_seconds: float | None) -> Answer:
    """Turn a status into an answer."""
    fate, result, pause = _classify(status, retry_after_seconds)
    return Answer(
        fate=fate,
        result=result,
        pause=pause,
        status=status,
        detail=f"the SMS API answered {status}",
        retry_after_seconds=retry_after_seconds,
    )


def _classify(
    status: int, retry_after_seconds: float | None
) -> tuple[Fate, Result, PauseReason | None]:
    if status in range(200, 300):
        return Fate.SENT, "success", None
    if status == 429:  # noqa: PLR2004
        return Fate.SLOW_DOWN, "rate_limited", None
    if (pause := _fault_of_the_setup(status)) is not None:
        fate = Fate.AMBIGUOUS if status in _AMBIGUOUS else Fate.SETUP
        return fate, "unauthorized" if status in _CREDENTIALS else "rejected", pause
    if status in _RETRY:
        return Fate.RETRY, "timeout" if status == 408 else "rejected", None  # noqa: PLR2004
    if status in range(400, 500):
        return Fate.REFUSED, "rejected", None
    later = status == 503 and retry_after_seconds is not None  # noqa: PLR2004
    if later or status in _ORIGIN_NOT_REACHED:
        return Fate.RETRY, "server_error", None
    return Fate.UNCERTAIN, "server_error" if status in range(500, 600) else "protocol_error", None


def _fault_of_the_setup(status: int) -> PauseReason | None:
    if status in _CREDENTIALS:
        return "credentials_rejected"
    if status == 402:  # noqa: PLR2004
        return "insufficient_funds"
    if status in _MISCONFIGURED or status in range(300, 400):
        return "misconfigured"
    return None


def judge_failure(fault: PostFault) -> Answer:
    """Turn the absence of an answer into one."""
    match fault:
        case "tls_failed":
            detail = "no trusted TLS connection to the SMS API"
            return Answer(Fate.SETUP, "connection_error", detail, pause="tls_failed")
        case "connect_failed" | "proxy_failed":
            return Answer(Fate.NOT_SENT, "connection_error", f"{_NO_CONNECTION} ({fault})")
        case "connect_timeout" | "pool_exhausted":
            return Answer(Fate.NOT_SENT, "timeout", f"{_NO_CONNECTION} in time ({fault})")
        case "answer_timeout":
            return Answer(Fate.UNCERTAIN, "timeout", f"{_NO_ANSWER} ({fault})")
        case "connection_lost":
            return Answer(Fate.UNCERTAIN, "connection_error", f"{_NO_ANSWER} ({fault})")
        case "not_http":
            return Answer(Fate.UNCERTAIN, "protocol_error", f"{_NO_ANSWER} ({fault})")
        case _:
            assert_never(fault)


_NO_CONNECTION: Final = "no connection to the SMS API"
_NO_ANSWER: Final = "no answer from the SMS API; the request may have arrived"
