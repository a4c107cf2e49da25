"""Memory alarms of a broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from bridge.sandbox.broker import Broker
from tests.erlang import evaluate
from tests.integration.conftest import eventually
from tests.plain_http import NO_AUTHORITIES

# Of the computer's memory.
USUAL_LIMIT = 0.6


def set_memory_limit(broker: Broker, share: float) -> None:
    """Set the memory limit, as `rabbitmqctl set_vm_memory_high_watermark` does."""
    evaluate(broker, f"vm_memory_monitor:set_vm_memory_high_watermark({share:.5f})")


@asynccontextmanager
async def memory_alarm(broker: Broker) -> AsyncIterator[None]:
    """Raise a memory alarm, so that the broker blocks publishers."""
    set_memory_limit(broker, 0.00001)
    try:
        yield
    finally:
        set_memory_limit(broker, USUAL_LIMIT)
        if broker.management_url is not None:
            await eventually(lambda: _is_over(broker), what="the management API without an alarm")


async def _is_over(broker: Broker) -> bool:
    # The management API is some seconds late, so wait, or the next test would read the alarm.
    async with httpx.AsyncClient(
        auth=("guest", "guest"), trust_env=False, verify=NO_AUTHORITIES
    ) as http:
        nodes = (await http.get(f"{broker.management_url}/api/nodes")).json()
    return all(node.get("mem_alarm") is False for node in nodes)
