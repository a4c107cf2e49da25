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
GROUPS = alert_groups()


def expectations(alert: str) -> list[dict[str, Any]]:
    """Return everything that the tests expect of an alert at some moment."""
    checks = (check for _, test in CASES.values() for check in test["alert_rule_test"])
    return [check for check in checks if check["alertname"] == alert]


def expected_labels(alert: str) -> list[dict[str, str]]:
    return [fired["exp_labels"] for check in expectations(alert) for fired in check["exp_alerts"]]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the rules that Helm renders, as Prometheus would load them."""
    return write_rules(GROUPS, tmp_path_factory.mktemp("rules") / "alerts.yaml")


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
        for group in GROUPS
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


def test_each_is_seen_to_fire() -> None:
    for alert in ALERTS:
        jobs = {labels["job"] for labels in expected_labels(alert)}
        tests = [str(t) for _, t in CASES.values() if alert in str(t["alert_rule_test"])]

        assert jobs, alert
        assert "good" not in jobs, alert
        assert any('job="good"' in test for test in tests), alert


def test_nothing_is_tested_that_is_no_alert() -> None:
    """Tests name alerts that exist: promtool lets the absence of an unknown one pass."""
    named = {c["alertname"] for _, test in CASES.values() for c in test["alert_rule_test"]}

    assert named == set(ALERTS)


def test_they_look_at_series_that_exist() -> None:
    """Every metric and label value of an expression is one that the bridge creates at zero."""
    expressions = (rule["expr"] for group in GROUPS for rule in group["rules"])

    assert [series for expression in expressions for series in unknown_in(expression)] == []


def test_everything_recorded_is_used() -> None:
    expressions = " ".join(rule["expr"] for rule in ALERTS.values())

    assert {name for name in records() if name not in expressions} == set()


# What on-call reads


def test_each_says_what_happens_and_how_bad_it_is() -> None:
    for alert, rule in ALERTS.items():
        annotations = rule["annotations"]
        quoted = set(re.findall(r"\$labels\.(\w+)", str(annotations)))

        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, alert
        assert 0 < len(annotations["summary"]) < 120, alert
        assert annotations["description"].endswith("."), alert
        assert annotations["runbook_url"] == f"{BASE}/runbooks.md#{alert.lower()}"
        assert quoted <= set(expected_labels(alert)[0]), alert


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    sections = re.findall(r"^### (SmsBridge\w+)$", RUNBOOKS.read_text(), re.MULTILINE)

    assert sections == list(ALERTS)


def test_each_runbook_says_what_to_do_and_when_it_is_mended() -> None:
    document = RUNBOOKS.read_text()
    for alert in ALERTS:
        text = document.partition(f"\n### {alert}\n")[2].partition("\n##")[0]

        for part in ("**What happens.**", "**Do.**", "**Resolved.**"):
            assert part in text, alert


def test_pages_name_metrics_that_exist() -> None:
    """Every metric and label value that a page tells to look at is there."""
    asked = [
        (page.name, text)
        for page in PAGES
        for text in re.findall(r"`([^`\n]*sms_bridge_[^`\n]*)`", page.read_text())
    ]

    # Prose names a histogram as a whole, an expression one of its series.
    assert [one for one in asked if unknown_in(one[1]) and unknown_in(f"{one[1]}_sum")] == []


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
