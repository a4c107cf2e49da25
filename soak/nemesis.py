"""Brings one fault after the other on a bench, in an order that the seed decides."""

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, TypeAlias

from bridge.sandbox.processes import wait_until
from soak.bench import Bench, SoakError
from soak.checker import API_503_LATER, GROUPS, WORKER_FREEZE, WORKER_KILL, Fault, Group

Card: TypeAlias = tuple[Group, str]
# Brings a fault on and ends it; returns when it ended, and a detail.
Act: TypeAlias = Callable[[], tuple[float, str]]

LOOK_SECONDS: Final = 0.2
RECOVERY_SECONDS: Final = 90.0
# The management plugin lists a connection some seconds after it was opened.
LISTED_SECONDS: Final = 15.0
# Before a fault of the broker or the worker so many messages are sent up the retry ladder, with
# an answer that says that they were not taken: what waits there must survive, too.
LADDER_FAULT: Final[dict[str, object]] = {"status": 425, "count": 20}
LADDER_SECONDS: Final = 0.8
NO_MEMORY, MEMORY = "0.00001", "0.4"

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

# The faults are dealt from a deck; the worse ones are in it more than once.
_DECK: Final[tuple[Card, ...]] = (
    *(("broker", "broker kill -9"),) * 3,
    *(("broker", "broker restart"),) * 2,
    *(("broker", "connections killed"),) * 3,
    *(("broker", "broker frozen"),) * 2,
    ("broker", "memory alarm"),
    *(("worker", WORKER_KILL),) * 3,
    *(("worker", "worker SIGTERM"),) * 2,
    *(("api", kind) for kind in _API_FAULTS),
)
# While the only worker is frozen there is nobody who could send what it has.
_OF_SEVERAL_WORKERS: Final[tuple[Card, ...]] = (("worker", WORKER_FREEZE),) * 2


class Nemesis:
    """Knows every fault of these groups, and those of `more`.

    `timeline` has those that were, `stalls` those that had no end.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        seed: int,
        groups: Collection[Group] = GROUPS,
        more: Mapping[Card, Act] = MappingProxyType({}),
    ) -> None:
        self.timeline: list[Fault] = []
        self.stalls: list[str] = []
        self._bench = bench
        self._random = random.Random(seed)
        deck = _DECK if bench.workers == 1 else (*_DECK, *_OF_SEVERAL_WORKERS)
        self._cards = self._deal([*(card for card in deck if card[0] in groups), *more])
        self._acts: Mapping[str, Act] = {
            **{kind: act for (_, kind), act in more.items()},
            "broker kill -9": self._kill_broker,
            "broker restart": self._restart_broker,
            "connections killed": self._kill_connections,
            "broker frozen": self._freeze_broker,
            "memory alarm": self._raise_alarm,
            WORKER_KILL: self._kill_worker,
            WORKER_FREEZE: self._freeze_worker,
            "worker SIGTERM": self._end_worker,
        }

    def strike(self) -> Fault:
        """Bring on the next fault, end it, and wait until the worker sends again."""
        group, kind = next(self._cards)
        act = self._acts.get(kind) or (lambda: self._spoil_api(kind))
        with self._ladder_filled(needed=group != "api"):
            started = time.time()
            ended, detail = act()
        fault = Fault(kind=kind, group=group, started=started, ended=ended, detail=detail)
        self.timeline.append(fault)
        if not self.wait(RECOVERY_SECONDS, until=lambda: self._bench.log.has_sent_since(ended)):
            self.stalls.append(f"nothing was sent for {RECOVERY_SECONDS:.0f} s after: {kind}")
        return fault

    def rest(self) -> None:
        """Leave everything in peace for some seconds."""
        self.wait(self._random.uniform(2, 6))

    def wait(self, seconds: float, *, until: Callable[[], object] = lambda: False) -> bool:
        """Wait and watch the processes; return whether `until` came true."""
        deadline = time.monotonic() + seconds
        while not until():
            if (remaining := deadline - time.monotonic()) <= 0:
                return False
            self._bench.look()
            time.sleep(min(LOOK_SECONDS, remaining))
        return True

    def _deal(self, deck: list[Card]) -> Iterator[Card]:
        """Deal from a shuffled deck, so that no kind is left out for long."""
        while True:
            self._random.shuffle(deck)
            yield from deck

    @contextmanager
    def _ladder_filled(self, *, needed: bool) -> Iterator[None]:
        if not needed:
            yield
            return
        self._bench.set_faults(LADDER_FAULT)
        self.wait(LADDER_SECONDS)
        try:
            yield
        finally:
            self._bench.set_faults()

    def _kill_broker(self) -> tuple[float, str]:
        self._bench.broker.kill()
        time.sleep(self._random.uniform(0, 3))
        self._bench.broker.start()
        return time.time(), ""

    def _restart_broker(self) -> tuple[float, str]:
        self._bench.broker.stop()
        time.sleep(self._random.uniform(0, 3))
        self._bench.broker.start()
        return time.time(), ""

    def _freeze_broker(self) -> tuple[float, str]:
        seconds = self._random.uniform(3, 25)
        self._bench.broker.pause()
        try:
            self.wait(seconds)
        finally:
            self._bench.broker.resume()
        return time.time(), f"{seconds:.0f} s"

    def _raise_alarm(self) -> tuple[float, str]:
        seconds = self._random.uniform(3, 10)
        self._bench.broker.ctl("set_vm_memory_high_watermark", NO_MEMORY)
        try:
            self.wait(seconds)
        finally:
            # The command takes a second to start, and the alarm is off before it returns.
            ended = time.time()
            self._bench.broker.ctl("set_vm_memory_high_watermark", MEMORY)
        return ended, f"{seconds:.0f} s"

    def _kill_connections(self) -> tuple[float, str]:
        found: dict[str, str] = {}

        def is_listed() -> bool:
            found.update(self._bench.connections())
            return bool(found)

        if not wait_until(is_listed, seconds=LISTED_SECONDS):
            raise SoakError("the broker lists no connection")
        names = sorted(found, key=lambda name: (found[name], name))
        victims = names if self._random.random() < 0.5 else [self._random.choice(names)]
        for name in victims:
            self._bench.close_connection(name)
        return time.time(), ", ".join(sorted({found[name] for name in victims}))

    def _kill_worker(self) -> tuple[float, str]:
        index = self._random.randrange(self._bench.workers)
        self._bench.kill_worker(index)
        time.sleep(self._random.uniform(0, 2))
        self._bench.start_worker(index)
        return time.time(), ""

    def _freeze_worker(self) -> tuple[float, str]:
        index = self._random.randrange(self._bench.workers)
        seconds = self._random.uniform(3, 25)
        self._bench.freeze_worker(index)
        try:
            self.wait(seconds)
        finally:
            self._bench.thaw_worker(index)
        return time.time(), f"{seconds:.0f} s"

    def _end_worker(self) -> tuple[float, str]:
        index = self._random.randrange(self._bench.workers)
        self._bench.end_worker(index)
        time.sleep(self._random.uniform(0, 2))
        self._bench.start_worker(index)
        return time.time(), ""

    def _spoil_api(self, kind: str) -> tuple[float, str]:
        seconds = self._random.uniform(2, 8)
        self._bench.set_faults(_API_FAULTS[kind])
        try:
            self.wait(seconds)
        finally:
            self._bench.set_faults()
        return time.time(), f"{seconds:.0f} s"
