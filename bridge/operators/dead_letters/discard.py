"""Write dead letters to a file, then remove them; killed at any point, nothing is lost."""

import contextlib
import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final, Self

from bridge.errors import BridgeError
from bridge.operators.dead_letters.letter import DeadLetter
from bridge.operators.dead_letters.order import Order, Tally
from bridge.operators.dead_letters.queue import DeadLetterQueue
from bridge.operators.dead_letters.records import as_record

# How many letters, or bytes of them, are written to the disk and then removed together.
BATCH_LETTERS: Final = 200
BATCH_BYTES: Final = 4 * 1024 * 1024


async def discard(queue: DeadLetterQueue, file: Path, order: Order) -> Tally:
    """Write the selected letters to a new file, a line of JSON each, then remove them.

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
                if len(batch) >= BATCH_LETTERS or sum(len(one.body) for one in batch) > BATCH_BYTES:
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
