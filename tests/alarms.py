"""Alarms of a broker, on purpose."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from bridge.sandbox.broker import Broker
from tests.integration.conftest import eventually


@asynccontextmanager
async def memory_alarm(broker: Broker) -> AsyncIterator[None]:
    """Have a broker take no messages."""
    await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.00001")
    try:
        yield
    finally:
        await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.6")
        if broker.management_url is not None:
            await eventually(lambda: _is_over(broker), what="the management API without an alarm")


async def _is_over(broker: Broker) -> bool:
    # What it says of nodes is some seconds old, and the next test would read it.
    async with httpx.AsyncClient(auth=("guest", "guest"), trust_env=False) as http:
        nodes = (await http.get(f"{broker.management_url}/api/nodes")).json()
    return all(node.get("mem_alarm") is False for node in nodes)
