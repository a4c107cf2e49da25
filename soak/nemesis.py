"""Injects faults into a rig, one after the other, in an order that the seed decides."""

import asyncio
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import Final, NamedTuple

from bridge.sandbox.broker import Broker
from soak.checker import API_503_LATER, WORKER_FREEZE, WORKER_KILL, Fault, Group
from soak.rig import QUEUE, Rig, SoakError
from tests.faults.amqp_proxy import ACK, DELIVER, Deed, Method, Sender, misnumber
from tests.faults.bench import CONSUME_LINK
from tests.faults.http_proxy import Spoil

# Starts and ends a fault, and returns its details.
Act = Callable[[], Awaitable[str]]

RECOVERY_SECONDS: Final = 90.0
# Before a fault of the broker or a worker, the service refuses some messages, so that they wait in
# retry queues. They must survive too.
LADDER_FAULT: Final[Mapping[str, object]] = {"status": 425, "count": 20}
LADDER_SECONDS: Final = 0.8
NO_MEMORY, MEMORY = "0.00001", "0.4"
# How long to wait for a frame to alter.
TRAP_SECONDS: Final = 10.0
MAX_NTH: Final = 20
# How long a node is down. Clients leave a frozen node after two missed heartbeats.
DOWN_SECONDS: Final = 12.0
FROZEN_SECONDS: Final = 25.0
# A node looks healthy until it notices that it was frozen or cut off, and then restarts.
NOTICE_SECONDS: Final = 3.0

# The worker logs a frame with a wrong length as an unexpected error.
CUT_SHORT: Final = "cut short"
HALVES, GARBAGE = "API cuts its answers", "API answers garbage"

_API_FAULTS: Final[Mapping[str, dict[str, object]]] = {
    "API 500": {"status": 500},
    "API 503": {"status": 503},
    API_503_LATER: {"status": 503, "headers": {"Retry-After": "2"}},
    "API 429 with Retry-After": {"status": 429, "headers": {"Retry-After": "2"}},
    "API 401": {"status": 401},
    "API hangs": {"mode": "hang"},
    "API cuts": {"mode": "cut"},
    "API accepts, then cuts": {"mode": "accept_then_cut"},
    "API accepts, then hangs": {"latency_seconds": 30},
    "API slow": {"latency_seconds": 1.2},
}
_GARBAGE: Final = (
    b"",
    b"\x00\xff\xfe not HTTP\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1 202 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 202 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
)
_HEAD_BYTES: Final = 7


def _break_end(frame: bytes) -> bytes:
    return frame[:-1] + b"\x00"


def _name_unknown_method(frame: bytes) -> bytes:
    return frame[:_HEAD_BYTES] + struct.pack(">HH", 60, 199) + frame[_HEAD_BYTES + 4 :]


def _cut_short(frame: bytes) -> bytes:
    payload = frame[_HEAD_BYTES:-1]
    kept = payload[: len(payload) // 2]
    return frame[:3] + struct.pack(">I", len(kept)) + kept + frame[-1:]


# Changes to a frame, each of which ends its channel or connection.
_FRAMES: Final[Mapping[str, tuple[Sender, Method, Deed]]] = {
    "connection cut before an ack": ("client", ACK, "cut"),
    "connection cut after an ack": ("client", ACK, "cut_after"),
    "channel closed": ("client", ACK, misnumber),
    "delivery without its end": ("broker", DELIVER, _break_end),
    "confirm without its end": ("broker", ACK, _break_end),
    "unknown method": ("broker", DELIVER, _name_unknown_method),
    f"delivery {CUT_SHORT}": ("broker", DELIVER, _cut_short),
    f"confirm {CUT_SHORT}": ("broker", ACK, _cut_short),
}


class Card(NamedTuple):
    """A kind of fault. `times` is its number of cards in the deck."""

    group: Group
    kind: str
    act: Act
    times: int = 1


class Nemesis:
    """Deals faults from a shuffled deck, so that every kind occurs regularly.

    `timeline` contains all faults, and `stalls` the faults after which nothing was sent. `spoiled`
    contains the times at which answers were spoiled, by the key of the POST.
    """

    def __init__(
        self, rig: Rig, rng: Random, *, groups: Sequence[str], only: str, without: str
    ) -> None:
        self.timeline: list[Fault] = []
        self.stalls: list[str] = []
        self.spoiled: defaultdict[str, list[float]] = defaultdict(list)
        self.new_keys = 0
        self._rig = rig
        self._random = rng
        cards = self._node_cards() if rig.cluster else [*self._cards()]
        self._is_shuffled = rig.cluster is None
        chosen = [card for card in cards if card.group in groups and only in card.kind]
        if without:
            chosen = [card for card in chosen if without not in card.kind]
        if not chosen:
            raise SoakError(f"there is no fault {only!r}")
        self._deck = self._deal([card for card in chosen for _ in range(card.times)])

    async def strike(self) -> Fault:
        """Inject the next fault, end it, and wait until a message is sent again."""
        card = next(self._deck)
        async with self._ladder_filled(needed=card.group != "api"):
            started = time.time()
            detail = await card.act()
            ended = time.time()
        fault = Fault(kind=card.kind, group=card.group, started=started, ended=ended, detail=detail)
        self.timeline.append(fault)
        try:
            await self._rig.until(
                lambda: any(worker.log.sent_at > ended for worker in self._rig.workers),
                what="recovered",
                seconds=RECOVERY_SECONDS,
            )
        except SoakError as error:
            if "ended by itself" in str(error):
                raise
            self.stalls.append(f"nothing was sent for {RECOVERY_SECONDS:.0f} s after: {card.kind}")
        return fault

    def _deal(self, deck: list[Card]) -> Iterator[Card]:
        while True:
            if self._is_shuffled:
                self._random.shuffle(deck)
            yield from deck

    @asynccontextmanager
    async def _ladder_filled(self, *, needed: bool) -> AsyncIterator[None]:
        if needed:
            await self._rig.api.set_faults(LADDER_FAULT)
            await self._rig.wait(LADDER_SECONDS)
        try:
            yield
        finally:
            await self._rig.api.set_faults()

    def _cards(self) -> Iterator[Card]:
        rig = self._rig
        yield Card("broker", "broker kill -9", partial(self._restart, rig.broker.kill), 3)
        yield Card("broker", "broker restart", partial(self._restart, rig.broker.stop), 2)
        yield Card("broker", "broker frozen", self._freeze_broker, 2)
        yield Card("broker", "memory alarm", self._raise_alarm)
        yield Card("broker", "broker closes connections", self._close_connections, 2)
        yield Card("broker", "connections cut", self._cut_connections, 2)
        for kind, (sender, method, deed) in _FRAMES.items():
            yield Card("broker", kind, partial(self._alter_frame, sender, method, deed))
        yield Card("worker", WORKER_KILL, partial(self._end_worker, is_kill=True), 4)
        yield Card("worker", "worker SIGTERM", partial(self._end_worker, is_kill=False), 3)
        if len(rig.workers) > 1:
            # If the only worker is frozen, nothing is sent.
            yield Card("worker", WORKER_FREEZE, self._freeze_worker, 3)
        yield Card("receiver", "receiver kill -9", self._kill_receiver, 2)
        for kind, fault in _API_FAULTS.items():
            yield Card("api", kind, partial(self._spoil_api, fault))
        yield Card("api", HALVES, partial(self._spoil_answers, self._halve))
        yield Card("api", GARBAGE, partial(self._spoil_answers, self._garble))
        yield Card("api", "API refuses connections", self._refuse_connections)
        yield Card("api", "API key replaced", self._replace_key)

    # The broker

    async def _restart(self, end: Callable[[], None]) -> str:
        await asyncio.to_thread(end)
        await asyncio.sleep(self._random.uniform(0, 3))
        await asyncio.to_thread(self._rig.broker.start)
        return ""

    async def _freeze_broker(self) -> str:
        seconds = self._random.uniform(3, 25)
        self._rig.broker.pause()
        try:
            await self._rig.wait(seconds)
        finally:
            self._rig.broker.resume()
        return f"{seconds:.0f} s"

    async def _raise_alarm(self) -> str:
        seconds = self._random.uniform(3, 10)
        await self._rig.ctl("set_vm_memory_high_watermark", NO_MEMORY)
        try:
            await self._rig.wait(seconds)
        finally:
            await self._rig.ctl("set_vm_memory_high_watermark", MEMORY)
        return f"{seconds:.0f} s"

    async def _close_connections(self) -> str:
        await self._rig.ctl("close_all_connections", "soak")
        return ""

    async def _cut_connections(self) -> str:
        name = self._random.choice(["", *self._rig.amqp.names])
        self._rig.amqp.cut(name)
        return name

    async def _alter_frame(self, sender: Sender, method: Method, deed: Deed) -> str:
        link = CONSUME_LINK if sender == "client" else ""
        nth = self._random.randrange(1, MAX_NTH)
        trap = self._rig.amqp.trap(sender, method, deed, nth=nth, link=link)
        with suppress(TimeoutError):
            async with asyncio.timeout(TRAP_SECONDS):
                await trap.sprung.wait()
        self._rig.amqp.traps.remove(trap)
        return "" if trap.sprung.is_set() else "(no such frame came)"

    # The roles

    async def _end_worker(self, *, is_kill: bool) -> str:
        # With ordering, only the active worker has messages in flight.
        active = [worker for worker in self._rig.workers if worker.log.is_active]
        worker = self._random.choice(active or self._rig.workers)
        worker.look()
        if is_kill:
            worker.kill()
        else:
            await worker.end()
        worker.log.is_active = False
        await asyncio.sleep(self._random.uniform(0, 2))
        worker.start()
        return f"{worker.name}{', active' * bool(active)}"

    async def _freeze_worker(self) -> str:
        worker = self._random.choice(self._rig.workers)
        seconds = self._random.uniform(3, 25)
        worker.look()
        worker.freeze()
        try:
            await self._rig.wait(seconds)
        finally:
            worker.thaw()
        return f"{worker.name}, {seconds:.0f} s"

    async def _kill_receiver(self) -> str:
        self._rig.receiver.look()
        self._rig.receiver.kill()
        await asyncio.sleep(self._random.uniform(0, 2))
        self._rig.receiver.start()
        return ""

    # The SMS service

    async def _spoil_api(self, fault: Mapping[str, object]) -> str:
        seconds = self._random.uniform(2, 8)
        await self._rig.api.set_faults(fault)
        await self._rig.wait(seconds)
        await self._rig.api.set_faults()
        return f"{seconds:.0f} s"

    async def _refuse_connections(self) -> str:
        seconds = self._random.uniform(2, 8)
        await self._rig.http.refuse()
        await self._rig.wait(seconds)
        await self._rig.http.accept()
        return f"{seconds:.0f} s"

    async def _replace_key(self) -> str:
        """Make the service refuse the key for some seconds, then give the workers a new key."""
        await self._rig.api.set_faults({"status": 401})
        await asyncio.sleep(self._random.uniform(1, 4))
        self.new_keys += 1
        fresh = self._rig.key_file.with_suffix(".new")
        fresh.write_text(f"key-{self.new_keys}\n", encoding="ascii")
        fresh.replace(self._rig.key_file)
        await self._rig.api.set_faults()
        return ""

    async def _spoil_answers(self, spoil: Spoil) -> str:
        seconds = self._random.uniform(2, 8)
        self._rig.http.spoil = spoil
        await self._rig.wait(seconds)
        self._rig.http.spoil = None
        return f"{seconds:.0f} s"

    def _halve(self, request: bytes, answer: bytes) -> bytes:
        self._note_spoiled(request)
        return answer[: self._random.randrange(len(answer))]

    def _garble(self, request: bytes, _answer: bytes) -> bytes:
        self._note_spoiled(request)
        return self._random.choice(_GARBAGE)

    def _note_spoiled(self, request: bytes) -> None:
        for line in request.partition(b"\r\n\r\n")[0].split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"idempotency-key":
                self.spoiled[value.strip().decode("ascii")].append(time.time())

    # Nodes of a cluster

    def _node_cards(self) -> list[Card]:
        acts: dict[str, Act] = {
            "the queue's leader is killed": self._kill_leader,
            "the worker's node is stopped": self._stop_node,
            "the queue's leader is frozen": self._freeze_leader,
            "the worker's node is frozen": self._freeze_node,
            "the worker's node is cut off": self._cut_off_node,
            "all nodes are restarted, one by one": self._restart_all,
        }
        return [
            Card("broker", kind, partial(self._then_in_sync, act)) for kind, act in acts.items()
        ]

    async def _then_in_sync(self, act: Act) -> str:
        """Inject a fault into a node. Until it is back, another fault would cost the majority."""
        assert self._rig.cluster is not None
        detail = await act()
        await self._rig.wait(NOTICE_SECONDS)
        await asyncio.to_thread(self._rig.cluster.until_in_sync)
        return detail

    def _workers_node(self) -> Broker:
        assert self._rig.cluster is not None
        self._rig.look()
        host = self._rig.workers[0].log.host
        return next(node for node in self._rig.cluster.nodes if host in node.url)

    async def _leader(self) -> Broker:
        assert self._rig.cluster is not None
        return await asyncio.to_thread(self._rig.cluster.leader, QUEUE)

    async def _kill_leader(self) -> str:
        return await self._without_node(await self._leader(), is_kill=True)

    async def _stop_node(self) -> str:
        return await self._without_node(self._workers_node())

    async def _without_node(
        self, node: Broker, *, is_kill: bool = False, seconds: float = DOWN_SECONDS
    ) -> str:
        await asyncio.to_thread(node.kill if is_kill else node.stop)
        await self._rig.wait(seconds)
        await asyncio.to_thread(node.start)
        return ""

    async def _restart_all(self) -> str:
        assert self._rig.cluster is not None
        for node in self._rig.cluster.nodes:
            await self._without_node(node, seconds=0)
            await asyncio.to_thread(self._rig.cluster.until_in_sync)
        return ""

    async def _freeze_leader(self) -> str:
        return await self._freeze_node_of(await self._leader())

    async def _freeze_node(self) -> str:
        return await self._freeze_node_of(self._workers_node())

    async def _freeze_node_of(self, node: Broker) -> str:
        assert self._rig.cluster is not None
        self._rig.cluster.freeze(node)
        try:
            await self._rig.wait(FROZEN_SECONDS)
        finally:
            self._rig.cluster.thaw()
        return ""

    async def _cut_off_node(self) -> str:
        assert self._rig.cluster is not None
        node = self._workers_node()
        await asyncio.to_thread(self._rig.cluster.cut_off, node)
        await self._rig.wait(DOWN_SECONDS)
        await asyncio.to_thread(self._rig.cluster.heal, node)
        return ""
