"""Runs both roles under faults, so that every panel of the dashboards has data.

Messages are sent, and replies and receipts arrive. Some numbers are refused, the service is busy,
fails and goes down, and an operator pauses sending for a while.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from bridge.amqp.client import AbstractChannel, DeliveryMode, Message
from bridge.amqp.connecting import close_quietly, open_connection
from bridge.config import ENV_PREFIX, load_settings
from bridge.sandbox.processes import Child, Guard, free_ports, wait_until
from tests.forked import ForkedChild, run_forked
from tests.plain_http import NO_AUTHORITIES

ROLES = ("worker", "webhook")
PATH = "/webhooks/twilio"
QUEUE = "sms.outbound"
URGENT_QUEUE = f"{QUEUE}.urgent"
# Share of messages on the urgent queue.
URGENT_SHARE = 0.1
KEY, SECRET = "the-key-of-a-run", "the-secret-of-a-run"
START_SECONDS = 60
GRACE_SECONDS = 30
# Messages per second, highest in the middle of the run.
MESSAGES_PER_SECOND = 24
REPLIES_PER_SECOND = 2
TICK_SECONDS = 0.25
# Numbers that the service always refuses, with its error.
REFUSED = {"+491713920001": "21610", "+491713920002": "21211"}
# Short limits, so that faults of hours take seconds.
SETTINGS: Mapping[str, object] = {
    "WORKER__RETRY_DELAYS": ["1s", "2s", "4s"],
    "WORKER__MAX_ATTEMPTS": 4,
    "WORKER__ON_UNCERTAIN": "retry",
    "WORKER__OUTAGE_AFTER": "2s",
    "WORKER__RATE_LIMIT__PER_SECOND": 60,
    "SMS_API__PRESET": "twilio",
    "SMS_API__ACCOUNT": "any-account",
    "SMS_API__KEY": KEY,
    "SMS_API__TIMEOUT_SECONDS": 2,
    "WEBHOOK__HOST": "127.0.0.1",
    "ADMIN__HOST": "127.0.0.1",
}


class WatchedRun:
    """The processes of a run, and its faults."""

    def __init__(self, url: str, *, folder: Path, guard: Guard) -> None:
        self._folder = folder
        self._guard = guard
        sandbox, webhook, *admin = free_ports(2 + len(ROLES))
        self.targets = {r: f"127.0.0.1:{port}" for r, port in zip(ROLES, admin, strict=True)}
        self._sandbox_url = f"http://127.0.0.1:{sandbox}"
        self._webhook_url = f"http://127.0.0.1:{webhook}{PATH}"
        endpoint = {
            "path": PATH,
            "preset": "twilio",
            "public_url": self._webhook_url,
            "secrets": [SECRET],
        }
        self._settings = {
            **SETTINGS,
            "RABBITMQ__URL": url,
            "SMS_API__BASE_URL": self._sandbox_url,
            "WEBHOOK__PORT": webhook,
            "WEBHOOK__ENDPOINTS": [endpoint],
        }
        self._chance = random.Random(7)
        self._seen = 0
        self._children: list[Child] = []

    def start(self) -> None:
        """Start all processes, and wait until they are ready."""
        port = str(httpx.URL(self._sandbox_url).port)
        webhook = ["--webhook-url", self._webhook_url, "--webhook-secret", SECRET]
        self._child("sandbox", ["--preset", "twilio", "--port", port, "--key", KEY, *webhook])
        with httpx.Client(trust_env=False, verify=NO_AUTHORITIES, timeout=1) as client:
            for child in [self._child(role) for role in ROLES]:
                self._wait_for(child, client)

    def stop(self) -> None:
        """End all processes."""
        for child in self._children:
            child.ask_to_end()
        for child in self._children:
            child.end(grace_seconds=GRACE_SECONDS)

    def _wait_for(self, role: Child, client: httpx.Client) -> None:
        url = f"http://{self.targets[role.name]}/readyz"
        ready = wait_until(
            lambda: _is_ready(client, url),
            seconds=START_SECONDS,
            running=lambda: role.exit_code is None,
        )
        assert ready, role.tail()

    async def play(self, seconds: float) -> None:
        """Run for a number of seconds."""
        settings = load_settings(None, self._environ("worker"))
        connection = await open_connection(settings.rabbitmq, settings.rabbitmq.url[0], name="run")
        try:
            async with (
                connection.channel() as channel,
                httpx.AsyncClient(
                    base_url=self._sandbox_url, trust_env=False, timeout=30
                ) as client,
                _beside(self._publish(channel, seconds), self._people(client)),
            ):
                await self._faults(client, seconds)
        finally:
            await close_quietly(connection)

    async def _faults(self, client: httpx.AsyncClient, seconds: float) -> None:
        """Start and end faults. Each number is a share of the whole time."""
        await _order(client)
        await asyncio.sleep(0.2 * seconds)
        busy = {"answer": "20429", "count": 12, "headers": {"Retry-After": "1"}}
        await _order(client, {"status": 500, "count": 30}, busy)
        await asyncio.sleep(0.1 * seconds)
        await self._command("pause", "--reason", "the wrong text went out")
        await asyncio.sleep(0.2 * seconds)
        await self._command("resume")
        await asyncio.sleep(0.2 * seconds)
        await _order(client, {"status": 503})
        await asyncio.sleep(0.1 * seconds)
        await _order(client)
        await asyncio.sleep(0.2 * seconds)

    async def _publish(self, channel: AbstractChannel, seconds: float) -> None:
        begun = time.monotonic()
        owed = 0.0
        while True:
            share = min(1.0, (time.monotonic() - begun) / seconds)
            # Between 50 % and 150 % of the rate.
            owed += MESSAGES_PER_SECOND * TICK_SECONDS * (0.5 + 4 * share * (1 - share))
            for _ in range(int(owed)):
                urgent = self._chance.random() < URGENT_SHARE
                queue = URGENT_QUEUE if urgent else QUEUE
                await channel.default_exchange.publish(self._message(), queue)
            owed %= 1
            await asyncio.sleep(TICK_SECONDS)

    def _message(self) -> Message:
        chance = self._chance.random()
        to = f"+999{self._chance.randrange(10**8, 10**9)}"
        body: dict[str, str] = {"to": to, "from": "Acme", "text": "Your code is 493027."}
        headers: dict[str, Any] = {}
        if chance < 0.06:
            body["to"] = self._chance.choice([*REFUSED])
        elif chance < 0.08:
            del body["text"]
        elif chance < 0.09:
            headers["sms-bridge-expires-at"] = int(time.time()) - 60
        elif chance < 0.3:
            body["text"] = "Dziękujemy! " * 9
        return Message(
            json.dumps(body).encode(),
            message_id=f"{self._chance.getrandbits(64):016x}",
            timestamp=None if 0.3 < chance < 0.35 else time.time(),
            headers=headers,
            delivery_mode=DeliveryMode.PERSISTENT,
        )

    async def _people(self, client: httpx.AsyncClient) -> None:
        """Send replies, receipts and unsigned webhooks."""
        while True:
            orders = [self._reply() for _ in range(REPLIES_PER_SECOND)]
            answer = await client.get("/sandbox/messages")
            messages = answer.raise_for_status().json()["messages"]
            orders += [self._receipt(message) for message in messages[self._seen :]]
            self._seen = len(messages)
            for path, body in orders:
                (await client.post(path, json=body)).raise_for_status()
            await client.get(self._webhook_url)
            await asyncio.sleep(1)

    def _reply(self) -> tuple[str, dict[str, Any]]:
        chance = self._chance.random()
        told = {"forged": chance < 0.15, "repeat": 2 if chance > 0.85 else 1}
        number = f"+999{self._chance.randrange(10**8, 10**9)}"
        return "/sandbox/replies", {"from": number, "text": "STOP", **told}

    def _receipt(self, message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        says = self._chance.choices(["delivered", "failed", "pending"], [80, 8, 12])[0]
        return "/sandbox/receipts", {"id": message["id"], "delivery": says}

    async def _command(self, name: str, *options: str) -> None:
        done = await run_forked([name, *options], given=b"", environ=self._environ("worker"))
        assert done.returncode == 0, done.stderr.decode()

    def _child(self, command: str, options: Sequence[str] = ()) -> Child:
        child = ForkedChild(
            [command, *options],
            guard=self._guard,
            log=self._folder / f"{command}.log",
            environ=self._environ(command) if command in ROLES else _others(),
        )
        self._children.append(child)
        return child

    def _environ(self, role: str) -> dict[str, str]:
        ours = {**self._settings, "ADMIN__PORT": self.targets[role].rpartition(":")[2]}
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in ours.items()}
        return {**_others(), **{ENV_PREFIX + name: text for name, text in texts.items()}}


@contextmanager
def watched_run(url: str, *, folder: Path, guard: Guard) -> Iterator[WatchedRun]:
    """Run both roles and the sandbox on their own broker."""
    run = WatchedRun(url, folder=folder, guard=guard)
    try:
        run.start()
        yield run
    finally:
        run.stop()


def _others() -> dict[str, str]:
    return {name: v for name, v in os.environ.items() if not name.startswith(ENV_PREFIX)}


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).is_success
    except httpx.HTTPError:
        return False


async def _order(client: httpx.AsyncClient, *faults: dict[str, Any]) -> None:
    always = [{"to": to, "answer": code} for to, code in REFUSED.items()]
    (await client.put("/sandbox/faults", json=[*always, *faults])).raise_for_status()


@asynccontextmanager
async def _beside(*parts: Any) -> AsyncIterator[None]:
    """Run coroutines until the end of the block. A failure ends it."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
