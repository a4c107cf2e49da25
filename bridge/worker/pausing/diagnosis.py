"""What answers tell of the SMS service: a wait that it wants, an outage, a fault of the set-up.

`fates` says what one answer means. This weighs it against those before it.
"""

from collections.abc import Callable
from typing import Final

from bridge.worker.delivery import MAX_HOLD_SECONDS
from bridge.worker.fates import About, Answer, Fate, PauseReason
from bridge.worker.pausing.evidence import Evidence
from bridge.worker.pausing.gate import Gate
from bridge.worker.pausing.outage import OutageWatch
from bridge.worker.pausing.pause import Pause

# After this many ambiguous answers in a row, whichever messages got them, a pause is due.
MAX_AMBIGUOUS_IN_A_ROW: Final = 3
# After the same unknown refusal of so many messages in a row it is the set-up that is refused.
MAX_REFUSED_IN_A_ROW: Final = 10


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
        # The unknown refusal that was answered last, and the messages that got it in a row.
        self._refusal: tuple[int | None, str | None] = (None, None)
        self._refused: set[str] = set()
        # The number to which a message got the only 429 since the last acceptance.
        self._limited_recipient: str | None = None
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

    def may_hold_back(self, key: str) -> bool:
        """Whether a message that has failed is to wait, this once, for an outage to be certain."""
        return self._outage.may_hold_back(key)

    def is_asked_to_wait(self, recipient: str) -> bool:
        """Whether messages to a number were the only ones that got a 429 lately."""
        return recipient == self._limited_recipient

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

    @property
    def has_subjects(self) -> bool:
        """Whether there are messages whose last answer may be about them alone."""
        return self._evidence.is_counting

    def is_subject(self, key: str) -> bool:
        """Whether the last answer to a message may be about that message alone."""
        return self._evidence.is_counting and self._evidence.is_subject(key)

    def is_subject_again(self, key: str) -> bool:
        """Whether that is so of more than one answer to it."""
        return self._evidence.is_subject_again(key)

    def is_only_sender(self, sender: str) -> bool:
        """Whether only this sender was asked for waits, and nothing of it was accepted since."""
        return self._evidence.is_only_sender(sender)

    def about(self, key: str, recipient: str, sender: str) -> About | None:
        """Say what another such answer to a message would be about; None: about all."""
        return self._evidence.about(key, recipient, sender)

    def begin(self, key: str) -> int:
        """Note that a request leaves; `attribute` wants the number that is returned."""
        return self._evidence.begin(key)

    def attribute(
        self,
        answer: Answer,
        key: str,
        recipient: str,
        sender: str,
        *,
        request_number: int,
        is_known: bool,
        pause: Pause | None,
    ) -> Answer:
        """Note the answer to a request, and say what it means: it may be about its message alone.

        `is_known`: another worker has found out that it is. In a pause it is not certain that the
        set-up is as it was when evidence was found, so that no message is found guilty; and what
        is refused as the message was that began the pause is refused for the same cause.
        """
        if answer.fate is Fate.SENT:
            self._evidence.accept(key, recipient, sender, request_number=request_number)
            self._refused.clear()
            self._limited_recipient = None
            return answer
        if answer.fate is Fate.REFUSED:
            answer = self._judge_refusal(answer, key, pause)
        if answer.fate is Fate.AMBIGUOUS:
            is_proven = self._evidence.suspect(key, recipient, request_number=request_number)
            return _of_the_message(answer) if is_proven and pause is None else answer
        if answer.may_be_about_one and answer.about is None:
            about = self._evidence.find_subject(
                key, recipient, sender, request_number=request_number, is_known=is_known
            )
            return answer if about is None or pause is not None else _about(answer, about)
        if answer.fate is Fate.REFUSED:
            self._evidence.clear(key, recipient)
        return answer

    def _judge_refusal(self, answer: Answer, key: str, pause: Pause | None) -> Answer:
        """Doubt a refusal that nobody knows and that message after message gets."""
        if not answer.is_unknown_refusal:
            self._refused.clear()
            return answer
        refusal = answer.status, answer.code
        if refusal != self._refusal:
            self._refusal = refusal
            self._refused.clear()
        if len(self._refused) < MAX_REFUSED_IN_A_ROW:
            self._refused.add(key)
            is_as_in_pause = pause is not None and pause.status == answer.status
            if len(self._refused) < MAX_REFUSED_IN_A_ROW and not is_as_in_pause:
                return answer
        detail = f"{answer.detail}, as to every message before it"
        return answer._replace(fate=Fate.AMBIGUOUS, pause="misconfigured", detail=detail)

    def learn(
        self, answer: Answer, recipient: str, *, pause: PauseReason | None
    ) -> PauseReason | None:
        """Note what an attributed answer tells of the service; return the pause that is due."""
        if answer.fate is Fate.SENT:
            self._note_acceptance()
            return None
        if answer.counts_as_outage:
            self._outage.note_failure()
            return "outage" if self._outage.is_certain else None
        self._outage.note_answer()
        return self._due_after(answer, recipient, pause)

    def _note_acceptance(self) -> None:
        self.accepted_at = now = self._clock()
        self._ambiguous_in_a_row = 0
        self._gate.note_acceptance()
        self._outage.note_acceptance(now)

    def _due_after(
        self, answer: Answer, recipient: str, pause: PauseReason | None
    ) -> PauseReason | None:
        if answer.about is not None:
            return None
        match answer.fate:
            case Fate.SLOW_DOWN:
                return self._slow_down(answer.retry_after_seconds, recipient, pause)
            case Fate.AMBIGUOUS:
                if not self._ambiguous_in_a_row:
                    self._ambiguous_since = self._clock()
                self._ambiguous_in_a_row += 1
                is_due = self._ambiguous_in_a_row >= MAX_AMBIGUOUS_IN_A_ROW
                return answer.pause if is_due or self._is_refused_in_a_row else None
            case Fate.SETUP:
                return answer.pause
            case Fate.SENT | Fate.REFUSED | Fate.RETRY | Fate.UNCERTAIN | Fate.NOT_SENT:
                pass  # It speaks of nothing but its message or of an outage, or is noted.
        return None

    @property
    def _is_refused_in_a_row(self) -> bool:
        return len(self._refused) >= MAX_REFUSED_IN_A_ROW

    def _slow_down(
        self, retry_after_seconds: float | None, recipient: str, pause: PauseReason | None
    ) -> PauseReason | None:
        """Close the gate, unless a long wait has been asked of messages to one number only.

        Then the pause begins all the same, and its first probe, which is another message where
        there is one, finds out whether the wait is for all.
        """
        is_first = self._limited_recipient is None and pause != "rate_limited"
        is_of_one = is_first or self._limited_recipient == recipient
        if is_first:
            self._limited_recipient = recipient
        if is_of_one and (retry_after_seconds or 0.0) > MAX_HOLD_SECONDS:
            return "rate_limited"
        is_long = self._gate.close(retry_after_seconds) > MAX_HOLD_SECONDS
        return "rate_limited" if is_long else None

    def forget_outage(self) -> None:
        """Begin to look for an outage anew: that nothing was accepted was not the service's."""
        self._outage.start_anew()

    def start_anew(self) -> None:
        """Forget what spoke for a pause: it is over."""
        self._ambiguous_in_a_row = 0
        self._refused.clear()
        self._limited_recipient = None
        self._outage.start_anew()

    def renew_key(self) -> None:
        """Forget what was answered to another API key, for it says nothing of the one from now."""
        self._ambiguous_in_a_row = 0
        self._refused.clear()
        self._evidence.renew()


def _of_the_message(answer: Answer) -> Answer:
    detail = f"{answer.detail}, twice, and took another message between"
    return answer._replace(fate=Fate.REFUSED, pause=None, detail=detail)


def _about(answer: Answer, about: About) -> Answer:
    others = "other messages" if about == "message" else "messages of other senders"
    detail = f"{answer.detail}, again, and takes {others}"
    return answer._replace(about=about, pause=None, detail=detail)
