"""Recognise what a publisher has sent twice, also when two workers take one each.

Each reports to the others which messages it takes, sends, and settles in another way, some times a
second, all in one message. Whoever is given what a peer is working on waits for that; what a peer
has sent is a repeat. Two that are taken within the time that a report takes are both sent. A report
that is lost is made good when somebody waits for it, and by no one otherwise.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from bridge.worker.cluster.asking import ASK_AGAIN_SECONDS, BUSY_SECONDS, MOST_BUSY_SECONDS
from bridge.worker.cluster.beats import PRESENT, REMEMBERED
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Beat, Hello
from bridge.worker.cluster.reports import (
    MAX_REPORTED,
    Recent,
    RecentQuestion,
    Report,
    read_digests,
    read_records,
    write_digests,
    write_records,
)
from bridge.worker.delivery import Delivery
from bridge.worker.expiring_map import MAX_ENTRIES
from bridge.worker.message_identity import MessageIdentity
from bridge.worker.sent_messages import Accepted, SentMessages

# Between two reports. The first after a quiet time goes at the end of the loop's iteration.
REPORT_SECONDS: Final = 0.02
# What was sent while nobody could be told is told afterwards; of more, the newest.
MAX_UNTOLD: Final = 10_000
# A worker that joins is told so much of what was sent lately, a part at a time: a second in all.
MAX_RECENT: Final = 20_000
PART_SECONDS: Final = 0.02
# While one answers no other is asked; nobody after that.
RECENT_AGAIN_SECONDS: Final = 2.0
MOST_RECENT_SECONDS: Final = 10.0
# How many may be answered at once; the others ask again.
MAX_ANSWERED: Final = 4


class ClusterDeduplicator:
    """One worker's part: what it reports, and what it has heard that peers are working on.

    What was sent is in `acceptances`. `now` gives unix seconds.
    """

    def __init__(
        self,
        peers: Peers,
        acceptances: SentMessages,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._peers = peers
        self._sent_messages = acceptances
        self._clock = clock
        self._now = now
        self._working_on: set[bytes] = set()
        # Which peer is working on it, and when that was heard.
        self._busy: dict[bytes, tuple[str, float]] = {}
        self._awaited: dict[bytes, asyncio.Future[None]] = {}
        self._taken: dict[bytes, None] = {}
        self._let_go: dict[bytes, None] = {}
        self._asked: dict[bytes, None] = {}
        self._sent: deque[tuple[bytes, Accepted]] = deque(maxlen=MAX_UNTOLD)
        self._reporting: asyncio.TimerHandle | None = None
        self._reported_at = -REPORT_SECONDS
        # Each time that the worker joins the exchange it may have missed something.
        self._join = -1
        self._joined_at = 0.0
        self._is_caught_up = False
        self._recent_asked_at = 0.0
        self._recent_asked: set[str] = set()
        self._answering: set[asyncio.Task[None]] = set()
        peers.on(Report, self._hear)
        peers.on(RecentQuestion, self._on_recent_question)
        peers.on(Recent, self._on_recent)
        peers.on(Beat, lambda peer, _: self._catch_up(peer))
        peers.on(Hello, lambda _peer, _: self._report_all_taken())
        peers.each_second(self._look_after)

    # What the worker does

    async def until_ended_elsewhere(
        self, delivery: Delivery, identity: MessageIdentity, *, may_wait: Callable[[], bool]
    ) -> bool:
        """Return when no peer is working on the same message any more.

        Returns False while one does and it `may_wait` no longer. A peer that is not heard, or that
        does not say that it has the message, is waited for for some seconds.
        """
        message, since = identity.message, self._clock()
        if message not in self._busy:
            return True
        with delivery.waits("peers"):
            while self._is_busy(message, since):
                if not may_wait() or self._clock() - since >= MOST_BUSY_SECONDS:
                    return False
                self._asked[message] = None
                self._report_soon()
                await self._until_heard(message)
        return True

    def take(self, identity: MessageIdentity) -> None:
        """Report that a message is being worked on here."""
        if identity.has_id:
            self._working_on.add(identity.message)
            self._taken[identity.message] = None
            self._let_go.pop(identity.message, None)
            self._report_soon()

    def end(self, identity: MessageIdentity, accepted: Accepted | None) -> None:
        """Report that it was accepted, or that it was not, so that another one may be tried."""
        if not identity.has_id:
            return
        self._working_on.discard(identity.message)
        self._taken.pop(identity.message, None)
        if accepted is None:
            self._let_go[identity.message] = None
        else:
            self._sent.append((identity.message, accepted))
        self._report_soon()

    # What is reported

    def _report_soon(self) -> None:
        if self._reporting is None:
            loop = asyncio.get_running_loop()
            wait_seconds = self._reported_at + REPORT_SECONDS - self._clock()
            self._reporting = loop.call_later(max(0.0, wait_seconds), self.report)

    def report(self) -> None:
        """Say all that has not been said yet."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        self._reported_at = self._clock()
        has_peers = bool(self._peers.roster.others(REMEMBERED))
        if self._peers.is_up and has_peers:
            self._report_now()
            return
        # Who comes, or comes back, is told what is being worked on by then.
        self._taken.clear()
        self._let_go.clear()
        self._asked.clear()
        if not has_peers:
            self._sent.clear()

    def _report_now(self) -> None:
        while self._taken or self._sent or self._let_go or self._asked:
            sent = [self._sent.popleft() for _ in range(min(len(self._sent), MAX_REPORTED))]
            self._peers.tell(
                Report(
                    taken=_take_some(self._taken),
                    sent=write_records(sent, now=self._now()),
                    let_go=_take_some(self._let_go),
                    asked=_take_some(self._asked),
                )
            )

    def _report_all_taken(self) -> None:
        if self._working_on:
            self._taken.update(dict.fromkeys(self._working_on))
            self._report_soon()

    # What peers report

    def _hear(self, peer: str, told: Report) -> None:
        now = self._clock()
        for message in read_digests(told.taken):
            self._busy[message] = (peer, now)
        while len(self._busy) > MAX_ENTRIES:
            self._forget(next(iter(self._busy)))
        self._learn(told.sent)
        for message in read_digests(told.let_go):
            if self._busy.get(message, ("",))[0] == peer:
                self._forget(message)
        for message in read_digests(told.asked):
            self._report_again(message)

    def _learn(self, sent: bytes) -> None:
        now = self._now()
        for message, attempts, status, age_seconds in read_records(sent):
            self._sent_messages.learn(message, attempts, status, now - age_seconds, age_seconds)
            self._forget(message)

    def _report_again(self, message: bytes) -> None:
        if message in self._working_on:
            self._taken[message] = None
            self._report_soon()
        elif (accepted := self._sent_messages.own(message)) is not None:
            self._sent.append((message, accepted))
            self._report_soon()

    def _is_busy(self, message: bytes, since: float) -> bool:
        """Whether a peer is working on it that is there, and says so when it is asked."""
        busy = self._busy.get(message)
        if busy is None:
            return False
        peer, heard_at = busy
        silent_seconds = self._clock() - max(since, heard_at)
        if silent_seconds < BUSY_SECONDS and peer in self._peers.roster.others(PRESENT):
            return True
        self._forget(message)
        return False

    async def _until_heard(self, message: bytes) -> None:
        """Wait until its end is heard of, but not for longer than until it is asked again."""
        heard = self._awaited.get(message)
        if heard is None:
            heard = self._awaited[message] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_AGAIN_SECONDS):
                await asyncio.shield(heard)

    def _forget(self, message: bytes) -> None:
        self._busy.pop(message, None)
        heard = self._awaited.pop(message, None)
        if heard is not None:
            heard.set_result(None)

    # What was sent before

    def _look_after(self) -> None:
        """Each second: say what could not be said, and see whether anything was missed."""
        if self._sent:
            self._report_soon()
        self._note_join()
        seconds = self._clock() - self._joined_at
        is_alone = not self._peers.roster.others(REMEMBERED)
        most_seconds = RECENT_AGAIN_SECONDS if is_alone else MOST_RECENT_SECONDS
        self._is_caught_up = self._is_caught_up or seconds >= most_seconds

    def _note_join(self) -> None:
        if self._join != self._peers.joins:
            self._join = self._peers.joins
            self._joined_at = self._clock()
            self._is_caught_up = False
            self._recent_asked_at = self._joined_at - RECENT_AGAIN_SECONDS
            self._recent_asked.clear()

    def _catch_up(self, peer: str) -> None:
        """Ask a peer that is there, once, unless another one is answering."""
        self._note_join()
        now = self._clock()
        is_answered = now - self._recent_asked_at < RECENT_AGAIN_SECONDS
        if not (self._is_caught_up or is_answered or peer in self._recent_asked):
            self._recent_asked_at = now
            self._recent_asked.add(peer)
            self._peers.tell(RecentQuestion(to=peer))

    def _on_recent_question(self, peer: str, asked: RecentQuestion) -> None:
        if asked.to == self._peers.worker_id and len(self._answering) < MAX_ANSWERED:
            task = asyncio.create_task(self._tell_recent(peer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _tell_recent(self, peer: str) -> None:
        recent = self._sent_messages.latest(MAX_RECENT)
        while part := list(itertools.islice(recent, MAX_REPORTED)):
            self._peers.tell(Recent(to=peer, sent=write_records(part, now=self._now())))
            await asyncio.sleep(PART_SECONDS)
        # Who has not caught up itself may not know all: another one is asked, too.
        if self._is_caught_up:
            self._peers.tell(Recent(to=peer, is_last=True))

    def _on_recent(self, _peer: str, told: Recent) -> None:
        if told.to != self._peers.worker_id:
            return
        self._learn(told.sent)
        self._recent_asked_at = self._clock()
        self._is_caught_up = self._is_caught_up or told.is_last


def _take_some(waiting: dict[bytes, None]) -> bytes:
    """Remove as many as one message holds, the first ones, and pack them."""
    some = list(itertools.islice(waiting, MAX_REPORTED))
    for message in some:
        del waiting[message]
    return write_digests(some)
