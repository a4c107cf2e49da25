"""The dashboards that the chart ships, as they are in their files."""

import json
import re
from typing import Any

from tests.chart.promql import FILES

Dashboard = dict[str, Any]

ALL: dict[str, Dashboard] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((FILES / "dashboards").glob("*.json"))
}
# The other one has the runbooks, and asks for nothing.
DASHBOARDS = {name: dashboard for name, dashboard in ALL.items() if name != "on-call"}


def panels_of(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Return the panels but for the rows between them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled(expression: str, *, rate: str = "5m", whole: str = "3h") -> str:
    """Put in what Grafana puts in: the span for rates, and the whole time shown."""
    times = expression.replace("$__rate_interval", rate).replace("$__range", whole)
    return re.sub(r'"\$\w+"', '".*"', times)
