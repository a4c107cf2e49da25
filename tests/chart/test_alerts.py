"""The alerts that the chart ships: each fires in trouble, is quiet without, and is explained."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.promql import RUNBOOKS as BASE
from tests.chart.promql import (
    alert_cases,
    alert_groups,
    alerts,
    promtool,
    records,
    unknown_in,
    write_rules,
)
from tests.chart.rendering import CHART

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOKS = DOCS / "runbooks.md"
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]
ALERTS = alerts()
CASES = alert_cases()


def expectations(alert: str) -> list[dict[str, Any]]:
    """Return everything that the tests expect of an alert at some moment."""
    checks = (check for _, test in CASES.values() for check in test["alert_rule_test"])
    return [check for check in checks if check["alertname"] == alert]


def expected_labels(alert: str) -> list[dict[str, str]]:
    return [fired["exp_labels"] for check in expectations(alert) for fired in check["exp_alerts"]]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the rules that Helm renders, as Prometheus would load them."""
    return write_rules(alert_groups(), tmp_path_factory.mktemp("rules") / "alerts.yaml")


# The rules


@pytest.mark.slow
def test_prometheus_takes_the_rules(shipped: Path) -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", shipped)

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_it_fires_in_trouble_and_only_then(case: str, tmp_path: Path) -> None:
    interval, test = CASES[case]
    wanted = {check["alertname"] for check in test["alert_rule_test"]}
    expressions = " ".join(ALERTS[alert]["expr"] for alert in wanted)
    # The rules that do not matter here would take most of the time.
    groups = [
        {
            "name": group["name"],
            "rules": [
                {key: value for key, value in rule.items() if key != "annotations"}
                for rule in group["rules"]
                if rule.get("alert") in wanted or rule.get("record", "none:") in expressions
            ],
        }
        for group in alert_groups()
    ]
    write_rules(groups, tmp_path / "alerts.yaml")
    plan = {
        "rule_files": ["alerts.yaml"],
        "evaluation_interval": interval,
        # Otherwise by chance, and an alert may not see yet what is recorded.
        "group_eval_order": [group["name"] for group in groups],
        "tests": [test],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(plan))
    played = promtool("test", "rules", tmp_path / "test.yaml")

    assert played.returncode == 0, played.stdout + played.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_it_is_seen_to_fire(alert: str) -> None:
    jobs = {labels["job"] for labels in expected_labels(alert)}
    tests = [str(t) for _, t in CASES.values() if alert in str(t["alert_rule_test"])]

    assert jobs
    assert "good" not in jobs
    assert any('job="good"' in test for test in tests)


def test_nothing_is_tested_that_is_no_alert() -> None:
    """Tests name alerts that exist: promtool lets the absence of an unknown one pass."""
    named = {c["alertname"] for _, test in CASES.values() for c in test["alert_rule_test"]}

    assert named == set(ALERTS)


@pytest.mark.parametrize(
    "rule",
    [rule for group in alert_groups() for rule in group["rules"]],
    ids=lambda rule: rule.get("alert") or rule["record"],
)
def test_it_looks_at_series_that_exist(rule: dict[str, Any]) -> None:
    """Every metric and label value of an expression is one that the bridge creates at zero."""
    assert unknown_in(rule["expr"]) == []


def test_everything_recorded_is_used() -> None:
    expressions = " ".join(rule["expr"] for rule in ALERTS.values())

    assert {name for name in records() if name not in expressions} == set()


# What on-call reads


@pytest.mark.parametrize("alert", ALERTS)
def test_it_says_what_happens_and_how_bad_it_is(alert: str) -> None:
    annotations = ALERTS[alert]["annotations"]

    assert ALERTS[alert]["labels"]["severity"] in {"critical", "warning", "info"}
    assert 0 < len(annotations["summary"]) < 120
    assert annotations["description"].endswith(".")
    assert annotations["runbook_url"] == f"{BASE}/runbooks.md#{alert.lower()}"


@pytest.mark.parametrize("alert", ALERTS)
def test_it_speaks_of_labels_that_it_has(alert: str) -> None:
    quoted = set(re.findall(r"\$labels\.(\w+)", str(ALERTS[alert]["annotations"])))

    assert quoted <= set(expected_labels(alert)[0])


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    sections = re.findall(r"^### (SmsBridge\w+)$", RUNBOOKS.read_text(), re.MULTILINE)

    assert sections == list(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_runbook_says_what_to_do_and_when_it_is_mended(alert: str) -> None:
    section = re.split(rf"^### {alert}$", RUNBOOKS.read_text(), flags=re.MULTILINE)[1]
    text = re.split(r"^##", section, flags=re.MULTILINE)[0]

    assert all(part in text for part in ("**What happens.**", "**Do.**", "**Resolved.**"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_pages_name_metrics_that_exist(page: Path) -> None:
    """Every metric and label value that a page tells to look at is there."""
    # Prose names a histogram as a whole, an expression one of its series.
    assert [
        text for text in _asked_in(page) if unknown_in(text) and unknown_in(f"{text}_sum")
    ] == []


def _asked_in(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]*sms_bridge_[^`\n]*)`", page.read_text())


def test_documents_and_examples_name_metrics_that_exist() -> None:
    """Metrics that a reader copies into an autoscaler or a query are there."""
    pages = ("deployment", "scaling", "secrets", "several-workers")
    files = [*(DOCS / f"{page}.md" for page in pages), *(CHART / "ci").glob("*.yaml")]
    named = {
        name
        for file in files
        for name in re.findall(r"\bsms_bridge_[a-z_]*[a-z]\b", file.read_text())
    }

    assert len(named) > 2
    assert [unknown for name in sorted(named) for unknown in unknown_in(name)] == []
