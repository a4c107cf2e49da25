"""Reports results: tables in a terminal and in docs/evidence, plots in docs/benchmarks."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.adaptive import PHASES
from bench.latency import PERCENTS
from bench.lineup import BROKER_LIMIT, OURS, PLAIN, RECEIVERS, WORKERS
from bench.rounds import Results, Row

mpl.use("svg")

DOCS: Final = Path(__file__).parents[1] / "docs"
PAGE: Final = DOCS / "evidence" / "benchmarks.md"
FOLDER: Final = DOCS / "benchmarks"
RESULTS: Final = FOLDER / "results.json"
BEGIN: Final = "<!-- written by make bench: begin -->"
END: Final = "<!-- written by make bench: end -->"

# Scenes that run the bridge compiled and plain.
COMPARED: Final = ("http", "https", "slow-api", "receivers")
# Facts that differ between runs.
_MOMENT: Final = ("date", "commit", "load before the first run")


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and the format of its cells."""

    heading: str
    show: Callable[[Row], str]


def _number(key: str, form: str = ",.0f", unit: str = "") -> Callable[[Row], str]:
    return lambda row: f"{row[key]:{form}}{unit}" if key in row else ""


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"


def _cost(row: Row) -> str:
    return f"{row['cpu_ms']:.3f} ms ({row['cpu_ms_min']:.3f}-{row['cpu_ms_max']:.3f})"


_NAME: Final = Column("", lambda row: str(row["name"]))
_CPU: Final = Column("per CPU second", _number("cpu_rate"))
_WALL: Final = Column("per second", _number("wall_rate"))
_BROKER: Final = Column("per CPU second of the broker", _number("broker_cpu_rate"))
_MEMORY: Final = Column("peak memory", _number("peak_mib", unit=" MiB"))
_CONNECTIONS: Final = Column("connections", _number("connections"))
_LATENCY: Final = (
    _NAME,
    Column("capacity per second", _number("capacity")),
    *(
        Column(f"{quantile} at {percent} % (ms)", _number(f"{quantile}_ms_at_{percent}", ",.1f"))
        for percent in PERCENTS
        for quantile in ("p50", "p99")
    ),
)
_TO_BARE: Final = Column("to the bare loop", _ratio)
_INSTRUCTIONS: Final = (
    Column("part", lambda row: str(row["name"])),
    Column("plain", _number("plain")),
    Column("compiled", _number("instructions")),
    Column("share, compiled", _number("share", ".0%")),
)

TITLES: Final = {
    "http": "Workers: instant API, 100 requests in flight",
    "https": "Workers: instant API over TLS 1.3",
    "slow-api": "Workers: API of 100 ms, 200 requests in flight",
    "receivers": "Receivers: 64 connections",
    "worker-latency": "Workers: latency from publish to answer",
    "receiver-latency": "Receivers: latency from request to answer",
    "pauses": "Pauses of the event loop",
    "shapes": "Worker: request formats of services",
    "tracing": "Worker: cost of spans",
    "long-queues": "Worker: length of the queue",
    "several-workers": "Worker: several processes on one queue",
    "adaptive": "Worker: `concurrency: auto` on an API that changes",
    "start-up": "Start of the process to the first POST",
    "log-line": "Log line of one delivery",
    "post": "One POST: the bridge's transport and httpx",
    "system-calls": "System calls of one message and one webhook",
    "instructions": "Instructions of one message",
    "webhook-instructions": "Instructions of one webhook",
}
COLUMNS: Final[Mapping[str, Sequence[Column]]] = {
    "http": (_NAME, _CPU, _TO_BARE, _WALL, _MEMORY),
    "https": (_NAME, _CPU, _TO_BARE, _WALL, Column("POSTs", _number("messages")), _CONNECTIONS),
    "slow-api": (
        _NAME,
        _WALL,
        Column("of the limit of 2,000", _number("of_limit", ".0%")),
        _CPU,
        _TO_BARE,
        _MEMORY,
    ),
    "receivers": (_NAME, _CPU, Column("to bare Starlette", _ratio), _WALL, _MEMORY),
    "worker-latency": _LATENCY,
    "receiver-latency": _LATENCY,
    "pauses": (
        Column("role", lambda row: str(row["name"])),
        Column("minutes", _number("minutes", ".1f")),
        Column("load per second", _number("rate")),
        Column("longest pause", _number("longest_ms", ".1f", " ms")),
        Column("most CPU time in a pause", _number("cpu_ms", ".1f", " ms")),
        Column("CPU time of a garbage collection", _number("garbage_ms", ".1f", " ms")),
        Column("CPU time of a scrape", _number("scrape_ms", ".1f", " ms")),
        Column("CPU time of reading secrets", _number("secrets_ms", ".1f", " ms")),
    ),
    "shapes": (
        Column("preset", lambda row: f"`{row['name']}`"),
        Column("request and answer", lambda row: str(row["what"])),
        _CPU,
        Column("to `generic`", _ratio),
        _WALL,
    ),
    "tracing": (
        Column("spans of", lambda row: str(row["name"])),
        _CPU,
        Column("to no spans", _ratio),
        Column("spans that arrived", _number("spans")),
        _MEMORY,
    ),
    "long-queues": (
        Column("queued", lambda row: str(row["name"])),
        Column("CPU time per message", _cost),
        _WALL,
        _BROKER,
        _MEMORY,
        Column("runs", _number("runs")),
    ),
    "several-workers": (
        Column("processes", lambda row: str(row["name"])),
        Column("40 in flight each, API of 100 ms: per second", _number("slow_wall_rate")),
        Column("of the limit", _number("of_limit", ".0%")),
        Column("100 in flight in all, instant API: per second", _number("wall_rate")),
        _CPU,
        _BROKER,
        _MEMORY,
    ),
    "adaptive": (
        Column("`worker.concurrency`", lambda row: str(row["name"])),
        *(Column(str(phase), lambda row, key=str(phase): str(row[key])) for phase in PHASES),  # type: ignore[misc]
        Column("after an outage: accepted, 429s", lambda row: str(row.get("comeback", ""))),
    ),
    "start-up": (_NAME, Column("seconds", _number("seconds", ".2f"))),
    "log-line": (_NAME, Column("CPU time", _number("microseconds", ".1f", " µs"))),
    "post": (_NAME, Column("CPU time", _number("microseconds", ".0f", " µs"))),
    "system-calls": (
        Column("role", lambda row: str(row["role"])),
        _NAME,
        Column("system calls", _number("calls", ".1f")),
    ),
    "instructions": _INSTRUCTIONS,
    "webhook-instructions": _INSTRUCTIONS,
}


def load_results() -> Results:
    """Read the results of earlier runs."""
    if not RESULTS.exists():
        return {}
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def draw(console: Console, scene: str, rows: Sequence[Row]) -> None:
    """Print a scene."""
    table = Table(title=TITLES[scene], title_justify="left")
    for index, column in enumerate(COLUMNS[scene]):
        table.add_column(column.heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(column.show(row) for column in COLUMNS[scene]))
    console.print(table)


def write(results: Results) -> None:
    """Write the results, the plots, and the generated part of the page."""
    FOLDER.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    plots = {scene: _plot(scene, results[scene]["rows"]) for scene in results if scene in _PLOTS}
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [BEGIN, *_page(results, plots), END]
    PAGE.write_text(before + "\n\n".join(parts) + after, encoding="utf-8")


def _page(results: Results, plots: Mapping[str, str]) -> Iterator[str]:
    shown = [scene for scene in TITLES if scene in results]
    for scene in shown:
        yield f"## {TITLES[scene]}"
        columns = COLUMNS[scene]
        lines = [[column.heading for column in columns]]
        lines.append(["---", *("---:" for _ in columns[1:])])
        lines += [[column.show(row) for column in columns] for row in results[scene]["rows"]]
        yield "\n".join("| " + " | ".join(line) + " |" for line in lines)
        if scene in plots:
            yield f"![{TITLES[scene]}](../benchmarks/{plots[scene]})"
        yield _describe(results[scene])
    yield from _compiled_and_plain(results)
    yield "## Contestants"
    yield "Workers:"
    yield "\n".join(f"- **{one.name}**: {one.what}." for one in WORKERS)
    yield "Receivers, which all verify each webhook, publish it, and wait for the confirm:"
    yield "\n".join(f"- **{one.name}**: {one.what}." for one in RECEIVERS)
    yield f"{BROKER_LIMIT.name} ({BROKER_LIMIT.what}) shows RabbitMQ's own limit."
    yield "## Machines and versions"
    yield from _machines({scene: results[scene]["environment"] for scene in shown})


def _machines(environments: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Write the versions of all scenes, then a table of the differences."""
    facts: dict[str, list[str]] = {}
    for environment in environments.values():
        for name, value in environment.items():
            if name not in _MOMENT and value not in facts.setdefault(name, []):
                facts[name].append(value)
    shared = [f"{name} {values[0]}" for name, values in facts.items() if len(values) == 1]
    yield f"The scenes used the following versions, where applicable: {', '.join(shared)}."
    others = [name for name, values in facts.items() if len(values) > 1]
    scenes: dict[tuple[str, ...], list[str]] = {}
    for scene, environment in environments.items():
        machine = tuple(environment.get(name, "") for name in others)
        scenes.setdefault(machine, []).append(f"`{scene}`")
    yield "\n".join(
        f"| {' | '.join(line)} |"
        for line in (
            ["scenes", *others],
            ["---"] * (len(others) + 1),
            *([", ".join(named), *machine] for machine, named in scenes.items()),
        )
    )


def _compiled_and_plain(results: Results) -> Iterator[str]:
    """Write the gain of compiling, from the bridge's two rows of each scene."""
    yield "## Compiled and plain"
    lines = []
    for scene in (scene for scene in COMPARED if scene in results):
        rows = {row["name"]: row for row in results[scene]["rows"]}
        ours = rows.get(OURS, {})
        if "to_plain" in ours:
            rates = f"{rows[PLAIN]['cpu_rate']:,.0f} | {ours['cpu_rate']:,.0f}"
            lines.append(f"| {TITLES[scene]} | {rates} | {ours['to_plain']:.2f} |")
    if lines:
        heading = "| per CPU second | plain | compiled | compiled to plain |"
        yield "\n".join((heading, "| --- | ---: | ---: | ---: |", *lines))
    else:
        yield "No scene has run both: see `make compiled`."


def _describe(result: Mapping[str, Any]) -> str:
    runs = sorted({row["runs"] for row in result["rows"]}, reverse=True)
    counts = " or ".join(f"{count}" for count in runs)
    what = "One run" if runs == [1] else f"Medians of {counts} interleaved runs"
    date, commit, load = (result["environment"][name] for name in _MOMENT)
    return f"{what}, {date}, commit {commit}, load {load}."


# Plots


def _plot(scene: str, rows: Sequence[Row]) -> str:
    # Reproducible output.
    with mpl.rc_context({"svg.hashsalt": scene, "font.size": 9}):
        figure = Figure(figsize=(7, 2.6), layout="constrained")
        _PLOTS[scene](figure, rows)
        name = f"{scene}.svg"
        figure.savefig(FOLDER / name, metadata={"Date": None})
    return name


def _plot_rates(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: float(row["cpu_rate"]))
    colours = ["#d9534f" if row["name"] == OURS else "#8a99a8" for row in ordered]
    bars = axes.barh(
        [row["name"] for row in ordered], [row["cpu_rate"] for row in ordered], color=colours
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_xlabel("messages per CPU second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)


def _plot_curve(figure: Figure, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["name"] == f"{row['messages']:,}"]
    panels = (("cpu_ms", "CPU time per message, ms"), ("peak_mib", "peak memory, MiB"))
    for axes, (key, label) in zip(figure.subplots(1, 2), panels, strict=True):
        axes.plot(
            [row["messages"] for row in rows],
            [row[key] for row in rows],
            marker="o",
            color="#d9534f",
        )
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("queued messages")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)


_PLOTS: Final[Mapping[str, Callable[[Figure, Sequence[Row]], None]]] = {
    "http": _plot_rates,
    "https": _plot_rates,
    "receivers": _plot_rates,
    "long-queues": _plot_curve,
}
