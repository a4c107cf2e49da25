"""The end of a worker: settle what is held, see that the broker has read the acks, hand over."""

import asyncio
import contextlib
import time
from typing import Final, Protocol

from bridge.telemetry.logs import Log
from bridge.worker.cluster.exchange import Peers
from bridge.worker.deduplicator import COMES_AGAIN_SECONDS, Deduplicator

log = Log(__name__)

# How often to check whether settled but unacked messages have come again, and for how long to go on
# taking them.
OWED_POLL_SECONDS: Final = 0.1
MAX_OWED_SECONDS: Final = 5.0
# How long other workers may take to ask for what was given back, and how often to look.
HAND_OVER_SECONDS: Final = 3.0
HAND_OVER_POLL_SECONDS: Final = 0.05


class Taking(Protocol):
    """What takes deliveries, as `Consumer` does."""

    @property
    def is_served(self) -> bool:
        """Whether the broker delivers to this worker, or to the active one in its place."""

    async def stop(self) -> None:
        """Take nothing more; return when the broker has been told, or is gone."""

    def resume(self) -> None:
        """Take deliveries again after `stop`."""

    async def flush(self) -> None:
        """Return when the broker has processed every ack that was written, or is gone."""

    async def end(self) -> None:
        """Let the broker deliver to others what is held; for good."""


class Held(Protocol):
    """What is taken and not settled; `redeliveries` counts those that have come so far."""

    redeliveries: int

    @property
    def count(self) -> int:
        """How many are held."""

    async def all_done(self) -> None:
        """Wait until nothing that is held now is held any more."""


async def finish(held: Held, consumer: Taking, deduplicator: Deduplicator) -> bool:
    """Take nothing more and settle what is held; then see that the broker has read the acks.

    What is done, or decided, but not acked comes again, and only this process knows it: it is taken
    once more.
    Everything else that is delivered then is left to the next worker. Returns False when the
    broker may not have read the acks of some; the caller sets the deadline.
    """
    await _settle(held, consumer)
    has_come = await _take_what_comes_again(held, consumer, deduplicator)
    await _settle(held, consumer)
    return has_come


async def _settle(held: Held, consumer: Taking) -> None:
    await consumer.stop()
    await held.all_done()
    await consumer.flush()


async def _take_what_comes_again(held: Held, consumer: Taking, deduplicator: Deduplicator) -> bool:
    """Return True when that is acked, or none of it comes; False when it still does at the end.

    What another worker has taken never comes here, so that silence of a broker that is there ends
    the wait. A broker that is away is waited for.
    """
    quiet_seconds = consuming_seconds = 0.0
    # What is held still waits for its copy, and may come again once more.
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


async def hand_over(consumer: Taking, deduplicator: Deduplicator, peers: Peers) -> None:
    """Have the broker deliver to other workers what was given back, while this one can be asked.

    Without it they would not know with what key it was begun, nor what was decided about it.
    """
    for _ in range(round(HAND_OVER_SECONDS / HAND_OVER_POLL_SECONDS)):
        if not (deduplicator.has_released and peers.is_up and peers.count):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                await consumer.end()
        await asyncio.sleep(HAND_OVER_POLL_SECONDS)
