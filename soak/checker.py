"""Judges a soak: the outcome of each message, and the cause of each repeated POST.

A pure function of `Evidence`. The rules are those of Jepsen's `total-queue`: a message that was
confirmed to the publisher must be sent or dead at the end, and no other message may appear.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, NamedTuple

Group = Literal["broker", "worker", "receiver", "api"]
Cause = Literal[
    "api_fault",
    "worker_kill",
    "worker_freeze",
    "other_worker",
    "publisher_repeat",
    "slow_answer",
    "unexplained",
]

WORKER_KILL: Final = "worker kill -9"
WORKER_FREEZE: Final = "worker frozen"
API_503_LATER: Final = "API 503 with Retry-After"

# In a soak, no message is invalid, refused or expired.
EXPECTED_DEATHS: Final = frozenset({"uncertain", "exhausted"})

CLOCK_SECONDS: Final = 0.5
# A POST takes at most two seconds, and its ack a little more. Older POSTs are already settled.
IN_FLIGHT_SECONDS: Final = 5.0
# How long after the worker has given up a POST a busy service may still read it.
LATE_SECONDS: Final = 2.0
# A frozen broker closes connections with missed heartbeats only when it resumes.
CLOSING_SECONDS: Final = 3.0
SHOWN: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault on the timeline, in Unix seconds."""

    kind: str
    group: Group
    started: float
    ended: float
    detail: str = ""

    def covers(self, moment: float) -> bool:
        """Return whether the fault was active at a time."""
        return self.started - CLOCK_SECONDS <= moment <= self.ended + CLOCK_SECONDS


class Post(NamedTuple):
    """A POST that reached the service. `message_id` is derived from the phone number."""

    message_id: str | None
    key: str | None
    at: float
    status: int | None
    accepted: bool


class DeadLetter(NamedTuple):
    """A dead letter."""

    message_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts, collected after every process has ended.

    `published` counts the attempts to publish each message. `slow` and `cut` contain the times at
    which a worker logged a timeout or a lost connection, and `spoiled` the times at which a fault
    spoiled an answer, by idempotency key. `nameless` messages were published without an id. `rows`
    are the messages of each ordering key, in order.
    """

    published: Mapping[str, int]
    confirmed: Collection[str]
    posts: Sequence[Post]
    dead: Sequence[DeadLetter] = ()
    waiting: Sequence[str] = ()
    faults: Sequence[Fault] = ()
    slow: Mapping[str, Sequence[float]] = field(default_factory=dict)
    cut: Mapping[str, Sequence[float]] = field(default_factory=dict)
    spoiled: Mapping[str, Sequence[float]] = field(default_factory=dict)
    nameless: Collection[str] = frozenset()
    rows: Collection[Sequence[str]] = ()
    concurrency: int = 50
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Extra:
    """A POST of a message after `root`, another POST that may have been accepted.

    `fault` is the kill, freeze or lost connection that caused it.
    """

    root: Post
    post: Post
    cause: Cause
    fault: Fault | None = None
    doubled: bool = False


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The counts, and a line in `problems` for each broken promise."""

    published: int
    confirmed: int
    posts: int
    sent: int
    dead: dict[str, int]
    dead_but_sent: int
    waiting: int
    lost: list[str]
    unexpected: list[str]
    new_keys: list[str]
    out_of_order: list[str]
    extra_posts: dict[str, int]
    doubled: dict[str, int]
    worst_kill: int
    worst_freeze: int
    recovery: dict[str, list[float]]
    histories: dict[str, list[str]]
    problems: list[str] = field(default_factory=list)


def check(evidence: Evidence) -> Verdict:
    """Compare the promises with the evidence."""
    checker = _Checker(evidence)
    verdict = checker.count()
    verdict.problems = [*checker.find_losses(verdict), *checker.find_repeats(verdict)]
    return verdict


class _Checker:
    """One pass over the evidence."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._by_message: dict[str, list[Post]] = defaultdict(list)
        for post in sorted(evidence.posts, key=lambda post: post.at):
            if post.message_id is not None:
                self._by_message[post.message_id].append(post)
        self._api_faults = [fault for fault in evidence.faults if fault.group == "api"]
        self._restarts = [fault for fault in evidence.faults if fault.group == "worker"]
        self._kills = [fault for fault in self._restarts if fault.kind == WORKER_KILL]
        self._freezes = [fault for fault in self._restarts if fault.kind == WORKER_FREEZE]
        self._losses = [fault for fault in evidence.faults if fault.group == "broker"]
        self._extras = [extra for posts in self._by_message.values() for extra in self._find(posts)]

    def count(self) -> Verdict:
        """Count every message by its outcome."""
        evidence = self._evidence
        sent = {post.message_id for post in evidence.posts if post.accepted and post.message_id}
        dead = {letter.message_id for letter in evidence.dead}
        found = sent | dead | set(evidence.waiting)
        keys = sorted(set(self._strangers()))
        lost = sorted(set(evidence.confirmed) - found)
        overtaken = [message for row in evidence.rows for message in self._overtaken(row)]
        return Verdict(
            published=len(evidence.published),
            confirmed=len(evidence.confirmed),
            posts=len(evidence.posts),
            sent=len(sent),
            dead=dict(Counter(letter.reason for letter in evidence.dead)),
            dead_but_sent=len(dead & sent),
            waiting=len(evidence.waiting),
            lost=lost,
            unexpected=sorted(found - set(evidence.published)),
            new_keys=keys,
            out_of_order=overtaken,
            extra_posts=dict(Counter(extra.cause for extra in self._extras)),
            doubled=dict(Counter(extra.cause for extra in self._extras if extra.doubled)),
            worst_kill=self._most_doubled("worker_kill"),
            worst_freeze=self._most_doubled("worker_freeze"),
            recovery=self._measure_recovery(),
            histories=self._tell([*lost, *keys, *overtaken, *self._unexplained()]),
        )

    def find_losses(self, verdict: Verdict) -> Iterator[str]:
        """Find lost messages, and other forbidden outcomes."""
        if verdict.lost:
            yield f"{len(verdict.lost)} confirmed messages were lost"
        if verdict.unexpected:
            yield f"{len(verdict.unexpected)} messages arrived that were never published"
        if verdict.waiting:
            yield f"{verdict.waiting} messages still wait"
        for reason in sorted(verdict.dead.keys() - EXPECTED_DEATHS):
            yield f"{verdict.dead[reason]} dead letters say {reason}, which no fault here causes"
        if count := sum(not self._met_an_api_fault(letter) for letter in self._evidence.dead):
            yield f"{count} dead letters did not meet a fault of the API"

    def find_repeats(self, verdict: Verdict) -> Iterator[str]:
        """Find POSTs that should not have happened."""
        if verdict.new_keys:
            yield f"{len(verdict.new_keys)} messages were POSTed with another message's key"
        if verdict.out_of_order:
            yield f"{len(verdict.out_of_order)} messages overtook an earlier one with the same key"
        if count := verdict.extra_posts.get("unexplained", 0):
            yield f"{count} extra POSTs were not caused by the API or a fault"
        if verdict.worst_kill > self._evidence.concurrency:
            yield f"one kill of a worker doubled {verdict.worst_kill} messages"
        if verdict.worst_freeze > self._evidence.concurrency:
            yield f"one freeze of a worker doubled {verdict.worst_freeze} messages"
        if count := verdict.extra_posts.get("other_worker", 0):
            yield f"{count} extra POSTs came from a worker that did not ask the others"

    def _overtaken(self, row: Sequence[str]) -> Iterator[str]:
        """Find messages that overtook an earlier message with the same ordering key.

        Earlier messages that were never accepted are dead or lost, and judged as such.
        """
        accepted_at = 0.0
        for message in row:
            posts = self._by_message.get(message, [])
            if posts and posts[0].at < accepted_at:
                yield message
            first = next((post.at for post in posts if post.accepted), 0.0)
            accepted_at = max(accepted_at, first)

    def _strangers(self) -> Iterator[str]:
        """Find messages that were POSTed with another message's key."""
        for message, posts in self._by_message.items():
            if message not in self._evidence.nameless:
                if any(post.key != message for post in posts):
                    yield message
            elif any(self._has_changed(*pair) for pair in pairwise(posts)):
                yield message

    def _has_changed(self, before: Post, after: Post) -> bool:
        """Return whether a message without an id got another key although its worker kept running.

        Only this worker knew the key. A message that is published twice counts as two messages.
        """
        if before.key == after.key or self._evidence.published.get(str(after.message_id), 0) > 1:
            return False
        ends = [*self._kills, *self._freezes]
        return _find_in_flight(ends, before.at, after.at, CLOSING_SECONDS) is None

    def _met_an_api_fault(self, letter: DeadLetter) -> bool:
        posts = self._by_message.get(letter.message_id, ())
        return any(self._is_in_api_fault(post.at) for post in posts)

    def _is_in_api_fault(self, moment: float) -> bool:
        return any(fault.covers(moment) for fault in self._api_faults)

    # Extra POSTs and their causes

    def _find(self, posts: Sequence[Post]) -> Iterator[Extra]:
        """Find the POSTs of a message that follow a possible acceptance."""
        root: Post | None = None
        was_accepted = False
        for post in posts:
            if root is not None:
                cause, fault = self._explain(root, post)
                yield Extra(root, post, cause, fault, doubled=post.accepted and was_accepted)
            if self._may_be_accepted(post):
                root = post
            was_accepted = was_accepted or post.accepted

    def _may_be_accepted(self, post: Post) -> bool:
        if post.accepted or post.status is None:
            return True
        if post.status == 503:
            later = [fault for fault in self._api_faults if fault.kind == API_503_LATER]
            return not any(fault.covers(post.at) for fault in later)
        return post.status >= 500

    def _explain(self, root: Post, post: Post) -> tuple[Cause, Fault | None]:
        """Find the cause of a POST after a possible acceptance."""
        # The service may have accepted the POST before the fault that spoiled its answer began.
        spoiled = self._evidence.spoiled.get(root.key or "", ())
        if any(root.at <= moment <= post.at for moment in spoiled):
            return "api_fault", None
        # The service may end before it sends an answer that it has counted.
        cut = self._evidence.cut.get(root.key or "", ())
        cuts = [moment for moment in cut if root.at <= moment <= post.at]
        is_answered = root.accepted and root.status is not None and not cuts
        # The service may also have counted it before the fault began.
        if not is_answered and any(self._is_in_api_fault(at) for at in (root.at, *cuts)):
            return "api_fault", None
        if (kill := _find_in_flight(self._kills, root.at, post.at, 0)) is not None:
            return "worker_kill", kill
        freeze = _find_in_flight(self._freezes, root.at, post.at, CLOSING_SECONDS)
        if freeze is not None:
            return "worker_freeze", freeze
        assert post.message_id is not None
        given_up = self._evidence.slow.get(root.key or "", ())
        began = root.at - (LATE_SECONDS if root.status is None else 0)
        if any(began <= moment <= post.at for moment in given_up):
            return "slow_answer", None
        # A worker recognises repeats of the publisher as long as its process runs.
        is_nameless = post.message_id in self._evidence.nameless
        was_restarted = any(root.at <= fault.ended <= post.at for fault in self._restarts)
        may_be_another = self._evidence.workers > 1 or is_nameless or was_restarted
        if may_be_another and self._evidence.published.get(post.message_id, 0) > 1:
            return "publisher_repeat", None
        # After a lost connection, another worker receives the messages in flight, and must ask.
        if self._evidence.workers > 1:
            loss = _find_in_flight(self._losses, root.at, post.at, CLOSING_SECONDS)
            if loss is not None:
                return "other_worker", loss
        return "unexplained", None

    def _most_doubled(self, cause: Cause) -> int:
        """Count the messages that the worst fault of a cause doubled."""
        faults = [
            e.fault.started for e in self._extras if e.doubled and e.fault and e.cause == cause
        ]
        return max(Counter(faults).values(), default=0)

    def _unexplained(self) -> list[str]:
        return [str(e.post.message_id) for e in self._extras if e.cause == "unexplained"]

    def _tell(self, messages: Sequence[str]) -> dict[str, list[str]]:
        return {message: self._tell_one(message) for message in messages[:SHOWN]}

    def _tell_one(self, message: str) -> list[str]:
        """Describe a message's POSTs and the faults between them, oldest first."""
        posts = self._by_message.get(message, [])
        lines = [(post.at, _describe(post)) for post in posts]
        for fault in self._evidence.faults if posts else ():
            if posts[0].at - CLOCK_SECONDS <= fault.ended and fault.started <= posts[-1].at:
                text = f"{fault.started:.3f} to {fault.ended:.3f} {fault.kind} {fault.detail}"
                lines.append((fault.started, text.rstrip()))
        return [line for _, line in sorted(lines)]

    # Time to recover

    def _measure_recovery(self) -> dict[str, list[float]]:
        """Return the seconds from a fault's end to the next accepted POST, by kind of fault."""
        accepted = sorted(post.at for post in self._evidence.posts if post.accepted)
        waits: defaultdict[str, list[float]] = defaultdict(list)
        for fault in self._evidence.faults:
            place = bisect.bisect_left(accepted, fault.ended)
            # In a long run, the evidence also contains faults of earlier rounds.
            if 0 < place < len(accepted):
                waits[fault.kind].append(accepted[place] - fault.ended)
        return waits


def _find_in_flight(
    faults: Sequence[Fault], begin: float, end: float, after_seconds: float
) -> Fault | None:
    """Find a fault that affected a message POSTed at `begin` and again at `end`.

    A fault affects messages until `after_seconds` after its end.
    """
    latest = min(end, begin + IN_FLIGHT_SECONDS)
    struck = (f for f in faults if begin <= f.ended + after_seconds and f.started <= latest)
    return next(struck, None)


def _describe(post: Post) -> str:
    fate = "accepted" if post.accepted else "not accepted"
    return f"{post.at:.3f} key={post.key} status={post.status} {fate}"
