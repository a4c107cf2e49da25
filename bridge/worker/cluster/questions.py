"""Ask the peers about a redelivery that this worker does not know, before processing it.

A peer may have the message in flight, or may have sent it before it lost its connection. The
deduplicator learns the answers as if they were its own records. The record of a released message
is handed on only once; a peer that repeats its question gets the same answer.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from bridge.amqp.properties import Properties
from bridge.errors import InvalidMessageError
from bridge.ttl_cache import ExpiringMap
from bridge.worker.cluster.membership import PRESENT, REMEMBERED, Membership, Part
from bridge.worker.cluster.messages import (
    MAX_ANSWERS,
    MAX_DETAIL_CHARACTERS,
    MAX_QUESTIONS,
    Answers,
    Join,
    Message,
    PeerAnswer,
    Question,
    Questions,
    ReleasedFacts,
    ReleasedOutcome,
    facts_of,
)
from bridge.worker.deduplicator import Deduplicator, MessageIdentity, Released, Repeat
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import Envelope, read_envelope
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.outcomes import Dead, Retried

# How often an open question is repeated, because it or its answer may have been lost.
ASK_AGAIN_SECONDS: Final = 1.0
# A peer that has not confirmed for this long that the message is in flight there does not have it.
BUSY_SECONDS: Final = 5.0
# How long to wait for a peer that has the message in flight. The broker waits 30 minutes for an ack
# (consumer_timeout).
MOST_BUSY_SECONDS: Final = 600.0
# This many redeliveries may wait while the worker consumes others; nine workers with the default
# concurrency have 450 in flight.
MOST_WAITING: Final = 500
# Two peers may hand on two equal messages without an id to one worker, which hands on the second
# one in turn. A peer that asks meanwhile has to wait this long.
HANDED_ON_SECONDS: Final = 2.0
# How many batches of questions may wait for the broker; the peers repeat the others anyway.
MAX_UNPROVEN: Final = 64
# Fields of both `Retried` and `Dead`, except their detail.
_SHARED: Final = ("reason", "status", "counted", "uncertain", "code", "meaning")


class Consuming(Protocol):
    """The consumer of the queue."""

    @property
    def prefetch(self) -> int:
        """The current prefetch; 0 if it does not consume."""

    def renew(self) -> None:
        """Register anew, so that unacked deliveries no longer count towards the prefetch."""

    async def prove(self) -> None:
        """Return when the broker has answered on its session, or the session is over."""


class Sendable(Protocol):
    """The account that the worker sends with."""

    @property
    def sending_prefetch(self) -> int:
        """Prefetch that sending needs."""


@dataclass(slots=True, eq=False)
class _Case:
    """A redelivery that waits for answers.

    `busy`: when each peer last said that the message is in flight there. `answered`: peers that
    have given their last answer. `told`: peers that had a record. Cases are kept for a minute, so
    they do not refer to the delivery's body or session.
    """

    properties: Properties
    envelope: Envelope
    identity: MessageIdentity
    question: Question
    is_done: bool = False
    busy: dict[str, float] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    released: list[ReleasedFacts] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class RedeliveryQuestions(Part):
    """One worker's questions and answers; `delays_seconds` are the delays of its retry queues.

    Waits up to `most_seconds` for the peers heard in the last minute. The prefetch limits the
    number of open questions.
    """

    def __init__(  # noqa: PLR0913
        self,
        membership: Membership,
        deduplicator: Deduplicator,
        consumer: Consuming,
        account: Sendable,
        *,
        most_seconds: float,
        delays_seconds: Sequence[float],
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._deduplicator = deduplicator
        self._consumer = consumer
        self._account = account
        self._most_seconds = most_seconds
        self._delays_seconds = delays_seconds
        self._metrics = metrics
        self._clock = clock
        self._numbers = itertools.count()
        self._open: dict[int, _Case] = {}
        self._open_entries: Counter[MessageIdentity | bytes] = Counter()
        # Numbers of the cases whose deliveries count towards the prefetch.
        self._in_the_way: set[int] = set()
        # For late answers: the peer that gave one has handed on its record.
        self._closed: ExpiringMap[int, _Case] = ExpiringMap(REMEMBERED.seconds, clock)
        # Numbers of the closed cases of messages without an id to which no peer gave a record.
        self._unanswered: ExpiringMap[MessageIdentity, int] = ExpiringMap(REMEMBERED.seconds, clock)
        self._to_ask: list[Question] = []
        self._given: ExpiringMap[tuple[str, int], PeerAnswer] = ExpiringMap(
            REMEMBERED.seconds, clock
        )
        self._handed_on: ExpiringMap[MessageIdentity, str] = ExpiringMap(HANDED_ON_SECONDS, clock)
        self._unproven: set[asyncio.Task[None]] = set()
        self._gives_up_copies = False

    # Asking

    async def learn_of(self, delivery: Delivery, identity: MessageIdentity) -> None:
        """Ask the peers about a redelivery, and pass their answers to the deduplicator."""
        if self._deduplicator.knows(identity):
            return
        if self._membership.awaits_peers:
            with delivery.waits("peers"):
                await self._membership.until_peers_are_back()
        if not self._membership.expects_answers:
            return
        facts = facts_of(identity)
        if facts is None:
            return
        question = Question(number=self._take_number(identity), **facts.model_dump())
        case = _Case(delivery.properties, delivery.envelope, identity, question)
        self._open_case(case)
        try:
            with delivery.waits("peers"):
                answer = await self._until_answered(case)
            self._metrics.redelivery_questions.labels(answer).inc()
        finally:
            self._close_case(case)
            # Also if this redelivery is cancelled: the peer has handed on its record.
            self._learn_released(case)

    def _take_number(self, identity: MessageIdentity) -> int:
        """Return the number of an unanswered question about an equal message, or a new one.

        The answer may have been lost with the connection on which this worker waited for it. The
        peer has handed on its record, and gives it again only to a question of the same number.
        """
        while (taken := self._unanswered.take(identity)) is not None:
            case = self._closed.get(taken[0])
            if case is not None and not case.told:
                return taken[0]
        return next(self._numbers)

    def make_room(self) -> None:
        """Register anew as a consumer if waiting redeliveries use up most of the prefetch.

        Up to ten times the prefetch may wait, at most 500, but at least twice the prefetch. It is
        not done more often, because messages sent to the cancelled consumer come as redeliveries.
        """
        prefetch, wanted = self._consumer.prefetch, self._account.sending_prefetch
        is_room_taken = 4 * len(self._in_the_way) >= 3 * prefetch > 0
        if is_room_taken and len(self._open) < max(2 * wanted, min(10 * wanted, MOST_WAITING)):
            self._in_the_way.clear()
            self._consumer.renew()

    def _open_case(self, case: _Case) -> None:
        self._open[case.question.number] = case
        self._open_entries[_message_of(case.identity)] += 1
        self._in_the_way.add(case.question.number)
        self.make_room()

    def _close_case(self, case: _Case) -> None:
        del self._open[case.question.number]
        asked = _message_of(case.identity)
        self._open_entries[asked] -= 1
        if not self._open_entries[asked]:
            del self._open_entries[asked]
        self._in_the_way.discard(case.question.number)
        self._closed.add(case.question.number, case)
        if not (case.told or case.identity.has_id):
            self._unanswered.add(case.identity, case.question.number)
        self.make_room()

    async def _until_answered(self, case: _Case) -> str:
        """Wait; return the answer as the metric names it, `none` if a peer did not answer."""
        began = self._clock()
        while True:
            self._ask(case.question)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_SECONDS):
                    while not (case.is_done or self._have_all_answered(case)):
                        await case.changed.wait()
                        case.changed.clear()
            if case.is_done:
                return "done"
            if self._have_all_answered(case):
                return "kept" if case.released else "unknown"
            waited_seconds = self._clock() - began
            is_busy = self._is_busy(case) and waited_seconds < MOST_BUSY_SECONDS
            if waited_seconds >= self._most_seconds and not is_busy:
                return "none"

    def _have_all_answered(self, case: _Case) -> bool:
        """Whether no answer is missing; only one peer has a record of a message without an id."""
        if case.released and not case.identity.has_id:
            return True
        return self._membership.others(REMEMBERED) <= case.answered

    def _is_busy(self, case: _Case) -> bool:
        """Whether a present peer has the message in flight."""
        since = self._clock() - BUSY_SECONDS
        present = self._membership.others(PRESENT)
        return any(peer in present and at >= since for peer, at in case.busy.items())

    def _ask(self, question: Question) -> None:
        """Publish the question at the end of this event loop iteration, with all others."""
        if not self._to_ask:
            asyncio.get_running_loop().call_soon(self._ask_now)
        self._to_ask.append(question)

    def _ask_now(self) -> None:
        questions = tuple(self._to_ask)
        self._to_ask.clear()
        for at in range(0, len(questions), MAX_QUESTIONS):
            self._membership.publish(Questions(questions=questions[at : at + MAX_QUESTIONS]))

    def receive(self, peer: str, message: Message) -> None:
        """Answer questions, process answers, and repeat open questions for a peer that joins."""
        match message:
            case Questions():
                self._on_questions(peer, message.questions)
            case Answers() if message.to == self._membership.worker_id:
                for answer in message.answers:
                    self._on_answer(peer, answer)
            case Join():
                for case in self._open.values():
                    self._ask(case.question)
            case _:
                pass

    def _on_answer(self, peer: str, answer: PeerAnswer) -> None:
        case = self._open.get(answer.number)
        if case is not None:
            self._note(case, peer, answer)
        elif (closed := self._closed.get(answer.number)) is not None:
            self._note(closed, peer, answer)
            self._learn_released(closed)

    def _note(self, case: _Case, peer: str, answer: PeerAnswer) -> None:
        # A peer repeats its answer to a repeated question.
        is_news = peer not in case.told
        if answer.knows in {"done", "kept"}:
            case.told.add(peer)
        match answer.knows:
            case "busy":
                case.busy[peer] = self._clock()
                case.answered.discard(peer)
            case "unknown":
                case.answered.add(peer)
            case "done":
                # Two peers may each have sent one of two equal messages without an id.
                if not case.is_done or (is_news and not case.identity.has_id):
                    self._deduplicator.learn(case.identity, None)
                case.is_done = True
            case "kept":
                if is_news and answer.released is not None:
                    case.released.append(answer.released)
                case.answered.add(peer)
        case.changed.set()

    def _learn_released(self, case: _Case) -> None:
        """Learn the handed-on state of a redelivery, unless the same message is settled."""
        released, case.released = case.released, []
        if case.is_done and case.identity.has_id:
            return
        for facts in released:
            told = read_released(
                facts, case.properties, case.envelope, self._delays_seconds, now=time.time()
            )
            self._deduplicator.learn(case.identity, told)

    # Answering

    def give_up_copies(self) -> None:
        """Hand on messages whose copies are unconfirmed too, because this worker ends.

        The peer publishes another copy, marked as one that may be in the queue twice.
        """
        self._gives_up_copies = True

    def _on_questions(self, peer: str, asked: Sequence[Question]) -> None:
        unproven = [question for question in asked if self._needs_proof(peer, question)]
        self._answer(peer, [question for question in asked if question not in unproven])
        if unproven and len(self._unproven) < MAX_UNPROVEN:
            task = asyncio.create_task(self._answer_when_proven(peer, unproven))
            self._unproven.add(task)
            task.add_done_callback(self._unproven.discard)

    def _needs_proof(self, peer: str, question: Question) -> bool:
        """Whether the session must be proved alive before this question can be answered."""
        identity, deduplicator = question.identity, self._deduplicator
        if (peer, question.number) in self._given or deduplicator.is_working_on(identity):
            return False
        return deduplicator.depends_on_session(identity)

    async def _answer_when_proven(self, peer: str, questions: Sequence[Question]) -> None:
        await self._consumer.prove()
        self._answer(peer, questions)

    def _answer(self, peer: str, questions: Sequence[Question]) -> None:
        answers = tuple(self._answer_once(peer, question) for question in questions)
        for at in range(0, len(answers), MAX_ANSWERS):
            part = answers[at : at + MAX_ANSWERS]
            self._membership.publish(Answers(to=peer, answers=part))

    def _answer_once(self, peer: str, question: Question) -> PeerAnswer:
        given = self._given.get((peer, question.number))
        if given is not None:
            return given
        answer = self._look_up(peer, question)
        if answer.knows in {"done", "kept"}:
            self._given.add((peer, question.number), answer)
            if not question.has_id:
                self._handed_on.add(question.identity, peer)
        return answer

    def _look_up(self, peer: str, question: Question) -> PeerAnswer:
        number, identity, deduplicator = question.number, question.identity, self._deduplicator
        # If several workers ask about the same message, the one with the lowest id goes first.
        is_asking = _message_of(identity) in self._open_entries
        is_first = is_asking and self._membership.worker_id < peer
        if is_first or deduplicator.is_working_on(identity):
            return PeerAnswer(number=number, knows="busy")
        known = deduplicator.hand_on(identity)
        if known is None:
            is_put_off = self._handed_on.get(identity) not in {None, peer}
            return PeerAnswer(number=number, knows="busy" if is_put_off else "unknown")
        if isinstance(known, Repeat):
            return PeerAnswer(number=number, knows="done")
        replacement = known.replacement
        if replacement is not None and replacement.is_stored:
            return PeerAnswer(number=number, knows="done")
        is_unconfirmed = replacement is not None and not replacement.is_refused
        if is_unconfirmed and not self._gives_up_copies:
            deduplicator.learn(identity, known)
            return PeerAnswer(number=number, knows="busy")
        return PeerAnswer(
            number=number, knows="kept", released=write_released(known, now=time.time())
        )


def _message_of(identity: MessageIdentity) -> MessageIdentity | bytes:
    """Return the identity without the number of the copy, if the message has an id."""
    return identity.message if identity.has_id else identity


def write_released(known: Released, *, now: float) -> ReleasedFacts:
    """Return a released delivery's state as it is published; `now` is in unix seconds."""
    envelope, outcome = known.envelope, known.outcome
    told = None
    if isinstance(outcome, Retried | Dead):
        told = ReleasedOutcome(
            is_dead=isinstance(outcome, Dead),
            delay_seconds=outcome.delay_seconds if isinstance(outcome, Retried) else 0,
            detail=outcome.detail[:MAX_DETAIL_CHARACTERS],
            **{name: getattr(outcome, name) for name in _SHARED},
        )
    return ReleasedFacts(
        key=envelope.key if envelope.message_id is None else None,
        first_delivered_seconds_ago=max(0.0, now - envelope.first_delivered_at),
        expires_in_seconds=None if envelope.expires_at is None else envelope.expires_at - now,
        scheduled_in_seconds=None if envelope.scheduled_at is None else envelope.scheduled_at - now,
        has_been_copied=envelope.has_been_copied
        or (known.replacement is not None and known.replacement.may_be_stored),
        attempts=envelope.attempts,
        uncertain_attempts=envelope.uncertain_attempts,
        outcome=told,
    )


def read_released(
    facts: ReleasedFacts,
    properties: Properties,
    envelope: Envelope,
    delays_seconds: Sequence[float],
    *,
    now: float,
) -> Released:
    """Return the state of a released delivery that a peer has handed on.

    `delays_seconds` are the delays of this worker's retry queues.
    """
    bare = envelope._replace(
        key=facts.key or envelope.key,
        first_delivered_at=now - facts.first_delivered_seconds_ago,
        expires_at=None if facts.expires_in_seconds is None else now + facts.expires_in_seconds,
        attempts=facts.attempts,
        uncertain_attempts=facts.uncertain_attempts,
    )
    try:
        envelope = read_envelope(properties, bare)
    except InvalidMessageError:
        envelope = bare
    envelope = envelope._replace(has_been_copied=facts.has_been_copied)
    if facts.scheduled_in_seconds is not None:
        envelope = envelope._replace(scheduled_at=now + facts.scheduled_in_seconds)
    told = facts.outcome
    if told is None:
        return Released(envelope, None)
    shared: dict[str, Any] = {name: getattr(told, name) for name in (*_SHARED, "detail")}
    outcome: Retried | Dead = (
        Dead(**shared)
        if told.is_dead
        else Retried(
            delay_seconds=min(
                (step for step in delays_seconds if step >= told.delay_seconds),
                default=delays_seconds[-1],
            ),
            **shared,
        )
    )
    return Released(envelope, outcome)
