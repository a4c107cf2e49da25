"""What both roles have to bear all through the soak of an hour, whatever fault is on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final

from soak.bench import QUEUE, Bench, read_rss_bytes
from soak.hostile import make_malformed, visit
from soak.webhook import MountedSecrets, Receiver, Service
from tests.faults.attack import ATTACKS, strike
from tests.faults.bench import open_amqp

MALFORMED_PER_SECOND: Final = 2.0
STRANGERS: Final = 4
FUZZERS: Final = 2
BETWEEN_SECONDS: Final = 0.5
ROTATION_SECONDS: Final = 60.0
# A malformed message is known by its property `app_id`, which its dead letter keeps.
MALFORMED: Final = "malformed-"


class Hardships:
    """Malformed messages, strangers, new webhook secrets; and the memory, looked at each second.

    `malformed` has the names of all malformed messages that the broker has confirmed.
    """

    def __init__(
        self,
        bench: Bench,
        receiver: Receiver,
        service: Service,
        secrets: MountedSecrets,
        rng: Random,
    ) -> None:
        self.malformed: set[str] = set()
        self.attacks: Counter[str] = Counter()
        self.fuzzed = self.webhook_secrets = 0
        self.memory: dict[str, list[int]] = {"worker": [], "receiver": []}
        self._bench = bench
        self._receiver = receiver
        self._service = service
        self._secrets = secrets
        self._random = rng

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Have all of it go on until the end of the block."""
        ways: list[Callable[[], Awaitable[None]]] = [
            self._watch,
            self._publish_malformed,
            self._rotate_secrets,
            *[self._attack] * STRANGERS,
            *[self._fuzz] * FUZZERS,
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_until_cancelled(way())) for way in ways]
            yield
            for task in tasks:
                task.cancel()

    async def _watch(self) -> None:
        while True:
            (pid,) = self._bench.worker_pids
            self.memory["worker"].append(read_rss_bytes(pid))
            self.memory["receiver"].append(read_rss_bytes(self._receiver.pid))
            await asyncio.sleep(1)

    async def _publish_malformed(self) -> None:
        number = 0
        while True:
            # Connections break here as often as those of the bridge.
            with suppress(Exception):
                async with open_amqp(self._bench.broker.url) as amqp:
                    while True:
                        number += 1
                        name = f"{MALFORMED}{number}"
                        body, properties = make_malformed(self._random, number)
                        await amqp.publish(QUEUE, body, app_id=name, **properties)
                        self.malformed.add(name)
                        await asyncio.sleep(1 / MALFORMED_PER_SECOND)
            await asyncio.sleep(BETWEEN_SECONDS)

    async def _rotate_secrets(self) -> None:
        """Give the receiver another secret, beside the one before it for what is on its way."""
        name, labels = "sms_bridge_secret_reloads_total", {"secret": "webhook"}
        while True:
            await asyncio.sleep(ROTATION_SECONDS)
            old, new = self._service.secret, f"secret-{self.webhook_secrets + 1}"
            before = await self._receiver.metric(name, outcome="changed", **labels)
            self._secrets.put(current=new, previous=old)
            await self._receiver.until_metric(name, before + 2, outcome="changed", **labels)
            self._service.secret = new
            self.webhook_secrets += 1

    async def _attack(self) -> None:
        while True:
            name = self._random.choice([*ATTACKS])
            with suppress(OSError):
                await strike(self._receiver.port, ATTACKS[name])
            self.attacks[name] += 1
            await asyncio.sleep(BETWEEN_SECONDS)

    async def _fuzz(self) -> None:
        while True:
            with suppress(OSError):
                await visit(self._receiver.port, self._random)
            self.fuzzed += 1
            await asyncio.sleep(BETWEEN_SECONDS)


async def _until_cancelled(way: Awaitable[None]) -> None:
    with suppress(asyncio.CancelledError):
        await way
