"""The dashboards of the chart."""

import json
import re
from typing import Any

from tests.chart.promql import FILES

Dashboard = dict[str, Any]

ALL: dict[str, Dashboard] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((FILES / "dashboards").glob("*.json"))
}
# The dashboard "on-call" has only runbooks, and no queries.
DASHBOARDS = {name: dashboard for name, dashboard in ALL.items() if name != "on-call"}


def panels_of(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Return the panels without rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled(expression: str, *, rate: str = "5m", whole: str = "3h") -> str:
    """Replace Grafana's variables: the rate interval, and the time range."""
    times = expression.replace("$__rate_interval", rate).replace("$__range", whole)
    return re.sub(r'"\$\w+"', '".*"', times)
