"""A real Prometheus scrapes both roles and sees the SMS service go away and come back."""

import json
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.sandbox.processes import Child, Guard, accepts, free_ports, wait_until
from tests.amqp_client import Amqp
from tests.chart.promql import alert_groups, alerts, write_rules
from tests.integration.conftest import Canaries, Launcher, Running, eventually, make_environ, unique
from tests.prometheus import Prometheus, running_prometheus

OUTAGE = "SmsBridgeWorkerProviderUnavailable"
MESSAGES = 15
SECONDS = 90.0
# What a busy computer sets off by itself.
OF_THE_COMPUTER = {"SmsBridgeEventLoopLag", "SmsBridgeBrokerConfirmsSlow"}


def impatient_rules(path: Path) -> Path:
    """Write the rules as Helm renders them, with every `for` overridden by the chart's values."""
    patient = {name for name, rule in alerts().items() if "for" in rule}
    return write_rules(alert_groups(overrides={name: {"for": "0s"} for name in patient}), path)


@contextmanager
def sms_service(port: int, key: str, *, guard: Guard, folder: Path) -> Iterator[None]:
    """Run the stand-in SMS service on a port until the end of the block."""
    command = [sys.executable, "-m", "bridge", "sandbox", "--port", str(port), "--key", key]
    log = folder / f"sandbox-{uuid.uuid4().hex}.log"
    child = Child(command, guard=guard, log=log, environ=make_environ({}))
    try:
        assert wait_until(lambda: accepts(port), seconds=SECONDS), child.tail()
        yield
    finally:
        child.kill()


@dataclass
class Seen:
    """What Prometheus said in good times, in the outage, and after it."""

    running: set[str]
    rules: list[dict[str, Any]]
    before: dict[str, dict[str, Any]]
    during: dict[str, dict[str, Any]]
    after: dict[str, dict[str, Any]]
    counted: float


async def all_sent(worker: Running, count: int) -> None:
    async def is_so() -> bool:
        name = "sms_bridge_worker_messages_processed_total"
        return await worker.metric(name, outcome="sent") == count

    await eventually(is_so, what=f"{count} messages sent", seconds=SECONDS)


async def until_scraped(prometheus: Prometheus) -> None:
    async def is_so() -> bool:
        up = await prometheus.query("up == 1")
        read = await prometheus.query("sms_bridge_worker_queue_stats_timestamp_seconds > 0")
        groups = (await prometheus.ask("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return len(up) == 2 and len(read) == 1 and all(r["health"] != "unknown" for r in rules)

    await eventually(is_so, what="both roles scraped", seconds=SECONDS)


@pytest.fixture(scope="module")
async def seen(
    launcher: Launcher,
    amqp: Amqp,
    canaries: Canaries,
    guard: Guard,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Seen]:
    """Run both roles, take the SMS service away and bring it back, with Prometheus looking on."""
    folder = tmp_path_factory.mktemp("prometheus")
    (port,) = free_ports(1)
    queue = unique("watched")
    worker = await launcher.role(
        "worker",
        settings={
            "worker.queue": queue,
            "worker.retry_delays": ["1s", "2s"],
            "worker.max_attempts": "50",
            "worker.outage_after": "1s",
            "sms_api.base_url": f"http://127.0.0.1:{port}",
            "sms_api.key": canaries.key,
        },
    )
    webhook = await launcher.role(
        "webhook",
        settings={
            "webhook.exchange": unique("events"),
            "webhook.queue": unique("events"),
            "webhook.secrets": [canaries.secret],
        },
    )
    targets = {role.child.name.split("-")[0]: admin_address(role) for role in (worker, webhook)}

    async def publish(count: int) -> None:
        for _ in range(count):
            body = json.dumps(canaries.request()).encode()
            await amqp.publish(queue, body, message_id=uuid.uuid4().hex)

    rules = impatient_rules(folder / "alerts.yaml")
    with running_prometheus(folder, guard=guard, targets=targets, rules=rules) as prometheus:
        with sms_service(port, canaries.key, guard=guard, folder=folder):
            await publish(1)
            await all_sent(worker, 1)
            await until_scraped(prometheus)
            running = await prometheus.query("sms_bridge_build_info")
            before = await prometheus.firing()
        await publish(MESSAGES)
        during = await eventually(
            lambda: firing_with(prometheus, OUTAGE), what=f"{OUTAGE} firing", seconds=SECONDS
        )
        with sms_service(port, canaries.key, guard=guard, folder=folder):
            await all_sent(worker, 1 + MESSAGES)
            after = await eventually(
                lambda: firing_without(prometheus, OUTAGE), what="it resolved", seconds=SECONDS
            )
        groups = (await prometheus.ask("rules"))["groups"]
        fired = await prometheus.query(f'count_over_time(ALERTS{{alertname="{OUTAGE}"}}[1h])')
        yield Seen(
            running={result["metric"]["component"] for result in running},
            rules=[rule for group in groups for rule in group["rules"]],
            before=before,
            during=during,
            after=after[0],
            counted=float(fired[0]["value"][1]),
        )


def admin_address(role: Running) -> str:
    return f"127.0.0.1:{role.logged('started')[0]['admin_port']}"


async def firing_with(prometheus: Prometheus, name: str) -> dict[str, dict[str, Any]] | None:
    firing = await prometheus.firing()
    return firing if name in firing else None


async def firing_without(
    prometheus: Prometheus, name: str
) -> tuple[dict[str, dict[str, Any]]] | None:
    firing = await prometheus.firing()
    return None if name in firing else (firing,)


async def test_both_roles_are_scraped(seen: Seen) -> None:
    """Prometheus sees which role each process runs."""
    assert seen.running == {"worker", "webhook"}


async def test_every_rule_can_be_evaluated(seen: Seen) -> None:
    """On real series no rule fails, as one with doubtful matches would."""
    assert {r["name"]: r["lastError"] for r in seen.rules if r["health"] != "ok"} == {}


async def test_nothing_fires_in_good_times(seen: Seen) -> None:
    """While all is well no alert fires, even without any patience."""
    assert set(seen.before) - OF_THE_COMPUTER == set()


async def test_an_outage_of_the_service_is_seen(seen: Seen) -> None:
    """While the SMS service is away the alert says so, and with what reason."""
    assert seen.during[OUTAGE]["labels"]["reason"] == "outage"


async def test_nobody_is_sent_the_wrong_way(seen: Seen) -> None:
    blamed = {
        "SmsBridgeWorkerPausedActionRequired",
        "SmsBridgeWorkerCannotStore",
        "SmsBridgeConsumerMissing",
        "SmsBridgeAmqpDisconnected",
        "SmsBridgeInternalErrors",
        "SmsBridgeWebhookErrorBudgetFastBurn",
    }

    assert set(seen.during) & blamed == set()


async def test_texts_of_alerts_are_complete(seen: Seen) -> None:
    """What on-call reads has all its values filled in."""
    texts = str([alert["annotations"] for alert in [*seen.during.values(), *seen.after.values()]])

    assert "<no value>" not in texts
    assert "<error" not in texts
    assert "outage" in texts


async def test_the_end_of_the_outage_is_seen(seen: Seen) -> None:
    """When the service is back, and every message sent, the alert has fired and is over."""
    assert OUTAGE not in seen.after
    assert seen.counted > 0
