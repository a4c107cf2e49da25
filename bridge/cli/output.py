"""Output of commands: tables, ages, escaped text, a progress bar, the error of a full disk."""

import errno
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

# Errors of a file or device that output goes to; a broken pipe is handled by typer itself.
UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "m"))


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Yield the lines of a table; the last column is not padded."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head) - 1)]
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*padded, row[-1]]).rstrip()


def format_age(seconds: float) -> str:
    """Write an age in its largest unit: 3d."""
    whole = max(0, int(seconds))
    for size, unit in _UNITS:
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def printable(text: str) -> str:
    """Escape text from outside, so that a terminal obeys nothing in it."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def counts_of(counts: Mapping[str, int]) -> str:
    """Write the parts of a number: ` (refused 3, invalid 1)`, or nothing if all are 0."""
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
    """Explain that output cannot be written, and that the command may have done its work."""
    return (
        f"cannot be written: {error.strerror}; the command may have done its work: look before you "
        "run it again"
    )
