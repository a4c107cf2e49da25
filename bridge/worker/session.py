"""A stretch of consuming on one channel, on which its deliveries are acked."""

import asyncio
import math

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS
from bridge.amqp.client import Channel
from bridge.amqp.wire import Wire


class Session:
    """One stretch of consuming on one channel; over when nothing can be acked on it any more.

    `prefetches`: the sum of the prefetches of its consumers of each queue. `tags`: the consumer tag
    of each queue that is consumed now. `held`: how many of its deliveries are not settled yet.
    `last_ack_at` is a time of the event loop. `is_leaving`: nothing more of it is begun, so that it
    can end. `has_failed`: the broker does not answer on it.
    """

    def __init__(self, channel: Channel, wire: Wire) -> None:
        self.channel = channel
        self.wire = wire
        self.has_failed = False
        self.is_leaving = False
        self.held = 0
        self.last_ack_at = -math.inf
        self.prefetches: dict[str, int] = {}
        self.tags: dict[str, str] = {}
        self._delivered: dict[str, int] = {}
        self.over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be acked on it any more."""
        return self.over.is_set()

    @property
    def most_unacked(self) -> int:
        """How many of its deliveries may be unacked, as the broker sees it.

        Of each queue no more than the prefetch, and no more than were made: the prefetch of a queue
        that delivers little puts no acks of the other in doubt.
        """
        prefetches = self.prefetches.items()
        return sum(min(most, self._delivered.get(queue, 0)) for queue, most in prefetches)

    def note_consumer(self, queue: str, prefetch: int) -> None:
        """Note a consumer; the deliveries of an earlier one are no part of its prefetch."""
        self.prefetches[queue] = self.prefetches.get(queue, 0) + prefetch

    def note_delivery(self, queue: str) -> None:
        """Note that a queue has made a delivery on it."""
        self._delivered[queue] = self._delivered.get(queue, 0) + 1

    def ack(self, tag: int) -> bool:
        """Write an ack, or return False: the broker delivers the message again."""
        if self.is_over or self.has_failed or self.channel.is_closed:
            return False
        self.last_ack_at = asyncio.get_running_loop().time()
        self.wire.ack(self.channel, tag)
        return True

    async def until_heard_from(self, *, changed: asyncio.Event) -> None:
        """Return when the broker has answered on it, so has read every ack, or it is over.

        Without an answer in time it `has_failed`, and `changed` is set, so that its consumer ends.
        """
        # In a task of its own: a closing channel cancels what waits on it.
        answer = asyncio.ensure_future(self.wire.acks_read(self.channel))
        try:
            await asyncio.wait({answer}, timeout=RPC_TIMEOUT_SECONDS)
        finally:
            answer.cancel()
        if not answer.done() or answer.cancelled() or answer.exception() is not None:
            self.has_failed = True
            changed.set()
            await self.over.wait()
