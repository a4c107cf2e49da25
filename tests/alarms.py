"""Alarms of a broker, on purpose."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bridge.sandbox.broker import Broker


@asynccontextmanager
async def memory_alarm(broker: Broker) -> AsyncIterator[None]:
    """Have a broker take no messages."""
    await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.00001")
    try:
        yield
    finally:
        await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.6")
