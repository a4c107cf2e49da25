"""What docs/upgrading.md says of a change of names and settings, on a real broker."""

import json

from tests.amqp_client import Amqp
from tests.integration.conftest import Canaries, Launcher, Service, unique


async def test_what_waits_on_an_earlier_ladder_is_sent(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, service: Service
) -> None:
    request, queue = canaries.request(), unique("upgrade")
    settings: dict[str, object] = {
        "worker.queue": queue,
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
    }
    busy = {"status": 503, "headers": {"Retry-After": "1"}, "to": request["to"], "count": 1}
    await service.misbehave(busy)
    before = await launcher.role("worker", settings={**settings, "worker.retry_delays": ["5s"]})
    await amqp.publish(queue, json.dumps(request).encode(), message_id=unique("id"))
    await amqp.until_count(f"{queue}.retry.5s", 1)
    assert await before.stop() == 0
    await launcher.role("worker", settings={**settings, "worker.retry_delays": ["1s"]})
    await service.until_sent(request["to"])

    assert len(await service.messages(request["to"])) == 1
    assert await amqp.count(f"{queue}.retry.5s") == 0
    assert await amqp.count(f"{queue}.dead") == 0
