"""Alerts and dashboards reach the cluster as their files hold them, with what the values change."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.promql import promtool, write_rules
from tests.chart.rendering import CHART, MINIMAL, Values, merged, nested, of_kind, render

FILE, BROKER_FILE = (
    yaml.safe_load((CHART / "files" / f"{name}.yaml").read_text())
    for name in ("alerts", "broker-alerts")
)
ALERTS = {r["alert"]: r for group in FILE["groups"] for r in group["rules"] if "alert" in r}
ALERT = next(iter(ALERTS))


def rules(**values: Any) -> list[dict[str, Any]]:
    over: Values = {"prometheusRule": {"enabled": True, **values}}
    (found,) = of_kind(render(merged(MINIMAL, over)), "PrometheusRule").values()
    return [rule for group in found["spec"]["groups"] for rule in group["rules"]]


def with_commands(file: dict[str, Any]) -> list[dict[str, Any]]:
    found = [dict(rule) for group in file["groups"] for rule in group["rules"]]
    for rule in found:
        if "annotations" in rule:
            kept = {key: text for key, text in rule["annotations"].items() if key != "runbook_url"}
            data = f"{{.data.{rule['alert']}}}"
            read = f"kubectl -n sms get configmap rel-sms-bridge-runbooks -o jsonpath='{data}'"
            rule["annotations"] = kept | {"runbook": read}
    return found


def alert(name: str, **values: Any) -> dict[str, Any]:
    return next(rule for rule in rules(**values) if rule.get("alert") == name)


def test_every_rule_is_rendered_as_it_is() -> None:
    """Expressions, times, labels and texts are the file's; the bare link has become a command."""
    rendered = rules()
    of_file = with_commands(FILE)

    def by_name(rule: dict[str, Any]) -> str:
        return json.dumps(rule, sort_keys=True)

    assert sorted(rendered, key=by_name) == sorted(of_file, key=by_name)
    assert "{{ $labels." in json.dumps(rendered)


def test_alerts_on_the_broker_are_added() -> None:
    assert rules(brokerAlerts=True) == rules() + with_commands(BROKER_FILE)


def test_alerts_on_the_broker_look_at_the_queue_that_is_configured() -> None:
    """Their virtual host and queue are the release's, whatever characters they have."""
    values = merged(
        MINIMAL,
        nested("prometheusRule", {"enabled": True, "brokerAlerts": True}),
        nested("rabbitmq.vhost", 'team "a"'),
        nested("config.worker.queue", "team\\out"),
    )
    (found,) = of_kind(render(values), "PrometheusRule").values()
    expressions = [r["expr"] for group in found["spec"]["groups"] for r in group["rules"]]
    matchers = set(re.findall(r"rabbitmq_\w+(\{.*?\})", " ".join(expressions)))

    own = r"team\\\\out"
    queues = f"{own}|{own}.urgent"
    assert matchers == {rf'{{vhost="team \"a\"",queue=~"{queues}"}}'}


SELECTOR = 'namespace=~"sms$|x",cluster="a"'


@pytest.mark.slow
def test_a_selector_stands_in_every_expression(tmp_path: Path) -> None:
    plain, selected = rules(brokerAlerts=True), rules(brokerAlerts=True, selector=SELECTOR)
    for before, after in zip(plain, selected, strict=True):
        expression = after["expr"]
        names = re.findall(r"\b(?:sms_bridge|process)_[a-z0-9_]+", expression)
        behind = re.findall(r"\b(?:sms_bridge|process)_[a-z0-9_]+(\{[^}]*)", expression)
        without = expression.replace(f"{{{SELECTOR}}}", "").replace(f"{SELECTOR},", "")

        assert len(behind) == len(names)
        assert all(matchers.startswith(f"{{{SELECTOR}") for matchers in behind)
        assert names or "rabbitmq_" in expression
        assert before == after | {"expr": without}
    path = write_rules([{"name": "selected", "rules": selected}], tmp_path / "rules.yaml")
    assert promtool("check", "rules", "--lint=all", "--lint-fatal", path).returncode == 0


def test_an_alert_can_be_left_out() -> None:
    names = {rule["alert"] for rule in rules(disabled=[ALERT]) if "alert" in rule}

    assert names == ALERTS.keys() - {ALERT}


def test_an_alert_can_be_changed() -> None:
    """Time, labels and annotations are laid over the file's; what is not named stays."""
    changed = alert(
        ALERT,
        overrides={
            ALERT: {"for": "42m", "labels": {"team": "a"}, "annotations": {"note": "b"}},
        },
        additionalRuleLabels={"cluster": "c"},
    )

    assert changed["for"] == "42m"
    assert changed["expr"] == ALERTS[ALERT]["expr"]
    assert changed["labels"] == ALERTS[ALERT]["labels"] | {"team": "a", "cluster": "c"}
    assert changed["annotations"]["note"] == "b"
    assert changed["annotations"]["summary"] == ALERTS[ALERT]["annotations"]["summary"]


@pytest.mark.parametrize("base", ["https://example.com/docs", "https://example.com/docs/"])
def test_an_alert_links_to_its_runbook(base: str) -> None:
    for rule in rules(runbookBaseUrl=base):
        if "alert" in rule:
            link = rule["annotations"]["runbook_url"]

            assert re.fullmatch(r"https://example\.com/docs/[\w.-]*#[\w-]+", link)
            assert "runbook" not in rule["annotations"]


def test_an_alert_leads_to_its_runbook_without_an_address() -> None:
    document = (CHART.parents[1] / "docs" / "runbooks.md").read_text()
    on = nested("prometheusRule", {"enabled": True, "brokerAlerts": True})
    kept = of_kind(render(merged(MINIMAL, on)), "ConfigMap")
    for rule in rules(brokerAlerts=True):
        if "alert" not in rule:
            continue
        *command, name, _, path = shlex.split(rule["annotations"]["runbook"])
        (key,) = re.findall(r"^jsonpath=\{\.data\.(\w+)\}$", path)
        text = kept[name]["data"][key]
        section = document.partition(f"\n### {key}\n")[2].partition("\n#")[0].strip()

        assert command == ["kubectl", "-n", kept[name]["metadata"]["namespace"], "get", "configmap"]
        assert key == rule["alert"]
        assert text.startswith("NS=sms REL=rel-sms-bridge\n")
        # Links lead nowhere from there: their words are kept.
        assert re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", section) in text != ""
        assert "](" not in text
    assert "kubectl -n $NS get pods" in kept["rel-sms-bridge-runbooks"]["data"]["README"]
    with_address = merged(MINIMAL, on, nested("prometheusRule.runbookBaseUrl", "https://a"))
    assert "rel-sms-bridge-runbooks" not in of_kind(render(with_address), "ConfigMap")


def test_every_dashboard_is_rendered_as_it_is() -> None:
    values = merged(
        MINIMAL,
        nested("dashboards", {"enabled": True, "annotations": {"grafana_folder": "SMS"}}),
    )
    found = [
        m
        for m in of_kind(render(values), "ConfigMap").values()
        if "grafana_dashboard" in m["metadata"]["labels"]
    ]
    files = sorted((CHART / "files" / "dashboards").glob("*.json"))

    assert files
    assert {name: text.rstrip() for m in found for name, text in m["data"].items()} == {
        file.name: file.read_text().rstrip() for file in files
    }
    assert {m["metadata"]["annotations"]["grafana_folder"] for m in found} == {"SMS"}
