"""Drain a worker: settle its deliveries, flush the acks, hand over to the other workers."""

import asyncio
import contextlib
import time
from typing import Final

from bridge.telemetry.logs import Log
from bridge.worker.cluster.membership import Membership
from bridge.worker.consumer import Consumer
from bridge.worker.deduplicator import COMES_AGAIN_SECONDS, Deduplicator
from bridge.worker.held import HeldDeliveries

log = Log(__name__)

# How often to check for redeliveries of settled but unacked messages, and for how long to consume
# them.
OWED_POLL_SECONDS: Final = 0.1
MAX_OWED_SECONDS: Final = 5.0
# How long other workers may take to ask about returned messages, and how often to check.
HAND_OVER_SECONDS: Final = 3.0
HAND_OVER_POLL_SECONDS: Final = 0.05


async def finish(held: HeldDeliveries, consumer: Consumer, deduplicator: Deduplicator) -> bool:
    """Stop consuming, settle all deliveries, and wait until the broker has read the acks.

    A message that is settled or decided but not acked is redelivered, and only this process knows
    that it must not be sent again: such redeliveries are consumed and acked. All other deliveries
    are left to the next worker. Returns False if the broker may not have read all acks; the caller
    sets the deadline.
    """
    await _settle(held, consumer)
    has_come = await _take_redeliveries(held, consumer, deduplicator)
    await _settle(held, consumer)
    return has_come


async def _settle(held: HeldDeliveries, consumer: Consumer) -> None:
    await consumer.stop()
    await held.all_done()
    await consumer.flush()


async def _take_redeliveries(
    held: HeldDeliveries, consumer: Consumer, deduplicator: Deduplicator
) -> bool:
    """Return True if all expected redeliveries are acked or none arrives; False if some are left.

    A message that another worker has received never arrives here. The wait therefore ends when a
    connected broker delivers nothing for a while. While the broker is away, the wait continues.
    """
    quiet_seconds = consuming_seconds = 0.0
    # A delivery whose copy is not confirmed yet may be redelivered once more.
    while deduplicator.expects_redeliveries or held.count:
        if quiet_seconds >= COMES_AGAIN_SECONDS:
            log.info("not_redelivered")
            return True
        if consuming_seconds >= MAX_OWED_SECONDS:
            return False
        consumer.resume()
        began, taken = time.monotonic(), held.redeliveries
        await asyncio.sleep(OWED_POLL_SECONDS)
        if consumer.is_served:
            seconds = time.monotonic() - began
            consuming_seconds += seconds
            is_quiet = held.redeliveries == taken and not held.count
            quiet_seconds = quiet_seconds + seconds if is_quiet else 0.0
    return True


async def hand_over(consumer: Consumer, deduplicator: Deduplicator, membership: Membership) -> None:
    """Return released messages to the other workers while this process can still answer questions.

    Once this process has ended, no worker knows the idempotency key with which a message was sent,
    or the outcome decided for it.
    """
    for _ in range(round(HAND_OVER_SECONDS / HAND_OVER_POLL_SECONDS)):
        if not (deduplicator.has_released and membership.is_up and membership.count):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                await consumer.end()
        await asyncio.sleep(HAND_OVER_POLL_SECONDS)
