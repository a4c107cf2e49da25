"""`sms-bridge status`: queues, workers and receivers on one screen, or as JSON."""

import asyncio
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, nullcontext
from datetime import datetime
from typing import Annotated, Final, Literal, NamedTuple

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bridge.admin.admin_port_client import (
    AdminPort,
    PauseFacts,
    explain_pause,
    local_port,
    parse_admin_port,
)
from bridge.admin.status import (
    ProcessReport,
    QueueReport,
    RatesReport,
    Status,
    StatusReader,
    WorkerReport,
)
from bridge.cli.options import AsJson, ConfigFile, examples, read_settings, until_interrupted
from bridge.cli.output import format_age, format_table, printable
from bridge.config import Settings
from bridge.errors import EXIT_FAILED, ConfigError

# From the start of one reading to the start of the next.
WATCH_SECONDS: Final = 2.0
# Sentences are wrapped at the usual width of a terminal, or at a smaller one.
WIDTH: Final = 80
_UNKNOWN: Final = "-"

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
        bool, typer.Option("--watch", help="Refresh the output every two seconds, until Ctrl-C.")
    ] = False,
    admin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Admin port of a process. A host name stands for all its addresses. May be "
            "repeated. Default: admin.port on this computer.",
        ),
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Show queues, rates, pauses with their causes, workers and receivers on one screen.

    The command reads queues, consumers and an operator's pause from the broker, and everything else
    from the admin ports. It shows ages only for messages that workers hold. It counts only
    dead letters since the workers started.

    The command exits with 1 if the broker, or an admin port given with --admin, does not respond.
    With --watch, it always exits with 0. With --watch and --json, each reading is one line.
    """
    settings = read_settings(context, config)
    ports = _ports(settings, admin or ())
    if watch:
        until_interrupted(lambda: asyncio.run(_watch(settings, ports, as_json=as_json)))
        return
    found = asyncio.run(_read(StatusReader(settings, ports)))
    _print(found, as_json=as_json)
    if found.broker.fault is not None or (admin and any(one.fault for one in found.processes)):
        raise typer.Exit(EXIT_FAILED)


def _ports(settings: Settings, names: Sequence[str]) -> list[AdminPort]:
    try:
        ports = [parse_admin_port(name, settings.admin.port) for name in names]
    except ValueError as error:
        raise ConfigError(f"--admin: {error}") from None
    # Port 0 is any free port, which only the role's log tells.
    return ports if ports or settings.admin.port == 0 else [local_port(settings.admin)]


async def _read(reader: StatusReader) -> Status:
    async with aclosing(reader):
        return await reader.read()


async def _watch(settings: Settings, ports: list[AdminPort], *, as_json: bool) -> None:
    """Show each status in place of the last, or below it if the cursor cannot be moved."""
    console = _console()
    is_screen = console.is_terminal and not console.is_dumb_terminal and not as_json
    live = Live(console=console, screen=True, auto_refresh=False) if is_screen else None
    async with aclosing(StatusReader(settings, ports)) as reader:
        with live or nullcontext():
            while True:
                begun_at = time.monotonic()
                found = await reader.read()
                if live is None:
                    _print(found, as_json=as_json, indent=None)
                else:
                    live.update(Group(*_texts(found)), refresh=True)
                await asyncio.sleep(max(0.0, begun_at + WATCH_SECONDS - time.monotonic()))


def _print(found: Status, *, as_json: bool, indent: int | None = 2) -> None:
    if as_json:
        typer.echo(json.dumps(found.model_dump(), indent=indent))
        return
    console = _console()
    for text in _texts(found):
        console.print(text, soft_wrap=True)


def _console() -> Console:
    has_colours = not os.environ.get("NO_COLOR")
    return Console(highlight=False, color_system="auto" if has_colours else None)


def _texts(found: Status) -> Iterator[Text]:
    width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    for line in format_status(found, width):
        # A line that is wider than the terminal is continued, not cut off.
        yield Text(line.text, line.style, overflow="fold")


# The screen


class StatusLine(NamedTuple):
    """A line, with the style of a table head, of a fault, or neither."""

    text: str
    style: Literal["bold", "red", ""] = ""


def format_status(status: Status, width: int = WIDTH) -> list[StatusLine]:
    """Format a status as lines of printable characters.

    Sentences are wrapped at `width`; tables are as wide as their contents.
    """
    parts = (
        [_summary(status)],
        [line for fault in _faults(status) for line in _wrapped(fault, width, "red")],
        list(_queues(status, width)),
        list(_workers(status)),
        list(_receivers(status)),
    )
    lines: list[StatusLine] = []
    for part in filter(None, parts):
        lines += [StatusLine(""), *part] if lines else part
    return [line._replace(text=printable(line.text)) for line in lines]


def _summary(status: Status) -> StatusLine:
    rates = status.rates
    if rates is None:
        done = "rates not known yet" if status.workers else "rates unknown: no worker answers"
        return StatusLine(f"{status.at}  {done}")
    return StatusLine(
        f"{status.at}  {_how_many(len(status.workers))}: "
        f"{rates.sent_per_second:.1f} sent/s, {rates.retried_per_second:.1f} retried/s, "
        f"{rates.dead_per_second:.1f} dead/s"
    )


def _how_many(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _wrapped(text: str, width: int, style: Literal["red", ""] = "") -> Iterator[StatusLine]:
    for line in textwrap.wrap(text, width, subsequent_indent="  "):
        yield StatusLine(line, style)


def _faults(status: Status) -> Iterator[str]:
    broker = status.broker
    if broker.fault is not None:
        yield f"BROKER  {broker.fault}"
    elif broker.stores is False:
        yield (
            "BROKER  accepts no messages (memory or disk alarm); look at "
            "rabbitmq-diagnostics check_alarms"
        )
    if broker.refused:
        yield (
            f"NO PERMISSION  on {', '.join(broker.refused)}: the number of messages is unknown; "
            "permission to read is enough (rabbitmqctl set_permissions)"
        )
    if status.is_paused_by_operator:
        note = status.paused_by_operator
        since = _since(None if note is None else note.since)
        why = "" if note is None or note.reason is None else f": {note.reason}"
        operator = "an operator" if note is None or note.by is None else note.by
        yield f"PAUSED  every worker, by {operator}{since}{why}; `sms-bridge resume` ends it"
    yield from _own_pauses(status)
    of_all = _how_many(len(status.workers))
    waits = [worker.retry_after_seconds for _, worker in status.workers]
    if slow := [wait for wait in waits if wait > 0]:
        left = format_age(max(slow))
        yield f"SLOWED DOWN  {len(slow)} of {of_all}, after the service's 429, for another {left}"
    if suspecting := sum(worker.outage_suspected for _, worker in status.workers):
        yield f"OUTAGE SUSPECTED  by {suspecting} of {of_all}: requests keep failing"
    for process in status.processes:
        if process.fault is not None:
            where = "" if process.name == process.address else f" ({process.name})"
            yield f"NO ANSWER  {process.address}{where}: {process.fault}"
    yield from _missing_workers(status)


def _own_pauses(status: Status) -> Iterator[str]:
    pauses: dict[tuple[str, str | None], list[PauseFacts]] = {}
    for _, worker in status.workers:
        for pause in worker.pauses:
            pauses.setdefault((pause.reason, pause.queue), []).append(pause)
    for (reason, _), ones in pauses.items():
        if reason == "operator" and status.is_paused_by_operator:
            continue
        first = min(ones, key=lambda pause: pause.since or "")
        answered = f", status {first.status}" if first.status is not None else ""
        answered += f", code {first.code}" if first.code is not None else ""
        count = f"{len(ones)} of {_how_many(len(status.workers))}"
        meaning = "; ".join(explain_pause(first))
        yield f"PAUSED  {count}, {reason}{_since(first.since)}{answered}: {meaning}"


def _missing_workers(status: Status) -> Iterator[str]:
    consumers = next((one.consumers for one in status.queues if one.role == "requests"), None)
    if status.queues_from != "broker" or consumers is None:
        return
    # A paused worker may have a consumer or not. A cancelled consumer counts until its messages are
    # settled, beside the worker's next consumer, which gets the probe.
    count_twice = sum(bool(worker.pauses and worker.held) for _, worker in status.workers)
    hidden = consumers - len(status.workers) - count_twice
    if consumers == 0 and not status.workers:
        yield "NO WORKER  consumes requests; start one; if one is running, its log says why"
    elif hidden > 0:
        yield (
            f"NOT SHOWN  {hidden} of {_how_many(consumers)} that consume: name their admin "
            "ports with --admin"
        )


def _since(moment: str | None) -> str:
    return "" if moment is None else f" since {moment} ({_age(moment)})"


def _age(moment: str | None) -> str:
    if moment is None:
        return _UNKNOWN
    return format_age(time.time() - datetime.fromisoformat(moment).timestamp())


def _queues(status: Status, width: int) -> Iterator[StatusLine]:
    source = ""
    if status.queues_from == "workers":
        source = f"seen by a worker {_age(status.queues_at)} ago"
    main = status.queues[0].name
    oldest = status.oldest_seconds
    in_hand = "" if oldest is None else f"oldest held: {format_age(oldest)}"
    rows = [
        (
            queue.name,
            _ready(queue),
            _count(queue.consumers),
            # The oldest message may come from either queue, so only the first row shows it.
            in_hand if queue.name == main else "",
        )
        for queue in status.queues
        if queue.role != "retry"
    ]
    yield from _table(("QUEUE", "WAITING", "CONSUMERS", source), rows)
    steps = (
        f"{_step(queue.name, main)} {_ready(queue)}"
        for queue in status.queues
        if queue.role == "retry"
    )
    yield from _wrapped("in the retry queues: " + ", ".join(steps), width)
    if (told := status.ladder) is not None and told.not_back:
        text = (
            f"retries since the workers started: {told.stored:,} stored, {told.returned:,} "
            f"returned, {told.not_back:,} outstanding"
        )
        yield from _wrapped(text, width)
    if status.workers:
        counts = sorted(status.dead_letters.by_reason.items(), key=lambda item: -item[1])
        dead = ", ".join(f"{reason} {count:,}" for reason, count in counts)
        yield from _wrapped(f"dead letters since the workers started: {dead or 'none'}", width)


def _step(name: str, main: str) -> str:
    """Shorten the name of a retry queue: `sms.outbound.urgent.retry.5s` is `urgent 5s`."""
    return name.removeprefix(f"{main}.").removeprefix("retry.").replace(".retry.", " ")


def _ready(queue: QueueReport) -> str:
    return "missing" if queue.exists is False else _count(queue.ready)


def _count(count: int | None) -> str:
    return _UNKNOWN if count is None else f"{count:,}"


def _rate(per_second: float | None) -> str:
    return _UNKNOWN if per_second is None else f"{per_second:,.1f}"


def _workers(status: Status) -> Iterator[StatusLine]:
    rows = [
        (
            process.address,
            _count(worker.held),
            *_rates(worker.rates),
            _age(worker.last_sent_at),
            _state(process, worker),
        )
        for process, worker in status.workers
    ]
    yield from _table(("WORKER", "HELD", "SENT/S", "RETRY/S", "DEAD/S", "LAST", "STATE"), rows)


def _rates(rates: RatesReport | None) -> list[str]:
    return [_UNKNOWN] * 3 if rates is None else [*map(_rate, rates.model_dump().values())]


def _receivers(status: Status) -> Iterator[StatusLine]:
    rows = [
        (
            process.address,
            _rate(process.webhook.published_per_second),
            _rate(process.webhook.refused_per_second),
            _rate(process.webhook.failed_per_second),
            _age(process.webhook.last_event_at),
            _state(process, None),
        )
        for process in status.processes
        if process.webhook is not None
    ]
    yield from _table(("WEBHOOK", "EVENTS/S", "REFUSED/S", "FAILED/S", "LAST", "STATE"), rows)


def _state(process: ProcessReport, worker: WorkerReport | None) -> str:
    if "not_draining" in process.failing:
        return "draining"
    if not process.is_connected:
        return "no broker"
    if worker is not None and worker.pauses:
        return "paused: " + ", ".join(pause.reason for pause in worker.pauses)
    if process.failing:
        return "not ready: " + ", ".join(process.failing)
    if worker is not None and worker.retry_after_seconds > 0:
        return "slowed down"
    if worker is not None and worker.is_standby is not None:
        return "standing by" if worker.is_standby else "active"
    return "ready"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[StatusLine]:
    if rows:
        first, *others = format_table(head, rows, has_numbers=True)
        yield StatusLine(first, "bold")
        yield from map(StatusLine, others)
