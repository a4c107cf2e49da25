"""What a worker counts when it works for real: the login's files, and messages ahead of time."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from yarl import URL

from tests.amqp_client import Amqp
from tests.integration.conftest import Canaries, Launcher, Running, Service, unique

HOUR_SECONDS = 3600.0
RELOADS = "sms_bridge_secret_reloads_total"
LATENCY = "sms_bridge_worker_acceptance_latency_seconds"


@dataclass
class Line:
    """A worker whose login to the broker comes from files."""

    queue: str
    worker: Running
    password: Path


@pytest.fixture(scope="module")
async def line(
    launcher: Launcher,
    amqp_url: str,
    canaries: Canaries,
    session_service: Service,
    tmp_path_factory: pytest.TempPathFactory,
) -> Line:
    url = URL(amqp_url)
    folder = tmp_path_factory.mktemp("login")
    user, password = folder / "user", folder / "password"
    user.write_text(url.user or "guest")
    password.write_text(url.password or "guest")
    queue = unique("counting")
    settings = {
        "rabbitmq.url": str(url.with_user(None)),
        "rabbitmq.username_file": str(user),
        "rabbitmq.password_file": str(password),
        "worker.queue": queue,
        "worker.retry_delays": ["1s"],
        "sms_api.base_url": session_service.url,
        "sms_api.key": canaries.key,
    }
    return Line(queue, await launcher.role("worker", settings=settings), password)


async def test_a_message_ahead_of_its_time_is_not_late(
    line: Line, amqp: Amqp, canaries: Canaries, session_service: Service
) -> None:
    request, now = canaries.request(), time.time()
    await amqp.publish(
        line.queue,
        json.dumps(request).encode(),
        timestamp=int(now - HOUR_SECONDS),
        headers={"sms-bridge-not-before": str(now - 1)},
    )
    await session_service.until_sent(request["to"])
    await line.worker.until_metric(f"{LATENCY}_count", 1)

    assert await line.worker.metric(f"{LATENCY}_sum") < HOUR_SECONDS / 2


async def test_a_login_that_cannot_be_read_is_counted(line: Line) -> None:
    """A password file that is lost shows before a new connection needs it."""
    line.password.write_text("")
    await line.worker.until_metric(RELOADS, 1, secret="rabbitmq", outcome="failed")

    assert await line.worker.metric("sms_bridge_amqp_connection_up") == 1
