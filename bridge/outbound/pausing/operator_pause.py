"""Follow the mark with which an operator stops every worker of the queue.

It is looked at on each new connection before anything is taken, and every second from then on. An
operator's pause wins: only a node that has known of it is believed at once that it is over.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.errors import BrokerError
from bridge.logs import Log
from bridge.outbound.pausing.pace import Pace
from bridge.topology.paused_queue import Note, is_certainly_absent, is_paused, read_note

log = Log(__name__)

LOOK_SECONDS: Final = 1.0
# A node that is back after a partition may know nothing of the mark for some seconds. What is still
# not there after so long, an operator has taken away.
STALE_SECONDS: Final = 10.0
# A note comes right after the mark, or never; where it may not be read, each try is an error in the
# broker's log.
MAX_READS: Final = 10


class OperatorPause:
    """Has `pace` hold while the workers of `queue` are to stop; `note` says what for."""

    def __init__(
        self, queue: str, pace: Pace, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._pace = pace
        self._clock = clock
        # Where the mark was seen last; where it is not seen, and since when.
        self._seen_on: Connection | None = None
        self._unseen_on: Connection | None = None
        self._unseen_since = 0.0
        self._publishing: Connection | None = None
        self._reads = 0
        self.note: Note | None = None

    async def beside(
        self, serve: Callable[[Connection], Awaitable[None]], connection: Connection
    ) -> None:
        """Serve a connection that publishes, which this asks too as long as it lasts."""
        self._publishing = connection
        try:
            await serve(connection)
        finally:
            self._publishing = None

    async def look(self, connection: Connection) -> None:
        """Find out whether to hold; raise BrokerError when that is not known."""
        if not await is_paused(connection, self._queue):
            if self._is_over(connection):
                self.note, self._reads = None, 0
                self._pace.release()
            return
        self._seen_on, self._unseen_on = connection, None
        self._pace.hold()
        if self.note is None and self._reads < MAX_READS:
            self._reads += 1
            self.note = await read_note(connection, self._queue)
            if self.note is not None:
                log.warning("paused_by_operator", note=self.note.reason, since=self.note.since_text)

    def _is_over(self, connection: Connection) -> bool:
        """Whether an operator has ended the pause, if there was one, when it is not seen now."""
        if not self._pace.is_held or connection is self._seen_on:
            return True
        if connection is not self._unseen_on:
            # Another node, or the same one after a restart.
            self._unseen_on, self._unseen_since = connection, self._clock()
        return self._clock() - self._unseen_since >= STALE_SECONDS

    async def watch(self, connection: Connection) -> NoReturn:
        """Look every second, as long as the connection is served; what is not known stays."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._pace.is_held or not await self._is_certainly_absent():
                try:
                    await self.look(connection)
                except BrokerError as error:
                    log.debug("pause_not_read", why=str(error))
                except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                    # Whatever else runs on the connection notices by itself when it is gone.
                    log.debug("pause_not_read", why=type(error).__name__)
                heed_cancellation()

    async def _is_certainly_absent(self) -> bool:
        connection = self._publishing
        return connection is not None and await is_certainly_absent(connection, self._queue)
