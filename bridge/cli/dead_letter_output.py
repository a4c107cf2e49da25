"""What `sms-bridge dlq` prints: a row for each letter, a progress bar, what was done."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from bridge.cli.output import format_age, printable

if TYPE_CHECKING:
    from bridge.admin.dead_letters.letter import DeadLetter
    from bridge.admin.dead_letters.order import Tally

# The rows of `dlq list`


def format_head() -> str:
    """Write the line above the rows."""
    return _format_row("AGE", "REASON", "TRIES", "STATUS", "CODE", "TO", "MESSAGE ID", "DETAIL")


def format_letter(letter: "DeadLetter", *, as_json: bool, reveal: bool) -> str:
    """Write a letter in one line, its number masked unless that is to be revealed."""
    from bridge.admin.dead_letters.records import as_summary, mask_number

    number = letter.to
    if number is not None and not reveal:
        number = mask_number(number)
    if as_json:
        return json.dumps(as_summary(letter) | {"to": number})
    return _format_row(
        None if letter.dead_at is None else format_age(time.time() - letter.dead_at),
        letter.reason,
        letter.attempts,
        letter.status,
        letter.code,
        number,
        letter.message_id,
        ": ".join(filter(None, (letter.detail, letter.meaning))) or None,
    )


def _format_row(*cells: object) -> str:
    # The widths are fixed, because the rows are printed as they come.
    texts = ["-" if cell is None else printable(str(cell)) for cell in cells]
    return "{:>4}  {:<14}  {:>5}  {:>6}  {:<8}  {:<16}  {:<36}  {}".format(*texts).rstrip()


def print_shown(shown: int, total: int, *, limit: int, repeats: int) -> None:
    """Say below the rows what they are not: all, or a message each."""
    if repeats:
        verb = "repeats" if repeats == 1 else "repeat"
        typer.echo(f"{repeats} of them {verb} an id: one message, dead twice", err=True)
    if total > shown == limit:
        typer.echo(f"{shown} shown of {total}; --limit shows more", err=True)
    elif not total:
        typer.echo("no dead letters", err=True)
    elif not shown:
        typer.echo(f"none of {total} dead letters is meant", err=True)


# What a replay or a discard did


@contextmanager
def progress_bar(total: int, *, is_shown: bool) -> Iterator[Callable[[], None]]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Says what a replay or a discard has done, or would do when it is not `applied`."""

    verb: Literal["replay", "discard"]
    applied: bool
    as_json: bool
    file: Path | None = None

    def print_done(self, tally: "Tally | None", done: int) -> None:
        """Say how many are done; without a tally it was cut short, and an error says why."""
        if self.as_json:
            typer.echo(json.dumps(self._document(tally, done), indent=2))
        elif self.verb == "replay" and self.applied:
            typer.echo(f"replayed {done}")
        elif self.verb == "discard" and done:
            typer.echo(f"discarded {done}, written to {self.file}")

    def _document(self, tally: "Tally | None", done: int) -> dict[str, object]:
        document: dict[str, object] = {"applied": self.applied, "done": done}
        if tally is None:
            return document
        document |= {
            "taken": dict(tally.taken),
            "maybe_sent": dict(tally.maybe_sent),
            "expired": tally.expired,
            "repeats": tally.repeats,
        }
        if self.applied and self.file is not None and done:
            document["file"] = str(self.file)
        return document

    def print_left_out(self, tally: "Tally", *, is_stopped: bool) -> None:
        """Say which letters were left out and why, and what another run would take."""
        if self.as_json:
            return
        if not self.applied:
            typer.echo(f"would {self.verb} {tally.total}{_by_reason(tally.taken)}")
        if tally.maybe_sent:
            typer.echo(
                f"left out, may have been sent already: {tally.maybe_sent.total()}"
                f"{_by_reason(tally.maybe_sent)}; --include-uncertain takes them too"
            )
        if tally.expired:
            typer.echo(
                f"left out, past their own expiry: {tally.expired}; `dlq discard` removes them"
            )
        if tally.repeats:
            # Before the replay this would remove the letter that it is to send, too.
            removal = ", `dlq discard --id` removes them" if self.applied else ""
            typer.echo(
                f"left out, with the id of one that is replayed: {tally.repeats}; "
                f"--include-repeats takes them too{removal}"
            )
        if not self.applied and tally.total and not is_stopped:
            typer.echo("nothing was changed; --yes does it")


def _by_reason(counts: Counter[str]) -> str:
    parts = ", ".join(f"{printable(name)} {count}" for name, count in counts.most_common() if count)
    return f" ({parts})" if parts else ""
