"""`sms-bridge pause` and `resume`: what an operator stops stays stopped, and nothing is lost."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from subprocess import CompletedProcess

import httpx
import pytest

from bridge.admin.pausing import this_operator
from tests.amqp_client import Amqp
from tests.integration.conftest import (
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    run_program,
    unique,
)

REASON = "wrong text in the campaign of 2026-11-22"
# Between two requests of a campaign.
FEED_SECONDS = 0.05


@dataclass
class Fleet:
    """A queue, its workers, and an operator before them."""

    amqp: Amqp
    http: httpx.AsyncClient
    canaries: Canaries
    service: Service
    launcher: Launcher
    settings: dict[str, object]
    numbers: list[str] = field(default_factory=list)

    @property
    def queue(self) -> str:
        return str(self.settings["worker.queue"])

    async def worker(self, **changed: object) -> Running:
        settings = {**self.settings, **{k.replace("__", "."): v for k, v in changed.items()}}
        return await self.launcher.role("worker", settings=settings)

    async def run(self, *command: str, **changed: object) -> CompletedProcess[bytes]:
        changed = {k.replace("__", "."): v for k, v in changed.items()}
        base = {"rabbitmq.url": self.launcher.base["rabbitmq.url"], **self.settings}
        return await run_program(*command, settings={**base, **changed})

    async def told(self, *command: str, **changed: object) -> str:
        result = await self.run(*command, **changed)
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout.decode().strip()

    async def publish(self, count: int, **properties: object) -> None:
        for _ in range(count):
            request = self.canaries.request()
            self.numbers.append(request["to"])
            body = json.dumps(request).encode()
            await self.amqp.publish(
                self.queue, body, **{"message_id": unique("pause"), **properties}
            )

    @asynccontextmanager
    async def campaign(self) -> AsyncIterator[None]:
        async def feed() -> None:
            while not over.is_set():
                await self.publish(1)
                await asyncio.sleep(FEED_SECONDS)

        over = asyncio.Event()
        feeding = asyncio.create_task(feed())
        try:
            yield
        finally:
            over.set()
            await feeding

    async def posts(self) -> list[str]:
        answer = await self.http.get(f"{self.service.url}/sandbox/requests")
        made = [request["to"] for request in answer.json()["requests"]]
        return [number for number in made if number in self.numbers]

    async def until_posts(self, count: int) -> None:
        async def enough() -> bool:
            return len(await self.posts()) >= count

        await eventually(enough, what=f"{count} POSTs")

    async def until_each_was_sent_once(self) -> None:
        await self.until_posts(len(self.numbers))
        assert sorted(await self.posts()) == sorted(self.numbers)
        assert await self.amqp.count(f"{self.queue}.dead") == 0


async def shown(worker: Running) -> tuple[int, str | None, object]:
    answer = await worker.ask("/readyz")
    facts = answer.json()["worker"]
    return answer.status_code, facts["paused"], facts["paused_by_operator"]


async def until_paused(worker: Running, reason: str | None = "operator") -> None:
    async def is_so() -> bool:
        return (await shown(worker))[1] == reason

    await eventually(is_so, what=f"paused: {reason}")


@pytest.fixture
async def fleet(
    launcher: Launcher,
    amqp: Amqp,
    http: httpx.AsyncClient,
    canaries: Canaries,
    service: Service,
) -> AsyncIterator[Fleet]:
    settings: dict[str, object] = {
        "worker.queue": unique("pausing"),
        "worker.retry_delays": ["1s", "2s"],
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
    }
    fleet = Fleet(amqp, http, canaries, service, launcher, settings)
    yield fleet
    await amqp.delete([f"{fleet.queue}.paused"])


@pytest.mark.serial
async def test_a_campaign_is_stopped(fleet: Fleet) -> None:
    """Two seconds after `pause` none of three workers posts; after `resume` each text goes once.

    Takes the seconds in which nothing is to happen.
    """
    workers = await asyncio.gather(*(fleet.worker() for _ in range(3)))
    async with fleet.campaign():
        await fleet.until_posts(30)
        newcomer = await _stop_and_replace_one(fleet, workers)
    assert len(fleet.numbers) > len(await fleet.posts())

    assert await fleet.told("resume") == f"resumed {fleet.queue}"
    await fleet.until_each_was_sent_once()
    for worker in (*workers[1:], newcomer):
        await until_paused(worker, None)
        assert await worker.metric("sms_bridge_worker_paused", reason="operator") == 0
        assert (await shown(worker))[2] is None
    assert await fleet.told("resume") == f"{fleet.queue} was not paused by an operator"


async def _stop_and_replace_one(fleet: Fleet, workers: Sequence[Running]) -> Running:
    text = await fleet.told("pause", "--reason", REASON)
    paused_at = time.monotonic()
    operator = this_operator()
    assert text.startswith(f"{operator} has paused every worker of {fleet.queue} since ")
    assert text.endswith(f": {REASON}; `sms-bridge resume` ends it")
    await asyncio.sleep(2 - (time.monotonic() - paused_at))
    before = await fleet.posts()
    for worker in workers:
        status, paused, note = await shown(worker)
        assert (status, paused) == (200, "operator")
        assert isinstance(note, dict)
        assert note["reason"] == REASON
        assert await worker.metric("sms_bridge_worker_paused", reason="operator") == 1
        assert worker.logged("paused")[0]["reason"] == "operator"
        assert worker.logged("paused_by_operator")[0]["note"] == REASON

    # A worker dies, another starts: it takes nothing, for it knows before its first delivery.
    workers[0].child.kill()
    workers[0].is_done = True
    newcomer = await fleet.worker()
    assert (await shown(newcomer))[1] == "operator"
    await asyncio.sleep(2)
    assert await fleet.posts() == before
    assert newcomer.logged("consuming") == []
    return newcomer


async def test_everybody_is_told(fleet: Fleet) -> None:
    worker = await fleet.worker()
    first = await fleet.told("pause", "--reason", "one")
    await until_paused(worker)
    again = await fleet.run("pause", "--reason", "two")
    checked = await fleet.run("check", "--online", "--role", "worker", "--quiet", admin__port=9)
    to, text = fleet.canaries.number(), fleet.canaries.text()
    send = ("send", "--to", to, "--from", "Acme", "--text", text, "--wait", "--timeout", "3")
    waited = await fleet.run(*send, admin__port=9)

    assert again.stdout.decode().strip() == f"already: {first}"
    assert again.stderr.decode() == "sms-bridge: the first reason stays\n"
    assert f"fail  pause: {first}" in checked.stdout.decode().splitlines()
    assert f"sms-bridge: still waiting: {first}" in waited.stderr.decode().splitlines()
    assert await fleet.service.requests(to) == []
    assert await fleet.told("resume") == f"resumed {fleet.queue}"
    await fleet.service.until_sent(to)


async def test_two_operators_at_once(fleet: Fleet) -> None:
    worker = await fleet.worker()
    reasons = ("one", "two")
    results = await asyncio.gather(*(fleet.run("pause", "--reason", one) for one in reasons))
    await until_paused(worker)

    assert [result.returncode for result in results] == [0, 0]
    ends = await asyncio.gather(fleet.run("resume"), fleet.run("resume"))
    assert [result.returncode for result in ends] == [0, 0]
    await until_paused(worker, None)
    await fleet.publish(1)
    await fleet.until_each_was_sent_once()


async def test_another_pause_is_on(fleet: Fleet) -> None:
    worker = await fleet.worker(sms_api__key="not-the-key")
    await fleet.publish(1)
    await until_paused(worker, "credentials_rejected")
    await fleet.told("pause")
    await until_paused(worker)
    for reason in ("operator", "credentials_rejected"):
        assert await worker.metric("sms_bridge_worker_paused", reason=reason) == 1
    before = len(await fleet.posts())
    # The next probe would have gone by then.
    await asyncio.sleep(3)
    assert len(await fleet.posts()) == before

    await fleet.told("resume")
    await until_paused(worker, "credentials_rejected")
    await fleet.until_posts(before + 1)


async def test_what_is_in_flight_is_finished(fleet: Fleet) -> None:
    worker = await fleet.worker()
    await fleet.service.misbehave({"to": None, "count": 1, "status": 202, "latency_seconds": 4})
    await fleet.publish(1)
    await fleet.until_posts(1)
    await fleet.told("pause")
    await until_paused(worker)
    await worker.until_metric("sms_bridge_worker_messages_processed_total", 1, outcome="sent")
    assert await worker.stop() == 0
    assert await fleet.posts() == fleet.numbers
    assert await fleet.amqp.count(fleet.queue) == 0


async def test_a_paused_worker_is_drained(fleet: Fleet) -> None:
    worker = await fleet.worker()
    await fleet.told("pause")
    await until_paused(worker)
    await fleet.publish(5)
    assert await worker.stop() == 0
    assert await fleet.posts() == []
    await fleet.amqp.until_count(fleet.queue, 5)

    await fleet.worker()
    await fleet.told("resume")
    await fleet.until_each_was_sent_once()


async def test_expiry_goes_on_counting(fleet: Fleet) -> None:
    worker = await fleet.worker()
    await fleet.told("pause")
    await until_paused(worker)
    expiry = {"sms-bridge-expires-at": int(time.time()) + 1}
    await fleet.publish(1, headers=expiry, message_id="late")
    await asyncio.sleep(2)
    await fleet.told("resume")
    letter = await fleet.amqp.take(f"{fleet.queue}.dead", message_id="late")
    assert letter.headers["sms-bridge-reason"] == "expired"
    assert await fleet.posts() == []


async def test_nothing_has_to_be_declared_before(fleet: Fleet) -> None:
    mode = "verify"
    await fleet.told("topology", "declare", "--role", "worker")
    worker = await fleet.worker(rabbitmq__topology=mode)
    await fleet.publish(1)
    await fleet.until_each_was_sent_once()
    await fleet.told("pause", rabbitmq__topology=mode)
    await until_paused(worker)
    await fleet.publish(1)
    await fleet.told("resume", rabbitmq__topology=mode)
    await fleet.until_each_was_sent_once()


async def test_pause_by_hand(fleet: Fleet) -> None:
    worker = await fleet.worker()
    await fleet.amqp.channel.declare_queue(f"{fleet.queue}.paused", durable=True)
    await until_paused(worker)
    assert await shown(worker) == (200, "operator", None)
    assert (await fleet.told("pause", "--reason", "mine")).endswith(
        "mine; `sms-bridge resume` ends it"
    )
    await fleet.amqp.delete([f"{fleet.queue}.paused"])
    await until_paused(worker, None)


async def test_a_reason_with_a_phone_number_is_refused(fleet: Fleet) -> None:
    result = await fleet.run("pause", "--reason", "complaints from +49 170 123-4567")
    assert result.returncode == 2
    assert result.stderr.decode().startswith("sms-bridge: --reason: ")
    assert "phone number" in result.stderr.decode()
    assert await fleet.told("resume") == f"{fleet.queue} was not paused by an operator"
