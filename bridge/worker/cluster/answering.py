"""Answer the questions of peers about messages that were redelivered to them.

What is known of a released message is handed on once, as the deduplicator does for its own worker.
A peer that asks again gets the same answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.questions import (
    MAX_ANSWERS,
    Answer,
    Answers,
    Question,
    Questions,
    write_released,
)
from bridge.worker.deduplicator import Deduplicator, Repeat
from bridge.worker.expiring_map import ExpiringMap
from bridge.worker.message_identity import MessageIdentity

# How long an answer is repeated to who asks again.
REPEATED_SECONDS: Final = 60.0
# Of equal messages without an id, one worker may be told of two by two peers, and hands on what it
# has too much. Who asks before it can do so is put off for so long.
HANDED_ON_SECONDS: Final = 2.0
# How many batches of questions may wait for the broker at once; more are asked again anyway.
MAX_WAITING: Final = 64


class Answerer:
    """Answers for one worker.

    `prove_session` returns when the broker has answered on the session that consumes, or when that
    is known to be lost: the message in question may be held on it, or its ack may be lost with it.
    `is_asking` says whether this worker itself asks for an identity. Set `gives_up_copies` when it
    ends: no confirm is waited for any more, and who asks publishes a copy that says that it may be
    there twice.
    """

    def __init__(
        self,
        peers: Peers,
        deduplicator: Deduplicator,
        *,
        is_asking: Callable[[MessageIdentity], bool],
        prove_session: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gives_up_copies = False
        self._peers = peers
        self._deduplicator = deduplicator
        self._is_asking = is_asking
        self._prove_session = prove_session
        self._given: ExpiringMap[tuple[str, int], Answer] = ExpiringMap(REPEATED_SECONDS, clock)
        self._handed_on: ExpiringMap[MessageIdentity, str] = ExpiringMap(HANDED_ON_SECONDS, clock)
        self._waiting: set[asyncio.Task[None]] = set()
        peers.on(Questions, self._on_questions)

    def _on_questions(self, peer: str, asked: Questions) -> None:
        known: list[Question] = []
        unproven: list[Question] = []
        for question in asked.questions:
            (unproven if self._needs_proof(peer, question) else known).append(question)
        self._answer(peer, known)
        if unproven and len(self._waiting) < MAX_WAITING:
            task = asyncio.create_task(self._answer_when_proven(peer, unproven))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    def _needs_proof(self, peer: str, question: Question) -> bool:
        if (peer, question.number) in self._given:
            return False
        identity, deduplicator = question.identity, self._deduplicator
        return not deduplicator.is_working_on(identity) and deduplicator.depends_on_session(
            identity
        )

    async def _answer_when_proven(self, peer: str, questions: Sequence[Question]) -> None:
        await self._prove_session()
        self._answer(peer, questions)

    def _answer(self, peer: str, questions: Sequence[Question]) -> None:
        answers = tuple(self._answer_once(peer, question) for question in questions)
        for at in range(0, len(answers), MAX_ANSWERS):
            self._peers.tell(Answers(to=peer, answers=answers[at : at + MAX_ANSWERS]))

    def _answer_once(self, peer: str, question: Question) -> Answer:
        given = self._given.get((peer, question.number))
        if given is not None:
            return given
        answer = self._look_up(peer, question)
        if answer.knows in {"done", "kept"}:
            self._given.add((peer, question.number), answer)
            if not question.has_id:
                self._handed_on.add(question.identity, peer)
        return answer

    def _look_up(self, peer: str, question: Question) -> Answer:
        number, identity, deduplicator = question.number, question.identity, self._deduplicator
        # Of several that ask for the same message, the others wait for the first by its id.
        is_first = self._peers.worker_id < peer and self._is_asking(identity)
        if is_first or deduplicator.is_working_on(identity):
            return Answer(number=number, knows="busy")
        known = deduplicator.hand_on(identity)
        if known is None:
            is_put_off = self._handed_on.get(identity) not in {None, peer}
            return Answer(number=number, knows="busy" if is_put_off else "unknown")
        if isinstance(known, Repeat):
            return Answer(number=number, knows="done")
        if known.replacement is not None and known.replacement.is_stored:
            return Answer(number=number, knows="done")
        is_written = known.replacement is not None and not known.replacement.is_refused
        if is_written and not self.gives_up_copies:
            # The broker has yet to say whether its copy is stored.
            deduplicator.learn(identity, known)
            return Answer(number=number, knows="busy")
        return Answer(number=number, knows="kept", kept=write_released(known, now=time.time()))
