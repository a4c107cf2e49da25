"""`sms-bridge status`: the state of queues, workers and receivers on one screen, or as JSON."""

import json
import os
import shutil
import sys
import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bridge.cli.options import (
    AsJson,
    ConfigFile,
    examples,
    read_settings,
    until_interrupted,
)
from bridge.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bridge.admin.admin_port import AdminPort
    from bridge.admin.status.report import Status
    from bridge.config import Settings

# From the beginning of a look to that of the next.
WATCH_SECONDS: Final = 2.0

# The style of each kind of line, on a terminal that has colours.
_STYLES: Final = {"head": "bold", "wrong": "red", "plain": ""}

app = typer.Typer()


@app.command(
    epilog=examples(
        "sms-bridge status",
        "sms-bridge status --watch --admin sms-worker-metrics --admin sms-webhook-metrics",
        "sms-bridge status --json | jq '.queues[] | select(.role == \"dead_letters\").ready'",
    )
)
def status(
    context: typer.Context,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")
    ] = False,
    admin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="An admin port to ask; a name stands for all its addresses. May be repeated. "
            "Without, admin.port of this computer.",
        ),
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Show what waits, what is sent, what is paused and why, and who works, on one screen.

    The broker tells what waits in the queues, who takes it, and an operator's pause; the admin
    ports tell the rest. Each is asked by itself, and what does not answer is named. Nothing is
    changed, and no message is looked at: so an age is known only of what a worker holds, and dead
    letters by reason are those that the workers have made since they started. `dlq list` looks into
    the queue.

    Exit 1 when the broker, or an admin port that was named, does not answer. With --watch it ends
    with 0; with --json, too, each look is a line.
    """
    import asyncio

    settings = read_settings(context, config)
    ports = _ports(settings, admin or ())
    if watch:
        until_interrupted(lambda: asyncio.run(_watch(settings, ports, as_json=as_json)))
        return
    found = asyncio.run(_look_once(settings, ports))
    _print(found, as_json=as_json)
    if found.broker.fault is not None or (admin and any(one.fault for one in found.processes)):
        raise typer.Exit(EXIT_FAILED)


def _ports(settings: "Settings", names: "Sequence[str]") -> "list[AdminPort]":
    from bridge.admin.admin_port import local_port, parse_admin_port

    try:
        ports = [parse_admin_port(name, settings.admin.port) for name in names]
    except ValueError as error:
        raise ConfigError(f"--admin: {error}") from None
    # Port 0 is any free one: only its log says which.
    return ports if ports or settings.admin.port == 0 else [local_port(settings.admin)]


async def _look_once(settings: "Settings", ports: "list[AdminPort]") -> "Status":
    from bridge.admin.status.look import Looker

    async with aclosing(Looker(settings, ports)) as looker:
        return await looker.look()


async def _watch(settings: "Settings", ports: "list[AdminPort]", *, as_json: bool) -> None:
    import asyncio

    from bridge.admin.status.look import Looker

    async with aclosing(Looker(settings, ports)) as looker:
        with _display(as_json=as_json) as show:
            while True:
                begun_at = time.monotonic()
                show(await looker.look())
                await asyncio.sleep(max(0.0, begun_at + WATCH_SECONDS - time.monotonic()))


@contextmanager
def _display(*, as_json: bool) -> "Iterator[Callable[[Status], None]]":
    """Yield a function that shows a status: on a terminal in place of the last one.

    Elsewhere, and on a terminal that cannot move its cursor, it is printed below the last one.
    """
    if as_json or not sys.stdout.isatty() or _is_dumb():
        yield lambda status: _print(status, as_json=as_json, indent=None)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from bridge.cli.status_screen import format_status

    def show(status: "Status") -> None:
        lines = format_status(status, _width())
        # A line wider than the terminal continues on the next one: nothing is cut off.
        live.update(
            Group(*(Text(line.text, _STYLES[line.kind], overflow="fold") for line in lines)),
            refresh=True,
        )

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        yield show


def _print(status: "Status", *, as_json: bool, indent: int | None = 2) -> None:
    from bridge.cli.status_screen import format_status

    if as_json:
        typer.echo(json.dumps(status.model_dump(), indent=indent))
        return
    has_colours = not os.environ.get("NO_COLOR") and not _is_dumb()
    for line in format_status(status, _width()):
        typer.secho(
            line.text,
            bold=True if line.kind == "head" else None,
            fg="red" if line.kind == "wrong" else None,
            color=None if has_colours else False,
        )


def _width() -> int:
    from bridge.cli.status_screen import WIDTH

    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def _is_dumb() -> bool:
    return os.environ.get("TERM") in {"dumb", "unknown"}
