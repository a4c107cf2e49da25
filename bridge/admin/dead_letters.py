"""Dead letters: read one, select some, and list, replay or discard them."""

import base64
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from bridge.admin.move import (
    Action,
    MessageMover,
    TakenMessage,
    open_mover,
    read_existing_queue,
)
from bridge.admin.replacement import NewLinesFile, Replaced, write_time
from bridge.amqp.frames import LARGE_BODY_BYTES, Body
from bridge.amqp.properties import Properties, as_facts
from bridge.config import Settings
from bridge.deadline import wait_at_most
from bridge.topology.declarations import dead_queue
from bridge.worker import envelope
from bridge.worker.copies import moved_properties, replayed_properties
from bridge.worker.envelope import read_moment

# After a kill at most one round of letters is in both queues.
MAX_ROUND: Final = 50
# The longest time for which a rate limit holds letters.
MAX_WAIT_SECONDS: Final = 0.1
# At most 13 MiB of UUIDs, 33 MiB of the longest ids.
MAX_REMEMBERED_IDS: Final = 100_000


class DeadLetter:
    """A message of the dead-letter queue, read from its properties and headers.

    A malformed header counts as missing. Times are in unix seconds.
    """

    def __init__(self, message: TakenMessage) -> None:
        headers = message.properties.headers or {}
        self.message = message
        self.message_id = message.properties.message_id or None
        self.reason = _text(headers.get(envelope.REASON))
        self.detail = _text(headers.get(envelope.DETAIL))
        self.attempts = _count(headers.get(envelope.ATTEMPTS))
        self.uncertain_attempts = _count(headers.get(envelope.UNCERTAIN_ATTEMPTS)) or 0
        self.status = _count(headers.get(envelope.STATUS))
        self.code = _text(headers.get(envelope.CODE))
        self.meaning = _text(headers.get(envelope.MEANING))
        self.dead_at = read_moment(headers, envelope.DEAD_AT)
        self.expires_at = read_moment(headers, envelope.EXPIRES_AT)
        self.queue = _text(headers.get(envelope.QUEUE))

    @property
    def may_have_been_sent(self) -> bool:
        """Whether an attempt may have reached the phone, so that a replay may be a second SMS."""
        return self.reason == "uncertain" or self.uncertain_attempts > 0

    @property
    def to(self) -> str | None:
        """The number, if the body has one."""
        document = _parsed(self.message.body)
        number = document.get("to") if isinstance(document, dict) else None
        return number if isinstance(number, str) else None

    def summary(self) -> dict[str, Any]:
        """Return plain data without number, text and headers."""
        dead_at = self.dead_at
        return {
            "message_id": self.message_id,
            "reason": self.reason,
            "detail": self.detail,
            "attempts": self.attempts,
            "status": self.status,
            "code": self.code,
            "meaning": self.meaning,
            "dead_at": write_time(dead_at),
            "age_seconds": None if dead_at is None else round(time.time() - dead_at),
        }

    def record(self) -> dict[str, Any]:
        """Return the whole letter for `write_record`, with `body_base64` if it is not text."""
        properties = {
            name: value
            for name, value in as_facts(self.message.properties).items()
            if name not in {"headers", "cluster_id"} and value not in {None, ""}
        }
        try:
            body = {"body": self.message.body.decode("utf-8")}
        except UnicodeDecodeError:
            body = {"body_base64": base64.b64encode(self.message.body).decode()}
        headers = self.message.properties.headers or {}
        return {**self.summary(), "properties": properties, "headers": headers, **body}


def _parsed(body: Body | str) -> object:
    """Return the JSON in a body; None if there is none, or the body is too large for a request."""
    if len(body) > LARGE_BODY_BYTES:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


# Masking

# Two sets, because a publisher may give a header the name of a property.
_SHOWN: Final = {
    "properties": frozenset(
        (
            *("content_type", "content_encoding", "delivery_mode", "priority"),
            *("message_id", "timestamp", "message_type", "app_id"),
        )
    ),
    "headers": frozenset(
        (
            *(envelope.EXPIRES_AT, envelope.NOT_BEFORE, envelope.ON_UNCERTAIN, envelope.REASON),
            *(envelope.DETAIL, envelope.ATTEMPTS, envelope.UNCERTAIN_ATTEMPTS, envelope.STATUS),
            *(envelope.FIRST_DELIVERED_AT, envelope.COPIES, envelope.DEAD_AT),
            *(envelope.DELIVERY_COUNT, envelope.CODE, envelope.MEANING, envelope.QUEUE),
            *(envelope.EARLIER_SPAN, "traceparent", "tracestate"),
        )
    ),
}
_HIDDEN: Final = "***"


def mask_number(number: str) -> str:
    """Mask a number so that only somebody who knows it recognises it: `+491*****78`."""
    shown = 9
    return f"{number[:4]}*****{number[-2:]}" if len(number) >= shown else _HIDDEN


def mask_record(record: dict[str, Any]) -> dict[str, Any]:
    """Mask everything in a record that could be personal data; the names of members stay."""
    masked = {
        part: {name: value if name in shown else _HIDDEN for name, value in record[part].items()}
        for part, shown in _SHOWN.items()
    }
    rest = {name: value for name, value in record.items() if name != "body_base64"}
    return rest | masked | {"body": _mask_body(record.get("body", ""))}


def _mask_body(body: str) -> str:
    document = _parsed(body)
    if not isinstance(document, dict):
        return f"<{len(body)} characters>"
    masked = dict.fromkeys(document, _HIDDEN)
    if isinstance(number := document.get("to"), str):
        masked["to"] = mask_number(number)
    if isinstance(text := document.get("text"), str):
        masked["text"] = f"<{len(text)} characters>"
    return json.dumps(masked)


# Selection


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """The filter options; the age of a letter counts from `sms-bridge-dead-at`."""

    reasons: Sequence[str] | None = None
    ids: Sequence[str] | None = None
    older_than_seconds: float | None = None
    newer_than_seconds: float | None = None

    @property
    def selects_all(self) -> bool:
        return self == LetterFilter()

    def selects(self, letter: DeadLetter, *, now: float) -> bool:
        """Whether a letter is selected; without `sms-bridge-dead-at` no age matches."""
        if self.reasons and letter.reason not in self.reasons:
            return False
        if self.ids and letter.message_id not in self.ids:
            return False
        age = None if letter.dead_at is None else now - letter.dead_at
        older, newer = self.older_than_seconds, self.newer_than_seconds
        return (older is None or (age is not None and age > older)) and (
            newer is None or (age is not None and age < newer)
        )


class RememberedIds:
    """The last `MAX_REMEMBERED_IDS` message ids of a run.

    After a lost confirm a copy is published twice, so one message can have two dead letters.
    """

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, message_id: str | None) -> bool:
        """Return whether an id is new, as a missing one always is; forget the oldest if needed."""
        if message_id is None:
            return True
        is_new = message_id not in self._ids
        self._ids[message_id] = None
        if len(self._ids) > MAX_REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]
        return is_new


@dataclass(slots=True)
class Tally:
    """The numbers of letters that a replay or a discard took and skipped."""

    taken: Counter[str] = field(default_factory=Counter)
    maybe_sent: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    repeats: int = 0

    @property
    def selected(self) -> int:
        """Number of selected letters, skipped ones included."""
        return self.taken.total() + self.maybe_sent.total() + self.expired + self.repeats


# Actions


@dataclass(frozen=True, slots=True)
class DeadLetterQueue:
    """The dead-letter queue of a worker; `total` is its length when it was opened."""

    name: str
    total: int
    mover: MessageMover

    async def run(self, action: Action) -> AsyncIterator[int]:
        """Act on the letters, oldest first; yield the number of letters after each round.

        Raises BridgeError as `MessageMover.run` does, before anything is taken if copies cannot be
        published.
        """
        if self.total:
            await self.mover.check(self.name, self.name)
        async for taken in self.mover.run(action, self.name, at_most=self.total):
            yield taken


@asynccontextmanager
async def open_dead_letters(settings: Settings) -> AsyncIterator[DeadLetterQueue]:
    """Open the dead-letter queue of `worker.queue`; the remaining letters are returned at the end.

    Raises BrokerError if no broker answers or the queue does not exist.
    """
    name = dead_queue(settings.worker.queue)
    async with open_mover(settings, "dead letters") as mover:
        sizes = await read_existing_queue(mover.connection, name)
        yield DeadLetterQueue(name, sizes.ready, mover)


class _LetterAction(Action):
    # Only a delivery limit of 0 would drop a letter that comes back for the first time.
    max_returns = 1

    def renewed(self, message: TakenMessage) -> Properties:
        return moved_properties(message.properties)


class Look(_LetterAction):
    """Reads up to `limit` of the selected letters, and leaves all of them in their queue.

    After each round `rows` has its letters as plain data: the record of each if `is_full`, else its
    summary and number.
    """

    def __init__(self, selection: LetterFilter, limit: int, *, is_full: bool = False) -> None:
        self._selection = selection
        self._limit = limit
        self._is_full = is_full
        self._ids = RememberedIds()
        self.rows: list[dict[str, Any]] = []
        self.shown = self.repeats = 0

    def next_round(self) -> int:
        """Return the size of a round, which is small because RabbitMQ counts each delivery."""
        self.rows = []
        left = self._limit - self.shown
        return min(left, MAX_ROUND) if self._selection.selects_all or not left else MAX_ROUND

    async def act(self, _: MessageMover, messages: Sequence[TakenMessage], /) -> Replaced:
        for message in messages:
            letter = DeadLetter(message)
            if self.shown < self._limit and self._selection.selects(letter, now=time.time()):
                self.shown += 1
                self.repeats += not self._ids.add(letter.message_id)
                row = letter.record() if self._is_full else letter.summary() | {"to": letter.to}
                self.rows.append(row)
        return Replaced()


@dataclass(kw_only=True)
class _Removal(_LetterAction):
    """An action that takes the selected letters out of their queue, or only counts them."""

    selection: LetterFilter
    apply: bool
    limit: int | None = None
    tally: Tally = field(default_factory=Tally)

    def next_round(self) -> int:
        """Return the size of a round, 0 if the limit is reached."""
        return 0 if self.tally.taken.total() == self.limit else MAX_ROUND

    def _choose(self, messages: Sequence[TakenMessage]) -> list[DeadLetter]:
        chosen: list[DeadLetter] = []
        for message in messages:
            letter = DeadLetter(message)
            if self.tally.taken.total() == self.limit:
                break
            if self.selection.selects(letter, now=time.time()) and self._take(letter):
                self.tally.taken[letter.reason or "-"] += 1
                chosen.append(letter)
        return chosen if self.apply else []

    def _take(self, _: DeadLetter) -> bool:
        return True


@dataclass(kw_only=True)
class Discard(_Removal):
    """Writes the selected letters to a file, a line of JSON each, then removes them."""

    file: NewLinesFile

    async def act(self, _: MessageMover, messages: Sequence[TakenMessage], /) -> Replaced:
        letters = self._choose(messages)
        if letters:
            self.file.write(letter.record() for letter in letters)
        return Replaced({letter.message.tag for letter in letters})


@dataclass(kw_only=True)
class Replay(_Removal):
    """Publishes each selected letter to the queue that it came from, as a new request with its key.

    `queues` are the queues of requests; a letter from another queue goes to the first. Skips
    letters that may have been sent already and letters whose id this run has already taken, unless
    they are included, and expired letters, which would only become dead letters again.
    """

    queues: Sequence[str]
    per_second: float | None = None
    include_uncertain: bool = False
    include_repeats: bool = False
    _ids: RememberedIds = field(default_factory=RememberedIds)
    _started: float = math.inf

    def next_round(self) -> int:
        """Return the size of a round, which is small under a rate limit."""
        at_most = super().next_round()
        if not self.apply or self.per_second is None:
            return at_most
        return min(at_most, max(1, int(self.per_second * MAX_WAIT_SECONDS)))

    def _take(self, letter: DeadLetter) -> bool:
        if letter.expires_at is not None and letter.expires_at <= time.time():
            self.tally.expired += 1
        elif letter.may_have_been_sent and not self.include_uncertain:
            self.tally.maybe_sent[letter.reason or "-"] += 1
        elif not (self._ids.add(letter.message_id) or self.include_repeats):
            self.tally.repeats += 1
        else:
            return True
        return False

    async def act(self, mover: MessageMover, messages: Sequence[TakenMessage], /) -> Replaced:
        """Publish the selected letters as soon as the rate limit allows."""
        letters = self._choose(messages)
        self._started = min(self._started, time.monotonic())
        if letters and self.per_second is not None:
            due = self._started + (self.tally.taken.total() - 1) / self.per_second
            await wait_at_most(max(0.0, due - time.monotonic()), mover.stopping)
        if mover.stopping.is_set():
            self.tally.taken -= Counter(letter.reason or "-" for letter in letters)
            return Replaced()
        return await mover.copies.store_all(
            {
                letter.message.tag: (
                    letter.message.body,
                    letter.queue
                    if letter.queue and letter.queue in self.queues
                    else self.queues[0],
                    replayed_properties(letter.message.properties),
                )
                for letter in letters
            }
        )
