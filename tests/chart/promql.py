"""Checks the chart's monitoring with promtool, and with the series of a real registry."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bridge.config import Settings
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.topology.declarations import (
    bridge_topology,
    dead_queue,
    name_of,
    request_queues,
    retry_queues,
)
from bridge.webhook.metrics import WebhookMetrics
from bridge.worker.metrics import WorkerMetrics
from tests.chart.rendering import MINIMAL, merged, of_kind, render

FILES = Path(__file__).parents[2] / "helm" / "sms-bridge" / "files"

RUNBOOKS = "https://example.com/docs"

# Labels that a scrape adds, and series that the rules record.
TARGET_LABELS = {"namespace", "job", "instance", "pod"}
_METRIC = r"\b((?:sms_bridge|process|python|rabbitmq)_[a-z0-9_]+|sms_bridge:[a-z0-9_:]+|up)\b"
_SELECTOR = re.compile(_METRIC + r"(?:\{([^}]*)\})?")
# RabbitMQ's metrics of queues. tests/integration/test_broker_metrics.py checks them.
BROKER_METRICS = ("rabbitmq_detailed_queue_messages_ready", "rabbitmq_detailed_queue_consumers")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')

Groups = list[dict[str, Any]]


def alert_groups(**values: Any) -> Groups:
    """Return all rules as Helm renders them with these values."""
    on = {"enabled": True, "brokerAlerts": True}
    over = {"prometheusRule": {**on, "runbookBaseUrl": RUNBOOKS, **values}}
    (rule,) = of_kind(render(merged(MINIMAL, over)), "PrometheusRule").values()
    groups: Groups = rule["spec"]["groups"]
    return groups


@cache
def alerts() -> dict[str, dict[str, Any]]:
    """Return every alert by name."""
    rules = (rule for group in alert_groups() for rule in group["rules"])
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def records() -> set[str]:
    """Return the names of the recorded series."""
    rules = (rule for group in alert_groups() for rule in group["rules"])
    return {rule["record"] for rule in rules if "record" in rule}


@cache
def alert_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    folder = Path(__file__).parent
    files = [
        yaml.load((folder / f"alerts{kind}_test.yaml").read_text(), yaml.CSafeLoader)
        for kind in ("", "_slow")
    ]
    return {
        test["name"]: (file["evaluation_interval"], test)
        for file in files
        for test in file["tests"]
    }


def write_rules(groups: Groups, path: Path) -> Path:
    """Write a rule file."""
    path.write_text(yaml.safe_dump({"groups": groups}, sort_keys=False))
    return path


def promtool(*args: object, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool with `given` as standard input. Fail with a hint if it is missing."""
    found = shutil.which("promtool")
    assert found, "promtool is missing: `make prometheus` installs it"
    command = [found, *map(str, args)]
    # Garbage collection of a few MB would take a third of its time.
    environ = {**os.environ, "GOGC": "400"}
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=120, env=environ
    )


def check_expressions(expressions: dict[str, str], folder: Path) -> str:
    """Let promtool parse expressions, by valid names, and return its output."""
    rules = [{"record": name, "expr": expr} for name, expr in expressions.items()]
    path = write_rules([{"name": "expressions", "rules": rules}], folder / "expressions.yaml")
    checked = promtool("check", "rules", "--lint=none", path)
    return "" if checked.returncode == 0 else checked.stdout + checked.stderr


@dataclass(frozen=True)
class Selector:
    """A metric name in an expression, with its matchers."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        """Format the selector."""
        return self.name + "{" + ",".join("{}{}{!r}".format(*m) for m in self.matchers) + "}"

    def selects(self, name: str, labels: dict[str, str]) -> bool:
        """Return whether it selects a series. Labels of the scrape are ignored."""
        return name == self.name and all(
            _matches(labels.get(label, ""), operator, value)
            for label, operator, value in self.matchers
            if label not in TARGET_LABELS
        )


def _matches(value: str, operator: str, pattern: str) -> bool:
    if operator in {"=", "!="}:
        return (value == pattern) == (operator == "=")
    return (re.fullmatch(pattern, value) is not None) == (operator == "=~")


def selectors(expression: str) -> Iterator[Selector]:
    """Yield every selector in an expression, one for each alternative of a `=~`.

    A negative matcher also yields a selector of its value, because a misspelt value would exclude
    nothing.
    """
    for found in _SELECTOR.finditer(expression):
        matchers = _MATCHER.findall(found[2] or "")
        yield from _alternatives(found[1], matchers)
        for label, operator, value in matchers:
            if operator in {"!=", "!~"}:
                yield from _alternatives(found[1], [(label, "=~", value)])


def _alternatives(name: str, matchers: list[tuple[str, str, str]]) -> Iterator[Selector]:
    """Split `a=~"b|c"`, so that each value is checked."""
    for index, (label, operator, value) in enumerate(matchers):
        if operator == "=~" and "|" in value and "$" not in value:
            for word in value.split("|"):
                rest = [*matchers[:index], (label, "=~", word), *matchers[index + 1 :]]
                yield from _alternatives(name, rest)
            return
    yield Selector(name, tuple(matchers))


@cache
def known_series() -> tuple[tuple[str, dict[str, str]], ...]:
    """Return every series of a new process with both roles."""
    settings = Settings.model_validate({"worker": {"outcome_exchange": "sms.outcome"}})
    worker, webhook = settings.worker, settings.webhook
    needed = bridge_topology(settings, ["worker", "webhook"])
    registry = new_registry()
    assert webhook.queue is not None
    BridgeMetrics(
        registry,
        component="worker",
        version="1",
        revision="1",
        exchanges=("default", webhook.exchange, "sms.outcome"),
        entities=[name_of(entity) for entity in needed.declarable],
    )
    WorkerMetrics(
        registry,
        queue=worker.queue,
        urgent_queue=worker.urgent_queue,
        retry_queues=list(retry_queues(worker)),
        dead=dead_queue(worker.queue),
    )
    WebhookMetrics(
        registry,
        paths=[webhook.path],
        event_types=webhook.event_types,
        queues=[webhook.queue],
    )
    samples = [(s.name, s.labels) for family in registry.collect() for s in family.samples]
    running = [
        ("sms_bridge_build_info", {"component": role, "version": "1", "revision": "1"})
        for role in ("webhook", "all")
    ]
    taken = request_queues(worker)
    of_broker = [(name, {"vhost": "/", "queue": q}) for name in BROKER_METRICS for q in taken]
    return (*samples, *running, *of_broker, ("up", {}), *((name, {}) for name in records()))


def unknown_in(expression: str) -> list[str]:
    return [
        str(selector)
        for selector in selectors(expression)
        if not any(selector.selects(*series) for series in known_series())
    ]
