"""Ask the peers about a redelivery that is unknown here, before anything is done with it.

Another worker may have it in flight, or may have sent it and lost its connection, so that the
broker has delivered it again. The deduplicator learns the answers as if it had known them itself.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bridge.amqp.properties import Properties
from bridge.worker.cluster.beats import PRESENT, REMEMBERED
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Hello
from bridge.worker.cluster.questions import (
    MAX_QUESTIONS,
    Answer,
    Answers,
    Question,
    Questions,
    ReleasedFacts,
    question_of,
    read_released,
)
from bridge.worker.deduplicator import Deduplicator
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import Envelope
from bridge.worker.expiring_map import ExpiringMap
from bridge.worker.message_identity import MessageIdentity
from bridge.worker.metrics import WorkerMetrics

# A question is asked again so often, as long as it is open: it or its answer may have been lost.
ASK_AGAIN_SECONDS: Final = 1.0
# Who has not said for so long that it is working on the message is not.
BUSY_SECONDS: Final = 5.0
# A peer that is working on the message is waited for longer than one that says nothing, but not
# for longer than the broker waits for an ack; its own limit is 30 minutes (consumer_timeout).
MOST_BUSY_SECONDS: Final = 600.0
# So many redeliveries may wait while others are taken; nine workers with the default concurrency
# have 450 in flight.
MOST_WAITING: Final = 500


@dataclass(slots=True, eq=False)
class _Case:
    """One redelivery that waits for answers: when each peer said it was busy, who knows no more.

    `told` are the peers that knew something. A case is kept for long, so it has only what it needs
    of the delivery, not its body or its connection.
    """

    properties: Properties
    envelope: Envelope
    identity: MessageIdentity
    question: Question
    is_done: bool = False
    busy: dict[str, float] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    kept: list[ReleasedFacts] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Asker:
    """Asks for one worker; `delays_seconds` are the steps of its retry ladder.

    `on_change` is called when one more redelivery waits for answers, or one less.

    Waits for peers that were heard in the last minute, `most_seconds` at most. As many questions
    are open as redeliveries are held, which the prefetch bounds.
    """

    def __init__(
        self,
        peers: Peers,
        deduplicator: Deduplicator,
        *,
        most_seconds: float,
        delays_seconds: Sequence[float],
        on_change: Callable[[], None],
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._deduplicator = deduplicator
        self._most_seconds = most_seconds
        self._delays_seconds = delays_seconds
        self._on_change = on_change
        self._metrics = metrics
        self._clock = clock
        self._numbers = itertools.count()
        self._open: dict[int, _Case] = {}
        self._open_entries: Counter[MessageIdentity | bytes] = Counter()
        self._in_the_way: set[int] = set()
        # Answers that come late are learned as well: whoever gave them knows nothing any more.
        self._closed: ExpiringMap[int, _Case] = ExpiringMap(REMEMBERED.seconds, clock)
        self._to_ask: list[Question] = []
        peers.on(Answers, self._on_answers)
        peers.on(Hello, lambda _peer, _hello: self._ask_all())

    @property
    def open(self) -> int:
        """How many redeliveries wait for answers."""
        return len(self._open)

    @property
    def in_the_way(self) -> int:
        """How many of them have come since `put_aside`, and so hold places of the prefetch."""
        return len(self._in_the_way)

    def leaves_few(self, prefetch: int, most_held: int) -> bool:
        """Say whether those in the way hold most places, and more may be held beside them.

        `most_held` is the prefetch without a pause: ten times as many may wait, up to 500, or twice
        as many where that is more. Renewing has a price: what the broker sends while the consumer
        is cancelled comes as a redelivery.
        """
        is_room_taken = 4 * self.in_the_way >= 3 * prefetch > 0
        most_waiting = max(2 * most_held, min(10 * most_held, MOST_WAITING))
        return is_room_taken and self.open < most_waiting

    def put_aside(self) -> None:
        """Note that this worker is about to consume anew, with other places than theirs."""
        self._in_the_way.clear()

    def is_asking(self, identity: MessageIdentity) -> bool:
        """Say whether a redelivery of the same message waits for answers here."""
        return _message_of(identity) in self._open_entries

    async def learn_of(self, delivery: Delivery, identity: MessageIdentity) -> None:
        """Have the deduplicator learn all that any peer knows of a redelivery within the time."""
        if self._deduplicator.knows(identity) or not self._peers.expects_answers:
            return
        question = question_of(next(self._numbers), identity)
        if question is None:
            return
        case = _Case(delivery.properties, delivery.envelope, identity, question)
        self._open_case(case)
        try:
            with delivery.waits("peers"):
                answer = await self._until_answered(case)
            self._metrics.redelivery_questions.labels(answer).inc()
        finally:
            self._close_case(case)
            # Also when this redelivery is given up: whoever told it knows it no more.
            self._learn_kept(case)

    def _open_case(self, case: _Case) -> None:
        self._open[case.question.number] = case
        self._open_entries[_message_of(case.identity)] += 1
        self._in_the_way.add(case.question.number)
        self._on_change()

    def _close_case(self, case: _Case) -> None:
        del self._open[case.question.number]
        asked = _message_of(case.identity)
        self._open_entries[asked] -= 1
        if not self._open_entries[asked]:
            del self._open_entries[asked]
        self._in_the_way.discard(case.question.number)
        self._closed.add(case.question.number, case)
        self._on_change()

    async def _until_answered(self, case: _Case) -> str:
        """Return what the answer is; `none` when some peer gave none in time."""
        began = self._clock()
        while True:
            self._ask(case.question)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_SECONDS):
                    await self._until_decided(case)
            if case.is_done:
                return "done"
            if self._have_all_answered(case):
                return "kept" if case.kept else "unknown"
            waited_seconds = self._clock() - began
            is_busy = self._is_busy(case) and waited_seconds < MOST_BUSY_SECONDS
            if waited_seconds >= self._most_seconds and not is_busy:
                return "none"

    async def _until_decided(self, case: _Case) -> None:
        while not (case.is_done or self._have_all_answered(case)):
            await case.changed.wait()
            case.changed.clear()

    def _have_all_answered(self, case: _Case) -> bool:
        """Say whether no more is to be expected; of one without an id, one peer knows all."""
        if case.kept and not case.identity.has_id:
            return True
        return self._peers.roster.others(REMEMBERED) <= case.answered

    def _is_busy(self, case: _Case) -> bool:
        """Say whether a peer that is there is working on it."""
        since = self._clock() - BUSY_SECONDS
        present = self._peers.roster.others(PRESENT)
        return any(peer in present and at >= since for peer, at in case.busy.items())

    def _ask(self, question: Question) -> None:
        """Ask at the end of this iteration of the event loop, together with all others."""
        if not self._to_ask:
            asyncio.get_running_loop().call_soon(self._ask_now)
        self._to_ask.append(question)

    def _ask_now(self) -> None:
        questions = tuple(self._to_ask)
        self._to_ask.clear()
        for at in range(0, len(questions), MAX_QUESTIONS):
            self._peers.tell(Questions(questions=questions[at : at + MAX_QUESTIONS]))

    def _ask_all(self) -> None:
        for case in self._open.values():
            self._ask(case.question)

    # What is answered

    def _on_answers(self, peer: str, answers: Answers) -> None:
        if answers.to != self._peers.worker_id:
            return
        for answer in answers.answers:
            case = self._open.get(answer.number)
            if case is not None:
                self._note(case, peer, answer)
            elif (closed := self._closed.take(answer.number)) is not None:
                self._note(closed[0], peer, answer)
                self._learn_kept(closed[0])
                self._closed.add(answer.number, closed[0])

    def _note(self, case: _Case, peer: str, answer: Answer) -> None:
        # Who is asked again says the same again.
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
                # Of equal messages without an id each peer may have sent another one.
                if not case.is_done or (is_news and not case.identity.has_id):
                    self._deduplicator.learn(case.identity, None)
                case.is_done = True
            case "kept":
                if is_news and answer.kept is not None:
                    case.kept.append(answer.kept)
                case.answered.add(peer)
        case.changed.set()

    def _learn_kept(self, case: _Case) -> None:
        """Learn how a redelivery goes on, unless it is done: one with an id is no other message."""
        kept, case.kept = case.kept, []
        if case.is_done and case.identity.has_id:
            return
        for facts in kept:
            delays, now = self._delays_seconds, time.time()
            told = read_released(
                facts, case.properties, case.envelope, delays_seconds=delays, now=now
            )
            self._deduplicator.learn(case.identity, told)


def _message_of(identity: MessageIdentity) -> MessageIdentity | bytes:
    """Return what all deliveries of a message have in common: with an id, those of each copy."""
    return identity.message if identity.has_id else identity
