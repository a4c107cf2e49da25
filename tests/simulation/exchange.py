"""A fanout exchange for workers on one event loop: what is told arrives later, or never."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from bridge.outbound.peers.exchange import ANSWER_SECONDS, BEAT_SECONDS
from bridge.outbound.peers.messages import (
    Beat,
    Facts,
    Hello,
    Message,
    new_worker_id,
    read_message,
    write_message,
)
from bridge.outbound.peers.roster import Roster

LATENCY_SECONDS: Final = 0.002


class Exchange:
    """Carries what one worker says to all others, after up to twice the latency."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, seed: int = 1) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.members: list[SimulatedPeers] = []
        self.carried = 0
        # Which messages are lost on the way.
        self.loses: Callable[[Message], bool] = lambda _: False

    def carry(self, body: bytes) -> None:
        """Carry a message to all."""
        message = read_message(body)
        assert message is not None
        if self.loses(message):
            return
        self.carried += len(self.members)
        delay = LATENCY_SECONDS * self.chance.uniform(0.5, 2)
        self.loop.call_later(delay, self._hand_out, message)

    def _hand_out(self, message: Message) -> None:
        for member in self.members:
            if member.worker_id != message.worker_id:
                member.hear(message)


class SimulatedPeers:
    """What stands in for `Peers`, on a simulated exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.worker_id = new_worker_id()
        self.is_up = False
        self.roster = Roster(clock=exchange.loop.time)
        self._exchange = exchange
        self._hearers: dict[str, tuple[type[Facts], Callable[[str, Any], None]]] = {}
        self._in_each_beat: list[Callable[[], Facts | None]] = []
        self._is_to_answer = False
        self.on(Hello, self._hear_hello)
        self.on(Beat, self._hear_beat)

    def on(self, facts: type[Facts], hear: Callable[[str, Any], None]) -> None:
        """Call `hear` with what peers say."""
        self._hearers[facts.kind] = (facts, hear)

    def in_each_beat(self, facts: Callable[[], Facts | None]) -> None:
        """Have each beat carry facts beside."""
        self._in_each_beat.append(facts)

    def tell(self, facts: Facts) -> None:
        """Say something to all."""
        if self.is_up:
            self._exchange.carry(write_message(self.worker_id, facts))

    def join(self) -> None:
        """Hear, and be heard."""
        self._exchange.members.append(self)
        self.is_up = True
        self.roster.resume()
        self.tell(Hello())

    def leave(self) -> None:
        """Fall silent, as one does that is killed."""
        self.is_up = False
        self.roster.pause()
        if self in self._exchange.members:
            self._exchange.members.remove(self)

    async def keep_beating(self) -> None:
        """Beat each second."""
        while True:
            await asyncio.sleep(BEAT_SECONDS * self._exchange.chance.uniform(0.99, 1.05))
            self.beat()

    def beat(self) -> None:
        """Say that it is there."""
        beside = [facts for make in self._in_each_beat if (facts := make()) is not None]
        self.tell(Beat(beside={facts.kind: facts.model_dump(mode="json") for facts in beside}))

    def hear(self, message: Message) -> None:
        """Hear what another one says."""
        self.roster.note(message.worker_id)
        self._hand_on(message.worker_id, message.kind, message.facts)

    def _hear_hello(self, _worker_id: str, _hello: Hello) -> None:
        if not self._is_to_answer:
            self._is_to_answer = True
            self._exchange.loop.call_later(ANSWER_SECONDS, self._answer)

    def _answer(self) -> None:
        self._is_to_answer = False
        self.beat()

    def _hear_beat(self, worker_id: str, beat: Beat) -> None:
        for kind, facts in beat.beside.items():
            self._hand_on(worker_id, kind, facts)

    def _hand_on(self, worker_id: str, kind: str, facts: object) -> None:
        if kind in self._hearers:
            model, hear = self._hearers[kind]
            hear(worker_id, model.model_validate(facts))


def start(coroutine: Coroutine[Any, Any, Any], tasks: "set[asyncio.Task[Any]]") -> None:
    """Run a coroutine in a task that is kept."""
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
