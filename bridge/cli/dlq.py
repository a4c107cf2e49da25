"""`sms-bridge dlq`: look at dead letters, send them again, remove them."""

import asyncio
import json
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import typer

from bridge.admin.dead_letters import (
    Discard,
    LetterFilter,
    Look,
    Replay,
    Tally,
    mask_number,
    mask_record,
    open_dead_letters,
)
from bridge.admin.replacement import NewLinesFile, write_record
from bridge.cli.options import (
    AsJson,
    AtMost,
    ConfigFile,
    Yes,
    examples,
    read_settings,
    stop_at_signals,
)
from bridge.cli.output import counts_of, format_age, print_json, printable, progress_bar
from bridge.config import Settings
from bridge.config.fields import parse_duration
from bridge.errors import BridgeError, ConfigError
from bridge.topology.declarations import request_queues
from bridge.worker.fates import DeadReason

app = typer.Typer(
    name="dlq",
    help="Inspect dead letters, send them again or remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=(
        "The dead letters are in the queue <worker.queue>.dead. The RabbitMQ user needs permission "
        "to read this queue and to write to amq.default."
    ),
)

# The options that select letters

REASONS: Final = get_args(DeadReason)


def _reason(value: str) -> str:
    if value not in REASONS:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, REASONS))}.")
    return value


def _age(value: str) -> float:
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return seconds if isinstance(seconds, float) else 0.0


Reasons = Annotated[
    list[str] | None,
    typer.Option(
        "--reason",
        parser=_reason,
        autocompletion=lambda: list(REASONS),
        metavar=f"[{'|'.join(REASONS)}]",
        help="Only dead letters with this reason. May be repeated.",
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="ID", help="Only dead letters with this id. May be repeated."),
]
OlderThan = Annotated[
    float | None,
    typer.Option(
        parser=_age,
        metavar="AGE",
        help="Only dead letters older than this, such as 90s, 5m, 2h or 7d.",
    ),
]
NewerThan = Annotated[
    float | None,
    typer.Option(parser=_age, metavar="AGE", help="Only dead letters newer than this."),
]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show numbers and texts unmasked.")]


# The commands


@app.command(
    name="list",
    epilog=examples(
        "sms-bridge dlq list",
        "sms-bridge dlq list --reason refused --older-than 1h",
        "sms-bridge dlq list --limit 100000 --json | jq -r .message_id",
    ),
)
def list_letters(  # noqa: PLR0913  an option each
    context: typer.Context,
    *,
    reason: Reasons = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    ids: Ids = None,
    limit: Annotated[int, typer.Option(help="Maximum number of dead letters to show.", min=1)] = 50,
    reveal: Reveal = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Show the oldest dead letters, one per line: age, reason, attempts, status, code, number, id.

    Without --reveal, phone numbers are masked. Dead letters with the same id are copies of one
    message. If there are copies, the last line counts them.
    """
    look = Look(LetterFilter(reason, ids, older_than, newer_than), limit)
    settings = read_settings(context, config)
    total = asyncio.run(_look(settings, look, as_json=as_json, reveal=reveal))
    if look.repeats:
        verb = "repeats" if look.repeats == 1 else "repeat"
        typer.echo(f"{look.repeats} of them {verb} the id of another", err=True)
    if total > look.shown == limit:
        typer.echo(f"{look.shown} shown of {total}; --limit shows more", err=True)
    elif not total:
        typer.echo("no dead letters", err=True)
    elif not look.shown:
        typer.echo(f"none of {total} dead letters matches", err=True)


@app.command(
    epilog=examples(
        "sms-bridge dlq show 0f8fad5b-d9cb-469f-a165-70867728950e",
        "sms-bridge dlq show 0f8fad5b-d9cb-469f-a165-70867728950e --reveal",
    )
)
def show(
    context: typer.Context,
    message_id: Annotated[str, typer.Argument(help="Message id, as shown by `dlq list`.")],
    *,
    reveal: Reveal = False,
    config: ConfigFile = None,
) -> None:
    """Show one dead letter as JSON, with its properties, headers and body.

    Without --reveal, everything that could be personal data is masked.
    """
    look = Look(LetterFilter(ids=[message_id]), 1, is_full=True)
    asyncio.run(_look(read_settings(context, config), look, as_json=True, reveal=reveal))
    if not look.shown:
        raise _unknown_id(message_id)


@app.command(
    epilog=examples(
        "sms-bridge dlq replay --reason exhausted                # prints what it would do",
        "sms-bridge dlq replay --reason exhausted --yes --rate 20",
        "sms-bridge dlq replay --reason exhausted --json | jq .taken",
        "sms-bridge dlq replay --id 0f8fad5b-d9cb-469f-a165-70867728950e --yes",
        "sms-bridge dlq replay --reason uncertain --include-uncertain --newer-than 1h --yes",
    )
)
def replay(  # noqa: PLR0913  an option each
    context: typer.Context,
    *,
    reason: Reasons = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    ids: Ids = None,
    include_uncertain: Annotated[
        bool,
        typer.Option(
            "--include-uncertain",
            help="Also replay messages that may have been sent. Recipients may get a text twice.",
        ),
    ] = False,
    include_repeats: Annotated[
        bool,
        typer.Option(
            "--include-repeats", help="Also replay letters whose id this run has already replayed."
        ),
    ] = False,
    rate: Annotated[
        float | None, typer.Option(help="Maximum number of letters per second.", min=0.001)
    ] = None,
    limit: AtMost = None,
    yes: Yes = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Return dead letters to their queue to be sent again, with attempts counted from zero.

    A letter keeps its idempotency key. The command skips letters that have expired, letters that
    may have been sent, and letters whose id it has already replayed.

    If the command is killed, nothing is lost. At most 50 letters are then in both queues at once,
    with the same key in both.
    """
    settings = read_settings(context, config)
    if "uncertain" in (reason or []) and not include_uncertain:
        raise ConfigError(
            "--reason uncertain: these letters may have been sent already; "
            "add --include-uncertain to send them again"
        )
    replay = Replay(
        selection=LetterFilter(reason, ids, older_than, newer_than),
        apply=yes,
        limit=limit,
        queues=request_queues(settings.worker),
        per_second=rate,
        include_uncertain=include_uncertain,
        include_repeats=include_repeats,
    )
    asyncio.run(_carry_out(settings, replay, "replay", as_json=as_json))


@app.command(
    epilog=examples(
        "sms-bridge dlq discard --reason invalid --older-than 30d        # prints what it would do",
        "sms-bridge dlq discard --reason invalid --older-than 30d --yes --to invalid.jsonl",
    )
)
def discard(  # noqa: PLR0913  an option each
    context: typer.Context,
    *,
    reason: Reasons = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    ids: Ids = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to write the letters to. Default: dead-letters-<time>.jsonl.",
        ),
    ] = None,
    limit: AtMost = None,
    yes: Yes = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Write dead letters to a file, one JSON object per line, and remove them from the queue.

    The file contains unmasked phone numbers and texts, and only its owner can read it. The command
    removes a letter from the queue only after writing it to disk.
    """
    settings = read_settings(context, config)
    path = to or Path(f"dead-letters-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")
    file = NewLinesFile(path, option="--to")
    selection = LetterFilter(reason, ids, older_than, newer_than)
    discard = Discard(selection=selection, apply=yes, limit=limit, file=file)
    asyncio.run(_carry_out(settings, discard, "discard", as_json=as_json, file=file))


async def _look(settings: Settings, look: Look, *, as_json: bool, reveal: bool) -> int:
    """Print letters, and return the number of all letters in the queue."""
    async with open_dead_letters(settings) as letters:
        stop_at_signals(letters.mover.stopping)
        is_first = not as_json
        async for _ in letters.run(look):
            # The letters of the round are already safe, so that `dlq list | head` loses none.
            for row in look.rows:
                if is_first:
                    typer.echo(_HEAD)
                    is_first = False
                typer.echo(_form_letter(row, as_json=as_json, reveal=reveal))
        return letters.total


async def _carry_out(
    settings: Settings,
    action: Replay | Discard,
    verb: Literal["replay", "discard"],
    *,
    as_json: bool,
    file: NewLinesFile | None = None,
) -> None:
    is_complete = False
    async with open_dead_letters(settings) as letters:
        stop_at_signals(letters.mover.stopping)
        try:
            # The file is created before anything is consumed.
            opened = file if file and action.apply else nullcontext()
            with opened, progress_bar(letters.total if action.apply else 0) as advance:
                async for count in letters.run(action):
                    advance(count)
            is_complete = True
        finally:
            done = letters.mover.moved.total()
            if as_json:
                # A run that was cut short has no tally, and an error gives the reason.
                tally = action.tally if is_complete else None
                _report_json(tally, done, applied=action.apply, file=file)
            elif verb == "replay" and action.apply:
                typer.echo(f"replayed {done}")
            elif file and done:
                typer.echo(f"discarded {done}, written to {file.path}")
    mover = letters.mover
    is_stopped = mover.stopping.is_set()
    if not as_json:
        _print_left_out(action.tally, verb, applied=action.apply, is_stopped=is_stopped)
    mover.check_stopped()
    if action.selection.ids and not action.tally.selected:
        raise _unknown_id(*action.selection.ids)


# The output

_ROW: Final = "{:>4}  {:<14}  {:>5}  {:>6}  {:<8}  {:<16}  {:<36}  {}"
# The widths are fixed, because rows are printed as they are read.
_HEAD: Final = _ROW.format("AGE", "REASON", "TRIES", "STATUS", "CODE", "TO", "MESSAGE ID", "DETAIL")


def _form_letter(row: dict[str, Any], *, as_json: bool, reveal: bool) -> str:
    """Format a letter as one line, or its whole record as JSON."""
    if "headers" in row:
        return write_record(row if reveal else mask_record(row), indent=2)
    if row["to"] is not None and not reveal:
        row = row | {"to": mask_number(row["to"])}
    if as_json:
        return json.dumps(row)
    age = row["age_seconds"]
    cells = (
        None if age is None else format_age(age),
        *(row[name] for name in ("reason", "attempts", "status", "code", "to", "message_id")),
        ": ".join(filter(None, (row["detail"], row["meaning"]))) or None,
    )
    texts = ("-" if cell is None else printable(str(cell)) for cell in cells)
    return _ROW.format(*texts).rstrip()


def _report_json(
    tally: Tally | None, done: int, *, applied: bool, file: NewLinesFile | None
) -> None:
    document: dict[str, object] = {"applied": applied, "done": done}
    if tally is not None:
        document |= {
            "taken": dict(tally.taken),
            "maybe_sent": dict(tally.maybe_sent),
            "expired": tally.expired,
            "repeats": tally.repeats,
        }
        if file and applied and done:
            document["file"] = str(file.path)
    print_json(document)


def _print_left_out(tally: Tally, verb: str, *, applied: bool, is_stopped: bool) -> None:
    """Print how many letters were skipped and why, and what a run with --yes would take."""
    if not applied:
        typer.echo(f"would {verb} {tally.taken.total()}{_by_reason(tally.taken)}")
    if tally.maybe_sent:
        typer.echo(
            f"skipped, may have been sent already: {tally.maybe_sent.total()}"
            f"{_by_reason(tally.maybe_sent)}; --include-uncertain includes them"
        )
    if tally.expired:
        typer.echo(f"skipped, expired: {tally.expired}; `dlq discard` removes them")
    if tally.repeats:
        # Before the replay this would also remove the letter that is to be sent.
        removal = ", `dlq discard --id` removes them" if applied else ""
        typer.echo(
            f"skipped, same id as a replayed letter: {tally.repeats}; "
            f"--include-repeats includes them{removal}"
        )
    if not applied and tally.taken and not is_stopped:
        typer.echo("nothing was changed; add --yes to do it")


def _by_reason(counts: Counter[str]) -> str:
    return counts_of(dict(counts.most_common()))


def _unknown_id(*ids: str) -> BridgeError:
    names = ", ".join(map(printable, ids))
    return BridgeError(f"no dead letter has the id {names}; `sms-bridge dlq list` shows them")
