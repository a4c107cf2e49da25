"""Workers that a scaler starts and ends, by the chart's ScaledObject and a real management API."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Guard
from soak.rig import Stand
from soak.scaling import Plan, deployed, play
from tests.faults.bench import eventually, open_service

# Far longer than anything takes that is waited for here, for a busy computer.
PATIENCE_SECONDS = 90
# Longer than two reports of the broker, 1 s each, the cooldown and a look: a worker that looks idle
# would be gone.
SLOW_SECONDS = 9
SMALL = Plan(
    messages=160,
    waves=1,
    seed=1,
    most=3,
    for_each=30,
    concurrency=5,
    trickle_seconds=3,
    refused_share=0,
    ladder_seconds=15,
)


@pytest.fixture
async def stand(managed_broker: Broker, guard: Guard, tmp_path: Path) -> AsyncIterator[Stand]:
    """Lend a broker that tells the lengths of its queues over HTTP, and a service."""
    async with open_service() as service:
        yield Stand(managed_broker, service, guard, tmp_path)


async def test_from_none_to_several_and_back(stand: Stand) -> None:
    """Workers come for what waits and what comes due; none that goes takes a message along."""
    finding = await play(stand, SMALL)

    assert finding.broken == []


async def test_a_request_in_flight_keeps_its_worker(stand: Stand) -> None:
    """A worker that holds all there is does not look idle, however long the service takes."""
    async with stand.rig() as rig, deployed(rig, SMALL) as deployment:
        stand.service.misbehave({"latency_seconds": SLOW_SECONDS})
        numbers = await rig.publish(1)
        await rig.until_taken(numbers, seconds=PATIENCE_SECONDS)
        # The service has it at once, and answers late.
        await eventually(
            lambda: deployment.deliveries == 1, what="the answer", seconds=PATIENCE_SECONDS
        )
        counts = [*deployment.counts]
        await eventually(lambda: deployment.is_empty, what="its end", seconds=PATIENCE_SECONDS)

    assert counts == [0, 1]
    assert [worker.child.exit_code for worker in deployment.ended] == [0]
