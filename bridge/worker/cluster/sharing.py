"""By how many workers the limits of `scope: cluster` are divided.

They are those that were heard just now, and whoever else the broker counts as a consumer of the
queue: one that had no time for a beat, or that does not speak here. A worker that starts is heard
before it sends, so that the others have given up their part by then; one that stops says so; of one
that is killed the broker loses the consumer at once. Who counts fewer than are known has all peers
answer, and whoever does not has no part any more.

The consumers are counted every half a second, and each worker tells how many of them are its own.
A quorum queue counts a consumer that is cancelled as long as it has something to ack: a worker that
consumes anew, as each does when another was killed, has several for a while.

Who hears no peers counts consumers alone, as `RateLimits.share_with` does.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, NoReturn

from pydantic import Field

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.topology.queue_sizes import try_to_read_queue
from bridge.worker.cluster.beats import HEARD, REMEMBERED, SPEAKING, Silence
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Facts
from bridge.worker.service.breaker import CircuitBreaker

# How often the number of workers is looked at, and the consumers are counted.
LOOK_SECONDS: Final = 0.1
COUNT_SECONDS: Final = 0.5
# By those who hear no peers: two counts in a row are compared, and workers that start together must
# see each other in one of them.
ALONE_COUNT_SECONDS: Final = 1.0
# How long peers have to answer when the roll is called.
ANSWER_SECONDS: Final = 0.3
# Within this time all who count fewer consumers have found that out, and one call is for all.
CALL_SECONDS: Final = COUNT_SECONDS + ANSWER_SECONDS


class Leaving(Facts):
    """A worker sends nothing new from now on: its part of the limits is the others'."""

    kind = "leaving"


class Consumers(Facts):
    """How many consumers of the queue are one worker's, as the broker counts."""

    kind = "consumers"

    count: Annotated[int, Field(ge=0, le=10_000)]


class RollCall(Facts):
    """Consumers are missing: who is there tells its `Consumers`."""

    kind = "roll_call"


class Sharing:
    """Tells a worker with how many it shares the limits, as long as a queue is served.

    `is_registered` says whether the broker has this worker as a consumer, `cancelled_consumers` how
    many more it counts that have been.
    """

    def __init__(
        self,
        queue: str,
        breaker: CircuitBreaker,
        peers: Peers,
        *,
        is_registered: Callable[[], bool],
        cancelled_consumers: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._breaker = breaker
        self._peers = peers
        self._is_registered = is_registered
        self._cancelled_consumers = cancelled_consumers
        self._clock = clock
        # The last count; whose of them were known then, by worker; and what was told since.
        self._consumers: int | None = None
        self._owners: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._own_told = 0
        # When the peers were last asked who is there, by whomever, and this one answered.
        self._called_at = self._answered_at = -math.inf
        self._missing_before = 0
        self._leaving: set[str] = set()
        self._has_left = False
        peers.on(Leaving, self._hear_leaving)
        peers.on(Consumers, self._hear_consumers)
        peers.on(RollCall, self._hear_roll_call)
        # Peers tell whether the limits are shared or not, and those that are gone are many in time.
        peers.each_second(self._forget_the_gone)
        peers.in_each_beat(lambda: Leaving() if self._has_left else None)
        peers.in_each_beat(lambda: Consumers(count=self._own_consumers))

    def leave(self) -> None:
        """Give up the part of this worker: it sends nothing new."""
        self._has_left = True
        self._peers.tell(Leaving())

    def tell(self) -> None:
        """Tell the peers how many consumers are this worker's, if they are more or fewer."""
        if self._own_consumers != self._own_told:
            self._own_told = self._own_consumers
            self._peers.tell(Consumers(count=self._own_told))

    async def watch(self, connection: Connection) -> NoReturn:
        """Keep the number of workers up to date, as long as the connection is served."""

        async def count() -> int | None:
            sizes = await try_to_read_queue(connection, self._queue)
            heed_cancellation()
            return None if sizes is None else sizes.consumers

        await self.follow(count)

    async def follow(self, count: Callable[[], Awaitable[int | None]]) -> NoReturn:
        """Keep the number of workers up to date; `count` returns the queue's consumers."""
        next_count_at = self._clock()
        while True:
            self.tell()
            if self._clock() >= next_count_at:
                uncounted = self._uncounted(self._heard)
                self._note(await count())
                # What was told meanwhile may or may not be in the count.
                is_clear = self._uncounted(self._heard) == uncounted or not self._peers.is_up
                next_count_at = self._clock() + (self._count_seconds if is_clear else LOOK_SECONDS)
            self._look()
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def _count_seconds(self) -> float:
        return COUNT_SECONDS if self._peers.is_up else ALONE_COUNT_SECONDS

    @property
    def _own_consumers(self) -> int:
        return self._is_registered() + self._cancelled_consumers()

    def _forget_the_gone(self) -> None:
        known = self._peers.roster.others(REMEMBERED)
        self._told = {peer: told for peer, told in self._told.items() if peer in known}
        self._leaving &= known

    def _note(self, consumers: int | None) -> None:
        self._forget_the_gone()
        known = self._peers.roster.others(REMEMBERED)
        # Who does not tell has one.
        self._owners = {peer: self._told.get(peer, 1) for peer in known}
        self._owners[self._peers.worker_id] = self._own_consumers
        self._consumers = consumers
        if not self._peers.is_up and consumers is not None and self._is_registered():
            self._share_alone(consumers - self._cancelled_consumers())

    def _share_alone(self, consumers: int) -> None:
        """Share the limits with so many consumers; a paused worker does not count itself."""
        if not self._breaker.takes_nothing:
            self._breaker.rates.share_with(consumers)

    def _look(self) -> None:
        if self._peers.is_up:
            heard = self._heard
            self._call_roll(-self._uncounted(heard))
            self._breaker.rates.divide_by(self._workers(heard))

    def _call_roll(self, missing: int) -> None:
        """Ask who is there when more consumers are missing than before, unless one just did."""
        if missing > self._missing_before and self._clock() - self._called_at > CALL_SECONDS:
            self._called_at = self._clock()
            self._peers.tell(RollCall())
        self._missing_before = max(0, missing)

    @property
    def workers(self) -> int:
        """How many share the limits, with this one."""
        return self._workers(self._heard)

    def _workers(self, heard: frozenset[str]) -> int:
        uncounted = self._uncounted(heard)
        if uncounted < 0:
            uncounted = max(uncounted, -self._unanswered(heard))
        return 1 + len(heard) + uncounted

    @property
    def _heard(self) -> frozenset[str]:
        silence = SPEAKING if self._consumers is None else HEARD
        return self._peers.roster.others(silence) - self._leaving

    def _uncounted(self, heard: frozenset[str]) -> int:
        """How many consumers are of none that was heard just now; below zero, how many lack."""
        if self._consumers is None:
            return 0
        known = (self._peers.worker_id, *heard, *self._leaving)
        return self._consumers - sum(self._owners.get(one, 0) for one in known)

    def _unanswered(self, heard: frozenset[str]) -> int:
        """How many were heard just now, and did not answer when the roll was called."""
        seconds = self._clock() - self._called_at
        if not ANSWER_SECONDS <= seconds < math.inf:
            return 0
        return len(heard - self._peers.roster.others(Silence(0, seconds)))

    def _hear_leaving(self, peer: str, _told: Leaving) -> None:
        self._leaving.add(peer)

    def _hear_roll_call(self, _peer: str, _told: RollCall) -> None:
        # All hear the answers, whoever has asked; and one answers all who ask at the same time.
        now = self._clock()
        if now - self._called_at > CALL_SECONDS:
            self._called_at = now
        if now - self._answered_at > ANSWER_SECONDS / 2:
            self._answered_at = now
            self._peers.tell(Consumers(count=self._own_consumers))

    def _hear_consumers(self, peer: str, told: Consumers) -> None:
        self._told[peer] = told.count
