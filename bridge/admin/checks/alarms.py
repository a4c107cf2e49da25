"""Whether a node of the broker accepts no messages, because memory or disk runs out."""

from typing import Final

from bridge.admin.checks.set_up import ManagedBroker
from bridge.admin.finding import Finding

_ALARMS: Final = (("memory", "mem_alarm"), ("disk", "disk_free_alarm"))


async def check_alarms(broker: ManagedBroker) -> list[Finding]:
    """Find each alarm of each node."""
    nodes = await broker.management.read("nodes") or ()
    return [
        Finding(
            f"broker node {node['name']}",
            "fail",
            f"{what} alarm: it takes no messages",
            f"free {what} on it",
        )
        for node in nodes
        for what, key in _ALARMS
        if node.get(key)
    ]
