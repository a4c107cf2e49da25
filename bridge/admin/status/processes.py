"""Asks the admin ports of all roles, each for what it says of itself and what it counts."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bridge.admin.admin_port import (
    STRANGER,
    AdminPort,
    Client,
    addresses_of,
    open_client,
    read_health,
    read_metrics,
)
from bridge.admin.status.reading import Reading, check_scrape, describe
from bridge.admin.status.report import Process
from bridge.errors import BridgeError

# More pods than the bridge is made for.
MAX_PORTS: Final = 256
ASKED_AT_ONCE: Final = 32
# Between the two readings that a rate is made of, when there is no earlier one.
RATE_SECONDS: Final = 1.0


class ProcessReader:
    """Reads, as often as it is asked, what the roles behind these names say.

    `readings` are those of the last time, by address.
    """

    def __init__(self, names: Sequence[AdminPort], *, queue: str) -> None:
        self._names = names
        self._queue = queue
        self.readings: Mapping[AdminPort, Reading] = {}

    async def read(self) -> list[Process]:
        """Read it all, a process for each address; the first time takes `RATE_SECONDS` longer.

        Raises BridgeError when the names stand for more than `MAX_PORTS` addresses.
        """
        names, unknown = await self._look_up()
        async with open_client() as client:
            if names and not self.readings:
                self.readings = _good(await _ask_all(client, names))
                await asyncio.sleep(RATE_SECONDS)
            answers = await _ask_all(client, names)
        before, self.readings = self.readings, _good(answers)
        return [
            *unknown,
            *(
                Process(name=str(names[address]), address=str(address), fault=answer)
                if isinstance(answer, str)
                else describe(
                    names[address], address, answer, before.get(address), queue=self._queue
                )
                for address, answer in answers.items()
            ),
        ]

    async def _look_up(self) -> tuple[dict[AdminPort, AdminPort], list[Process]]:
        """Return the name of each address, the first of several, and names that stand for none."""
        found = await asyncio.gather(*map(_addresses_or_fault, self._names))
        names: dict[AdminPort, AdminPort] = {}
        unknown = []
        for name, addresses in zip(self._names, found, strict=True):
            if isinstance(addresses, str):
                unknown.append(Process(name=str(name), address=str(name), fault=addresses))
            else:
                names = dict.fromkeys(addresses, name) | names
        if len(names) > MAX_PORTS:
            raise BridgeError(f"--admin: stands for more than {MAX_PORTS} addresses; name fewer")
        return dict(sorted(names.items())), unknown


async def _addresses_or_fault(name: AdminPort) -> list[AdminPort] | str:
    try:
        return await addresses_of(name)
    except BridgeError as error:
        return str(error)


async def _ask_all(
    client: Client, addresses: Iterable[AdminPort]
) -> dict[AdminPort, Reading | str]:
    """Return what each says, or why it says nothing."""
    slots = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(address: AdminPort) -> tuple[AdminPort, Reading | str]:
        async with slots:
            try:
                health = await read_health(client, address)
                reading = Reading(time.monotonic(), health, await read_metrics(client, address))
                check_scrape(reading.scrape)
            except BridgeError as error:
                return address, str(error)
            except ValueError:
                return address, STRANGER
            return address, reading

    return dict(await asyncio.gather(*(ask(address) for address in addresses)))


def _good(answers: Mapping[AdminPort, Reading | str]) -> dict[AdminPort, Reading]:
    return {at: answer for at, answer in answers.items() if isinstance(answer, Reading)}
