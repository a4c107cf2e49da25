"""What becomes of a delivery, as pure data: (status | how it failed) -> fate -> outcome.

| the API said                                        | fate      | then                           |
|-----------------------------------------------------|-----------|--------------------------------|
| 2xx                                                 | SENT      | ack                            |
| 400 413 414 415 422 431 451, other 4xx              | REFUSED   | dead letter `refused`          |
| 401 402 407 426 511, 3xx, TLS                       | SETUP     | the worker pauses; no attempt  |
|                                                     |           | is burned                      |
| 403 404 405 410 501 505                             | AMBIGUOUS | up the ladder, no attempt is   |
|                                                     |           | burned; `evidence` decides     |
| 408 409 421 425                                     | RETRY     | up the ladder                  |
| 429                                                 | SLOW_DOWN | the worker slows down; no      |
|                                                     |           | attempt is burned              |
| 503 with Retry-After, 521 523 525 526 530           | RETRY     | up the ladder                  |
| other 5xx, anything that is no status               | UNCERTAIN | up the ladder with the same    |
|                                                     |           | key, a few times; or `park`    |
| nothing; the request never left                     | NOT_SENT  | again at once, then the ladder |
| nothing; the request may have arrived               | UNCERTAIN | as above                       |
"""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, assert_never

from bridge.errors import AttemptFault

# Commands name reasons of ours in their help, which is to be quick: settings are slow to import.
if TYPE_CHECKING:
    from bridge.config import WorkerSettings


class Fate(Enum):
    """What an answer, or the lack of one, means for the message."""

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
    "not_before",
    "ordering",
]
DeadReason = Literal["invalid", "refused", "expired", "exhausted", "uncertain", "internal_error"]
# What became of a request that is not tried again.
FinalOutcome = Literal["sent", "dead"]
# What became of a delivery: its outcome; or it was given back to the queue, or repeats a request
# that was sent.
DeliveryOutcome = Literal[FinalOutcome, "retried", "released", "dropped"]


class Answer(NamedTuple):
    """One attempt's end. `detail` is our own text: nothing that the API wrote is in it."""

    fate: Fate
    result: Result
    detail: str
    status: int | None = None
    pause: PauseReason | None = None
    retry_after_seconds: float | None = None
    provider_id: str | None = None

    @property
    def counts_as_outage(self) -> bool:
        """Whether the service itself looks down: 5xx, time-outs, no connection."""
        match self.fate:
            case Fate.SENT | Fate.REFUSED | Fate.SETUP | Fate.AMBIGUOUS | Fate.SLOW_DOWN:
                return False
            case Fate.UNCERTAIN | Fate.NOT_SENT:
                return True
            case Fate.RETRY:
                return self.result == "server_error"
            case _:
                assert_never(self.fate)

    @property
    def ends_pause(self) -> bool:
        """Whether the service speaks of messages, as it does not while a pause is due."""
        match self.fate:
            case Fate.SENT | Fate.REFUSED:
                return True
            case Fate.RETRY:
                return not self.counts_as_outage
            case Fate.SETUP | Fate.AMBIGUOUS | Fate.SLOW_DOWN | Fate.UNCERTAIN | Fate.NOT_SENT:
                return False
            case _:
                assert_never(self.fate)

    @property
    def counts_as_overload(self) -> bool:
        """Whether the service may have had too much at once: 429, 503, 504, time-outs."""
        return self.status in _OVERLOADED or self.result == "timeout"


_OVERLOADED = frozenset({429, 503, 504})
_CREDENTIALS = frozenset({401, 403, 407, 511})
_MISCONFIGURED = frozenset({404, 405, 410, 426, 501, 505})
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


def judge_failure(fault: AttemptFault) -> Answer:
    """Turn the lack of an answer into one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What decides between again and dead, as far as a message does not ask for something else."""

    max_attempts: int
    max_uncertain_attempts: int
    retry_delays_seconds: tuple[float, ...]
    on_uncertain: Literal["retry", "park"] = "retry"

    @classmethod
    def of(cls, settings: "WorkerSettings") -> "Policy":
        """Make the policy of a worker."""
        return cls(
            max_attempts=settings.max_attempts,
            max_uncertain_attempts=settings.max_uncertain_attempts,
            retry_delays_seconds=settings.retry_delays,
            on_uncertain=settings.on_uncertain,
        )

    def is_last_try(self, *, attempts: int, uncertain_attempts: int) -> bool:
        """Whether one more failure may be the end of a message that has had so many."""
        return (
            attempts + 1 >= self.max_attempts
            or uncertain_attempts + 1 >= self.max_uncertain_attempts
        )

    def delay_for(self, attempts: int, *, at_least_seconds: float = 0) -> float:
        """Return the step of the ladder after so many attempts, not shorter than asked if any."""
        step = self.retry_delays_seconds[min(attempts, len(self.retry_delays_seconds)) - 1]
        if step >= at_least_seconds:
            return step
        fitting = [s for s in self.retry_delays_seconds if s >= at_least_seconds]
        return fitting[0] if fitting else self.retry_delays_seconds[-1]

    def longest_within(self, seconds: float) -> float:
        """Return the longest step of the ladder that ends in time, the first one if none does."""
        fitting = [step for step in self.retry_delays_seconds if step <= seconds]
        return fitting[-1] if fitting else self.retry_delays_seconds[0]


class Sent(NamedTuple):
    """The API accepted it."""

    status: int
    provider_id: str | None = None


class Retried(NamedTuple):
    """A copy waits on the ladder; `burned` says whether an attempt was used up.

    `uncertain` says whether it may have been sent, and counts even if no attempt was burned.
    """

    reason: RetryReason
    delay_seconds: float
    detail: str
    status: int | None = None
    burned: bool = False
    uncertain: bool = False


class Dead(NamedTuple):
    """It goes to the dead-letter queue; `burned` says whether the last attempt counts."""

    reason: DeadReason
    detail: str
    status: int | None = None
    burned: bool = False
    uncertain: bool = False


Outcome = Sent | Retried | Dead


def decide(
    answer: Answer, policy: Policy, *, attempts: int, uncertain_attempts: int, park: bool
) -> Outcome:
    """Turn the answer to a delivery's attempt into its outcome.

    `attempts` and `uncertain_attempts` are those before this one. SETUP, AMBIGUOUS and SLOW_DOWN
    burn nothing: the fault need not be the message's.
    """
    match answer.fate:
        case Fate.SENT:
            return Sent(status=answer.status or 0, provider_id=answer.provider_id)
        case Fate.REFUSED:
            return Dead(reason="refused", detail=answer.detail, status=answer.status, burned=True)
        case Fate.SETUP | Fate.AMBIGUOUS | Fate.SLOW_DOWN:
            return put_off_for(answer, policy)
        case Fate.UNCERTAIN:
            is_last = park or uncertain_attempts + 1 >= policy.max_uncertain_attempts
            if is_last or attempts + 1 >= policy.max_attempts:
                return _dead("uncertain", answer)
            return _try_again("uncertain", answer, policy, attempts)
        case Fate.RETRY | Fate.NOT_SENT:
            if attempts + 1 >= policy.max_attempts:
                return _dead("exhausted", answer)
            return _try_again(_reason_to_try_again(answer.result), answer, policy, attempts)
        case _:
            assert_never(answer.fate)


def _try_again(reason: RetryReason, answer: Answer, policy: Policy, attempts: int) -> Retried:
    wait_seconds = answer.retry_after_seconds or 0
    return Retried(
        reason=reason,
        delay_seconds=policy.delay_for(attempts + 1, at_least_seconds=wait_seconds),
        detail=answer.detail,
        status=answer.status,
        burned=True,
        uncertain=answer.fate is Fate.UNCERTAIN,
    )


def _reason_to_try_again(result: Result) -> RetryReason:
    match result:
        case "timeout" | "connection_error" | "rate_limited":
            return result
        case "success" | "rejected" | "unauthorized" | "server_error" | "protocol_error":
            return "server_error"
        case _:
            assert_never(result)


def _dead(reason: DeadReason, answer: Answer) -> Dead:
    return Dead(
        reason=reason,
        detail=answer.detail,
        status=answer.status,
        burned=True,
        uncertain=answer.fate is Fate.UNCERTAIN,
    )


def put_off(
    reason: RetryReason,
    policy: Policy,
    *,
    detail: str,
    wait_seconds: float = 0,
    times: int = 1,
    status: int | None = None,
    uncertain: bool = False,
) -> Retried:
    """Send a delivery up the ladder without burning an attempt.

    It goes to the step that `times` says, or to one that lasts for `wait_seconds` if that is
    longer, but not for more than twice as long: one that comes back too early is put off again.
    """
    step = policy.delay_for(times, at_least_seconds=wait_seconds)
    if wait_seconds and step > 2 * wait_seconds:
        step = policy.longest_within(wait_seconds)
    return Retried(
        reason=reason, delay_seconds=step, detail=detail, status=status, uncertain=uncertain
    )


def put_off_for(answer: Answer, policy: Policy, *, times: int = 1) -> Retried:
    """Send a delivery up the ladder for an answer that is not to burn an attempt."""
    return put_off(
        _reason_to_put_off(answer.fate),
        policy,
        detail=answer.detail,
        wait_seconds=answer.retry_after_seconds or 0,
        times=times,
        status=answer.status,
        uncertain=answer.fate is Fate.UNCERTAIN,
    )


def _reason_to_put_off(fate: Fate) -> RetryReason:
    match fate:
        case Fate.SLOW_DOWN:
            return "rate_limited"
        case Fate.AMBIGUOUS:
            return "ambiguous"
        case Fate.SENT | Fate.REFUSED | Fate.SETUP | Fate.RETRY | Fate.UNCERTAIN | Fate.NOT_SENT:
            return "paused"
        case _:
            assert_never(fate)
