"""What answers tell of the SMS service: a wait that it wants, an outage, a fault of the set-up.

`fates` says what one answer means. This weighs it against those before it.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from bridge.outbound.delivery import MAX_HOLD_SECONDS
from bridge.outbound.fates import Answer, Fate, PauseReason
from bridge.outbound.pausing.evidence import Evidence
from bridge.outbound.pausing.gate import Gate
from bridge.outbound.pausing.outage import OutageWatch

# After this many ambiguous answers in a row, whichever messages got them, a pause is due.
MAX_AMBIGUOUS_IN_A_ROW: Final = 3


class Finding(NamedTuple):
    """What an answer means, and the reason for the pause that is due after it, if one is."""

    answer: Answer
    pause: PauseReason | None = None


class Diagnosis:
    """What one worker's answers tell; `gate` is closed when one asks for a wait.

    Messages are known by their key. Times are of `clock`.
    """

    def __init__(
        self, *, gate: Gate, outage_after_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._gate = gate
        self._outage = OutageWatch(outage_after_seconds, clock)
        self._evidence = Evidence()
        self._clock = clock
        self._ambiguous_in_a_row = 0
        self._ambiguous_since = 0.0
        # When the service last accepted a message of this worker.
        self.accepted_at: float | None = None

    @property
    def is_outage_likely(self) -> bool:
        """Whether so many requests have failed that it is an outage if it lasts."""
        return self._outage.is_likely

    @property
    def is_outage(self) -> bool:
        """Whether it has lasted."""
        return self._outage.is_certain

    def unaccepted_since(self, reason: PauseReason) -> float:
        """Return since when what speaks for a pause that is due has not been refuted."""
        if reason == "outage":
            return self._outage.last_accepted_at
        return self._ambiguous_since if self._ambiguous_in_a_row else self._clock()

    def is_suspect(self, key: str, recipient: str) -> bool:
        """Whether the message, or another one to its recipient, got an ambiguous answer."""
        return self._evidence.is_suspect(key, recipient)

    def doubts(self, key: str) -> int:
        """Return how many ambiguous answers in a row a message has got, as far as is known."""
        return self._evidence.times(key)

    def begin(self, key: str) -> int:
        """Note that a request leaves; `learn` wants the number that is returned."""
        return self._evidence.begin(key)

    def learn(
        self, answer: Answer, key: str, recipient: str, *, request_number: int, is_paused: bool
    ) -> Finding:
        """Note the answer to a request, and say what it means: it may be the message's own fault.

        In a pause it is not certain that the set-up is as it was when evidence was found, so that
        no message is found guilty.
        """
        if answer.fate is Fate.SENT:
            self._note_acceptance(key, recipient, request_number)
            return Finding(answer)
        if answer.fate is Fate.AMBIGUOUS or answer.is_setup_by_code:
            is_proven = self._evidence.suspect(key, recipient, request_number=request_number)
            if is_proven and not is_paused:
                answer = _of_the_message_alone(answer)
        if answer.counts_as_outage:
            self._outage.note_failure()
            return Finding(answer, "outage" if self._outage.is_certain else None)
        self._outage.note_answer()
        return Finding(answer, self._due_after(answer, key))

    def _note_acceptance(self, key: str, recipient: str, request_number: int) -> None:
        self.accepted_at = now = self._clock()
        self._ambiguous_in_a_row = 0
        self._gate.note_acceptance()
        self._outage.note_acceptance(now)
        self._evidence.accept(key, recipient, request_number=request_number)

    def _due_after(self, answer: Answer, key: str) -> PauseReason | None:
        match answer.fate:
            case Fate.REFUSED:
                self._evidence.clear(key)
            case Fate.SLOW_DOWN:
                if self._gate.close(answer.retry_after_seconds) > MAX_HOLD_SECONDS:
                    return "rate_limited"
            case Fate.AMBIGUOUS:
                if not self._ambiguous_in_a_row:
                    self._ambiguous_since = self._clock()
                self._ambiguous_in_a_row += 1
                return answer.pause if self._ambiguous_in_a_row >= MAX_AMBIGUOUS_IN_A_ROW else None
            case Fate.SETUP:
                return answer.pause
            case Fate.SENT | Fate.RETRY | Fate.UNCERTAIN | Fate.NOT_SENT:
                pass  # It speaks of nothing but its message or of an outage, or is noted.
        return None

    def forget_outage(self) -> None:
        """Begin to look for an outage anew: that nothing was accepted was not the service's."""
        self._outage.start_anew()

    def start_anew(self) -> None:
        """Forget what spoke for a pause: it is over."""
        self._ambiguous_in_a_row = 0
        self._outage.start_anew()

    def renew_key(self) -> None:
        """Forget what was answered to another API key, for it says nothing of the one from now."""
        self._ambiguous_in_a_row = 0
        self._evidence.renew()


def _of_the_message_alone(answer: Answer) -> Answer:
    if answer.fate is Fate.SETUP:
        # It waits until that is mended, and holds up no other: they are taken.
        return answer._replace(pause=None)
    detail = f"{answer.detail}, twice, and took another message between"
    return answer._replace(fate=Fate.REFUSED, pause=None, detail=detail)
