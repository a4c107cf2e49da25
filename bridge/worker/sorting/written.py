"""Copies that are written and whose confirm no task waits for: most of them need no more."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from bridge.amqp.confirm_deadlines import ConfirmDeadlines
from bridge.amqp.publisher import Publisher
from bridge.worker.sorting.move import Move, make_properties

# After so long a task waits for a copy's confirm, and sees to it that one is stored.
LATE_SECONDS: Final = 5.0


class Written:
    """Writes copies and hears of their confirms.

    `on_stored` is called with those that the broker has stored, many at a time; `on_late` with each
    that it has refused, or not confirmed in time, or that was lost with its channel. Neither is
    called for one that was taken out.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        keeps_priority: bool,
        on_stored: Callable[[list[Move]], object],
        on_late: Callable[[Move], object],
    ) -> None:
        self._publisher = publisher
        self._keeps_priority = keeps_priority
        self._on_stored = on_stored
        self._on_late = on_late
        self._moves = ConfirmDeadlines[Move, Move](LATE_SECONDS, lambda move, _: on_late(move))
        self._stored: list[Move] = []

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Move]:
        return iter(self._moves)

    def write(self, move: Move) -> bool:
        """Write the copy of a move, unless it would have to wait for that."""
        delivery = move.delivery
        delivery.replacement = self._publisher.write_at_once(
            delivery.body,
            exchange="",
            routing_key=move.target.queue,
            properties=make_properties(
                delivery,
                self._publisher.max_properties_bytes,
                keeps_priority=self._keeps_priority,
            ),
        )
        if delivery.replacement is None:
            return False
        self._moves.add(move, move)
        delivery.replacement.when_known(partial(self._on_known, move))
        return True

    def take_out(self, move: Move) -> bool:
        """Hear no more of it, and say whether it was there."""
        return self._moves.discard(move) is not None

    def _on_known(self, move: Move, is_stored: bool) -> None:  # noqa: FBT001  a callback
        if not is_stored:
            if self.take_out(move):
                self._on_late(move)
            return
        if not self._stored:
            # Confirms come many at a time, and so do the acks.
            asyncio.get_running_loop().call_soon(self._end_stored)
        self._stored.append(move)

    def _end_stored(self) -> None:
        moves, self._stored = [move for move in self._stored if self.take_out(move)], []
        if moves:
            self._on_stored(moves)
