"""`sms-bridge dlq`: look at dead letters, send them again, take them away."""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar, get_args

import typer

from bridge.commands.options import AsJson, ConfigFile, examples, read_settings
from bridge.commands.output import printable
from bridge.errors import BridgeError, ConfigError
from bridge.outbound.fates import DeadReason

if TYPE_CHECKING:
    from bridge.config import Settings
    from bridge.operators.dead_letters import DeadLetter, DeadLetterQueue, Filter
    from bridge.operators.replay import Tally

T = TypeVar("T")

HEAD: Final = ("AGE", "REASON", "TRIES", "STATUS", "TO", "MESSAGE ID", "DETAIL")

app = typer.Typer(
    help="Look at dead letters, send them again, take them away.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=(
        "The queue is <worker.queue>.dead. A look gives every message back, which RabbitMQ "
        "counts; one that has come back four times is put to the end of its queue as a fresh "
        "copy, so that no delivery limit ever drops it. The user needs the permissions to read "
        "<worker.queue>.dead and to write amq.default."
    ),
)


REASONS: Final = get_args(DeadReason)


def _reason(value: str) -> str:
    if value not in REASONS:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, REASONS))}.")
    return value


def _age(value: str) -> float:
    from bridge.config.durations import parse_duration

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
        help="Only this reason; may be repeated.",
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="ID", help="Only this message id; may be repeated."),
]
OlderThan = Annotated[
    float | None,
    typer.Option(parser=_age, metavar="AGE", help="Only what died longer ago, as 90s, 5m, 2h, 7d."),
]
NewerThan = Annotated[
    float | None,
    typer.Option(parser=_age, metavar="AGE", help="Only what died after that."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show numbers and texts in full.")]
AtMost = Annotated[int | None, typer.Option("--limit", help="At most so many.", min=1)]


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
    limit: Annotated[int, typer.Option(help="Show at most so many.", min=1)] = 50,
    reveal: Reveal = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Show the oldest dead letters, a line each: age, reason, attempts, status, number, id.

    Numbers are masked without --reveal. With --json each line is a JSON object. Below the rows
    it says how many have the id of one above: the same message, dead twice.
    """
    from bridge.operators.replay import RememberedIds

    wanted, seen = _filter(reason, ids, older_than, newer_than), RememberedIds()

    async def show(queue: "DeadLetterQueue") -> None:
        shown = repeats = 0
        # Whatever is delivered counts as looked at, so ask for no more than is shown.
        at_most = limit if wanted.takes_all else None
        async with aclosing(queue.letters(at_most)) as letters:
            async for letter in letters:
                if wanted.takes(letter, now=time.time()):
                    if not (shown or as_json):
                        typer.echo(_row(*HEAD))
                    typer.echo(_as_line(letter, as_json=as_json, reveal=reveal))
                    shown += 1
                    repeats += seen.knows(letter)
                    seen.add(letter)
                await queue.keep(letter)
                if shown == limit:
                    break
        await queue.finish()
        if repeats:
            verb = "repeats" if repeats == 1 else "repeat"
            typer.echo(f"{repeats} of them {verb} an id: one message, dead twice", err=True)
        if queue.total > shown == limit:
            typer.echo(f"{shown} shown of {queue.total}; --limit shows more", err=True)
        elif not queue.total:
            typer.echo("no dead letters", err=True)
        elif not shown:
            typer.echo(f"none of {queue.total} dead letters is meant", err=True)

    _with_queue(read_settings(context, config), show)


@app.command(
    epilog=examples(
        "sms-bridge dlq show 0f8fad5b-d9cb-469f-a165-70867728950e",
        "sms-bridge dlq show 0f8fad5b-d9cb-469f-a165-70867728950e --reveal",
    )
)
def show(
    context: typer.Context,
    message_id: Annotated[str, typer.Argument(help="As `dlq list` shows it.")],
    *,
    reveal: Reveal = False,
    config: ConfigFile = None,
) -> None:
    """Show one dead letter as JSON: what is known of it, its properties, headers and body.

    Whatever could be personal is masked without --reveal.
    """
    from bridge.operators.dead_letter_records import as_record, mask_record

    async def find(queue: "DeadLetterQueue") -> "DeadLetter | None":
        found = None
        async with aclosing(queue.letters()) as letters:
            async for letter in letters:
                await queue.keep(letter)
                if letter.message_id == message_id:
                    found = letter
                    break
        await queue.finish()
        return found

    letter = _with_queue(read_settings(context, config), find)
    if letter is None:
        raise _unknown_id(message_id)
    record = as_record(letter)
    typer.echo(json.dumps(record if reveal else mask_record(record), indent=2))


@app.command(
    epilog=examples(
        "sms-bridge dlq replay --reason exhausted                # says what it would do",
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
            "--include-uncertain", help="Also what may have been sent: it may be a second SMS."
        ),
    ] = False,
    include_repeats: Annotated[
        bool,
        typer.Option(
            "--include-repeats", help="Also what has the id of a letter that this run sends."
        ),
    ] = False,
    rate: Annotated[float | None, typer.Option(help="At most so many a second.", min=0.001)] = None,
    limit: AtMost = None,
    yes: Yes = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Send dead letters again: put them back into the queue, their attempts counted from zero.

    Each keeps its idempotency key. Left out is what may have been sent already, unless
    --include-uncertain says otherwise, what is past its own expiry, and, of letters with one id,
    all but the oldest, unless --include-repeats says otherwise (a run knows its last 100,000 ids).
    A letter leaves the dead-letter queue when the broker has confirmed its copy: stop or kill this
    at any point and nothing is lost, and at most 50 letters are in both queues, with one key each.
    """
    from bridge.operators.replay import Order
    from bridge.operators.replay import replay as replay_letters

    settings = read_settings(context, config)
    wanted = _filter(reason, ids, older_than, newer_than)
    if "uncertain" in (reason or []) and not include_uncertain:
        raise ConfigError(
            "--reason uncertain: these may have been sent already; "
            "add --include-uncertain to send them again"
        )

    async def act(queue: "DeadLetterQueue") -> "tuple[Tally, int, bool]":
        with _progress(queue.total, is_shown=yes) as step:
            order = Order(
                wanted=wanted,
                apply=yes,
                at_most=limit,
                per_second=rate,
                include_uncertain=include_uncertain,
                include_repeats=include_repeats,
                step=step,
            )
            tally = None
            try:
                tally = await replay_letters(queue, settings.worker.queue, order)
            finally:
                if as_json:
                    _print_json(tally, queue.done, applied=yes)
                elif yes:
                    typer.echo(f"replayed {queue.done}")
        return tally, queue.done, queue.is_stopped

    tally, done, is_stopped = _with_queue(settings, act)
    if not as_json:
        _report(tally, verb="replay", applied=yes, is_stopped=is_stopped)
    _end(tally, done, is_stopped=is_stopped, ids=ids)


@app.command(
    epilog=examples(
        "sms-bridge dlq discard --reason invalid --older-than 30d        # says what it would do",
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
            help="Where to write what is removed; dead-letters-<time>.jsonl without.",
        ),
    ] = None,
    limit: AtMost = None,
    yes: Yes = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Remove dead letters, each written to a file first, as a line of JSON.

    The file holds numbers and texts in full; only its owner can read it. A letter is removed
    when it is safely on the disk: stop or kill this at any point and nothing is lost.
    """
    from bridge.operators.replay import Order
    from bridge.operators.replay import discard as discard_letters

    settings = read_settings(context, config)
    wanted = _filter(reason, ids, older_than, newer_than)
    file = to or Path(f"dead-letters-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")

    async def act(queue: "DeadLetterQueue") -> "tuple[Tally, int, bool]":
        with _progress(queue.total, is_shown=yes) as step:
            order = Order(wanted=wanted, apply=yes, at_most=limit, step=step)
            tally = None
            try:
                tally = await discard_letters(queue, file, order)
            finally:
                if as_json:
                    _print_json(tally, queue.done, applied=yes, file=file)
                elif queue.done:
                    typer.echo(f"discarded {queue.done}, written to {file}")
        return tally, queue.done, queue.is_stopped

    tally, done, is_stopped = _with_queue(settings, act)
    if not as_json:
        _report(tally, verb="discard", applied=yes, is_stopped=is_stopped)
    _end(tally, done, is_stopped=is_stopped, ids=ids)


def _filter(
    reasons: list[str] | None,
    ids: list[str] | None,
    older_than: float | None,
    newer_than: float | None,
) -> "Filter":
    from bridge.operators.dead_letters import Filter

    return Filter(
        reasons=reasons or (),
        ids=ids or (),
        older_than=older_than,
        newer_than=newer_than,
    )


def _with_queue(settings: "Settings", act: "Callable[[DeadLetterQueue], Awaitable[T]]") -> T:
    import asyncio

    return asyncio.run(_act_on_queue(settings, act))


async def _act_on_queue(
    settings: "Settings", act: "Callable[[DeadLetterQueue], Awaitable[T]]"
) -> T:
    from bridge.operators.dead_letters import open_dead_letters

    async with open_dead_letters(settings) as queue, _stopped_by_signals(queue.stop):
        return await act(queue)


@asynccontextmanager
async def _stopped_by_signals(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Finish what is in hand at the first SIGINT or SIGTERM; the second ends the process."""
    import asyncio

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    yield


@contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal; yield what moves it on."""
    if not (is_shown and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _report(tally: "Tally", *, verb: str, applied: bool, is_stopped: bool) -> None:
    if not applied:
        typer.echo(f"would {verb} {tally.total}{_by_reason(tally.taken)}")
    if tally.maybe_sent:
        typer.echo(
            f"left out, may have been sent already: {tally.maybe_sent.total()}"
            f"{_by_reason(tally.maybe_sent)}; --include-uncertain takes them too"
        )
    if tally.expired:
        typer.echo(f"left out, past their own expiry: {tally.expired}; `dlq discard` removes them")
    if tally.repeats:
        # Before the replay this would remove the letter that it is to send, too.
        removal = ", `dlq discard --id` removes them" if applied else ""
        typer.echo(
            f"left out, with the id of one that is replayed: {tally.repeats}; "
            f"--include-repeats takes them too{removal}"
        )
    if not applied and tally.total and not is_stopped:
        typer.echo("nothing was changed; --yes does it")


def _end(tally: "Tally", done: int, *, is_stopped: bool, ids: list[str] | None) -> None:
    if is_stopped:
        raise BridgeError(f"stopped after {done}; nothing is lost, run it again for the rest")
    if ids and not tally.met:
        raise _unknown_id(*ids)


def _unknown_id(*ids: str) -> BridgeError:
    names = ", ".join(map(printable, ids))
    return BridgeError(f"no dead letter has the id {names}; `sms-bridge dlq list` shows them")


def _print_json(
    tally: "Tally | None", done: int, *, applied: bool, file: Path | None = None
) -> None:
    """Print one object; without a tally it ended before its end, and the error says why."""
    document: dict[str, object] = {"applied": applied, "done": done}
    if tally is not None:
        document |= {
            "taken": dict(tally.taken),
            "maybe_sent": dict(tally.maybe_sent),
            "expired": tally.expired,
            "repeats": tally.repeats,
        }
        if applied and file is not None and done:
            document["file"] = str(file)
    typer.echo(json.dumps(document, indent=2))


def _by_reason(counts: Counter[str]) -> str:
    parts = ", ".join(f"{printable(name)} {count}" for name, count in counts.most_common() if count)
    return f" ({parts})" if parts else ""


def _as_line(letter: "DeadLetter", *, as_json: bool, reveal: bool) -> str:
    from bridge.operators.dead_letter_records import as_summary, mask_number

    number = letter.to
    if number is not None and not reveal:
        number = mask_number(number)
    if as_json:
        return json.dumps(as_summary(letter) | {"to": number})
    return _row(
        _format_age(letter.dead_at),
        letter.reason,
        letter.attempts,
        letter.status,
        number,
        letter.message_id,
        letter.detail,
    )


def _row(*cells: object) -> str:
    # The widths are fixed, because the rows are printed as they come.
    texts = ["-" if cell is None else printable(str(cell)) for cell in cells]
    return "{:>4}  {:<14}  {:>5}  {:>6}  {:<16}  {:<36}  {}".format(*texts).rstrip()


def _format_age(dead_at: float | None) -> str | None:
    """Write an age in its largest unit: 3d."""
    if dead_at is None:
        return None
    seconds = max(0, int(time.time() - dead_at))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
