"""Every threshold, condition and time of the alerts matters: without it some test would fail."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.promql import alert_cases, alert_groups, alerts, promtool, write_rules

ALERTS = alerts()
_THRESHOLD = re.compile(r"(?P<sign>>|==) (?P<number>(?:[\d.]+ \* )?[\d.]+)")
_JOINT = re.compile(r"\b(?P<word>and|unless|or)\b(?P<on> on \([^)]*\))?")
RULE_KEYS = {"expr", "for", "keep_firing_for", "labels"}
_MATCHER = re.compile(r'\w+(?:=~|!~|!=|=)"[^"]*"')
# What changes nothing as long as the rest is as it is.
EQUIVALENT = {
    # Everything with this reason is dead.
    ("SmsBridgeCallerErrorsHigh", 'drop outcome="dead"'),
    ("SmsBridgeMessagesExpired", 'drop outcome="dead"'),
    # Only a valid signature has a key.
    ("SmsBridgePreviousSigningKeyStillUsed", 'drop result="valid"'),
}


def mutants(rule: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an alert with one part of it changed or gone, and what was done."""
    for key in ("for", "keep_firing_for"):
        if key in rule:
            yield f"without {key}", {k: v for k, v in rule.items() if k != key}
    for what, expression in changed(rule["expr"]):
        yield what, rule | {"expr": expression}


def changed(expression: str) -> Iterator[tuple[str, str]]:
    def put(found: re.Match[str], text: str) -> str:
        return expression[: found.start()] + text + expression[found.end() :]

    for number, found in enumerate(_THRESHOLD.finditer(expression)):
        yield f"threshold {number} always reached", put(found, ">= -1")
        if found["sign"] == ">":
            yield f"threshold {number} never reached", put(found, "> 1e12")
    for number, found in enumerate(_JOINT.finditer(expression)):
        on = found["on"] or ""
        for other in {"and", "unless", "or"} - {found["word"]}:
            yield f"{found['word']} {number} as {other}", put(found, other + on)
    for matcher in dict.fromkeys(found[0] for found in _MATCHER.finditer(expression)):
        yield f"drop {matcher}", tidy(expression.replace(matcher, ""))


def tidy(expression: str) -> str:
    return re.sub(r",(?=\})|(?<=\{),|,(?=,)", "", expression)


def cases_of(alert: str) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    found = []
    for interval, test in alert_cases().values():
        checks = [check for check in test["alert_rule_test"] if check["alertname"] == alert]
        if checks:
            found.append((interval, test, checks))
    return found


def unnoticed(alert: str, folder: Path) -> list[str]:
    living = dict(mutants(ALERTS[alert]))
    names = {what: f"Mutant{number}" for number, what in enumerate(living)}
    expressions = " ".join(rule["expr"] for rule in living.values())
    recorded = [
        {
            "name": group["name"],
            "rules": [r for r in group["rules"] if r.get("record", "none:") in expressions],
        }
        for group in alert_groups()
    ]
    groups = [
        *(group for group in recorded if group["rules"]),
        {
            "name": "mutants",
            "rules": [
                {"alert": names[what]} | {k: v for k, v in rule.items() if k in RULE_KEYS}
                for what, rule in living.items()
            ],
        },
    ]
    write_rules(groups, folder / "alerts.yaml")
    failed: set[str] = set()
    for interval, test, checks in cases_of(alert):
        plan = {
            "rule_files": ["alerts.yaml"],
            "evaluation_interval": interval,
            "group_eval_order": [group["name"] for group in groups],
            "tests": [
                test
                | {
                    "alert_rule_test": [
                        check | {"alertname": name} for name in names.values() for check in checks
                    ]
                }
            ],
        }
        (folder / "test.yaml").write_text(yaml.safe_dump(plan))
        played = promtool("test", "rules", folder / "test.yaml")
        failed |= set(re.findall(r"alertname: (Mutant\d+), time", played.stdout + played.stderr))
    return [what for what in living if names[what] not in failed]


@pytest.mark.parametrize("alert", ALERTS)
@pytest.mark.slow
@pytest.mark.thorough
def test_no_part_of_an_alert_is_without_a_test(alert: str, tmp_path: Path) -> None:
    """Whatever is changed in an alert, some test sees it fire wrongly, or not at all."""
    found = {(alert, what) for what in unnoticed(alert, tmp_path)}

    assert found - EQUIVALENT == set()
