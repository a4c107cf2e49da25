"""A worker process that is told to end, and what is seen of its end."""

import json
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from bridge.sandbox.orders import Fault
from bridge.sandbox.processes import Child
from tests.faults.bench import Bench, eventually, make_numbers

SHUTDOWN_SECONDS = 2


@dataclass
class Ending:
    """How one worker process ended after SIGTERM."""

    code: int | None
    seconds: float
    numbers: list[str]
    posts: dict[str, int]
    taken: dict[str, int]
    # Ready in any of its queues once it is gone.
    left: set[str]
    log: str

    @property
    def lost(self) -> set[str]:
        """Numbers that are neither sent nor in a queue."""
        return {*self.numbers} - {*self.taken} - self.left


class Scenario:
    """One worker process, brought into a state and told to end."""

    def __init__(self, bench: Bench, child: Child) -> None:
        self.bench = bench
        self.child = child

    def has_logged(self, event: str) -> bool:
        """Say whether the process has logged an event."""
        assert self.child.exit_code is None, self.child.tail()
        return f'"event":"{event}"' in self.child.log.read_text()

    def count_logged(self, words: str) -> int:
        """Count how often the process has logged these words."""
        return self.child.log.read_text().count(words)

    async def until_logged(self, event: str) -> None:
        """Return when the process has logged an event."""
        await eventually(lambda: self.has_logged(event), what=f"{event}\n{self.child.tail()}")

    async def publish(self, fault: dict[str, Any] | None = None) -> list[str]:
        """Publish three messages whose POSTs meet a fault, and wait until they are POSTed."""
        numbers = make_numbers(3)
        faults = self.bench.service.faults
        faults += [Fault(**fault, to=number) for number in numbers if fault]
        await self.bench.publish(numbers)
        await eventually(lambda: len(self.bench.service.posts(numbers)) >= 3, what="3 POSTs")
        return numbers

    async def end(self, numbers: list[str]) -> Ending:
        """Send SIGTERM, wait for the end, and take stock."""
        bench, started = self.bench, time.monotonic()
        self.child.ask_to_end()
        await eventually(lambda: self.child.exit_code is not None, what=self.child.name)
        seconds = time.monotonic() - started
        bench.proxy.refuse()
        bench.proxy.thaw()
        await eventually(self._is_gone, what="no consumer left")
        return Ending(
            code=self.child.exit_code,
            seconds=seconds,
            numbers=numbers,
            posts=Counter(str(attempt.to) for attempt in bench.service.posts(numbers)),
            taken=Counter(message.to for message in bench.service.taken(numbers)),
            left=await self._left(),
            log=self.child.log.read_text(),
        )

    async def _is_gone(self) -> bool:
        return await self.bench.amqp.consumers(self.bench.queue) == 0

    async def _left(self) -> set[str]:
        ladder = [f"{self.bench.queue}.retry.{step}" for step in ("1m", "2m")]
        messages = [
            message
            for queue in (self.bench.queue, self.bench.dead_queue, *ladder)
            for message in await self.bench.amqp.take_all(queue)
        ]
        return {str(json.loads(message.body)["to"]) for message in messages}
