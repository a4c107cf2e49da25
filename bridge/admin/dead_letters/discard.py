"""Write dead letters to a file, then remove them; killed at any point, nothing is lost."""

import contextlib
import time
from pathlib import Path
from typing import Final

from bridge.admin.dead_letters.letter import DeadLetter
from bridge.admin.dead_letters.order import Order, Tally
from bridge.admin.dead_letters.queue import DeadLetterQueue
from bridge.admin.dead_letters.records import as_record
from bridge.admin.lines_file import NewLinesFile
from bridge.errors import BridgeError

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
        backup = stack.enter_context(NewLinesFile(file, option="--to"))
        if order.apply:
            # Before anything is taken: what cannot be written down stays where it is.
            backup.make()
            stack.callback(backup.remove_if_empty)
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


async def _remove(queue: DeadLetterQueue, backup: NewLinesFile, batch: list[DeadLetter]) -> None:
    try:
        if batch:
            backup.write(as_record(letter) for letter in batch)
    except BridgeError:
        for letter in batch:
            await queue.keep(letter)
        raise
    for letter in batch:
        await queue.remove(letter)
    batch.clear()
