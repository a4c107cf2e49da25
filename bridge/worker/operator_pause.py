"""Follow the operator's pause: a queue whose existence stops every worker of the request queue.

The worker checks for that queue, the mark, on each new connection before it consumes, and every
second afterwards. In doubt the pause stays: a missing mark ends it at once only if the connection
that reports it has seen the mark before.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from bridge.amqp.channels import heed_cancellation
from bridge.amqp.client import Connection
from bridge.deadline import wait_at_most
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
from bridge.worker.pauses import WorkerPauses

log = Log(__name__)

LOOK_SECONDS: Final = 1.0
# For users without permission on the mark: how often to check whether an existing mark is still
# there, and how long the first check waits for the publishing connection.
HIDDEN_LOOK_SECONDS: Final = 5.0
PUBLISHING_SECONDS: Final = 5.0
# A node that returns after a partition may not know of the mark for some seconds. A mark that is
# missing for longer was deleted by an operator.
STALE_SECONDS: Final = 10.0
# A note is published right after the mark, or never. If the user may not read it, each read is
# an error in the broker's log.
MAX_READS: Final = 10


class OperatorPause:
    """Pauses the worker while an operator pauses `queue`; `note` is the operator's reason."""

    def __init__(
        self, queue: str, pauses: WorkerPauses, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._pauses = pauses
        self._clock = clock
        # Connection that saw the mark last; connection that does not see it, and since when.
        self._seen_on: Connection | None = None
        self._unseen_on: Connection | None = None
        self._unseen_since = 0.0
        self._publishing: Connection | None = None
        self._is_publishing = asyncio.Event()
        # Connection whose user has no permission on the mark.
        self._hidden_on: Connection | None = None
        self._is_hidden_logged = False
        self._reads = 0
        self.note: Note | None = None

    async def beside(
        self, serve: Callable[[Connection], Awaitable[None]], connection: Connection
    ) -> None:
        """Serve a publishing connection, and use it for checks until it ends."""
        self._publishing = connection
        self._is_publishing.set()
        try:
            await serve(connection)
        finally:
            self._publishing = None
            self._is_publishing.clear()

    async def look(self, connection: Connection) -> None:
        """Check once for the mark; raise BrokerError if the result is unknown.

        If the user has no permission on the mark, the check uses the publishing connection as soon
        as there is one. If that one cannot tell either, the last known state stays.
        """
        seen_on: Connection | None = connection
        try:
            is_on: bool | None = await is_paused(connection, self._queue)
        except HiddenPauseError:
            self._note_hidden(connection)
            await wait_at_most(PUBLISHING_SECONDS, self._is_publishing)
            seen_on = self._publishing
            is_on = await self._probe()
        if is_on is not None and seen_on is not None:
            await self._follow(is_on, seen_on, connection)

    async def watch(self, connection: Connection) -> NoReturn:
        """Check every second while the connection is served; an unknown result changes nothing.

        The check by publishing leaves messages in an existing mark that was declared without a
        length limit. If the mark exists but cannot be read, it is therefore checked less often.
        """
        while True:
            is_hidden = connection is self._hidden_on
            seldom = is_hidden and self._pauses.by_operator
            await asyncio.sleep(HIDDEN_LOOK_SECONDS if seldom else LOOK_SECONDS)
            publishing = self._publishing
            is_to_probe = is_hidden or not self._pauses.by_operator
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
                    # If the connection is lost, its other users notice that themselves.
                    log.debug("pause_not_read", why=type(error).__name__)
                heed_cancellation()

    async def _probe(self) -> bool | None:
        publishing = self._publishing
        return None if publishing is None else await probe(publishing, self._queue)

    async def _follow(self, is_on: bool, seen_on: Connection, reading: Connection) -> None:  # noqa: FBT001  what was seen
        """Apply the state of the mark that `seen_on` reported; read the note on `reading`."""
        if not is_on:
            if self._note_missing(seen_on):
                self.note, self._reads = None, 0
                self._pauses.operator_resumed()
            return
        self._seen_on, self._unseen_on = seen_on, None
        self._pauses.operator_paused()
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

    def _note_missing(self, connection: Connection) -> bool:
        """Note a missing mark; return whether the pause is over, or there was none."""
        if not self._pauses.by_operator or connection is self._seen_on:
            return True
        if connection is not self._unseen_on:
            # Another node, or the same node after a restart.
            self._unseen_on, self._unseen_since = connection, self._clock()
        return self._clock() - self._unseen_since >= STALE_SECONDS
