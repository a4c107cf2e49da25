"""Draws the dashboards from a real run: `make pictures` writes docs/img/*.png.

A real Prometheus scrapes both roles under faults. The panels are drawn from their JSON, so that a
picture shows the same data as Grafana.
"""

import asyncio
import io
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import guarded
from tests.chart.dashboards import filled
from tests.prometheus import Prometheus, running_prometheus
from tests.watched_run import WatchedRun, watched_run

HERE = Path(__file__).parent
FILES = HERE.parent / "helm" / "sms-bridge" / "files"
IMAGES = HERE / "img"
MAX_BYTES = 200_000

# Minutes instead of hours, and rates over seconds instead of minutes.
RUN_SECONDS = 240
RATE_SECONDS = 30
STEP_SECONDS = 1.0
DRAWN = ("overview", "worker", "webhook")

COLUMNS = 24
UNIT_INCHES = (0.56, 0.36)
DPI = 80
COLOURS = 96
LINES = 8
NAMED = {
    "green": "#3f9b4f",
    "yellow": "#d9a300",
    "orange": "#e8771a",
    "red": "#d0342c",
    "dark-red": "#8e1b1b",
    "blue": "#3274b5",
    "purple": "#8255b0",
    "transparent": "#eeeeee",
}
SUFFIXES = {"mps": " msg/s", "eps": " ev/s", "reqps": " req/s", "cps": " /s"}

Panel = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A series of a panel, with its legend and values."""

    name: str
    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Run:
    """A run recorded by Prometheus, in Unix seconds."""

    prometheus: Prometheus
    start: float
    end: float
    job: str = ".*"

    def expression(self, text: str) -> str:
        """Replace Grafana's variables."""
        whole = f"{self.end - self.start:.0f}s"
        return filled(text.replace("$job", self.job), rate=f"{RATE_SECONDS}s", whole=whole)

    async def lines(self, panel: Panel) -> list[Line]:
        """Return every line of a panel."""
        found: list[Line] = []
        for target in panel["targets"]:
            if target["instant"]:
                found += await self._now(target)
                continue
            results = await self.prometheus.query_range(
                self.expression(target["expr"]),
                start=self.start,
                end=self.end,
                step_seconds=STEP_SECONDS,
            )
            found += [self._line(target["legendFormat"], result) for result in results]
        return found

    async def _now(self, target: dict[str, Any]) -> list[Line]:
        results = await self.prometheus.query(self.expression(target["expr"]), at=self.end)
        return [
            self._line(target["legendFormat"], {**result, "values": [result["value"]]})
            for result in results
        ]

    def _line(self, legend: str, result: dict[str, Any]) -> Line:
        """Make a line with gaps for missing values, as Grafana does."""
        template = "" if legend == "__auto" else legend
        name = re.sub(r"\{\{(\w+)\}\}", lambda m: result["metric"].get(m[1], ""), template)
        known = {round(at - self.start): float(value) for at, value in result["values"]}
        times = range(round(self.end - self.start) + 1)
        return Line(name.strip(), times, [known.get(at, float("nan")) for at in times])


def main() -> None:
    """Run both roles, query every panel, and draw the dashboards."""
    with (
        tempfile.TemporaryDirectory() as folder,
        private_broker() as broker,
        guarded() as guard,
        watched_run(broker.url, folder=Path(folder), guard=guard) as roles,
        running_prometheus(
            Path(folder), guard=guard, targets=roles.targets, rules=FILES / "alerts.yaml"
        ) as server,
    ):
        run = asyncio.run(_perform(roles, server))
        for name in DRAWN:
            board = json.loads((FILES / "dashboards" / f"{name}.json").read_text())
            chosen = replace(run, job=name) if name in roles.targets else run
            asyncio.run(_draw(board, chosen, IMAGES / f"{name}.png"))


async def _perform(roles: WatchedRun, prometheus: Prometheus) -> Run:
    start = time.time()
    await roles.play(RUN_SECONDS)
    return Run(prometheus, start, time.time())


async def _draw(board: dict[str, Any], run: Run, path: Path) -> None:
    mpl.rcParams.update({"font.size": 8, "axes.titlesize": 8.5, "axes.titlelocation": "left"})
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    width_inches, height_inches = COLUMNS * UNIT_INCHES[0], height * UNIT_INCHES[1]
    figure = plt.figure(figsize=(width_inches, height_inches), dpi=DPI, facecolor="white")
    for panel in board["panels"]:
        place = panel["gridPos"]
        if panel["type"] == "row":
            figure.text(
                0.008,
                1 - (place["y"] + 0.65) / height,
                panel["title"],
                fontsize=11,
                fontweight="bold",
                va="center",
            )
            continue
        axes = figure.add_axes(_box(place, height, has_scales=panel["type"] != "stat"))
        axes.set_title(panel["title"])
        await _DRAWN_AS[panel["type"]](axes, panel, run)
    _save(figure, path)


def _box(
    place: dict[str, int], height: int, *, has_scales: bool
) -> tuple[float, float, float, float]:
    left, right, top, bottom = 1.15, 0.25, 0.85, 0.75
    if not has_scales:
        left, bottom = 0.25, 0.15
    return (
        (place["x"] + left) / COLUMNS,
        1 - (place["y"] + place["h"] - bottom) / height,
        (place["w"] - left - right) / COLUMNS,
        (place["h"] - top - bottom) / height,
    )


async def _draw_stat(axes: Axes, panel: Panel, run: Run) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    defaults = panel["fieldConfig"]["defaults"]
    lines = await run.lines(panel)
    known = [(line.name, [v for v in line.values if not np.isnan(v)]) for line in lines]
    texts = [(name, values[-1]) for name, values in known if values]
    if not texts:
        _write(axes, [(defaults.get("noValue", "no data"), "grey")])
        return
    colours = [_colour(value, defaults) for _, value in texts]
    words = [f"{name} {_said(value, defaults)}".strip() for name, value in texts]
    _write(axes, list(zip(words, colours, strict=True)))
    if panel["options"]["graphMode"] == "area":
        _sketch(axes, lines[0], colours[0])


def _sketch(axes: Axes, line: Line, colour: str) -> None:
    """Draw a small line of the past values in the lower third."""
    below = axes.inset_axes((0, 0, 1, 0.33))
    below.fill_between(line.times, line.values, color=colour, alpha=0.25, lw=0)
    below.set_ylim(bottom=min(0.0, np.nanmin(line.values)))
    below.set_xlim(line.times[0], line.times[-1])
    below.axis("off")


def _write(axes: Axes, texts: Sequence[tuple[str, str]]) -> None:
    """Write coloured texts below each other."""
    size = 17 if sum(len(text) for text, _ in texts) < 12 else 11  # noqa: PLR2004  what fits
    for row, (text, colour) in enumerate(texts):
        y = 0.6 + 0.2 * ((len(texts) - 1) / 2 - row)
        axes.text(0.5, y, text, ha="center", va="center", fontsize=size, color=colour)


def _said(value: float, defaults: dict[str, Any]) -> str:
    for mapping in defaults["mappings"]:
        if (found := mapping["options"].get(f"{value:g}")) is not None:
            return str(found["text"])
    return _with_unit(value, defaults["unit"], defaults.get("decimals"))


def _with_unit(value: float, unit: str, decimals: int | None = None) -> str:
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f} %"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB" if value >= 2**20 else f"{value / 1024:.3g} KiB"
    if unit == "s" and value >= 60:  # noqa: PLR2004  a minute
        return f"{value / 60:.3g} min" if value < 3600 else f"{value / 3600:.3g} h"  # noqa: PLR2004
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"
    text = f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"
    return text + SUFFIXES.get(unit, "")


def _colour(value: float, defaults: dict[str, Any]) -> str:
    for mapping in defaults["mappings"]:
        if (found := mapping["options"].get(f"{value:g}")) is not None:
            return NAMED[found["color"]]
    steps = defaults["thresholds"]["steps"]
    passed = [step for step in steps if step["value"] is None or value >= step["value"]]
    return NAMED[passed[-1]["color"]]


async def _draw_lines(axes: Axes, panel: Panel, run: Run) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    lines = [line for line in await run.lines(panel) if not all(np.isnan(line.values))]
    colours = _line_colours(panel, lines)
    # Leave out series that are always zero.
    shown = [line for line in lines if np.nanmax(line.values) > 0]
    if not shown:
        text = "zero all the time" if lines else defaults.get("noValue", "no data")
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="grey")
    if defaults["custom"]["stacking"]["mode"] == "normal":
        _stack(axes, shown, colours)
    else:
        for line in shown:
            axes.plot(line.times, line.values, color=colours[line.name], lw=1.1, label=line.name)
    _scales(axes, run, defaults["unit"])
    top = axes.get_ylim()[1]
    for step in defaults["thresholds"]["steps"][1:]:
        if step["value"] < top * 1.5:
            axes.axhline(step["value"], color=NAMED[step["color"]], ls="--", lw=0.8)
    if shown:
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[:LINES], names[:LINES], fontsize=6.5, loc="upper right", framealpha=0.6)


def _line_colours(panel: Panel, lines: Sequence[Line]) -> dict[str, Any]:
    given = {
        override["matcher"]["options"]: NAMED[asked["value"]["fixedColor"]]
        for override in panel["fieldConfig"]["overrides"]
        for asked in override["properties"]
        if asked["id"] == "color"
    }
    palette = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    free = iter([*palette[::2], *palette[1::2]] * 3)
    return {line.name: given.get(line.name) or next(free) for line in lines}


def _stack(axes: Axes, lines: Sequence[Line], colours: dict[str, Any]) -> None:
    times = sorted({at for line in lines for at in line.times})
    if not times:
        return
    rows = []
    for line in lines:
        values = dict(zip(line.times, line.values, strict=True))
        rows.append([np.nan_to_num(values.get(at, 0.0)) for at in times])
    axes.stackplot(
        times,
        rows,
        labels=[line.name for line in lines],
        colors=[colours[line.name] for line in lines],
        alpha=0.75,
    )


def _scales(axes: Axes, run: Run, unit: str) -> None:
    axes.set_xlim(0, run.end - run.start)
    axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-3 if unit == "s" else 0.01))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:.0f} s"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _with_unit(value, unit)))
    axes.tick_params(labelsize=6.5)
    axes.grid(visible=True, color="#dddddd", lw=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


async def _draw_states(axes: Axes, panel: Panel, run: Run) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    lines = await run.lines(panel)
    for row, line in enumerate(lines):
        known = [(at, v) for at, v in zip(line.times, line.values, strict=True) if not np.isnan(v)]
        spans = [(at, STEP_SECONDS * 1.02) for at, _ in known]
        colours = [_colour(value, defaults) for _, value in known]
        axes.broken_barh(spans, (row + 0.1, 0.8), facecolors=colours)
    axes.set_yticks([row + 0.5 for row in range(len(lines))])
    axes.set_yticklabels([])
    for row, line in enumerate(lines):
        axes.text(1, row + 0.5, line.name, va="center", fontsize=6.5)
    axes.set_xlim(0, run.end - run.start)
    axes.set_ylim(max(1, len(lines)), 0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:.0f} s"))
    axes.tick_params(labelsize=6.5, left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


async def _draw_heat(axes: Axes, panel: Panel, run: Run) -> None:
    lines = sorted(await run.lines(panel), key=lambda line: float(line.name))
    times = sorted({at for line in lines for at in line.times})
    grid = np.zeros((len(lines), len(times)))
    for row, line in enumerate(lines):
        values = dict(zip(line.times, line.values, strict=True))
        grid[row] = [np.nan_to_num(values.get(at, 0.0)) for at in times]
    # Buckets are cumulative.
    grid[1:] = np.maximum(0, np.diff(grid, axis=0))
    axes.pcolormesh(times, range(len(lines)), np.sqrt(grid), cmap="Oranges", shading="nearest")
    axes.set_yticks(range(len(lines)))
    bounds = [float(line.name) for line in lines]
    names = ["more" if np.isinf(bound) else _with_unit(bound, "s") for bound in bounds]
    axes.set_yticklabels([name if row % 2 == 0 else "" for row, name in enumerate(names)])
    axes.set_xlim(0, run.end - run.start)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:.0f} s"))
    axes.tick_params(labelsize=6.5)


async def _draw_table(axes: Axes, panel: Panel, run: Run) -> None:
    axes.axis("off")
    results = await run.prometheus.query(run.expression(panel["targets"][0]["expr"]))
    columns = ("component", "version", "revision", "instance")
    rows = [[result["metric"].get(column, "") for column in columns] for result in results]
    for row, cells in enumerate([list(columns), *sorted(rows)]):
        for column, cell in enumerate(cells):
            weight = "bold" if row == 0 else "normal"
            axes.text(column / 4, 0.9 - row * 0.14, cell, fontsize=7, fontweight=weight)


async def _draw_alerts(axes: Axes, _panel: Panel, run: Run) -> None:
    axes.axis("off")
    found = await run.prometheus.query('sort_desc(ALERTS{alertname=~"SmsBridge.*"})')
    texts = sorted(f"{r['metric']['alertname']}  {r['metric']['alertstate']}" for r in found)
    for row, text in enumerate(texts or ["nothing fires, nothing is about to"]):
        axes.text(0, 0.9 - row * 0.12, text, fontsize=7)


Drawing = Callable[[Axes, Panel, Run], Any]
_DRAWN_AS: dict[str, Drawing] = {
    "stat": _draw_stat,
    "timeseries": _draw_lines,
    "state-timeline": _draw_states,
    "heatmap": _draw_heat,
    "table": _draw_table,
    "alertlist": _draw_alerts,
}


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    # A palette reduces the size to a third without a visible difference.
    picture = Image.open(drawn).convert("RGB").quantize(COLOURS)
    picture.save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size} bytes, more than {MAX_BYTES}")
    print(f"{path.relative_to(HERE.parent)}: {size / 1000:.0f} kB")  # noqa: T201


if __name__ == "__main__":
    main()
