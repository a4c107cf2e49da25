"""What commands print: tables, what came from outside, and that output cannot be written."""

import errno
from collections.abc import Iterable, Sequence
from typing import Final

# Of a file or a device that output goes to; typer itself ends when nobody reads a pipe any more.
UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Yield the lines of a table; the last column is as wide as it is."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head) - 1)]
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*padded, row[-1]]).rstrip()


def printable(text: str) -> str:
    """Write what came from outside so that a terminal takes nothing of it for a command."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def explain_unwritable(error: OSError) -> str:
    """Say that output cannot be written, and that the command may have been carried out."""
    return (
        f"cannot be written: {error.strerror}; what the command does may be done: look before you "
        "run it again"
    )
