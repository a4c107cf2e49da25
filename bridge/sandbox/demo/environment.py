"""The processes of the demo: a broker, the sandbox, the worker and the webhook receiver."""

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
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, open_connection
from bridge.config import ENV_PREFIX, Role, Settings, load_settings
from bridge.errors import BridgeError, ConfigError
from bridge.sandbox.broker import URL_VARIABLE, answers_amqp, private_broker
from bridge.sandbox.processes import Child, Guard, free_ports, guarded, wait_until
from bridge.topology.declarations import bridge_topology

READY_SECONDS: Final = 30
ROLES: Final[tuple[Role, ...]] = ("worker", "webhook")
# Slightly longer than the roles' own deadlines for a drain.
GRACE_SECONDS: Final = 30

# Short limits, so that faults take only seconds.
_WORKER: Final[Mapping[str, str]] = {
    "SMS_API__TIMEOUT_SECONDS": "2",
    "WORKER__CONCURRENCY": "50",
    "WORKER__MAX_ATTEMPTS": "4",
    "WORKER__RETRY_DELAYS": '["1s", "2s", "4s"]',
}


class DemoBroker(NamedTuple):
    """The broker of the demo; `names` are the queues on a broker that others use too."""

    environ: Mapping[str, str]
    names: Mapping[str, str] = {}

    @property
    def is_private(self) -> bool:
        return not self.names


class DemoEnvironment:
    """The sandbox and the roles; `more` has additional settings of the roles."""

    def __init__(
        self, broker: DemoBroker, folder: Path, guard: Guard, more: Mapping[str, str]
    ) -> None:
        self.broker = broker
        self.folder = folder
        self.api_key, self._secret = secrets.token_urlsafe(), secrets.token_urlsafe()
        self._guard = guard
        self._more = more
        self._children: dict[str, Child] = {}
        sandbox, webhook, *admin = free_ports(2 + len(ROLES))
        self._ports = {"sandbox": sandbox, "webhook": webhook}
        self._admin_ports = dict(zip(ROLES, admin, strict=True))
        self.sandbox_url = f"http://127.0.0.1:{sandbox}"
        self.webhook_url = f"http://127.0.0.1:{webhook}/webhooks"
        self.admin_urls = {
            role: f"http://127.0.0.1:{port}" for role, port in self._admin_ports.items()
        }
        self.settings = load_settings(None, self._environ("worker"))

    def start(self) -> None:
        to = ["--webhook-url", self.webhook_url, "--webhook-secret", self._secret]
        port = str(self._ports["sandbox"])
        self._start("sandbox", self.broker.environ, ["--port", port, "--key", self.api_key, *to])
        for role in ROLES:
            self._start(role, self._environ(role))
        self._wait_for("sandbox", f"{self.sandbox_url}/sandbox/faults")
        for role in ROLES:
            self._wait_for(role, f"{self.admin_urls[role]}/readyz")

    def _wait_for(self, name: str, url: str) -> None:
        if not wait_until(lambda: self._answers(url), seconds=READY_SECONDS):
            raise _failure(self._children[name], f"was not ready within {READY_SECONDS} s")

    def _answers(self, url: str) -> bool:
        self.check()
        try:
            return httpx.get(url, trust_env=False, timeout=1).is_success
        except httpx.HTTPError:
            return False

    def check(self) -> None:
        """Raise BridgeError if a process has ended."""
        for child in self._children.values():
            if child.exit_code is not None:
                raise _failure(child, f"ended with code {child.exit_code}")

    def stop(self) -> list[str]:
        """End all processes; return a line for each role that did not exit cleanly."""
        for child in self._children.values():
            child.ask_to_end()
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self._children.values():
            child.end(grace_seconds=max(0, deadline - time.monotonic()))
        ended = [self._children[role] for role in ROLES if role in self._children]
        return [f"{c.name} ended with code {c.exit_code}" for c in ended if c.exit_code != 0]

    async def connect(self, name: str) -> Connection:
        rabbitmq = self.settings.rabbitmq
        return await open_connection(rabbitmq, rabbitmq.url[0], name=name)

    async def delete_queues(self) -> None:
        connection = await self.connect("demo clean-up")
        try:
            channel = await connection.channel()
            for queue in queues_of(self.settings, *ROLES):
                await channel.queue_delete(queue)
            await channel.exchange_delete(self.settings.webhook.exchange)
        finally:
            await close_quietly(connection)

    def _environ(self, role: Role) -> dict[str, str]:
        settings = {
            **self.broker.names,
            **_WORKER,
            "SMS_API__BASE_URL": self.sandbox_url,
            "SMS_API__KEY": self.api_key,
            "WEBHOOK__HOST": "127.0.0.1",
            "WEBHOOK__PORT": str(self._ports["webhook"]),
            "WEBHOOK__SECRETS": json.dumps([self._secret]),
            "ADMIN__HOST": "127.0.0.1",
            "ADMIN__PORT": str(self._admin_ports[role]),
            "LOG__FORMAT": "json",
            **self._more,
        }
        return {**self.broker.environ, **{ENV_PREFIX + k: v for k, v in settings.items()}}

    def _start(self, command: str, environ: Mapping[str, str], options: Sequence[str] = ()) -> None:
        self._children[command] = Child(
            [sys.executable, "-m", "bridge", command, *options],
            guard=self._guard,
            log=self.folder / f"{command}.log",
            environ=environ,
        )


def _failure(child: Child, how: str) -> BridgeError:
    return BridgeError(f"{child.name} {how}; the end of {child.log}:\n{child.tail()}")


def queues_of(settings: Settings, *roles: Role) -> list[str]:
    return [queue.name for queue in bridge_topology(settings, roles).queues]


@contextmanager
def open_environment(more: Mapping[str, str] | None = None) -> Iterator[DemoEnvironment]:
    """Provide an environment, and remove it completely, except for the logs of a failure.

    `more` has additional settings of the roles, such as `TRACING__SAMPLE_RATIO`.
    """
    with _open_broker() as broker, guarded() as guard:
        folder = Path(tempfile.mkdtemp(prefix="sms-bridge-demo-"))
        environment = DemoEnvironment(broker, folder, guard, more or {})
        try:
            yield environment
        except KeyboardInterrupt:
            shutil.rmtree(folder)
            raise
        finally:
            environment.stop()
            if not broker.is_private:
                asyncio.run(environment.delete_queues())
        shutil.rmtree(folder)


@contextmanager
def _open_broker() -> Iterator[DemoBroker]:
    """Provide the broker that the environment names, with separate queues, or a private one."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    url = find_broker(os.environ)
    if url is None:
        with private_broker() as broker:
            yield DemoBroker({**others, URL_VARIABLE: broker.url})
        return
    section = f"{ENV_PREFIX}RABBITMQ__"
    login = {name: value for name, value in os.environ.items() if name.startswith(section)}
    prefix = f"demo.{secrets.token_hex(4)}"
    names = {
        "WORKER__QUEUE": f"{prefix}.outbound",
        "WEBHOOK__EXCHANGE": f"{prefix}.inbound",
        "WEBHOOK__QUEUE": f"{prefix}.inbound",
    }
    yield DemoBroker({**others, **login, URL_VARIABLE: url}, names)


def find_broker(environ: Mapping[str, str]) -> str | None:
    """Return the first URL of the setting `rabbitmq.url` that answers, or None."""
    value = environ.get(URL_VARIABLE, "").strip()
    if not value:
        return None
    try:
        settings = load_settings(None, {URL_VARIABLE: value})
    except ConfigError:
        return None
    urls = [url.get_secret_value() for url in settings.rabbitmq.url]
    return next(filter(answers_amqp, urls), None)
