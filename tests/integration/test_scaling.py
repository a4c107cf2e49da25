"""Workers that a scaler starts and ends, by the chart's ScaledObject and a real management API."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Guard
from soak.rig import DEAD, QUEUE, Rig, rig_on
from soak.scaling import Plan, deployed, play
from soak.traffic import plan_requests
from tests.amqp_client import open_amqp

# Far longer than anything takes that is waited for here, for a busy computer.
PATIENCE_SECONDS = 90
# Longer than two reports of the broker, 1 s each, the cooldown and a look: a worker that looks idle
# would be gone.
SLOW_SECONDS = 9
SMALL = Plan(
    messages=160,
    most=3,
    for_each=30,
    concurrency=5,
    trickle_seconds=3,
    refused_share=0,
    ladder_seconds=15,
)


@pytest.fixture
async def rig(managed_broker: Broker, guard: Guard, tmp_path: Path) -> AsyncIterator[Rig]:
    """Lend a rig whose broker tells the lengths of its queues over HTTP."""
    async with rig_on(managed_broker, tmp_path, guard) as ours:
        yield ours
    async with open_amqp(managed_broker.url) as amqp:
        for queue in (QUEUE, f"{QUEUE}.urgent", DEAD):
            await amqp.channel.queue_delete(queue)


async def test_from_none_to_several_and_back(rig: Rig) -> None:
    """Workers come for what waits and for what comes due, and none that goes takes anything along.

    Takes the seconds of the broker's reports, and those of a retry that comes due without a worker.
    """
    assert await play(rig, SMALL) == []


async def test_a_request_in_flight_keeps_its_worker(rig: Rig) -> None:
    """A worker that holds all there is does not look idle, however long the service takes.

    Takes the seconds of the service, more than the cooldown and two reports of the broker.
    """
    async with deployed(rig, SMALL) as deployment, open_amqp(rig.broker.url) as amqp:
        await rig.api.set_faults({"latency_seconds": SLOW_SECONDS})
        for request in plan_requests(1, seed=1):
            await amqp.channel.default_exchange.publish(request.message(), QUEUE)
        # The service has it at once, and answers late.
        await rig.until(lambda: deployment.sent == 1, what="the answer", seconds=PATIENCE_SECONDS)
        counts = [*deployment.counts]
        await rig.until(lambda: deployment.is_empty, what="its end", seconds=PATIENCE_SECONDS)

    assert counts == [0, 1]
    assert [dict(worker.exit_codes) for worker in rig.workers] == [{0: 1}]
