"""A fanout exchange for workers on one event loop: what is told arrives later, or never."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from bridge.worker.cluster.beats import Beats
from bridge.worker.cluster.exchange import LOOK_SECONDS
from bridge.worker.cluster.messages import (
    Beat,
    Facts,
    Hello,
    Message,
    new_worker_id,
    read_message,
    write_message,
)
from bridge.worker.cluster.roster import Roster

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

    def carry(self, body: bytes, to: "str | None" = None) -> None:
        """Carry a message to all, its sender included, or to one worker."""
        message = read_message(body)
        assert message is not None
        if self.loses(message):
            return
        self.carried += len(self.members) if to is None else 1
        delay = LATENCY_SECONDS * self.chance.uniform(0.5, 2)
        self.loop.call_later(delay, self._hand_out, message, to)

    def _hand_out(self, message: Message, to: "str | None") -> None:
        for member in self.members:
            if member.worker_id != message.worker_id and to in {None, member.worker_id}:
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
        self._each_second: list[Callable[[], None]] = []
        self._beats = Beats(self.roster.beats)
        self.hurry_while = self._beats.hurry_while
        self.on(Hello, self._hear_hello)
        self.on(Beat, self._hear_beat)

    def on(self, facts: type[Facts], hear: Callable[[str, Any], None]) -> None:
        """Call `hear` with what peers say."""
        self._hearers[facts.kind] = (facts, hear)

    def in_each_beat(self, facts: Callable[[], Facts | None]) -> None:
        """Have each beat carry facts beside."""
        self._in_each_beat.append(facts)

    def each_second(self, look: Callable[[], None]) -> None:
        self._each_second.append(look)

    def tell(self, facts: Facts, to: str | None = None) -> None:
        """Say something to all, or to one."""
        if self.is_up:
            self._exchange.carry(write_message(self.worker_id, facts), to)

    def join(self) -> None:
        """Hear, and be heard."""
        self._exchange.members.append(self)
        self.is_up = True
        self.roster.resume()
        self.tell(Hello(joins=1, beat_seconds=self._beats.seconds))

    def leave(self) -> None:
        """Fall silent, as one does that is killed."""
        self.is_up = False
        self.roster.pause()
        if self in self._exchange.members:
            self._exchange.members.remove(self)

    async def keep_beating(self) -> None:
        """Look each second, and beat when it is time."""
        while True:
            await asyncio.sleep(LOOK_SECONDS * self._exchange.chance.uniform(0.99, 1.05))
            for look in self._each_second:
                look()
            if self._beats.is_due():
                self.beat()

    def beat(self, to: str | None = None) -> None:
        """Say that it is there."""
        beside = [facts for make in self._in_each_beat if (facts := make()) is not None]
        told = {facts.kind: facts.model_dump(mode="json") for facts in beside}
        self.tell(Beat(beat_seconds=self._beats.seconds, beside=told), to)

    def hear(self, message: Message) -> None:
        self.roster.note(message.worker_id)
        self._hand_on(message.worker_id, message.kind, message.facts)

    def _hear_hello(self, worker_id: str, hello: Hello) -> None:
        self.roster.note(worker_id, hello.beat_seconds)
        self.beat(worker_id)

    def _hear_beat(self, worker_id: str, beat: Beat) -> None:
        self.roster.note(worker_id, beat.beat_seconds)
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
