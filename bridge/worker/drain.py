"""The end of a worker: settle what is held, see that the broker has read the acks, hand over."""

import asyncio
import contextlib
import time
from typing import Final

from bridge.telemetry.logs import Log
from bridge.worker.cluster.exchange import Peers
from bridge.worker.consumer import Consumer
from bridge.worker.deduplicator import COMES_AGAIN_SECONDS, Deduplicator
from bridge.worker.held import HeldDeliveries

log = Log(__name__)

# How often to check whether settled but unacked messages have come again, and for how long to go on
# taking them.
OWED_POLL_SECONDS: Final = 0.1
MAX_OWED_SECONDS: Final = 5.0
# How long other workers may take to ask for what was given back, and how often to look.
HAND_OVER_SECONDS: Final = 3.0
HAND_OVER_POLL_SECONDS: Final = 0.05


async def finish(held: HeldDeliveries, consumer: Consumer, deduplicator: Deduplicator) -> bool:
    """Take nothing more and settle what is held; then see that the broker has read the acks.

    A message that is settled or decided but not acked comes again, and only this process knows it:
    it is taken once more. Every other delivery is left to the next worker. Returns False when the
    broker may not have read the acks of some; the caller sets the deadline.
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
    """Return True when all are acked, or none comes; False when some still come at the end.

    A message that another worker has taken never comes here, so the wait ends when a broker that is
    there is silent. A broker that is away is waited for.
    """
    quiet_seconds = consuming_seconds = 0.0
    # A delivery that still waits for its copy may come again once more.
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


async def hand_over(consumer: Consumer, deduplicator: Deduplicator, peers: Peers) -> None:
    """Have the broker deliver released messages to other workers while this one can be asked.

    Otherwise they would not know with what key each was begun, nor what was decided about it.
    """
    for _ in range(round(HAND_OVER_SECONDS / HAND_OVER_POLL_SECONDS)):
        if not (deduplicator.has_released and peers.is_up and peers.count):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                await consumer.end()
        await asyncio.sleep(HAND_OVER_POLL_SECONDS)
