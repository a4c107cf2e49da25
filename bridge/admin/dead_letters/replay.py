"""Send dead letters again; killed at any point, nothing is lost."""

import contextlib
import time
from typing import Final

from bridge.admin.dead_letters.letter import DeadLetter
from bridge.admin.dead_letters.order import Order, Tally
from bridge.admin.dead_letters.queue import MAX_ROUND, DeadLetterQueue
from bridge.admin.dead_letters.remembered_ids import RememberedIds
from bridge.worker.copies import replayed_properties

# How long a letter is in hand at most because of a limit of so many a second.
MAX_WAIT_SECONDS: Final = 0.1


async def replay(queue: DeadLetterQueue, target: str, order: Order) -> Tally:
    """Publish the selected letters to the queue `target`, as new, with their old keys.

    Left out are those that may have been sent already and those with the id of one that this run
    has taken, unless they are included, and those whose own expiry is over, which would only die
    again. Killed at any point, nothing is lost; at most `IN_FLIGHT` letters are then in both
    queues, each with the same message id.
    """
    tally, taken = Tally(), RememberedIds()
    started = time.monotonic()
    # What waits for its turn is better left in the queue.
    max_round = MAX_ROUND
    if order.apply and order.per_second is not None:
        max_round = max(1, min(MAX_ROUND, int(order.per_second * MAX_WAIT_SECONDS)))
    async with contextlib.aclosing(queue.letters(max_round=max_round)) as letters:
        async for letter in letters:
            order.step()
            if not _is_replayed(letter, order, tally, taken):
                await queue.keep(letter)
                continue
            if order.apply and order.per_second is not None:
                await queue.wait(started + tally.total / order.per_second - time.monotonic())
            if queue.is_stopped:
                await queue.keep(letter)
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
