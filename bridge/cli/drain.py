"""`sms-bridge drain`: move the waiting messages to the dead letters."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bridge.admin.drain import Drain, Waiting, count_waiting
from bridge.admin.move import open_mover
from bridge.admin.replacement import NewLinesFile
from bridge.cli.options import (
    AsJson,
    AtMost,
    ConfigFile,
    Reason,
    Yes,
    examples,
    read_reason,
    read_settings,
    stop_at_signals,
)
from bridge.cli.output import counts_of, print_json, progress_bar
from bridge.config import Settings
from bridge.errors import ConfigError

app = typer.Typer()


@app.command(
    epilog=examples(
        'sms-bridge drain --reason "wrong text"      # prints what it would do',
        'sms-bridge drain --reason "wrong text" --yes',
        'sms-bridge drain --reason "wrong text" --limit 1 --yes',
    )
)
def drain(  # noqa: PLR0913  an option each
    context: typer.Context,
    *,
    reason: Annotated[str, Reason],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what the command would do (default).")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(help="File that lists the moved messages. Default: drained-<time>.jsonl."),
    ] = None,
    limit: AtMost = None,
    yes: Yes = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Move waiting messages to the dead-letter queue, for example if their text is wrong.

    Run `sms-bridge pause` first, or the workers keep sending. The command moves the messages in the
    main queue, the urgent queue and their retry queues. Each becomes a dead letter with the reason
    `drained`, and keeps its key and expiry. `dlq replay` returns them.

    If the command is killed, nothing is lost. At most 256 messages are then in two queues at once,
    with the same id in both. The file contains ids, times and sizes, but no phone numbers or texts.
    """
    if dry_run and yes:
        raise ConfigError("--dry-run and --yes: give only one of them")
    reason = read_reason(reason)
    settings = read_settings(context, config)
    path = file or Path(f"drained-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")
    asyncio.run(_drain(settings, reason, path, limit=limit, apply=yes, as_json=as_json))


async def _drain(
    settings: Settings,
    reason: str,
    path: Path,
    *,
    limit: int | None,
    apply: bool,
    as_json: bool,
) -> None:
    async with open_mover(settings, "drain") as mover:
        stop_at_signals(mover.stopping)
        waiting = await count_waiting(mover.connection, settings.worker)
        total = waiting.total if limit is None else min(waiting.total, limit)
        if apply or not as_json:
            _warn_of_workers(waiting, settings.worker.queue)
        if not apply:
            if as_json:
                _report_json(waiting, applied=False, done=0)
            else:
                _print_waiting(waiting, total)
            return
        file = NewLinesFile(path, option="--file")
        drain = Drain(settings.worker, mover, reason, file, limit=limit)
        try:
            if total:
                with file, progress_bar(total) as advance:
                    async for count in drain.run(waiting):
                        advance(count)
        finally:
            _print_moved(mover.moved, drain.maybe_sent, waiting, path, as_json=as_json)
        mover.check_stopped()
        rest = await count_waiting(mover.connection, settings.worker)
        if limit is None and rest.total:
            typer.echo(
                f"{rest.total} are waiting now, published or returned meanwhile"
                f"{counts_of(rest.ready)}; run it again to move them",
                err=True,
            )


def _print_waiting(waiting: Waiting, count: int) -> None:
    typer.echo(f"would move {count} of {waiting.total} waiting{counts_of(waiting.ready)}")
    if count:
        typer.echo("nothing was changed; add --yes to do it")


def _print_moved(
    moved: Mapping[str, int], maybe_sent: int, waiting: Waiting, path: Path, *, as_json: bool
) -> None:
    done = sum(moved.values())
    if as_json:
        facts: dict[str, object] = {"moved": dict(moved), "maybe_sent": maybe_sent}
        if done:
            facts["file"] = str(path)
        _report_json(waiting, applied=True, done=done, **facts)
        return
    listed = f", listed in {path}" if done else ""
    typer.echo(f"moved {done}{counts_of(moved)}{listed}")
    if maybe_sent:
        typer.echo(
            f"of them may have been sent already: {maybe_sent}; "
            "`dlq replay` skips these without --include-uncertain"
        )


def _report_json(waiting: Waiting, *, applied: bool, done: int, **facts: object) -> None:
    document = {
        "applied": applied,
        "done": done,
        "waiting": dict(waiting.ready),
        "workers": waiting.workers,
        **facts,
    }
    print_json(document)


def _warn_of_workers(waiting: Waiting, queue: str) -> None:
    if waiting.workers:
        count = waiting.workers
        consumers = "1 consumer" if count == 1 else f"{count} consumers"
        typer.echo(
            f"{queue} has {consumers}, workers or another drain; messages that they hold are not "
            "moved; stop workers with `sms-bridge pause` first",
            err=True,
        )
