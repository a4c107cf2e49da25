"""Figures for a terminal, and for the documentation: tables, kept between two marks of a page."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "guarantees.md"

Cells = tuple[str, ...]


def tell(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def conclude(table: str, problems: Sequence[str], *, page: Path | None, mark: str) -> int:
    """Print the table and what is wrong; put it into a page when nothing is.

    Returns the exit code.
    """
    tell(f"\n{table}\n")
    for problem in problems:
        tell(f"FAILED: {problem}")
    if page is not None and not problems:
        text = page.read_text(encoding="utf-8")
        page.write_text(replace_table(text, mark, table), encoding="utf-8")
    return 1 if problems else 0


def format_table(head: Cells, rows: Sequence[Cells]) -> str:
    """Format a Markdown table."""
    rule = tuple("---" for _ in head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def read_rows(page: str, mark: str) -> list[Cells]:
    """Read the rows of the table between the marks; raise ValueError when the page has none."""
    begin, end = _marks(mark)
    table = page[page.index(begin) + len(begin) : page.index(end)].strip()
    return [tuple(line[2:-2].split(" | ")) for line in table.splitlines()[2:]]


def merge_rows(page: str, mark: str, rows: Sequence[Cells], order: Sequence[str]) -> list[Cells]:
    """Return these rows, and those of the page whose first cell none of them has, in `order`.

    Rows of the page that `order` does not name are dropped.
    """
    new = {row[0] for row in rows}
    old = (row for row in read_rows(page, mark) if row[0] not in new and row[0] in order)
    return sorted([*rows, *old], key=lambda row: order.index(row[0]))


def replace_table(page: str, mark: str, table: str) -> str:
    """Return the page with the table between the marks; raise ValueError when it has none."""
    begin, end = _marks(mark)
    before, after = page[: page.index(begin) + len(begin)], page[page.index(end) :]
    return f"{before}\n{table}\n{after}"


def _marks(mark: str) -> tuple[str, str]:
    return f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
