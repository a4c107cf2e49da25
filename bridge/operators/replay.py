"""Replay dead letters, or discard them into a file; killed at any point, nothing is lost."""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from bridge.errors import BridgeError
from bridge.operators.dead_letter_records import as_record
from bridge.operators.dead_letters import DeadLetter, DeadLetterQueue, Filter
from bridge.outbound.envelope import replayed_properties

BATCH: Final = 200
BATCH_BYTES: Final = 4 * 1024 * 1024
# At most 13 MiB of usual ids, 33 MiB of the longest.
MAX_REMEMBERED_IDS: Final = 100_000


class RememberedIds:
    """The ids that were met, the last `MAX_REMEMBERED_IDS` of them.

    A copy whose confirm was lost is published again, so a message can have died twice.
    """

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def knows(self, letter: DeadLetter) -> bool:
        """Say whether a letter has the id of one that was added; without an id it has not."""
        return letter.message_id in self._ids

    def add(self, letter: DeadLetter) -> None:
        """Remember a letter's id, and forget the oldest one over the bound."""
        if letter.message_id is None:
            return
        self._ids[letter.message_id] = None
        if len(self._ids) > MAX_REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]


@dataclass(slots=True)
class Tally:
    """What a replay or a discard did, or would do."""

    taken: Counter[str] = field(default_factory=Counter)
    maybe_sent: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    repeats: int = 0

    @property
    def total(self) -> int:
        """How many letters are taken."""
        return self.taken.total()

    @property
    def met(self) -> int:
        """How many letters were meant, those that were left out too."""
        return self.total + self.maybe_sent.total() + self.expired + self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to replay or discard: `at_most` so many, and only when `apply` is set.

    `per_second` limits how fast a replay publishes; `step` is called after each letter looked at.
    """

    wanted: Filter
    apply: bool
    at_most: int | None = None
    per_second: float | None = None
    include_uncertain: bool = False
    include_repeats: bool = False
    step: Callable[[], None] = lambda: None


async def replay(queue: DeadLetterQueue, target: str, order: Order) -> Tally:
    """Publish the letters that are meant to the queue `target`, as new, with their old keys.

    Left out are those that may have been sent already and those with the id of one that this run
    has taken, unless they are included, and those whose own expiry is over, which would only die
    again. Killed at any point, nothing is lost; at most `IN_FLIGHT` letters are then in both
    queues, each with the same message id.
    """
    tally, taken = Tally(), RememberedIds()
    started = time.monotonic()
    async with contextlib.aclosing(queue.letters()) as letters:
        async for letter in letters:
            order.step()
            if not _is_replayed(letter, order, tally, taken):
                await queue.keep(letter)
                continue
            if order.apply and order.per_second is not None:
                await queue.wait(started + tally.total / order.per_second - time.monotonic())
            if queue.is_stopped:
                break
            tally.taken[letter.reason or "-"] += 1
            taken.add(letter)
            if order.apply:
                await queue.move(letter, target, replayed_properties(letter.properties))
            else:
                await queue.keep(letter)
            if tally.total == order.at_most:
                break
    await queue.finish()
    return tally


def _is_replayed(letter: DeadLetter, order: Order, tally: Tally, taken: RememberedIds) -> bool:
    now = time.time()
    if not order.wanted.takes(letter, now=now):
        return False
    if letter.expires_at is not None and letter.expires_at <= now:
        tally.expired += 1
        return False
    if letter.may_be_sent and not order.include_uncertain:
        tally.maybe_sent[letter.reason or "-"] += 1
        return False
    if taken.knows(letter) and not order.include_repeats:
        tally.repeats += 1
        return False
    return True


async def discard(queue: DeadLetterQueue, file: Path, order: Order) -> Tally:
    """Write the letters that are meant to a new file, a line of JSON each, then remove them.

    The file is the user's alone (0600) and on the disk before a letter is acked. Killed at any
    point, a letter is in the file, in the queue, or in both.
    """
    tally = Tally()
    batch: list[DeadLetter] = []
    with contextlib.ExitStack() as stack:
        backup = stack.enter_context(Backup(file))
        async with contextlib.aclosing(queue.letters()) as letters:
            async for letter in letters:
                order.step()
                is_meant = order.wanted.takes(letter, now=time.time())
                tally.taken[letter.reason or "-"] += is_meant
                if is_meant and order.apply:
                    batch.append(letter)
                else:
                    await queue.keep(letter)
                if len(batch) >= BATCH or sum(len(one.body) for one in batch) > BATCH_BYTES:
                    await _remove(queue, backup, batch)
                if tally.total == order.at_most:
                    break
        await _remove(queue, backup, batch)
    await queue.finish()
    return tally


async def _remove(queue: DeadLetterQueue, backup: "Backup", batch: list[DeadLetter]) -> None:
    if batch:
        backup.write(batch)
    for letter in batch:
        await queue.remove(letter)
    batch.clear()


class Backup:
    """A file of JSON lines that nobody else can read; made new with the first line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def write(self, letters: Collection[DeadLetter]) -> None:
        """Write letters and return when they are on the disk.

        Raises BridgeError when they cannot be, or when there is a file of that name already.
        """
        lines = (json.dumps(as_record(letter)) + "\n" for letter in letters)
        content = "".join(lines).encode("ascii")
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._descriptor = os.open(self._path, flags, 0o600)
                _sync_folder(self._path.parent)
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise BridgeError(
                f"{self._path}: {error.strerror}; what is not in it is still in the queue; "
                "name another file with --to"
            ) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
