"""See that a role finds on the broker what it needs, when it connects and as long as it runs."""

import asyncio
import contextlib
from typing import Final, Literal, NoReturn

import aio_pika

from bridge.topology import Topology, ensure

Mode = Literal["declare", "verify", "off"]
MEND_SECONDS: Final = 5.0


class Upkeep:
    """Keeps one role's part of the topology, as `rabbitmq.topology` says."""

    def __init__(self, needed: Topology, mode: Mode) -> None:
        self._needed = needed
        self._mode: Mode = mode

    async def settle(self, connection: aio_pika.Connection) -> None:
        """Declare or verify; raises BrokerError that says what is wrong and what to do."""
        await ensure(connection, self._needed, self._mode)

    async def mend(self, connection: aio_pika.Connection, missing: asyncio.Event) -> NoReturn:
        """Settle again when `missing` is set, at most every 5 s.

        Raises BrokerError as `settle` does.
        """
        while True:
            await missing.wait()
            missing.clear()
            with contextlib.suppress(TimeoutError):  # a broker that hangs; it is seen elsewhere
                await self.settle(connection)
            await asyncio.sleep(MEND_SECONDS)
