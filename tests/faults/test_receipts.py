"""A broker that is lost between an event and the outcome of its receipt: neither is."""

import asyncio
import json
from collections import Counter

import httpx
import pytest

from tests.amqp_client import open_amqp
from tests.faults.amqp_proxy import ACK, PUBLISH, Deed, Method, Sender
from tests.faults.bench import WEBHOOK_LINK, Bench, Live, eventually, sign

RECEIPTS = {
    "webhook__receipts__status_pointers": ["/status"],
    "webhook__receipts__delivered": ["delivered"],
    "webhook__receipts__provider_id_pointers": ["/message"],
}


async def post(client: httpx.AsyncClient, live: Live, name: str) -> int:
    receipt = {"id": f"evt-{name}", "status": "delivered", "message": name}
    body = json.dumps({"type": "message.status", **receipt}).encode()
    return (await client.post(live.webhook_url, content=body, headers=sign(body))).status_code


async def until_stored(client: httpx.AsyncClient, live: Live, name: str) -> None:
    """Post a receipt as its service would, until it is told 200."""

    async def is_stored() -> bool:
        return await post(client, live, name) == 200

    await eventually(is_stored, what="200")


async def bind_outcomes(bench: Bench) -> None:
    """Have outcome events stored."""
    channel = bench.amqp.channel
    exchange = await channel.declare_exchange(f"{bench.exchange}.outcome", "topic", durable=True)
    queue = await channel.declare_queue(
        f"{bench.exchange}.outcome", durable=True, arguments={"x-queue-type": "quorum"}
    )
    await queue.bind(exchange, "#")


async def stored(bench: Bench) -> tuple[Counter[str], Counter[str]]:
    async with open_amqp(bench.broker.url) as amqp:
        events = await amqp.take_all(bench.exchange)
        outcomes = await amqp.take_all(f"{bench.exchange}.outcome")
    return (
        Counter(str(event.headers["sms-bridge-provider-id"]) for event in events),
        Counter(str(json.loads(outcome.body)["provider_id"]) for outcome in outcomes),
    )


@pytest.mark.parametrize(
    ("sender", "method", "deed", "is_killed"),
    [
        pytest.param("client", PUBLISH, "cut", False, id="before the outcome leaves"),
        pytest.param("client", PUBLISH, "cut", True, id="before the outcome leaves, for good"),
        pytest.param("client", PUBLISH, "cut_after", False, id="when both have left"),
        pytest.param("broker", ACK, "cut", False, id="at the confirm"),
    ],
)
async def test_broker_lost_between_the_two_publishes(
    bench: Bench,
    client: httpx.AsyncClient,
    sender: Sender,
    method: Method,
    deed: Deed,
    is_killed: bool,  # noqa: FBT001  pytest passes it by its name
) -> None:
    await bind_outcomes(bench)
    outcome = {"worker__outcome_exchange": f"{bench.exchange}.outcome"}
    async with bench.webhook(**RECEIPTS, **outcome) as live:
        await until_stored(client, live, "zero")
        await asyncio.to_thread(bench.broker.flush)
        nth = 2 if method == PUBLISH else 1
        trap = bench.proxy.trap(sender, method, deed, nth=nth, link=WEBHOOK_LINK)
        first = await post(client, live, "one")
        if is_killed:
            await asyncio.to_thread(bench.broker.kill)
            await asyncio.to_thread(bench.broker.start)
        await until_stored(client, live, "one")
        reports = live.metric("sms_bridge_webhook_delivery_reports_total", status="delivered")

    events, outcomes = await stored(bench)
    assert trap.sprung.is_set()
    assert (first, reports) == (503, 2)
    assert events.keys() == outcomes.keys() == {"zero", "one"}
    # At least once: a confirm that was lost with its connection is not known.
    assert max(*events.values(), *outcomes.values()) <= 2
