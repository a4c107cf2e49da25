"""A real Prometheus answers every panel of the dashboards after a run with faults of all kinds."""

import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Guard
from tests.accounts import virtual_host
from tests.chart.dashboards import DASHBOARDS, filled, panels_of
from tests.prometheus import Prometheus, running_prometheus
from tests.watched_run import QUEUE, URGENT_QUEUE, watched_run

RUN_SECONDS = 30.0
RATE_SECONDS = 20
# What this run does not bring about, by panel: a connection that is lost, a queue with other
# arguments, a changed secret, a signature that has a time.
NOTHING_TO_SHOW = {
    "Connections opened and lost",
    "Topology differences",
    "Reloaded secret files",
    "Age of signatures (p99)",
    "Lag of events (p95)",
    "web page that counts as sent",
    # Nor is the memory of these processes limited.
    "limit of {{instance}}",
}
# Of the overview, in its five rows of questions.
FIRST_PANELS = 17
TARGETS = [
    pytest.param(target, panel["title"], id=f"{name}-{panel['title']}-{target['refId']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in panels_of(dashboard)
    for target in panel["targets"]
]


@dataclass
class Watched:
    """What Prometheus has seen, in Unix seconds."""

    prometheus: Prometheus
    start: float
    end: float

    async def series(self, expression: str) -> list[dict[str, Any]]:
        asked = filled(expression, rate=f"{RATE_SECONDS}s", whole=f"{self.end - self.start:.0f}s")
        return await self.prometheus.query_range(
            asked, start=self.start, end=self.end, step_seconds=1
        )

    async def values(self, expression: str) -> list[float]:
        found = await self.series(expression)
        values = [float(value) for result in found for _, value in result["values"]]
        return [value for value in values if not math.isnan(value)]


@pytest.fixture(scope="module")
async def watched(
    guard: Guard, tmp_path_factory: pytest.TempPathFactory, managed_broker: Broker
) -> AsyncIterator[Watched]:
    """Have both roles at work in a virtual host of their own, with Prometheus looking on."""
    folder = tmp_path_factory.mktemp("watched")
    with (
        virtual_host(managed_broker, "watched") as url,
        watched_run(url, folder=folder, guard=guard) as run,
        running_prometheus(folder, guard=guard, targets=run.targets) as prometheus,
    ):
        start = time.time()
        await run.play(RUN_SECONDS)
        yield Watched(prometheus, start, time.time())


@pytest.mark.parametrize(("target", "title"), TARGETS)
async def test_a_panel_has_something_to_show(
    watched: Watched, target: dict[str, Any], title: str
) -> None:
    """Each query of a panel gets an answer that is a number, unless nothing of it happened."""
    values = await watched.values(target["expr"])

    assert values or {title, target["legendFormat"]} & NOTHING_TO_SHOW


async def test_the_urgent_queue_has_a_line_of_its_own(watched: Watched) -> None:
    sent = next(p for p in panels_of(DASHBOARDS["worker"]) if p["title"] == "Sent, by queue")
    series = await watched.series(sent["targets"][0]["expr"])
    shown = {
        found["metric"]["queue"]
        for found in series
        if any(float(value) > 0 for _, value in found["values"])
    }

    assert shown == {QUEUE, URGENT_QUEUE}


async def test_what_happened_is_seen(watched: Watched) -> None:
    """The overview's first five rows show the faults of the run, and not only zeros.

    Queues are read every 15 s, which may miss a backlog of seconds.
    """
    seen: dict[str, bool] = {}
    for panel in panels_of(DASHBOARDS["overview"])[:FIRST_PANELS]:
        for target in panel["targets"]:
            values = await watched.values(target["expr"])
            seen[f"{panel['title']}, {target['legendFormat']}"] = max(values, default=0) > 0

    assert [title for title, is_seen in seen.items() if not is_seen] in (
        [],
        ["Waiting to be sent, __auto"],
    )
