"""Follow the mark with which an operator stops every worker of the queue.

The worker looks for it on each new connection before it takes anything, and every second from then
on. An operator's pause wins: only a node that has known of it is believed at once that it is over.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.errors import BrokerError
from bridge.telemetry.logs import Log
from bridge.topology.paused_queue import (
    HIDDEN,
    HIDDEN_REMEDY,
    HiddenPauseError,
    Note,
    is_paused,
    paused_queue,
    probe,
    read_note,
)
from bridge.worker.service.breaker import CircuitBreaker

log = Log(__name__)

LOOK_SECONDS: Final = 1.0
# Where the user has no permission on the mark: how often it is asked whether it is still there, and
# for how long a first look waits for the connection that can tell.
HIDDEN_LOOK_SECONDS: Final = 5.0
PUBLISHING_SECONDS: Final = 5.0
# A node that is back after a partition may know nothing of the mark for some seconds. What is still
# not there after so long, an operator has taken away.
STALE_SECONDS: Final = 10.0
# A note comes right after the mark, or never; where it may not be read, each try is an error in the
# broker's log.
MAX_READS: Final = 10


class OperatorPause:
    """Has `breaker` stop everything while an operator has paused `queue`; `note` says why."""

    def __init__(
        self, queue: str, breaker: CircuitBreaker, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._breaker = breaker
        self._clock = clock
        # Where the mark was seen last; where it is not seen, and since when.
        self._seen_on: Connection | None = None
        self._unseen_on: Connection | None = None
        self._unseen_since = 0.0
        self._publishing: Connection | None = None
        self._is_publishing = asyncio.Event()
        # Where the user may not know of the mark.
        self._hidden_on: Connection | None = None
        self._is_hidden_logged = False
        self._reads = 0
        self.note: Note | None = None

    async def beside(
        self, serve: Callable[[Connection], Awaitable[None]], connection: Connection
    ) -> None:
        """Serve a connection that publishes, which this asks too as long as it lasts."""
        self._publishing = connection
        self._is_publishing.set()
        try:
            await serve(connection)
        finally:
            self._publishing = None
            self._is_publishing.clear()

    async def look(self, connection: Connection) -> None:
        """Find out whether to hold; raise BrokerError when that is not known.

        Where the user has no permission on the mark, the connection that publishes is asked, as
        soon as there is one. When it cannot tell either, what was known stays.
        """
        seen_on: Connection | None = connection
        try:
            is_on: bool | None = await is_paused(connection, self._queue)
        except HiddenPauseError:
            self._note_hidden(connection)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUBLISHING_SECONDS):
                    await self._is_publishing.wait()
            seen_on = self._publishing
            is_on = await self._probe()
        if is_on is not None and seen_on is not None:
            await self._follow(is_on, seen_on, connection)

    async def watch(self, connection: Connection) -> NoReturn:
        """Look every second, as long as the connection is served; what is not known stays.

        Probes stay in a mark that others have made without a limit, so one that is there and hidden
        is asked for seldom.
        """
        while True:
            is_hidden = connection is self._hidden_on
            seldom = is_hidden and self._breaker.is_paused_by_operator
            await asyncio.sleep(HIDDEN_LOOK_SECONDS if seldom else LOOK_SECONDS)
            publishing = self._publishing
            is_to_probe = is_hidden or not self._breaker.is_paused_by_operator
            exists = await self._probe() if is_to_probe else None
            if is_hidden:
                if exists is not None and publishing is not None:
                    await self._follow(exists, publishing, connection)
            elif exists is not False:
                try:
                    await self.look(connection)
                except BrokerError as error:
                    log.debug("pause_not_read", why=str(error))
                except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                    # Whatever else runs on the connection notices by itself when it is gone.
                    log.debug("pause_not_read", why=type(error).__name__)
                heed_cancellation()

    async def _probe(self) -> bool | None:
        publishing = self._publishing
        return None if publishing is None else await probe(publishing, self._queue)

    async def _follow(self, is_on: bool, seen_on: Connection, reading: Connection) -> None:  # noqa: FBT001  what was seen
        """Do as the mark says, which a connection has shown; on another one the note is read."""
        if not is_on:
            if self._is_over(seen_on):
                self.note, self._reads = None, 0
                self._breaker.operator_resumed()
            return
        self._seen_on, self._unseen_on = seen_on, None
        self._breaker.operator_paused()
        is_readable = reading is not self._hidden_on
        if is_readable and self.note is None and self._reads < MAX_READS:
            self._reads += 1
            self.note = await read_note(reading, self._queue)
            if self.note is not None:
                log.warning("paused_by_operator", note=self.note.reason, since=self.note.since_text)

    def _note_hidden(self, connection: Connection) -> None:
        self._hidden_on = connection
        if not self._is_hidden_logged:
            self._is_hidden_logged = True
            queue = paused_queue(self._queue)
            log.warning("pause_hidden", queue=queue, why=HIDDEN, remedy=HIDDEN_REMEDY)

    def _is_over(self, connection: Connection) -> bool:
        """Whether an operator has ended the pause, if there was one, when it is not seen now."""
        if not self._breaker.is_paused_by_operator or connection is self._seen_on:
            return True
        if connection is not self._unseen_on:
            # Another node, or the same one after a restart.
            self._unseen_on, self._unseen_since = connection, self._clock()
        return self._clock() - self._unseen_since >= STALE_SECONDS
