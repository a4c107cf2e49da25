"""`sms-bridge dlq`: look at dead letters, send them again, take them away."""

import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bridge.cli.dead_letter_options import (
    AtMost,
    Ids,
    NewerThan,
    OlderThan,
    Reasons,
    Reveal,
    Yes,
    make_filter,
)
from bridge.cli.dead_letter_output import (
    Account,
    format_head,
    format_letter,
    print_shown,
    progress_bar,
)
from bridge.cli.options import AsJson, ConfigFile, examples, read_settings
from bridge.cli.output import printable
from bridge.cli.signals import stopped_by_signals
from bridge.errors import BridgeError, ConfigError

if TYPE_CHECKING:
    from bridge.admin.dead_letters.letter import DeadLetter
    from bridge.admin.dead_letters.order import Order, Tally
    from bridge.admin.dead_letters.queue import DeadLetterQueue
    from bridge.config import Settings

T = TypeVar("T")

app = typer.Typer(
    name="dlq",
    help="Look at dead letters, send them again, take them away.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=(
        "The queue is <worker.queue>.dead. A look gives every message back, which RabbitMQ counts "
        "up to version 4.2; one that has come back before is put to the end of its queue as a "
        "fresh copy, so that no delivery limit drops it. The user needs the permissions to "
        "read <worker.queue>.dead and to write amq.default; without them nothing is taken."
    ),
)


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
    """Show the oldest dead letters, a line each: age, reason, attempts, status, code, number, id.

    Numbers are masked without --reveal. With --json each line is a JSON object. Below the rows
    it says how many have the id of one above: the same message, dead twice.
    """
    from bridge.admin.dead_letters.remembered_ids import RememberedIds

    wanted, seen = make_filter(reason, ids, older_than, newer_than), RememberedIds()

    def read(letter: "DeadLetter") -> tuple[str, bool] | None:
        if not wanted.takes(letter, now=time.time()):
            return None
        is_repeat = seen.knows(letter)
        seen.add(letter)
        return format_letter(letter, as_json=as_json, reveal=reveal), is_repeat

    async def show(queue: "DeadLetterQueue") -> None:
        shown = repeats = 0
        # Whatever is delivered counts as looked at, so ask for no more than is shown.
        at_most = limit if wanted.takes_all else None
        async with aclosing(queue.look(read, at_most)) as rows:
            async for row in rows:
                if row is not None:
                    if not (shown or as_json):
                        typer.echo(format_head())
                    typer.echo(row[0])
                    shown += 1
                    repeats += row[1]
                if shown == limit:
                    break
        await queue.finish()
        print_shown(shown, queue.total, limit=limit, repeats=repeats)

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
    from bridge.admin.dead_letters.records import as_record, mask_record

    def read(letter: "DeadLetter") -> "DeadLetter | None":
        return letter if letter.message_id == message_id else None

    async def find(queue: "DeadLetterQueue") -> "DeadLetter | None":
        found = None
        async with aclosing(queue.look(read)) as letters:
            async for letter in letters:
                if letter is not None:
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
    from bridge.admin.dead_letters.order import Order
    from bridge.admin.dead_letters.replay import replay as replay_letters

    settings = read_settings(context, config)
    if "uncertain" in (reason or []) and not include_uncertain:
        raise ConfigError(
            "--reason uncertain: these may have been sent already; "
            "add --include-uncertain to send them again"
        )
    order = Order(
        wanted=make_filter(reason, ids, older_than, newer_than),
        apply=yes,
        at_most=limit,
        per_second=rate,
        include_uncertain=include_uncertain,
        include_repeats=include_repeats,
    )

    async def work(queue: "DeadLetterQueue", order: "Order") -> "Tally":
        return await replay_letters(queue, settings.worker.queue, order)

    account = Account(verb="replay", applied=yes, as_json=as_json)
    _carry_out(settings, order, work, account)


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
    from bridge.admin.dead_letters.discard import discard as discard_letters
    from bridge.admin.dead_letters.order import Order

    settings = read_settings(context, config)
    file = to or Path(f"dead-letters-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl")
    order = Order(wanted=make_filter(reason, ids, older_than, newer_than), apply=yes, at_most=limit)

    async def work(queue: "DeadLetterQueue", order: "Order") -> "Tally":
        return await discard_letters(queue, file, order)

    account = Account(verb="discard", applied=yes, as_json=as_json, file=file)
    _carry_out(settings, order, work, account)


def _carry_out(
    settings: "Settings",
    order: "Order",
    work: "Callable[[DeadLetterQueue, Order], Awaitable[Tally]]",
    account: Account,
) -> None:
    async def act(queue: "DeadLetterQueue") -> "tuple[Tally, int, bool]":
        tally = None
        with progress_bar(queue.total, is_shown=order.apply) as step:
            try:
                tally = await work(queue, replace(order, step=step))
            finally:
                account.print_done(tally, queue.done)
        return tally, queue.done, queue.is_stopped

    tally, done, is_stopped = _with_queue(settings, act)
    account.print_left_out(tally, is_stopped=is_stopped)
    if is_stopped:
        raise BridgeError(f"stopped after {done}; nothing is lost, run it again for the rest")
    if order.wanted.ids and not tally.met:
        raise _unknown_id(*order.wanted.ids)


def _with_queue(settings: "Settings", act: "Callable[[DeadLetterQueue], Awaitable[T]]") -> T:
    import asyncio

    return asyncio.run(_act_on_queue(settings, act))


async def _act_on_queue(
    settings: "Settings", act: "Callable[[DeadLetterQueue], Awaitable[T]]"
) -> T:
    from bridge.admin.dead_letters.queue import open_dead_letters

    async with open_dead_letters(settings) as queue, stopped_by_signals(queue.stop):
        return await act(queue)


def _unknown_id(*ids: str) -> BridgeError:
    names = ", ".join(map(printable, ids))
    return BridgeError(f"no dead letter has the id {names}; `sms-bridge dlq list` shows them")
