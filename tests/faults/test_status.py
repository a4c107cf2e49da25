"""What `sms-bridge status` reads of a broker that freezes, dies, comes back, or stores nothing."""

import asyncio
import time

import pytest

from bridge.errors import BrokerError
from bridge.operators.pausing import pause, resume
from bridge.operators.status.broker import ANSWER_SECONDS, CONNECT_SECONDS, BrokerReader
from tests.alarms import memory_alarm
from tests.faults.bench import Bench, make_settings


async def test_a_broker_that_comes_and_goes(bench: Bench) -> None:
    """A broker that freezes or dies is told in time, and read again as soon as it is back.

    Takes the seconds for which a frozen one is asked, and in which another starts.
    """
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    async with bench.worker():
        reader = BrokerReader(settings, [bench.queue])
        first = await reader.read()
        await asyncio.to_thread(bench.broker.flush)
        bench.broker.pause()
        begun_at = time.monotonic()
        with pytest.raises(BrokerError, match="no answer within"):
            await reader.read()
        seconds = time.monotonic() - begun_at
        bench.broker.resume()
        second = await reader.read()
        bench.broker.kill()  # while the event loop stands still, and sees no connection end
        with pytest.raises(BrokerError, match="refused"):
            await reader.read()
        await asyncio.to_thread(bench.broker.start)
        third = await reader.read()
        await reader.aclose()

    for reading in (first, second, third):
        sizes = reading.sizes[bench.queue]
        assert sizes is not None
        assert sizes.exists
        assert (reading.stores, reading.is_paused) == (True, False)
    # Closing two connections that nobody answers takes the rest.
    assert seconds < CONNECT_SECONDS + ANSWER_SECONDS + 10


async def test_a_broker_that_stores_nothing(bench: Bench) -> None:
    """In an alarm sizes and an operator's pause are read all the same, and the alarm is told."""
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    async with bench.worker():
        await pause(settings, "wrong text")
        reader = BrokerReader(settings, [bench.queue])
        async with memory_alarm(bench.broker):
            readings = [await reader.read() for _ in range(2)]
        await resume(settings)
        await reader.aclose()

    for reading in readings:
        assert (reading.stores, reading.is_paused) == (False, True)
        assert reading.paused is not None
        assert reading.paused.note is not None
        assert reading.paused.note.reason == "wrong text"
