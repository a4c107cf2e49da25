"""One period of consuming on one channel; its deliveries can only be acked on that channel."""

import asyncio
import math

from bridge.amqp.channels import RPC_TIMEOUT_SECONDS
from bridge.amqp.client import Channel
from bridge.amqp.wire import Wire


class Session:
    """A period of consuming on one channel. It is over when nothing can be acked on it any more.

    `prefetches`: for each queue, the sum of the prefetches of all consumers registered so far.
    `tags`: the current consumer tag of each queue. `in_progress`: number of deliveries
    with a running task. `last_ack_at` is in event loop time. `is_leaving`: no new delivery is
    started, so that the session can end. `has_failed`: the broker does not answer on the channel.
    """

    def __init__(self, channel: Channel, wire: Wire) -> None:
        self.channel = channel
        self.wire = wire
        self.has_failed = False
        self.is_leaving = False
        self.in_progress = 0
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
    def is_in_doubt(self) -> bool:
        """Whether it may be over without this process noticing; ask `until_heard_from` then."""
        return self.wire.is_in_doubt

    @property
    def most_unacked(self) -> int:
        """Upper bound of the deliveries that the broker considers unacked.

        For each queue this is the prefetch or the number of deliveries, whichever is lower. An idle
        queue therefore does not make acks of the other queue doubtful.
        """
        prefetches = self.prefetches.items()
        return sum(min(most, self._delivered.get(queue, 0)) for queue, most in prefetches)

    def note_consumer(self, queue: str, prefetch: int) -> None:
        """Note a consumer; deliveries of an earlier consumer do not count towards its prefetch."""
        self.prefetches[queue] = self.prefetches.get(queue, 0) + prefetch

    def note_delivery(self, queue: str) -> None:
        self._delivered[queue] = self._delivered.get(queue, 0) + 1

    def ack(self, tag: int) -> bool:
        """Write an ack; return False if the session is lost, so that the message is redelivered."""
        if self.is_over or self.has_failed or self.channel.is_closed:
            return False
        self.last_ack_at = asyncio.get_running_loop().time()
        self.wire.ack(self.channel, tag)
        return True

    async def until_heard_from(self, *, changed: asyncio.Event) -> None:
        """Return when the broker has read every ack that was written, or when the session is over.

        If the broker does not answer in time, set `has_failed` and `changed`, which end the
        consumer.
        """
        # In a separate task: a channel that closes cancels the tasks that wait on it.
        answer = asyncio.ensure_future(self.wire.acks_read(self.channel))
        try:
            await asyncio.wait({answer}, timeout=RPC_TIMEOUT_SECONDS)
        finally:
            answer.cancel()
        if not answer.done() or answer.cancelled() or answer.exception() is not None:
            self.has_failed = True
            changed.set()
            await self.over.wait()
