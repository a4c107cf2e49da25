"""The admin port: what the probes and the metrics answer, and with which codes."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from bridge.http.admin_port import LIMITS, Health, admin_handler
from bridge.http.listener import Listener
from bridge.http.messages import Request
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from tests.clock import Clock
from tests.plain_http import NO_AUTHORITIES

# Hangs end here; no healthy test comes near it.
GUARD_SECONDS = 8.0
LAG_COUNT = "sms_bridge_event_loop_lag_seconds_count"


@dataclass
class Admin:
    """What is asked, and the way to ask."""

    health: Health
    clock: Clock
    registry: CollectorRegistry
    client: httpx.AsyncClient

    async def probe(self, path: str) -> tuple[int, Any]:
        answer = await self.client.get(path)
        return answer.status_code, answer.json()

    async def until_beats(self, count: int) -> None:
        seen = 0.0
        async with asyncio.timeout(GUARD_SECONDS):
            while seen < count:
                await asyncio.sleep(0.001)
                seen = self.registry.get_sample_value(LAG_COUNT) or 0

    async def metrics(self, accept: str | None) -> httpx.Response:
        headers = {} if accept is None else {"Accept": accept}
        return await self.client.get("/metrics", headers=headers)


def new_health(registry: CollectorRegistry, clock: Clock) -> Health:
    metrics = BridgeMetrics(
        registry, component="worker", version="1.2.3", revision="abc", exchanges=["sms.dead"]
    )
    return Health(metrics, clock=clock)


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    registry = new_registry()
    clock = Clock()
    health = new_health(registry, clock)
    listener = Listener(
        admin_handler(health, registry), LIMITS, section="admin", host="127.0.0.1", port=0
    )
    running = asyncio.create_task(listener.run())
    url = f"http://127.0.0.1:{listener.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_AUTHORITIES) as client:
        del client.headers["accept"]
        yield Admin(health, clock, registry, client)
    listener.stop()
    await asyncio.wait_for(running, GUARD_SECONDS)


# --- Probes ---------------------------------------------------------------------------------------


async def test_draining_process_is_not_ready(admin: Admin) -> None:
    """While draining, /readyz is 503 and says so, and the metrics follow it to its end."""
    ready = [await admin.probe("/readyz"), (await admin.metrics(None)).text]
    admin.health.is_draining = True
    draining = [await admin.probe("/readyz"), (await admin.metrics(None)).text]

    assert ready[0] == (200, {"status": "ok", "checks": {"not_draining": "ok"}})
    assert draining[0] == (503, {"status": "failing", "checks": {"not_draining": "failing"}})
    assert "sms_bridge_ready 1.0" in ready[1]
    assert "sms_bridge_ready 0.0" in draining[1]


async def test_failing_check_is_named(admin: Admin) -> None:
    admin.health.ready["consumer"] = lambda: False

    assert await admin.probe("/readyz") == (
        503,
        {"status": "failing", "checks": {"not_draining": "ok", "consumer": "failing"}},
    )


async def test_readiness_tells_facts(admin: Admin) -> None:
    """What /readyz tells besides its checks makes nothing failing, and is told nowhere else."""
    admin.health.facts["worker"] = lambda: {"queue": "q", "paused": "outage"}

    assert await admin.probe("/readyz") == (
        200,
        {
            "status": "ok",
            "checks": {"not_draining": "ok"},
            "worker": {"queue": "q", "paused": "outage"},
        },
    )
    assert "worker" not in (await admin.probe("/livez"))[1]


@pytest.mark.parametrize("path", ["/livez", "/startupz"])
async def test_readiness_is_no_reason_to_restart(admin: Admin, path: str) -> None:
    """What makes a process not ready, like a drain or a broker that is away, keeps it alive."""
    admin.health.ready["consumer"] = lambda: False
    admin.health.is_draining = True

    assert (await admin.probe(path))[0] == 200


async def test_dead_task_is_named(admin: Admin) -> None:
    """/livez is 503 and names the check when one of our tasks is gone."""
    admin.health.live["worker"] = lambda: False

    assert await admin.probe("/livez") == (
        503,
        {"status": "failing", "checks": {"event_loop": "ok", "worker": "failing"}},
    )


async def test_event_loop_that_wakes_no_timer_is_not_alive(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/livez is 503 once no timer was woken for 10 s, and 200 again after the next one."""
    monkeypatch.setattr("bridge.http.admin_port.BEAT_SECONDS", 0.001)
    answers = []
    for seconds in (9.9, 0.1):
        admin.clock.now += seconds
        answers.append(await admin.probe("/livez"))
    beating = asyncio.create_task(admin.health.beat())
    await admin.until_beats(1)
    answers.append(await admin.probe("/livez"))
    beating.cancel()
    await asyncio.wait([beating])

    assert await admin.probe("/startupz") == (200, {"status": "ok", "checks": {}})
    alive = (200, {"status": "ok", "checks": {"event_loop": "ok"}})
    stuck = (503, {"status": "failing", "checks": {"event_loop": "failing"}})
    assert answers == [alive, stuck, alive]


async def test_probe_answers_head(admin: Admin) -> None:
    """A probe can be asked without a body."""
    answer = await admin.client.head("/readyz")

    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/metrics"])
async def test_nothing_can_be_posted(admin: Admin, path: str) -> None:
    """The admin port changes nothing: other methods are 405, with those that are allowed."""
    answer = await admin.client.post(path)

    assert (answer.status_code, "GET" in answer.headers["allow"]) == (405, True)


@pytest.mark.parametrize("path", ["/", "/livez/", "/metrics/x", "/webhooks"])
async def test_other_paths_are_not_there(admin: Admin, path: str) -> None:
    """What is not served is 404."""
    assert (await admin.client.get(path)).status_code == 404


# --- Metrics --------------------------------------------------------------------------------------

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("application/openmetrics-text", OPEN),
        ("application/openmetrics-text; version=1.0.0", OPEN),
        ("", TEXT),
    ],
    ids=["none", "browser", "open", "open 1.0", "empty"],
)
async def test_format_follows_the_accept_header(
    admin: Admin, accept: str | None, content_type: str
) -> None:
    """The metrics come as OpenMetrics to who asks for it, as text to everybody else."""
    given = (await admin.metrics(accept)).headers["content-type"]

    assert given.partition("; escaping")[0] == content_type


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=abc",
        "application/openmetrics-text; version=1",
        "application/openmetrics-text; version=1.0.0; escaping=nonsense",
        ",;=,",
    ],
)
async def test_odd_accept_header_is_no_error(admin: Admin, accept: str) -> None:
    """Whatever a client accepts, it gets the metrics."""
    answer = await admin.metrics(accept)

    assert (answer.status_code, "sms_bridge_build_info" in answer.text) == (200, True)


class Slow:
    """A collector of metrics each of which takes longer than all that is written in one go."""

    names = tuple(f"slow_{number}" for number in range(20))

    def collect(self) -> Iterator[Metric]:
        for name in self.names:
            time.sleep(0.003)
            yield GaugeMetricFamily(name, "Slow.", value=1)


@pytest.mark.parametrize("accept", [PROMETHEUS, "text/plain"])
async def test_messages_have_their_turn_during_a_scrape(accept: str) -> None:
    """However many metrics there are, the event loop stands still for a few of them only."""
    registry = CollectorRegistry()
    handler = admin_handler(new_health(registry, Clock()), registry)
    registry.register(Slow())
    scrape = handler(Request("GET", "/metrics", b"", [(b"accept", accept.encode())], b""))
    assert isinstance(scrape, asyncio.Future)
    turns = 0
    while not scrape.done():
        turns += 1
        await asyncio.sleep(0)

    assert turns > len(Slow.names)
    parse = parse_openmetrics if accept == PROMETHEUS else parse_text
    families = parse(scrape.result().body.decode())
    assert {*Slow.names, "sms_bridge_ready"} <= {family.name for family in families}


async def test_scrapes_take_no_room_from_probes(admin: Admin) -> None:
    """Probes are answered while many scrapes are, with headers as large as are allowed."""
    large = {"x-large": "x" * 15_000}
    scrapes = [asyncio.create_task(admin.client.get("/metrics", headers=large)) for _ in range(20)]
    statuses = set()
    while not all(scrape.done() for scrape in scrapes):
        statuses.add((await admin.client.get("/livez")).status_code)

    assert statuses == {200}
    assert {scrape.result().status_code for scrape in scrapes} == {200}
