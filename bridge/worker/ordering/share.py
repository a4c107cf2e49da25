"""Which lanes are whose: all workers that hear each other deal them out alike.

That they agree makes the load even. What makes it safe when they do not is the broker: it has a
single active consumer for each lane.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection
from typing import Annotated, Final

from pydantic import Field

from bridge.config.settings import MAX_LANES
from bridge.telemetry.logs import Log
from bridge.worker.cluster.beats import REMEMBERED, SPEAKING
from bridge.worker.cluster.exchange import Peers
from bridge.worker.cluster.messages import Bye, Facts

log = Log(__name__)

LOOK_SECONDS: Final = 0.2


class TakesLanes(Facts):
    """A worker takes from its share of so many lanes, none of them if it stops or is paused.

    `sorts`: it moves requests from the main queue to the lanes, which one at a time does.
    """

    kind = "lanes"

    lanes: Annotated[int, Field(ge=1, le=MAX_LANES)]
    takes: bool
    sorts: bool


def deal(lanes: int, workers: Collection[str]) -> list[str]:
    """Return the worker of each lane: as many for each as can be, and as few that move as that.

    Each lane goes to the worker that a hash of both says, unless that one has its part already.
    """
    most, some = divmod(lanes, len(workers))
    room = dict.fromkeys(workers, most)
    owners = []
    for lane in range(lanes):
        ranked = sorted(workers, key=lambda worker: _rank(lane, worker))
        # Those that are left when all have the same number: one more for each of so many workers.
        owner = next((one for one in ranked if room[one] > 0), None)
        if owner is None:
            owner = next(one for one in ranked if room[one] == 0)
            some -= 1
        room[owner] -= 1
        owners.append(owner)
    return owners


def _rank(lane: int, worker: str) -> bytes:
    return hashlib.blake2b(f"{lane} {worker}".encode(), digest_size=8).digest()


class LaneShare:
    """The part of this worker; `changed` is called when it may be another one."""

    def __init__(self, lanes: int, peers: Peers, *, changed: Callable[[], object]) -> None:
        self.lanes = lanes
        self._peers = peers
        self._changed = changed
        self._told: dict[str, TakesLanes] = {}
        self._takes = False
        self._sorts = False
        self._dealt_to: frozenset[str] = frozenset()
        self._own: frozenset[int] = frozenset()
        peers.on(TakesLanes, self._hear)
        peers.on(Bye, lambda peer, _: self._forget(peer))
        peers.in_each_beat(self._facts)

    @property
    def own(self) -> frozenset[int]:
        """The lanes from which this worker is to take.

        If one that was silent takes from its own nevertheless, the others only wait at them.
        """
        present = self._peers.roster.others(SPEAKING)
        takers = {peer for peer, told in self._told.items() if told.takes and peer in present}
        workers = frozenset(takers | {self._peers.worker_id})
        if workers != self._dealt_to:
            owners = deal(self.lanes, workers)
            self._dealt_to = workers
            self._own = frozenset(
                lane for lane, owner in enumerate(owners) if owner == self._peers.worker_id
            )
            log.info("lanes_dealt", workers=len(workers), lanes=len(self._own))
        return self._own

    @property
    def is_sorted_elsewhere(self) -> bool:
        """Whether another worker that is there sorts the queue."""
        present = self._peers.roster.others(SPEAKING)
        return any(told.sorts and peer in present for peer, told in self._told.items())

    async def until_nobody_sorts(self) -> None:
        """Return when no other worker that is there sorts the queue."""
        while self.is_sorted_elsewhere:  # noqa: ASYNC110  silence sets no event
            await asyncio.sleep(LOOK_SECONDS)

    def note_taking(self, *, takes: bool) -> None:
        """Tell the others whether this worker takes from its lanes."""
        if takes is not self._takes:
            self._takes = takes
            self._peers.tell(self._facts())

    def note_sorting(self, *, sorts: bool) -> None:
        """Tell the others whether this worker sorts the queue."""
        if sorts is not self._sorts:
            self._sorts = sorts
            self._peers.tell(self._facts())

    def _facts(self) -> TakesLanes:
        return TakesLanes(lanes=self.lanes, takes=self._takes, sorts=self._sorts)

    def _hear(self, peer: str, told: TakesLanes) -> None:
        if told.lanes == self.lanes and self._told.get(peer) != told:
            known = self._peers.roster.others(REMEMBERED)
            self._told = {one: facts for one, facts in self._told.items() if one in known}
            self._told[peer] = told
            self._changed()

    def _forget(self, peer: str) -> None:
        if self._told.pop(peer, None) is not None:
            self._changed()
