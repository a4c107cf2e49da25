"""A private Prometheus that scrapes the processes of a test or the demo."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from bridge.sandbox.processes import Child, Guard, free_ports, wait_until
from tests.plain_http import NO_AUTHORITIES

START_SECONDS = 60
GRACE_SECONDS = 10


class Prometheus:
    """Queries a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ask(self, path: str, **params: str) -> Any:
        """Return the data of an answer. Raise if the query failed."""
        async with httpx.AsyncClient(
            base_url=self.url, trust_env=False, verify=NO_AUTHORITIES, timeout=30
        ) as client:
            answer = await client.get(f"/api/v1/{path}", params=params)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    async def query(self, expression: str, *, at: float | None = None) -> list[dict[str, Any]]:
        """Evaluate an expression, now or at a Unix time. Each result has `metric` and `value`."""
        when = {} if at is None else {"time": f"{at:.3f}"}
        data = await self.ask("query", query=expression, **when)
        found: list[dict[str, Any]] = data["result"]
        return found

    async def query_range(
        self, expression: str, *, start: float, end: float, step_seconds: float
    ) -> list[dict[str, Any]]:
        """Evaluate an expression over a time range. Each result has `metric` and `values`."""
        span = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_seconds:g}"}
        data = await self.ask("query_range", query=expression, **span)
        found: list[dict[str, Any]] = data["result"]
        return found

    async def firing(self) -> dict[str, dict[str, Any]]:
        """Return the firing alerts by name."""
        found = (await self.ask("alerts"))["alerts"]
        return {a["labels"]["alertname"]: a for a in found if a["state"] == "firing"}


@contextmanager
def running_prometheus(
    folder: Path,
    *,
    guard: Guard,
    targets: Mapping[str, str],
    rules: Path | None = None,
    interval: str = "1s",
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes each job's `host:port`."""
    found = shutil.which("prometheus")
    assert found, "Prometheus is missing: `make prometheus` installs it"
    (port,) = free_ports(1)
    config = {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "evaluation_interval": interval,
        },
        "rule_files": [] if rules is None else [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        found,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    child = Child(command, guard=guard, log=folder / "prometheus.log", environ={})
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(trust_env=False, verify=NO_AUTHORITIES, timeout=1) as client:
            ready = wait_until(
                lambda: _is_ready(client, url),
                seconds=START_SECONDS,
                running=lambda: child.exit_code is None,
            )
        assert ready, child.tail()
        yield Prometheus(url)
    finally:
        child.end(grace_seconds=GRACE_SECONDS)


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/-/ready").is_success
    except httpx.HTTPError:
        return False
