"""The dashboards that the chart ships: Grafana can show them, and every panel asks what exists."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from tests.chart.dashboards import ALL, DASHBOARDS, Dashboard, filled, panels_of
from tests.chart.generate import PANEL_ADDRESS
from tests.chart.promql import (
    alerts,
    check_expressions,
    known_series,
    promtool,
    selectors,
    unknown_in,
)

KINDS = {"stat", "timeseries", "state-timeline", "heatmap", "table", "alertlist"}
# Of Grafana's units.
UNITS = {"mps", "eps", "reqps", "cps", "short", "s", "percentunit", "bytes", "none"}
COLUMNS = 24
BUILT_IN = {"__rate_interval", "__range"}
# Shown by no panel and watched by no alert, on purpose.
UNSEEN = {
    # Beside the secret's own counters it says nothing that an alert could use.
    "sms_bridge_secret_last_reload_timestamp_seconds",
    "sms_bridge_shutdown_timestamp_seconds",
}


# What Grafana reads and writes itself, and its published models do not have.
BEYOND_THE_MODELS = {
    ".annotations.list[].builtIn",
    ".annotations.list[].step",
    ".annotations.list[].textFormat",
    ".annotations.list[].titleFormat",
    ".panels[].options.tooltip.mode",
    ".templating.list[].definition",
}


PANELS = [panel for dashboard in DASHBOARDS.values() for panel in panels_of(dashboard)]


def expressions_of(dashboard: Dashboard) -> Iterator[str]:
    for panel in panels_of(dashboard):
        yield from (target["expr"] for target in panel["targets"])
    yield from (note["expr"] for note in dashboard["annotations"]["list"] if "expr" in note)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), \w+\)", variable["definition"])
            assert found, variable["definition"]
            yield found[1]


EXPRESSIONS = {
    f"{name}:{number}": filled(expression)
    for name, dashboard in DASHBOARDS.items()
    for number, expression in enumerate(expressions_of(dashboard))
}


# What is asked


@pytest.mark.slow
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    assert check_expressions(EXPRESSIONS, tmp_path) == ""


def test_it_asks_for_series_that_exist() -> None:
    """Every metric and label value is one that the bridge creates at zero."""
    unknown = {name: unknown_in(expression) for name, expression in EXPRESSIONS.items()}

    assert {name: series for name, series in unknown.items() if series} == {}


def test_every_metric_is_seen() -> None:
    asked = [e for dashboard in DASHBOARDS.values() for e in expressions_of(dashboard)]
    asked += [rule["expr"] for rule in alerts().values()]
    seen = {base_name(selector.name) for expr in asked for selector in selectors(filled(expr))}
    ours = {base_name(name) for name, _ in known_series() if name.startswith("sms_bridge_")}

    assert ours - seen == UNSEEN


def base_name(name: str) -> str:
    """Drop what a histogram adds to its name."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_is_there_and_used(name: str) -> None:
    dashboard = DASHBOARDS[name]
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(expressions_of(dashboard))))

    assert used - BUILT_IN == defined - {"datasource"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_everything_asks_the_chosen_source(name: str) -> None:
    """No address of a data source is written in: the one at the top is asked."""
    text = json.dumps(DASHBOARDS[name])
    sources = set(re.findall(r'"datasource": \{"type": "(\w+)", "uid": "([^"]+)"\}', text))

    assert sources == {("prometheus", "${datasource}"), ("grafana", "-- Grafana --")}
    assert DASHBOARDS[name]["templating"]["list"][0]["type"] == "datasource"


# What an expression says

DIED = 'sms_bridge_worker_messages_processed_total{instance="a",outcome="dead",reason="invalid"}'
DEAD = 'sms_bridge_worker_queue_messages_ready{queue="sms.outbound.dead",role="dead_letter"}'


@pytest.mark.parametrize(
    ("died", "dead", "shown"),
    [
        ("7x240", "0x240", {"waiting": 0, "made": 0}),
        ("0x180 1x59", "0x180 1x59", {"waiting": 1, "made": 1}),
        # Replayed or discarded before anybody looked, or held by somebody who looks.
        ("0x180 2x59", "0x240", {"waiting": 0, "made": 2}),
        # Given up before the first scrape of a new process, and the process is gone.
        ("_x180 3x9 stale", "_x180 0x9 stale", {"made": 3}),
        # The process of the same address was started anew.
        ("5x180 1x59", "0x240", {"waiting": 0, "made": 1}),
        # From before the time shown.
        ("0x30 4x209", "0x30 4x209", {"waiting": 4, "made": 0}),
    ],
    ids=["none", "one", "replayed", "unseen", "restarted", "old"],
)
@pytest.mark.slow
def test_dead_letters_show_while_they_wait_and_when_they_were_made(
    died: str, dead: str, shown: dict[str, int], tmp_path: Path
) -> None:
    (panel,) = [p for p in panels_of(DASHBOARDS["overview"]) if p["title"] == "Dead letters"]
    _, orange = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    asked = {target["legendFormat"]: filled(target["expr"]) for target in panel["targets"]}
    plan = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": DIED, "values": died},
                    {"series": DEAD, "values": dead},
                ],
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": "4h",
                        "exp_samples": [{"value": shown[name]}] if name in shown else [],
                    }
                    for name, expression in asked.items()
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(plan))
    played = promtool("test", "rules", tmp_path / "test.yaml")

    assert asked.keys() == {"waiting", "made"}
    assert played.returncode == 0, played.stdout + played.stderr
    assert orange == {"color": "orange", "value": 1}


# What is shown


@pytest.mark.parametrize("name", ALL)
def test_grafana_knows_every_setting(name: str) -> None:
    plugins.register_default_plugins()
    read = GrafanaDashboard.from_json(ALL[name])
    written = json.loads(json.dumps(read, default=lambda part: part.to_json()))

    assert set(lost(ALL[name], written)) <= BEYOND_THE_MODELS


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{path}.{key}")
            elif value not in (None, False, "", [], {}):
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(after, list):
        for one, other in zip(before, after, strict=True):
            yield from lost(one, other, f"{path}[]")


def test_dashboards_have_addresses_of_their_own() -> None:
    """Each has an address that stays, a title and the common tag."""
    heads = [(d["uid"], d["title"], d["tags"]) for d in ALL.values()]

    assert heads == [(f"sms-bridge-{name}", f"SMS bridge / {name}", ["sms-bridge"]) for name in ALL]
    assert set(ALL) == {"overview", "worker", "webhook", "on-call"}


def test_each_panel_leads_to_the_runbooks() -> None:
    sections = {p["title"]: p["id"] for p in panels_of(ALL["on-call"])}
    for panel in PANELS:
        links = panel.get("links", [])

        assert links or panel["type"] == "alertlist", panel["title"]
        for link in links:
            name = link["title"].removeprefix("Runbook: ")
            assert link["url"] == PANEL_ADDRESS.format("on-call", sections[name])
            assert name in alerts()


def test_every_alert_is_led_to_its_panels() -> None:
    places = {
        f"{name.capitalize()}: {panel['title']}": PANEL_ADDRESS.format(name, panel["id"])
        for name, dashboard in DASHBOARDS.items()
        for panel in panels_of(dashboard)
    }
    for panel in panels_of(ALL["on-call"]):
        text = panel["options"]["content"]
        links = re.findall(r"\[((?:Overview|Worker|Webhook): [^]]+)\]\(([^)]+)\)", text)

        assert links or panel["title"] not in alerts(), panel["title"]
        assert dict(links).items() <= places.items()


@pytest.mark.parametrize("name", ALL)
def test_panels_have_places_and_numbers_of_their_own(name: str) -> None:
    """No two panels overlap, or share an id, which Grafana would mix up."""
    numbers = [panel["id"] for panel in ALL[name]["panels"]]
    cells = [cell for panel in ALL[name]["panels"] for cell in cells_of(panel["gridPos"])]

    assert len(numbers) == len(set(numbers))
    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} == set(range(COLUMNS))


def cells_of(place: dict[str, int]) -> list[tuple[int, int]]:
    """Return the cells of the grid that a panel takes."""
    columns = range(place["x"], place["x"] + place["w"])
    return list(itertools.product(columns, range(place["y"], place["y"] + place["h"])))


def test_each_panel_explains_itself() -> None:
    for panel in PANELS:
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        steps = [step["value"] for step in defaults["thresholds"]["steps"]]
        letters = [target["refId"] for target in panel["targets"]]
        quoted = {
            (label, target["expr"])
            for target in panel["targets"]
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        }

        assert title
        assert panel["description"].endswith("."), title
        assert panel["type"] in KINDS, title
        assert defaults["unit"] in UNITS, title
        assert steps[0] is None, title
        assert steps[1:] == sorted(steps[1:]), title
        assert len(letters) == len(set(letters)), title
        assert [pair for pair in quoted if not keeps(*pair)] == [], title


def keeps(label: str, expression: str) -> bool:
    groups = re.findall(r"\bby \(([^)]*)\)", expression)
    return all(label in group.replace(" ", "").split(",") for group in groups)
