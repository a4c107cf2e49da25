"""What the demo runs on: a broker, the sandbox, the worker and the webhook receiver."""

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, open_connection
from bridge.config import ENV_PREFIX, Settings, load_settings
from bridge.errors import BridgeError
from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import Child, Guard, free_ports, guarded, wait_until
from bridge.sandbox.reachability import URL_VARIABLE, find_broker
from bridge.topology.declarations import dead_queue, retry_queue

READY_SECONDS: Final = 30
ROLES: Final = ("worker", "webhook")
# A little longer than the roles' own time limits for a drain.
GRACE_SECONDS: Final = 30

# Short limits, so that the faults of a minute play out within seconds.
_WORKER: Final[Mapping[str, str]] = {
    "SMS_API__TIMEOUT_SECONDS": "2",
    "WORKER__CONCURRENCY": "50",
    "WORKER__MAX_ATTEMPTS": "4",
    "WORKER__RETRY_DELAYS": '["1s", "2s", "4s"]',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A broker, and the names of what the demo uses there."""

    is_private: bool
    environ: Mapping[str, str]
    names: Mapping[str, str]


class Stage:
    """The processes of the demo and their addresses."""

    def __init__(self, place: Place, folder: Path, guard: Guard) -> None:
        self.place = place
        self.folder = folder
        self._guard = guard
        self._children: dict[str, Child] = {}
        self._key, self._secret = secrets.token_urlsafe(), secrets.token_urlsafe()
        sandbox, webhook, *admin = free_ports(2 + len(ROLES))
        self.sandbox_url = f"http://127.0.0.1:{sandbox}"
        self.webhook_url = f"http://127.0.0.1:{webhook}/webhooks"
        self.admin_urls = {
            role: f"http://127.0.0.1:{port}" for role, port in zip(ROLES, admin, strict=True)
        }
        self.settings = load_settings(None, self._environ("worker"))

    def start(self) -> None:
        """Start everything and return when all is ready."""
        port = str(httpx.URL(self.sandbox_url).port)
        to = ["--webhook-url", self.webhook_url, "--webhook-secret", self._secret]
        self._start("sandbox", ["--port", port, "--key", self._key, *to])
        for role in ROLES:
            self._start(role)
        self._wait_for("sandbox", f"{self.sandbox_url}/sandbox/faults")
        for role in ROLES:
            self._wait_for(role, f"{self.admin_urls[role]}/readyz")

    def check(self) -> None:
        """Raise when a process has ended."""
        for child in self._children.values():
            if child.exit_code is not None:
                raise BridgeError(
                    f"{child.name} ended with code {child.exit_code}; the end of {child.log}:\n"
                    f"{child.tail()}"
                )

    def stop(self) -> list[str]:
        """End everything; return a line for each role that did not end cleanly."""
        for child in self._children.values():
            child.ask_to_end()
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self._children.values():
            child.end(grace_seconds=max(0, deadline - time.monotonic()))
        ended = [self._children[role] for role in ROLES if role in self._children]
        return [f"{c.name} ended with code {c.exit_code}" for c in ended if c.exit_code != 0]

    async def connect(self, name: str) -> Connection:
        """Connect to the broker as the roles do, with whatever login and TLS it takes."""
        rabbitmq = self.settings.rabbitmq
        return await open_connection(rabbitmq, rabbitmq.url[0], name=name)

    def _environ(self, role: str) -> dict[str, str]:
        admin = httpx.URL(self.admin_urls[role])
        ours = {
            **self.place.names,
            **_WORKER,
            "SMS_API__BASE_URL": self.sandbox_url,
            "SMS_API__KEY": self._key,
            "WEBHOOK__HOST": "127.0.0.1",
            "WEBHOOK__PORT": str(httpx.URL(self.webhook_url).port),
            "WEBHOOK__SECRETS": json.dumps([self._secret]),
            "ADMIN__HOST": "127.0.0.1",
            "ADMIN__PORT": str(admin.port),
            "LOG__FORMAT": "json",
        }
        return {**self.place.environ, **{ENV_PREFIX + name: ours[name] for name in ours}}

    def _start(self, command: str, options: Sequence[str] = ()) -> None:
        self._children[command] = Child(
            [sys.executable, "-m", "bridge", command, *options],
            guard=self._guard,
            log=self.folder / f"{command}.log",
            environ=self._environ(command) if command in ROLES else dict(self.place.environ),
        )

    def _wait_for(self, name: str, url: str) -> None:
        child = self._children[name]
        with httpx.Client(trust_env=False, timeout=1) as client:
            ready = wait_until(
                lambda: _answers(client, url),
                seconds=READY_SECONDS,
                running=lambda: child.exit_code is None,
            )
        self.check()
        if not ready:
            raise BridgeError(
                f"{name} was not ready within {READY_SECONDS} s; the end of {child.log}:\n"
                f"{child.tail()}"
            )


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def open_stage() -> Iterator[Stage]:
    """Lend a stage, and leave nothing of it behind; the logs stay when it fails."""
    with _open_place() as place, guarded() as guard:
        folder = Path(tempfile.mkdtemp(prefix="sms-bridge-demo-"))
        stage = Stage(place, folder, guard)
        try:
            yield stage
        except KeyboardInterrupt:
            shutil.rmtree(folder)
            raise
        finally:
            stage.stop()
            if not place.is_private:
                asyncio.run(_delete_names(stage))
        shutil.rmtree(folder)


@contextmanager
def _open_place() -> Iterator[Place]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    url = find_broker(os.environ)
    if url is None:
        with private_broker() as broker:
            yield Place(is_private=True, environ={**others, URL_VARIABLE: broker.url}, names={})
        return
    section = f"{ENV_PREFIX}RABBITMQ__"
    login = {name: value for name, value in os.environ.items() if name.startswith(section)}
    prefix = f"demo.{secrets.token_hex(4)}"
    names = {
        "WORKER__QUEUE": f"{prefix}.outbound",
        "WEBHOOK__EXCHANGE": f"{prefix}.inbound",
        "WEBHOOK__QUEUE": f"{prefix}.inbound",
    }
    yield Place(is_private=False, environ={**others, **login, URL_VARIABLE: url}, names=names)


async def _delete_names(stage: Stage) -> None:
    connection = await stage.connect("demo clean-up")
    try:
        channel = await connection.channel()
        for queue in queues_of(stage.settings):
            await channel.queue_delete(queue)
        await channel.exchange_delete(stage.settings.webhook.exchange)
    finally:
        await close_quietly(connection)


def queues_of(settings: Settings) -> list[str]:
    """Name every queue that the roles declare."""
    worker, inbound = settings.worker, settings.webhook.queue
    ladder = [retry_queue(worker.queue, delay) for delay in worker.retry_delays]
    queues = [worker.queue, *ladder, dead_queue(worker.queue)]
    return queues if inbound is None else [*queues, inbound]
