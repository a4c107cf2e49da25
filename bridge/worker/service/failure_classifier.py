"""Whose fault an answer shows: the message's, its sender's, the set-up's or the service's.

Evidence decides, not time. An ambiguous status (403, 404) is the message's own fault if the message
gets one again and the same API key was accepted with another message between its two tries.
Between means that the other request left after the first answer had come, and was accepted before
the second try left; a request that was in flight when a key was revoked proves nothing.

A 401, 402, 429 or 503 with `Retry-After` is about one message if that message, or its number, gets
one again while other messages of its sender are accepted. It is about one sender if only messages
of other senders are accepted after the sender's first such answer. A limit that holds for all gives
others many such answers too, so that at most a tenth of theirs may be of this kind.

The same unknown refusal of ten messages in a row is the set-up's fault.
"""

from collections import OrderedDict
from typing import Final

from bridge.worker.fates import About, Answer, Fate
from bridge.worker.service.breaker_states import Open

MAX_SUSPECTS: Final = 10_000
MAX_SENDERS: Final = 1000
# For each answer of this kind that others got, so many of theirs must have been accepted.
ACCEPTED_PER_REFUSED: Final = 10
# After the same unknown refusal of so many messages in a row it is the set-up that is refused.
MAX_REFUSED_IN_A_ROW: Final = 10


class _Suspect:
    """A message with ambiguous statuses: how many in a row, and the number of the last request."""

    __slots__ = ("answered_at", "is_proven", "times")

    def __init__(self) -> None:
        self.times = 0
        self.answered_at = 0
        self.is_proven = False


class _Tally:
    """How a sender's requests, or all, were answered; the number of the latest accepted one."""

    __slots__ = ("accepted", "accepted_at", "refused")

    def __init__(self) -> None:
        self.accepted = 0
        self.refused = 0
        self.accepted_at = 0


class _Subject:
    """A message, a number or a sender that an answer may be about, and the counts before it.

    `first_at` is the number of the latest request when its first such answer came; `accepted` and
    `refused` are the counts of others by then, `own` its own such answers since.
    """

    __slots__ = ("accepted", "first_at", "own", "refused")

    def __init__(self, first_at: int, accepted: int, refused: int) -> None:
        self.first_at = first_at
        self.accepted = accepted
        self.refused = refused
        self.own = 0

    def is_shown_by(self, accepted: int, refused: int, accepted_at: int) -> bool:
        """Whether the counts of others by now show that the answers are about this one."""
        accepted -= self.accepted
        refused -= self.refused + self.own
        is_after = accepted_at > self.first_at
        return is_after and refused * ACCEPTED_PER_REFUSED <= accepted


_Subjects = OrderedDict[str, _Subject]


class FailureClassifier:
    """Remembers the messages of one worker that got doubtful answers, by key.

    The memory is bounded, and the oldest entries are dropped first: a forgotten fault is found out
    again at the cost of one more try. Numbers of recipients are remembered too, the ambiguous ones
    only to choose a better probe. Time is counted in requests since the start.
    """

    def __init__(self) -> None:
        self._requests = 0
        # When the latest request that was accepted had left.
        self._accepted_at = 0
        self._key_changed_at = 0
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._recipients: OrderedDict[str, None] = OrderedDict()
        self._messages: _Subjects = OrderedDict()
        self._numbers: _Subjects = OrderedDict()
        self._senders: _Subjects = OrderedDict()
        # The last unknown refusal, and the messages that got it in a row.
        self._refusal: tuple[int | None, str | None] = (None, None)
        self._refused: set[str] = set()
        self._start_counting()

    def _start_counting(self) -> None:
        self._all = _Tally()
        # The number of the latest accepted request, its sender, and the latest one of any other.
        self._latest_at, self._latest_sender, self._other_at = 0, "", 0
        self._tallies: OrderedDict[str, _Tally] = OrderedDict()
        # Whether there is a message, number or sender that a later acceptance would speak of.
        self.is_counting = False

    def begin(self, key: str) -> int:
        """Note that a request leaves; `classify` wants the number that is returned."""
        self._requests += 1
        if self._suspects and (suspect := self._suspects.get(key)) is not None:
            suspect.is_proven = self._accepted_at > suspect.answered_at
        return self._requests

    def classify(
        self,
        answer: Answer,
        key: str,
        recipient: str,
        sender: str,
        *,
        request_number: int,
        is_known: bool,
        opened: Open | None,
    ) -> Answer:
        """Note the answer to a request, and return it as an answer about one, or about all.

        `is_known`: another worker has found out that it is about this message. While the breaker is
        open (`opened`), it is not certain that the set-up is as it was when evidence was found, so
        that no message is found guilty; and a refusal with the status that opened the breaker has
        the same cause.
        """
        if answer.fate is Fate.SENT:
            self._accept(key, recipient, sender, request_number)
            return answer
        if answer.fate is Fate.REFUSED:
            answer = self._judge_refusal(answer, key, opened)
        if answer.fate is Fate.AMBIGUOUS:
            is_proven = self._suspect(key, recipient, request_number)
            return _of_the_message(answer) if is_proven and opened is None else answer
        if answer.may_be_about_one and answer.about is None:
            about = self._find_subject(key, recipient, sender, request_number, is_known=is_known)
            return answer if about is None or opened is not None else _about(answer, about)
        if answer.fate is Fate.REFUSED:
            self._forget(key, recipient)
        return answer

    def _accept(self, key: str, recipient: str, sender: str, request_number: int) -> None:
        self._accepted_at = max(self._accepted_at, request_number)
        if self._recipients:
            self._recipients.pop(recipient, None)
        if self._suspects:
            self._suspects.pop(key, None)
        if self._refused:
            self._refused.clear()
        if self.is_counting:
            self._count_acceptance(sender, request_number)
            self._senders.pop(sender, None)
            self._messages.pop(key, None)
            self._numbers.pop(recipient, None)
            self._stop_counting_if_over()

    # Refusals

    def _judge_refusal(self, answer: Answer, key: str, opened: Open | None) -> Answer:
        """Doubt an unknown refusal that message after message gets."""
        if not answer.is_unknown_refusal:
            self._refused.clear()
            return answer
        refusal = answer.status, answer.code
        if refusal != self._refusal:
            self._refusal = refusal
            self._refused.clear()
        if not self.is_refused_in_a_row:
            self._refused.add(key)
            has_opened = opened is not None and opened.status == answer.status
            if not self.is_refused_in_a_row and not has_opened:
                return answer
        detail = f"{answer.detail}, as to every message before it"
        return answer._replace(fate=Fate.AMBIGUOUS, pause="misconfigured", detail=detail)

    @property
    def is_refused_in_a_row(self) -> bool:
        """Whether so many messages in a row got the same unknown refusal that all would."""
        return len(self._refused) >= MAX_REFUSED_IN_A_ROW

    def _forget(self, key: str, recipient: str) -> None:
        """Forget a message that is refused, and that its number had to wait."""
        self._suspects.pop(key, None)
        if self.is_counting:
            self._messages.pop(key, None)
            self._numbers.pop(recipient, None)
            self._stop_counting_if_over()

    # Ambiguous statuses

    def _suspect(self, key: str, recipient: str, request_number: int) -> bool:
        """Note an ambiguous status, and say whether it is proven to be the message's own."""
        if request_number <= self._key_changed_at:
            return False
        suspect = self._suspects.setdefault(key, _Suspect())
        self._suspects.move_to_end(key)
        suspect.times += 1
        suspect.answered_at = self._requests
        self._remember(recipient)
        if len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        return suspect.is_proven

    def is_suspect(self, key: str, recipient: str) -> bool:
        """Whether the message, or another one to its recipient, got such an answer."""
        return key in self._suspects or recipient in self._recipients

    def ambiguous_answers(self, key: str) -> int:
        """Return how many ambiguous answers in a row a message has got, as far as is known."""
        suspect = self._suspects.get(key)
        return 0 if suspect is None else suspect.times

    # Answers that may be about one message or one sender

    def is_subject(self, key: str) -> bool:
        """Whether the last answer to a message may be about that message alone."""
        return self.is_counting and key in self._messages

    def is_subject_again(self, key: str) -> bool:
        """Whether that is so of more than one answer to it."""
        subject = self._messages.get(key)
        return subject is not None and subject.own > 0

    def is_only_sender(self, sender: str) -> bool:
        """Whether all such answers were to one sender, and nothing of it was accepted since."""
        return len(self._senders) == 1 and sender in self._senders

    def about(self, key: str, recipient: str, sender: str) -> About | None:
        """Say what another such answer to a message would be about by now; None: about all."""
        if not self.is_counting:
            return None
        if self._is_shown(key, recipient, sender):
            return "message"
        subject = self._senders.get(sender)
        if subject is None:
            return None
        own = self._tallies.get(sender, _NOTHING)
        others_at = self._other_at if sender == self._latest_sender else self._latest_at
        is_shown = subject.is_shown_by(
            self._all.accepted - own.accepted, self._all.refused - own.refused, others_at
        )
        return "sender" if is_shown else None

    def _is_shown(self, key: str, recipient: str, sender: str) -> bool:
        """Whether the message, or its recipient's number, is shown to be singled out."""
        own = self._tallies.get(sender, _NOTHING)
        subjects = (self._messages.get(key), self._numbers.get(recipient))
        return any(
            subject is not None and subject.is_shown_by(own.accepted, own.refused, own.accepted_at)
            for subject in subjects
        )

    def _find_subject(
        self, key: str, recipient: str, sender: str, request_number: int, *, is_known: bool
    ) -> About | None:
        """Note such an answer to a message, and say what it is about; None: about all.

        The worker's own evidence comes before that of another one (`is_known`). Each answer is
        judged by the counts of others by then, since a limit for all may have begun after a
        message was singled out.
        """
        if request_number <= self._key_changed_at:
            return None
        found = self.about(key, recipient, sender)
        is_known = is_known and key not in self._messages
        self.is_counting = True
        own = self._tally(sender)
        own.refused += 1
        self._all.refused += 1
        _note(self._messages, key, self._requests, own.accepted, own.refused, MAX_SUSPECTS)
        _note(self._numbers, recipient, self._requests, own.accepted, own.refused, MAX_SUSPECTS)
        accepted, refused = self._all.accepted - own.accepted, self._all.refused - own.refused
        if sender not in self._senders:
            _note(self._senders, sender, self._requests, accepted, refused, MAX_SENDERS)
        self._remember(recipient)
        return "message" if is_known and found is None else found

    def _count_acceptance(self, sender: str, request_number: int) -> None:
        own = self._tally(sender)
        own.accepted += 1
        own.accepted_at = max(own.accepted_at, request_number)
        self._all.accepted += 1
        if sender == self._latest_sender:
            self._latest_at = max(self._latest_at, request_number)
        elif request_number > self._latest_at:
            self._other_at = self._latest_at
            self._latest_at, self._latest_sender = request_number, sender
        else:
            self._other_at = max(self._other_at, request_number)

    def _tally(self, sender: str) -> _Tally:
        tally = self._tallies.get(sender)
        if tally is not None:
            self._tallies.move_to_end(sender)
            return tally
        tally = self._tallies[sender] = _Tally()
        if len(self._tallies) > MAX_SENDERS:
            self._tallies.popitem(last=False)
        return tally

    def _stop_counting_if_over(self) -> None:
        """Forget all counts when no message is left that they would speak of."""
        if not self._messages and not self._numbers:
            self._senders.clear()
            self._start_counting()

    # The end of evidence

    def forget_refusals(self) -> None:
        """Forget the refusals in a row: the breaker has closed."""
        self._refused.clear()

    def renew_key(self) -> None:
        """Forget all: the API key has changed, and of the new one nothing is known."""
        self._key_changed_at = self._requests
        for memory in (self._suspects, self._messages, self._numbers, self._senders):
            memory.clear()
        self._recipients.clear()
        self._refused.clear()
        self._start_counting()

    def _remember(self, recipient: str) -> None:
        self._recipients[recipient] = None
        self._recipients.move_to_end(recipient)
        if len(self._recipients) > MAX_SUSPECTS:
            self._recipients.popitem(last=False)


_NOTHING: Final = _Tally()


def _note(
    subjects: _Subjects, name: str, requests: int, accepted: int, refused: int, most: int
) -> None:
    """Note one more answer that may be about a subject; the first one is remembered."""
    subject = subjects.get(name)
    if subject is not None:
        subject.own += 1
        subjects.move_to_end(name)
        return
    subjects[name] = _Subject(first_at=requests, accepted=accepted, refused=refused)
    if len(subjects) > most:
        subjects.popitem(last=False)


def _of_the_message(answer: Answer) -> Answer:
    detail = f"{answer.detail}, twice, and took another message between"
    return answer._replace(fate=Fate.REFUSED, pause=None, detail=detail)


def _about(answer: Answer, about: About) -> Answer:
    others = "other messages" if about == "message" else "messages of other senders"
    detail = f"{answer.detail}, again, and takes {others}"
    return answer._replace(about=about, pause=None, detail=detail)
