"""The verdict of a soak: what became of every message, and why any was POSTed again.

Pure: everything it knows is in `Evidence`. It keeps the books of Jepsen's `total-queue`: a message
that was confirmed to the publisher must have been sent, be dead or wait; nothing else may turn up.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, NamedTuple, get_args

Group = Literal["broker", "worker", "api"]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)
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

# These answers say that the message was not taken. 503 says so only with Retry-After.
DEFINITE_NO: Final = frozenset({401, 425, 429})
# With the faults of a soak no message can be invalid, refused or expired.
EXPECTED_DEATHS: Final = frozenset({"uncertain", "exhausted"})

CLOCK_SECONDS: Final = 0.5
# A POST takes at most two seconds, its ack some more; what is older was settled before the kill.
IN_FLIGHT_SECONDS: Final = 5.0
# How long the service may take to read what it cannot answer any more: as long as a POST may take.
LATE_SECONDS: Final = 2.0
# A broker that goes on closes the connections whose heartbeats it has missed only then.
CLOSING_SECONDS: Final = 3.0
SHOWN: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault on the nemesis' timeline, in unix seconds."""

    kind: str
    group: Group
    started: float
    ended: float
    detail: str = ""

    def covers(self, moment: float) -> bool:
        """Say whether it was at work at a moment."""
        return self.started - CLOCK_SECONDS <= moment <= self.ended + CLOCK_SECONDS


class Post(NamedTuple):
    """One POST that reached the service; `message_id` is told by the number that it went to."""

    message_id: str | None
    key: str | None
    at: float
    status: int | None
    accepted: bool


class DeadLetter(NamedTuple):
    """One message of the dead-letter queue."""

    message_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known when everything is over.

    `published` counts the tries to publish; `slow` has the moments at which the worker gave up
    waiting for an answer, as its log says, by the idempotency key. `nameless` are the messages that
    were published without an id.
    """

    published: Mapping[str, int]
    confirmed: Collection[str]
    posts: Sequence[Post]
    dead: Sequence[DeadLetter] = ()
    waiting: Sequence[str] = ()
    faults: Sequence[Fault] = ()
    slow: Mapping[str, Sequence[float]] = field(default_factory=dict)
    nameless: Collection[str] = frozenset()
    concurrency: int = 50
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Extra:
    """A POST of a message after one that may have been accepted already: `root`, the last such.

    `fault` is the kill, the freeze or the lost connection that is behind it.
    """

    root: Post
    post: Post
    cause: Cause
    fault: Fault | None = None
    doubled: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """How long after the end of the faults of a kind the next POST was accepted."""

    faults: int
    median_seconds: float | None
    max_seconds: float | None


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The numbers, and a line in `problems` for each thing that must not be."""

    published: int
    confirmed: int
    recovered: int
    unknown: int
    publishes: int
    posts: int
    sent: int
    dead: dict[str, int]
    dead_but_sent: int
    waiting: int
    lost: list[str]
    unexpected: list[str]
    new_keys: list[str]
    extra_posts: dict[str, int]
    doubled: dict[str, int]
    worst_kill: int
    worst_freeze: int
    worst_loss: int
    retries_after_no: int
    recovery: dict[str, Recovery]
    histories: dict[str, list[str]]
    problems: list[str] = field(default_factory=list)


def check(evidence: Evidence) -> Verdict:
    """Compare what was promised with what happened."""
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
        """Put every message into its column."""
        evidence = self._evidence
        sent = {post.message_id for post in evidence.posts if post.accepted and post.message_id}
        dead = {letter.message_id for letter in evidence.dead}
        found = sent | dead | set(evidence.waiting)
        unconfirmed = set(evidence.published) - set(evidence.confirmed)
        keys = sorted(set(self._strangers()))
        lost = sorted(set(evidence.confirmed) - found)
        return Verdict(
            published=len(evidence.published),
            confirmed=len(evidence.confirmed),
            recovered=len(unconfirmed & found),
            unknown=len(unconfirmed - found),
            publishes=sum(evidence.published.values()),
            posts=len(evidence.posts),
            sent=len(sent),
            dead=dict(Counter(letter.reason for letter in evidence.dead)),
            dead_but_sent=len(dead & sent),
            waiting=len(evidence.waiting),
            lost=lost,
            unexpected=sorted(found - set(evidence.published)),
            new_keys=keys,
            extra_posts=dict(Counter(extra.cause for extra in self._extras)),
            doubled=dict(Counter(extra.cause for extra in self._extras if extra.doubled)),
            worst_kill=self._most_doubled("worker_kill"),
            worst_freeze=self._most_doubled("worker_freeze"),
            worst_loss=self._most_doubled("other_worker"),
            retries_after_no=self._count_retries_after_no(),
            recovery=self._measure_recovery(),
            histories=self._tell([*lost, *keys, *self._unexplained()]),
        )

    def find_losses(self, verdict: Verdict) -> Iterator[str]:
        """Say which messages did not come to an end that was promised."""
        if verdict.lost:
            yield f"{len(verdict.lost)} confirmed messages are lost"
        if verdict.unexpected:
            yield f"{len(verdict.unexpected)} messages turned up that nobody published"
        if verdict.waiting:
            yield f"{verdict.waiting} messages still wait"
        for reason in sorted(verdict.dead.keys() - EXPECTED_DEATHS):
            yield f"{verdict.dead[reason]} dead letters say {reason}, which no fault here explains"
        if count := sum(not self._met_an_api_fault(letter) for letter in self._evidence.dead):
            yield f"{count} dead letters never met a fault of the API"

    def find_repeats(self, verdict: Verdict) -> Iterator[str]:
        """Say which POSTs should not have been."""
        if verdict.new_keys:
            yield f"{len(verdict.new_keys)} messages were POSTed with a key that is not theirs"
        if count := verdict.extra_posts.get("unexplained", 0):
            yield f"{count} extra POSTs that neither the API nor a fault explains"
        if verdict.worst_kill > self._evidence.concurrency:
            yield f"one kill of a worker doubled {verdict.worst_kill} messages"
        if verdict.worst_freeze > self._evidence.concurrency:
            yield f"one freeze of a worker doubled {verdict.worst_freeze} messages"
        if count := verdict.extra_posts.get("other_worker", 0):
            yield f"{count} extra POSTs of what a worker was given that did not ask the others"

    def _strangers(self) -> Iterator[str]:
        """Name the messages with a POST under another key than their own."""
        for message, posts in self._by_message.items():
            if message not in self._evidence.nameless:
                if any(post.key != message for post in posts):
                    yield message
            elif any(self._has_changed(*pair) for pair in pairwise(posts)):
                yield message

    def _has_changed(self, before: Post, after: Post) -> bool:
        """Say whether a message without an id has lost its key, for no reason that is known.

        Only its worker knew it, and whoever publishes it twice publishes two messages.
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
        """Walk through a message's POSTs; each that follows a possible acceptance is extra."""
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
        """Say why there is another POST after one that may have been accepted."""
        is_answered = root.accepted and root.status is not None
        if not is_answered and self._is_in_api_fault(root.at):
            return "api_fault", None
        if (kill := _find_in_flight(self._kills, root.at, post.at, 0)) is not None:
            return "worker_kill", kill
        freeze = _find_in_flight(self._freezes, root.at, post.at, CLOSING_SECONDS)
        if freeze is not None:
            return "worker_freeze", freeze
        assert post.message_id is not None
        given_up = self._evidence.slow.get(root.key or "", ())
        # A service that is too busy reads a POST when its sender has given it up already.
        began = root.at - (LATE_SECONDS if root.status is None else 0)
        if any(began <= moment <= post.at for moment in given_up):
            return "slow_answer", None
        # The bridge knows a repeat of the publisher's for as long as the process lives.
        is_nameless = post.message_id in self._evidence.nameless
        was_restarted = any(root.at <= fault.ended <= post.at for fault in self._restarts)
        may_be_another = self._evidence.workers > 1 or is_nameless or was_restarted
        if may_be_another and self._evidence.published.get(post.message_id, 0) > 1:
            return "publisher_repeat", None
        # What is in flight when a connection is lost may be given to a worker that does not know,
        # and that has to ask the others.
        if self._evidence.workers > 1:
            loss = _find_in_flight(self._losses, root.at, post.at, CLOSING_SECONDS)
            if loss is not None:
                return "other_worker", loss
        return "unexplained", None

    def _most_doubled(self, cause: Cause) -> int:
        """Count the messages that were doubled by the worst fault behind a cause."""
        faults = [
            e.fault.started for e in self._extras if e.doubled and e.fault and e.cause == cause
        ]
        return max(Counter(faults).values(), default=0)

    def _count_retries_after_no(self) -> int:
        repeats = sum(len(posts) - 1 for posts in self._by_message.values())
        return repeats - len(self._extras)

    def _unexplained(self) -> list[str]:
        return [str(e.post.message_id) for e in self._extras if e.cause == "unexplained"]

    def _tell(self, messages: Sequence[str]) -> dict[str, list[str]]:
        return {message: self._tell_one(message) for message in messages[:SHOWN]}

    def _tell_one(self, message: str) -> list[str]:
        """Tell a message's POSTs, and the faults in between, in the order of time."""
        posts = self._by_message.get(message, [])
        lines = [(post.at, _describe(post)) for post in posts]
        for fault in self._evidence.faults if posts else ():
            if posts[0].at - CLOCK_SECONDS <= fault.ended and fault.started <= posts[-1].at:
                text = f"{fault.started:.3f} to {fault.ended:.3f} {fault.kind} {fault.detail}"
                lines.append((fault.started, text.rstrip()))
        return [line for _, line in sorted(lines)]

    # Time to recover

    def _measure_recovery(self) -> dict[str, Recovery]:
        accepted = sorted(post.at for post in self._evidence.posts if post.accepted)
        waits: dict[str, list[float | None]] = defaultdict(list)
        for fault in self._evidence.faults:
            following = (at - fault.ended for at in accepted if at >= fault.ended)
            waits[fault.kind].append(next(following, None))
        return {kind: _summarize(waits[kind]) for kind in sorted(waits)}


def _find_in_flight(
    faults: Sequence[Fault], begin: float, end: float, after_seconds: float
) -> Fault | None:
    """Find a fault that struck what was POSTed at `begin`, and at `end` again.

    Until a fault is over, and `after_seconds` more, what comes in may be struck by it.
    """
    latest = min(end, begin + IN_FLIGHT_SECONDS)
    struck = (f for f in faults if begin <= f.ended + after_seconds and f.started <= latest)
    return next(struck, None)


def _summarize(waits: Sequence[float | None]) -> Recovery:
    known = [wait for wait in waits if wait is not None]
    if not known:
        return Recovery(len(waits), None, None)
    return Recovery(len(waits), round(statistics.median(known), 2), round(max(known), 2))


def _describe(post: Post) -> str:
    fate = "accepted" if post.accepted else "not accepted"
    return f"{post.at:.3f} key={post.key} status={post.status} {fate}"
