"""The report of a soak as tables for a person."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_CAUSES: Final = {
    "api_fault": "the policy asks for it: the API had not said no",
    "slow_answer": "the same, but no fault was ordered: the answer came too late",
    "worker_kill": "the worker was killed between POST and ack",
    "worker_freeze": "the worker was frozen, and another one was given what it had in flight",
    "other_worker": "a connection was lost, and another worker was given what was in flight",
    "publisher_repeat": "published twice, and taken by another worker",
    "unexplained": "nothing explains it",
}


def draw(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report: the books, the extra POSTs, the faults, the verdict."""
    for table in (_books(report), _extras(report), _faults(report)):
        console.print()
        console.print(table)
    console.print()
    for problem in report["problems"]:
        console.print(f"FAILED: {problem}", markup=False)
    for message, posts in report["histories"].items():
        console.print("\n  ".join([message, *(posts or ["never POSTed"])]), markup=False)
    if not report["problems"]:
        console.print("PASSED: nothing was lost, nothing was sent twice without need.")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=len(columns) > 2)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _books(report: Mapping[str, Any]) -> Table:
    settings, versions = report["settings"], report["versions"]
    title = f"Soak, seed {settings['seed']}"
    if settings["workers"] > 1:
        title += f", {settings['workers']} workers"
    if settings["ids"] != "on":
        title += ", without ids" if settings["ids"] == "off" else ", half of them without ids"
    if settings["only"]:
        title += f", only faults of the {settings['only']}"
    table = _table(title, "", "")
    for name, value in _book_lines(report):
        table.add_row(name, str(value))
    table.add_section()
    table.add_row("faults", str(len(report["timeline"])))
    table.add_row("duration", f"{report['seconds']:.0f} s")
    table.add_row("peak memory of a worker", f"{report['worker_peak_mib']:.0f} MiB")
    for name, number in versions.items():
        table.add_row(name, number)
    return table


def _book_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "published", report["published"]
    yield "  tries to publish", report["publishes"]
    yield "confirmed", report["confirmed"]
    yield "never confirmed: found / not found", f"{report['recovered']} / {report['unknown']}"
    yield "sent", report["sent"]
    for reason, count in sorted(report["dead"].items()):
        yield f"dead: {reason}", count
    yield "  dead, and yet accepted by the API", report["dead_but_sent"]
    yield "waiting", report["waiting"]
    yield "lost", len(report["lost"])
    yield "unexpected", len(report["unexpected"])
    dropped = report["worker_deliveries"].get("dropped duplicate", 0)
    yield "repeats that the worker dropped unsent", dropped
    yield "POSTs", report["posts"]
    yield "  again after a definite no", report["retries_after_no"]
    yield "  again with a new key (messages)", len(report["new_keys"])


def _extras(report: Mapping[str, Any]) -> Table:
    table = _table("POSTs after one that may have been accepted", "why", "POSTs", "SMS doubled")
    for cause, text in _CAUSES.items():
        extra, doubled = report["extra_posts"].get(cause, 0), report["doubled"].get(cause, 0)
        table.add_row(text, str(extra), str(doubled))
    table.add_row("most by one kill of a worker", "", str(report["worst_kill"]))
    table.add_row("most by one freeze of a worker", "", str(report["worst_freeze"]))
    table.add_row("most by one lost connection", "", str(report["worst_loss"]))
    return table


def _faults(report: Mapping[str, Any]) -> Table:
    table = _table(
        "From the end of the fault to the next accepted POST", "fault", "count", "median", "max"
    )
    for kind, recovery in report["recovery"].items():
        seconds = (recovery["median_seconds"], recovery["max_seconds"])
        shown = ("-" if value is None else f"{value:.2f} s" for value in seconds)
        table.add_row(kind, str(recovery["faults"]), *shown)
    return table
