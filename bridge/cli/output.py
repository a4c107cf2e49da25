"""Output that commands share: tables, ages, escaped text, a progress bar, write errors."""

import errno
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import typer

# Errors of the file or device that receives the output; typer itself handles broken pipes.
UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "m"))


def format_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, has_numbers: bool = False
) -> Iterable[str]:
    """Yield the lines of a table; with numbers, the columns in the middle are aligned right."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = str.rjust if has_numbers else str.ljust
    for first, *middle, last in cells:
        padded = map(align, middle, widths[1:])
        yield "  ".join((first.ljust(widths[0]), *padded, last)).rstrip()


def print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))


def format_age(seconds: float) -> str:
    """Format an age in its largest unit: 3d."""
    whole = max(0, int(seconds))
    for size, unit in _UNITS:
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def printable(text: str) -> str:
    """Escape text from outside, so that it cannot control the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def counts_of(counts: Mapping[str, int]) -> str:
    """Format the parts of a total: ` (refused 3, invalid 1)`, or nothing if all are 0."""
    parts = ", ".join(f"{printable(name)} {count}" for name, count in counts.items() if count)
    return f" ({parts})" if parts else ""


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal; yield the function that advances it."""
    if not (total and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def explain_unwritable(error: OSError) -> str:
    """Return the reason why output cannot be written, and a warning."""
    return (
        f"cannot be written: {error.strerror}; the command may have done its work: check before "
        "you run it again"
    )
