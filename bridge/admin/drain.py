"""Move the waiting messages of a worker's queues to its dead letters.

For each message a copy is published and confirmed, the copy is listed in a file, the message is
acked, and its outcome is published, in this order.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from bridge.admin.move import (
    Action,
    MessageMover,
    TakenMessage,
    read_existing_queue,
    read_readable_queue,
)
from bridge.admin.replacement import NewLinesFile, Replaced, write_time
from bridge.amqp.client import Connection
from bridge.amqp.properties import Properties
from bridge.config import WorkerSettings
from bridge.errors import InvalidMessageError
from bridge.topology.declarations import dead_queue, request_queues, retry_queue, retry_queues
from bridge.topology.queue_sizes import read_queue
from bridge.worker.announcer import Announcer
from bridge.worker.copies import copy_properties, renewed_properties
from bridge.worker.envelope import DEAD_AT, Envelope, bare_envelope, read_envelope
from bridge.worker.outcomes import Dead
from bridge.worker.settle import count_attempt

# After a kill at most one round of messages is in both queues.
MAX_ROUND: Final = 256


@dataclass(frozen=True, slots=True)
class Waiting:
    """The number of ready messages in each queue, and of consumers of the main queue.

    The order of `ready` is that of the drain: retry queues, the longest delay first, then the
    queues of requests, to which messages return from the retry queues meanwhile.
    """

    ready: Mapping[str, int]
    workers: int

    @property
    def total(self) -> int:
        return sum(self.ready.values())


async def count_waiting(connection: Connection, worker: WorkerSettings) -> Waiting:
    """Count the waiting messages without consuming any; a missing retry queue counts as empty.

    Raises BrokerError if the main queue or the dead-letter queue is missing.
    """
    await read_existing_queue(connection, dead_queue(worker.queue))
    ready = {}
    for delay in sorted(worker.retry_delays, reverse=True):
        for queue in request_queues(worker):
            name = retry_queue(queue, delay)
            ready[name] = (await read_readable_queue(connection, name)).ready
    main = await read_existing_queue(connection, worker.queue)
    if worker.urgent_queue is not None:
        # Missing until a worker with an urgent queue has run.
        urgent = await read_readable_queue(connection, worker.urgent_queue)
        ready[worker.urgent_queue] = urgent.ready
    ready[worker.queue] = main.ready
    return Waiting(ready, main.consumers)


@dataclass(frozen=True, slots=True)
class DrainedMessage:
    """A message with its envelope before the drain, and the properties of its dead letter."""

    message: TakenMessage
    envelope: Envelope
    outcome: Dead
    properties: Properties

    @property
    def may_have_been_sent(self) -> bool:
        """Whether an attempt may have reached the phone."""
        return self.message.redelivered or self.envelope.uncertain_attempts > 0

    def record(self, queue: str) -> dict[str, Any]:
        """Return plain data for the file: no number, no text, no header."""
        return {
            "message_id": self.properties.message_id,
            "queue": queue,
            "published_at": write_time(self.envelope.published_at),
            "not_before": write_time(self.envelope.not_before),
            "expires_at": write_time(self.envelope.expires_at),
            "attempts": self.envelope.attempts,
            "may_be_sent": self.may_have_been_sent,
            "bytes": len(self.message.body),
            "moved_at": (self.properties.headers or {})[DEAD_AT],
        }


def drain_message(
    message: TakenMessage, reason: str, *, queue: str, max_bytes: int
) -> DrainedMessage:
    """Make the dead letter of a message; a replay puts it back into `queue`.

    A redelivered message may have been sent by the worker that did not ack it. It gets an uncertain
    attempt, so that a replay skips it by default.
    """
    envelope = bare_envelope(message.properties, now=time.time())
    # Unreadable headers are kept; a worker that gets the message after a replay calls it `invalid`.
    with suppress(InvalidMessageError):
        envelope = read_envelope(message.properties, envelope)
    outcome = Dead("drained", reason, uncertain=message.redelivered)
    properties = copy_properties(
        message.properties,
        count_attempt(envelope, outcome),
        outcome,
        queue=queue,
        max_bytes=max_bytes,
    )
    return DrainedMessage(message, envelope, outcome, properties)


class Drain(Action):
    """Moves messages to the dead letters and lists them in a file.

    `limit` applies to all queues together. `maybe_sent` counts messages that may have been sent.
    """

    # A drain returns a message only if it fails at the first one. Some returns by workers are
    # allowed before that, because a renewal costs a message its place in the queue.
    max_returns = 4

    def __init__(
        self,
        worker: WorkerSettings,
        mover: MessageMover,
        reason: str,
        file: NewLinesFile,
        *,
        limit: int | None,
    ) -> None:
        self._worker = worker
        self._mover = mover
        self._reason = reason
        self._file = file
        self._limit = limit
        self._target = dead_queue(worker.queue)
        # The queue to which the messages of each retry queue return.
        self._origins = retry_queues(worker)
        publisher = mover.copies.publisher
        self._max_bytes = publisher.max_properties_bytes
        self._announcer = Announcer(publisher, outcome_exchange=worker.outcome_exchange)
        self._drained: list[DrainedMessage] = []
        self.maybe_sent = 0

    async def run(self, waiting: Waiting) -> AsyncIterator[int]:
        """Move as many messages of each queue as it has when its turn comes.

        Messages that are published later stay, so that the drain ends. Yields the number of
        messages after each round. After BridgeError the remaining messages are in their queues.
        """
        await self._mover.check(self._worker.queue, self._target)
        for queue in waiting.ready:
            sizes = await read_queue(self._mover.connection, queue)
            at_most = 0 if sizes is None else sizes.ready
            async for taken in self._mover.run(self, queue, at_most=at_most):
                await self._announce()
                yield taken

    def renewed(self, message: TakenMessage) -> Properties | None:
        """Renew a message, except in a retry queue, where its copy would wait from the start.

        There the broker moves a message above the delivery limit to the main queue.
        """
        if self._mover.queue in self._origins:
            return None
        return renewed_properties(
            message.properties, is_repeated=message.redelivered, max_bytes=self._max_bytes
        )

    def next_round(self) -> int:
        done = self._mover.moved.total()
        return MAX_ROUND if self._limit is None else min(MAX_ROUND, self._limit - done)

    async def act(self, mover: MessageMover, messages: Sequence[TakenMessage], /) -> Replaced:
        """Publish the copies of messages, then list the confirmed ones in the file."""
        origin = self._origins.get(mover.queue, mover.queue)
        drained = [
            drain_message(one, self._reason, queue=origin, max_bytes=self._max_bytes)
            for one in messages
        ]
        stored = await mover.copies.store_all(
            {one.message.tag: (one.message.body, self._target, one.properties) for one in drained}
        )
        moved = [one for one in drained if one.message.tag in stored.tags]
        self._file.write(one.record(mover.queue) for one in moved)
        # Free the bodies, which are no longer needed.
        self._drained += [replace(one, message=one.message._replace(body=b"")) for one in moved]
        return stored

    async def _announce(self) -> None:
        drained, self._drained = self._drained, []
        self.maybe_sent += sum(one.may_have_been_sent for one in drained)
        at = time.time()
        async with asyncio.TaskGroup() as group:
            for one in drained:
                properties, envelope = one.message.properties, one.envelope
                announcing = self._announcer.announce(
                    properties, envelope, one.outcome, at, trace=envelope.trace
                )
                group.create_task(announcing)
