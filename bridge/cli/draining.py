"""`sms-bridge drain`: move what waits to the dead letters."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.cli.dead_letter_options import AtMost, Yes
from bridge.cli.dead_letter_output import progress_bar
from bridge.cli.options import AsJson, ConfigFile, examples, read_settings
from bridge.cli.signals import stopped_by_signals
from bridge.errors import BridgeError, ConfigError

if TYPE_CHECKING:
    from bridge.admin.draining.drain import Drain
    from bridge.admin.draining.waiting import Waiting
    from bridge.config import Settings

app = typer.Typer()


@app.command(
    epilog=examples(
        'sms-bridge drain --reason "wrong text"      # says what it would do',
        'sms-bridge drain --reason "wrong text" --yes',
        'sms-bridge drain --reason "wrong text" --limit 1 --yes',
    )
)
def drain(  # noqa: PLR0913  an option each
    context: typer.Context,
    *,
    to_dead: Annotated[  # noqa: ARG001  accepted, and needless: there is no other place
        bool,
        typer.Option("--to-dead", hidden=True),
    ] = False,
    reason: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="What for: a line for others to read, without phone numbers."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done, as without --yes.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(help="Where to list what is moved; drained-<time>.jsonl without."),
    ] = None,
    limit: AtMost = None,
    yes: Yes = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Move what waits for the workers to the dead letters: a campaign with the wrong text.

    Both what is in the queue and what waits on the retry ladder, as much as there is when it
    begins. Run `sms-bridge pause` before, else workers go on sending meanwhile. Nothing is deleted:
    each becomes a dead letter `drained` with its key, its expiry and this reason, `sms-bridge dlq`
    shows it, and `dlq replay` sends it after all. Who waits for its outcome is told `dead`.
    A message leaves its queue when the broker has confirmed its copy and the copy is listed in the
    file: stop or kill this at any point and nothing is lost, and at most 256 are in both places,
    with one id each. The file has ids, moments and sizes, no number and no text.
    """
    import asyncio

    from bridge.topology.paused_queue import checked_reason

    if dry_run and yes:
        raise ConfigError("--dry-run and --yes: only one of them")
    try:
        reason = checked_reason(reason)
    except ValueError as error:
        raise ConfigError(f"--reason: {error}") from None
    settings = read_settings(context, config)
    if yes:
        file = file or Path(f"drained-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")
        asyncio.run(_move(settings, reason, file, at_most=limit, as_json=as_json))
    else:
        asyncio.run(_count(settings, at_most=limit, as_json=as_json))


async def _count(settings: "Settings", *, at_most: int | None, as_json: bool) -> None:
    from bridge.admin.draining.waiting import find_waiting

    waiting = await find_waiting(settings)
    if as_json:
        _print_json(waiting, applied=False, done=0)
        return
    _warn_of_workers(waiting, settings.worker.queue)
    count = waiting.total if at_most is None else min(waiting.total, at_most)
    typer.echo(f"would move {count} of {waiting.total} that wait{_by_queue(waiting.ready)}")
    if count:
        typer.echo("nothing was changed; --yes does it")


async def _move(
    settings: "Settings", reason: str, file: Path, *, at_most: int | None, as_json: bool
) -> None:
    from bridge.admin.draining.drain import open_drain
    from bridge.admin.lines_file import NewLinesFile

    async with open_drain(settings) as drain, stopped_by_signals(drain.stop):
        total = drain.waiting.total if at_most is None else min(drain.waiting.total, at_most)
        _warn_of_workers(drain.waiting, settings.worker.queue)
        with NewLinesFile(file, option="--file") as listed:
            try:
                if total:
                    with progress_bar(total, is_shown=True) as step:
                        await drain.run(reason, listed, at_most=at_most, step=step)
            finally:
                _print_moved(drain, file, as_json=as_json)
        if drain.is_stopped:
            done = drain.done
            raise BridgeError(f"stopped after {done}; nothing is lost, run it again for the rest")
        rest = await drain.left()
        if at_most is None and rest.total:
            typer.echo(
                f"{rest.total} wait by now, published or put back meanwhile"
                f"{_by_queue(rest.ready)}; run it again for them",
                err=True,
            )


def _print_moved(drain: "Drain", file: Path, *, as_json: bool) -> None:
    if as_json:
        facts: dict[str, object] = {"moved": dict(drain.moved), "maybe_sent": drain.maybe_sent}
        if drain.done:
            facts["file"] = str(file)
        _print_json(drain.waiting, applied=True, done=drain.done, **facts)
        return
    listed = f", listed in {file}" if drain.done else ""
    typer.echo(f"moved {drain.done}{_by_queue(drain.moved)}{listed}")
    if drain.maybe_sent:
        typer.echo(
            f"of them may have been sent already: {drain.maybe_sent}; "
            "`dlq replay` leaves them out without --include-uncertain"
        )


def _print_json(waiting: "Waiting", *, applied: bool, done: int, **facts: object) -> None:
    document = {
        "applied": applied,
        "done": done,
        "waiting": dict(waiting.ready),
        "workers": waiting.workers,
        **facts,
    }
    typer.echo(json.dumps(document, indent=2))


def _warn_of_workers(waiting: "Waiting", queue: str) -> None:
    if waiting.workers:
        count = waiting.workers
        consumers = "a consumer takes" if count == 1 else f"{count} consumers take"
        typer.echo(
            f"{consumers} from {queue} meanwhile, workers or another drain, and what they have in "
            "hand is not moved; `sms-bridge pause` stops workers first",
            err=True,
        )


def _by_queue(counts: Mapping[str, int]) -> str:
    parts = ", ".join(f"{queue} {count}" for queue, count in counts.items() if count)
    return f" ({parts})" if parts else ""
