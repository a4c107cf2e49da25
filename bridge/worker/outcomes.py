"""Decide the outcome of a delivery: sent, retried or dead; pure.

`fates` interprets the answer to a POST; this module weighs it against the attempts of the message.

An attempt is a POST that counts towards `worker.max_attempts`. A POST does not count if its failure
is not the message's own, and quick repeats of a request that never left count as one. `Sent` and
`Dead` are also the outcome of the message, which `Announcer` publishes as an outcome event.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

from bridge.config import OnUncertain, WorkerSettings
from bridge.worker.fates import Answer, DeadReason, Fate, Result, RetryReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings that decide between a retry and a dead letter; a message may override them."""

    max_attempts: int
    max_uncertain_attempts: int
    retry_delays_seconds: tuple[float, ...]
    on_uncertain: OnUncertain = "retry"

    @classmethod
    def of(cls, settings: WorkerSettings) -> "Policy":
        return cls(
            max_attempts=settings.max_attempts,
            max_uncertain_attempts=settings.max_uncertain_attempts,
            retry_delays_seconds=settings.retry_delays,
            on_uncertain=settings.on_uncertain or "retry",
        )

    def is_last_attempt(self, *, attempts: int, uncertain_attempts: int) -> bool:
        """Whether one more failure may turn a message with these attempts into a dead letter."""
        return (
            attempts + 1 >= self.max_attempts
            or uncertain_attempts + 1 >= self.max_uncertain_attempts
        )

    def delay_for(self, attempts: int, *, at_least_seconds: float = 0) -> float:
        """Return the retry delay after `attempts` attempts, or the next that is long enough."""
        step = self.retry_delays_seconds[min(attempts, len(self.retry_delays_seconds)) - 1]
        if step >= at_least_seconds:
            return step
        fitting = [s for s in self.retry_delays_seconds if s >= at_least_seconds]
        return fitting[0] if fitting else self.retry_delays_seconds[-1]

    def longest_within(self, seconds: float) -> float:
        """Return the longest retry delay within `seconds`, the shortest delay if none is."""
        fitting = [step for step in self.retry_delays_seconds if step <= seconds]
        return fitting[-1] if fitting else self.retry_delays_seconds[0]


class Sent(NamedTuple):
    """The API accepted the message."""

    status: int
    provider_id: str | None = None


class Retried(NamedTuple):
    """The message is to be sent after a wait; `counted`: its last POST counts as an attempt.

    A copy waits in a retry queue. In ordered mode the message waits in this process, unless it is
    not due yet.

    `uncertain`: the message may have been sent; this is counted separately, even if the POST is not
    an attempt. `code` is the API's own error code, `meaning` the preset's explanation of it.
    """

    reason: RetryReason
    delay_seconds: float
    detail: str
    status: int | None = None
    counted: bool = False
    uncertain: bool = False
    code: str | None = None
    meaning: str | None = None


class Dead(NamedTuple):
    """The message moves to the dead-letter queue; `counted`: its last POST counts as an attempt."""

    reason: DeadReason
    detail: str
    status: int | None = None
    counted: bool = False
    uncertain: bool = False
    code: str | None = None
    meaning: str | None = None


Outcome = Sent | Retried | Dead


def name_of(outcome: Outcome) -> Literal["sent", "retried", "dead"]:
    """Return the name of an outcome in metrics and logs."""
    match outcome:
        case Sent():
            return "sent"
        case Retried():
            return "retried"
        case Dead():
            return "dead"


def attempts_after(attempts: int, outcome: Outcome | None) -> int:
    """Return the number of attempts including this outcome; None is a repeat."""
    if outcome is None:
        return attempts
    return attempts + (isinstance(outcome, Sent) or outcome.counted)


def decide(
    answer: Answer, policy: Policy, *, attempts: int, uncertain_attempts: int, park: bool
) -> Outcome:
    """Turn the answer to a delivery's POST into its outcome.

    `attempts` and `uncertain_attempts` do not include this one. SETUP, AMBIGUOUS and SLOW_DOWN
    count no attempt, because the fault need not be the message's, unless `about` says that it is.
    """
    if answer.about == "message":
        return _try_again_if_any_left("singled_out", answer, policy, attempts)
    match answer.fate:
        case Fate.SENT:
            return Sent(status=answer.status or 0, provider_id=answer.provider_id)
        case Fate.REFUSED:
            return _dead("refused", answer)
        case Fate.SETUP | Fate.AMBIGUOUS | Fate.SLOW_DOWN:
            return put_off_for(answer, policy)
        case Fate.UNCERTAIN:
            # The accepted parts of the text would arrive twice.
            park = park or answer.in_part
            is_last = park or uncertain_attempts + 1 >= policy.max_uncertain_attempts
            if is_last or attempts + 1 >= policy.max_attempts:
                return _dead("uncertain", answer)
            return _try_again("uncertain", answer, policy, attempts)
        case Fate.RETRY | Fate.NOT_SENT:
            reason = _reason_to_try_again(answer.result)
            return _try_again_if_any_left(reason, answer, policy, attempts)
        case _:
            assert_never(answer.fate)


def _try_again_if_any_left(
    reason: RetryReason, answer: Answer, policy: Policy, attempts: int
) -> Outcome:
    if attempts + 1 >= policy.max_attempts:
        return _dead("exhausted", answer)
    return _try_again(reason, answer, policy, attempts)


def _try_again(reason: RetryReason, answer: Answer, policy: Policy, attempts: int) -> Retried:
    wait_seconds = answer.retry_after_seconds or 0
    return Retried(
        reason=reason,
        delay_seconds=policy.delay_for(attempts + 1, at_least_seconds=wait_seconds),
        detail=answer.detail,
        status=answer.status,
        counted=True,
        uncertain=answer.fate is Fate.UNCERTAIN,
        code=answer.code,
        meaning=answer.meaning,
    )


def _reason_to_try_again(result: Result) -> RetryReason:
    match result:
        case "timeout" | "connection_error" | "rate_limited":
            return result
        # 409, 421, 425 and the codes that a preset calls temporary: the reason says that the
        # service could not take the message now, whatever the class of its answer.
        case "success" | "rejected" | "unauthorized" | "server_error" | "protocol_error":
            return "server_error"
        case _:
            assert_never(result)


def _dead(reason: DeadReason, answer: Answer) -> Dead:
    return Dead(
        reason=reason,
        detail=answer.detail,
        status=answer.status,
        counted=True,
        uncertain=answer.fate is Fate.UNCERTAIN,
        code=answer.code,
        meaning=answer.meaning,
    )


def put_off(
    reason: RetryReason,
    policy: Policy,
    *,
    detail: str,
    wait_seconds: float = 0,
    times: int = 1,
    answer: Answer | None = None,
) -> Retried:
    """Send a delivery to a retry queue without counting an attempt.

    The delay is that of the `times`-th retry, or a longer one to cover `wait_seconds`. It is at
    most twice `wait_seconds` if a shorter delay exists: a delivery that returns too early is put
    off again.
    """
    step = policy.delay_for(times, at_least_seconds=wait_seconds)
    if wait_seconds and step > 2 * wait_seconds:
        step = policy.longest_within(wait_seconds)
    if answer is None:
        return Retried(reason=reason, delay_seconds=step, detail=detail)
    return Retried(
        reason=reason,
        delay_seconds=step,
        detail=detail,
        status=answer.status,
        uncertain=answer.fate is Fate.UNCERTAIN,
        code=answer.code,
        meaning=answer.meaning,
    )


def put_off_for(answer: Answer, policy: Policy, *, times: int = 1) -> Retried:
    """Send a delivery to a retry queue for an answer that does not count as an attempt."""
    return put_off(
        _reason_to_put_off(answer.fate),
        policy,
        detail=answer.detail,
        wait_seconds=answer.retry_after_seconds or 0,
        times=times,
        answer=answer,
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
