"""Decide whether a failure concerns one message, one sender, the set-up or the whole service.

The decision needs evidence, not time. An ambiguous status (403, 404, 405, 410, 501, 505) is
the message's own fault if the message receives one again, and another message was accepted with the
same API key between the two requests. Between means that the other request was sent after the first
answer had arrived, and accepted before the second request was sent. A request that was in flight
when a key was revoked proves nothing.

A 401, 402, 429 or 503 with `Retry-After` concerns one message if that message, or its number,
receives one again while other messages of its sender are accepted. It concerns one sender if only
messages of other senders are accepted after the sender's first such answer. A limit for all senders
gives others such answers too; at most a tenth of their answers may therefore be of this kind.

If ten messages in a row receive the same unknown refusal, the set-up is at fault.
"""

from collections import OrderedDict
from typing import Final

from bridge.worker.fates import About, Answer, Fate
from bridge.worker.service.breaker_states import Trip

MAX_SUSPECTS: Final = 10_000
MAX_SENDERS: Final = 1000
# For each answer of this kind to others, this many of their messages must have been accepted.
ACCEPTED_PER_REFUSED: Final = 10
# After the same unknown refusal of this many messages in a row, the set-up is at fault.
MAX_REFUSED_IN_A_ROW: Final = 10


class _Suspect:
    """A message with ambiguous answers.

    `times` counts them; `answered_at` is the number of the latest request when the last one
    arrived.
    """

    __slots__ = ("answered_at", "is_proven", "times")

    def __init__(self) -> None:
        self.times = 0
        self.answered_at = 0
        self.is_proven = False


class _Tally:
    """Counts of the accepted and refused requests of one sender, or of all.

    `accepted_at` is the number of the latest accepted request.
    """

    __slots__ = ("accepted", "accepted_at", "refused")

    def __init__(self) -> None:
        self.accepted = 0
        self.refused = 0
        self.accepted_at = 0


class _Subject:
    """A message, number or sender that an answer may concern.

    When its first such answer arrived, `first_at` was the number of the latest request, and
    `accepted` and `refused` were the counts of the others. `own` counts its own such answers since.
    """

    __slots__ = ("accepted", "first_at", "own", "refused")

    def __init__(self, first_at: int, accepted: int, refused: int) -> None:
        self.first_at = first_at
        self.accepted = accepted
        self.refused = refused
        self.own = 0

    def is_shown_by(self, accepted: int, refused: int, accepted_at: int) -> bool:
        """Whether the others' current counts prove that the answers concern this subject alone."""
        accepted -= self.accepted
        refused -= self.refused + self.own
        is_after = accepted_at > self.first_at
        return is_after and refused * ACCEPTED_PER_REFUSED <= accepted


_Subjects = OrderedDict[str, _Subject]


class FailureClassifier:
    """Remembers which messages of one worker received doubtful answers, by key.

    The memory is limited, and the oldest entries are dropped first: a forgotten fault is found
    again at the cost of one more POST. Recipients' numbers are remembered too; those with
    ambiguous answers only to choose a better probe. Requests are numbered from the start, and the
    numbers serve as times. `others` are the messages about to be sent, or sent since counting
    began: their answers may show that a wait is not for all. Discard a message that leaves.
    """

    def __init__(self) -> None:
        self._requests = 0
        # Number of the latest request that was accepted.
        self._accepted_at = 0
        self._key_changed_at = 0
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._recipients: OrderedDict[str, None] = OrderedDict()
        self._messages: _Subjects = OrderedDict()
        self._numbers: _Subjects = OrderedDict()
        self._senders: _Subjects = OrderedDict()
        # The last unknown refusal, and the messages in a row that received it.
        self._refusal: tuple[int | None, str | None] = (None, None)
        self._refused: set[str] = set()
        self.others: set[str] = set()
        self._start_counting()

    def _start_counting(self) -> None:
        self._all = _Tally()
        # The number of the latest accepted request, its sender, and the latest one of any other
        # sender.
        self._latest_at, self._latest_sender, self._other_at = 0, "", 0
        self._tallies: OrderedDict[str, _Tally] = OrderedDict()
        # Whether a later acceptance could prove anything about a message, number or sender.
        self.is_counting = False

    def expect(self, key: str) -> None:
        """Note that a message is about to be sent; `classify` ends that."""
        if not self.is_subject(key):
            self.others.add(key)

    def begin(self, key: str) -> int:
        """Note that a request is sent; return its number, for `classify`."""
        self._requests += 1
        if self.others:
            self.others.discard(key)
        if self.is_counting and key not in self._messages:
            self.others.add(key)
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
        trip: Trip | None,
    ) -> Answer:
        """Note the answer to a request; return it with `about` set if it concerns only one.

        `is_known`: another worker has proved that it concerns this message. While the breaker is
        open (`trip`), earlier evidence may no longer be valid, so no message is found at fault;
        and a refusal with the status that tripped the breaker has the same cause.
        """
        if self.others:
            self.others.discard(key)
        if answer.fate is Fate.SENT:
            self._accept(key, recipient, sender, request_number)
            return answer
        if answer.fate is Fate.REFUSED:
            answer = self._judge_refusal(answer, key, trip)
        if answer.fate is Fate.AMBIGUOUS:
            is_proven = self._suspect(key, recipient, request_number)
            return _of_the_message(answer) if is_proven and trip is None else answer
        if answer.may_be_about_one and answer.about is None:
            about = self._note_subject(key, recipient, sender, request_number, is_known=is_known)
            return answer if about is None or trip is not None else _about(answer, about)
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

    def _judge_refusal(self, answer: Answer, key: str, trip: Trip | None) -> Answer:
        """Treat an unknown refusal as ambiguous once message after message receives it."""
        if not answer.is_unknown_refusal:
            self._refused.clear()
            return answer
        refusal = answer.status, answer.code
        if refusal != self._refusal:
            self._refusal = refusal
            self._refused.clear()
        if not self.is_refused_in_a_row:
            self._refused.add(key)
            has_opened = trip is not None and trip.status == answer.status
            if not self.is_refused_in_a_row and not has_opened:
                return answer
        detail = f"{answer.detail}, as for the messages before it"
        return answer._replace(fate=Fate.AMBIGUOUS, pause="misconfigured", detail=detail)

    @property
    def is_refused_in_a_row(self) -> bool:
        """Whether ten messages in a row received the same unknown refusal."""
        return len(self._refused) >= MAX_REFUSED_IN_A_ROW

    def _forget(self, key: str, recipient: str) -> None:
        """Forget the evidence about a refused message and its number."""
        self._suspects.pop(key, None)
        if self.is_counting:
            self._messages.pop(key, None)
            self._numbers.pop(recipient, None)
            self._stop_counting_if_over()

    # Ambiguous statuses

    def _suspect(self, key: str, recipient: str, request_number: int) -> bool:
        """Note an ambiguous status; return whether it is proved to be the message's own fault."""
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
        """Whether the message, or another one to its recipient, received an ambiguous answer."""
        return key in self._suspects or recipient in self._recipients

    def ambiguous_answers(self, key: str) -> int:
        """Return how many ambiguous answers in a row a message has received, as far as is known."""
        suspect = self._suspects.get(key)
        return 0 if suspect is None else suspect.times

    # Answers that may concern one message or one sender

    def is_subject(self, key: str) -> bool:
        """Whether the last answer to a message may concern that message alone."""
        return self.is_counting and key in self._messages

    def is_subject_again(self, key: str) -> bool:
        """Whether more than one answer to a message may concern that message alone."""
        subject = self._messages.get(key)
        return subject is not None and subject.own > 0

    def is_only_sender(self, sender: str) -> bool:
        """Whether all such answers went to one sender without an acceptance since."""
        return len(self._senders) == 1 and sender in self._senders

    def about(self, key: str, recipient: str, sender: str) -> About | None:
        """Return what another such answer to a message would concern now; None means all."""
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
        """Whether such answers are proved to concern this message, or its recipient's number."""
        own = self._tallies.get(sender, _NOTHING)
        subjects = (self._messages.get(key), self._numbers.get(recipient))
        return any(
            subject is not None and subject.is_shown_by(own.accepted, own.refused, own.accepted_at)
            for subject in subjects
        )

    def _note_subject(
        self, key: str, recipient: str, sender: str, request_number: int, *, is_known: bool
    ) -> About | None:
        """Note such an answer to a message; return what it concerns, None for all.

        This worker's own evidence takes precedence over another worker's (`is_known`). Each answer
        is judged by the others' current counts, because a limit for all may have begun after the
        answers were proved to concern one message.
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
        """Reset all counts when there is no message or number left to decide about."""
        if not self._messages and not self._numbers:
            self._senders.clear()
            self._start_counting()

    # The end of evidence

    def forget_refusals(self) -> None:
        """Forget the refusals in a row: the breaker has closed."""
        self._refused.clear()

    def renew_key(self) -> None:
        """Forget everything: the API key has changed, and nothing is known about the new one."""
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
    """Note one more answer that may concern a subject; the counts at its first answer are kept."""
    subject = subjects.get(name)
    if subject is not None:
        subject.own += 1
        subjects.move_to_end(name)
        return
    subjects[name] = _Subject(first_at=requests, accepted=accepted, refused=refused)
    if len(subjects) > most:
        subjects.popitem(last=False)


def _of_the_message(answer: Answer) -> Answer:
    detail = f"{answer.detail}, twice, and accepted another message in between"
    return answer._replace(fate=Fate.REFUSED, pause=None, detail=detail)


def _about(answer: Answer, about: About) -> Answer:
    others = "other messages" if about == "message" else "messages of other senders"
    detail = f"{answer.detail} again, but accepts {others}"
    return answer._replace(about=about, pause=None, detail=detail)
