"""Generates parts of pages: tables, and text between two marks."""

from collections.abc import Iterable


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a Markdown table. A | inside a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def with_part(text: str, name: str, part: str, *, target: str) -> str:
    """Replace the text between the marks of a make target. Raise ValueError if they are missing."""
    begin, end = f"<!-- {name}: made by `make {target}` -->\n", f"\n<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"there is no place for {name}")
    return f"{before}{begin}{part}{end}{after}"
