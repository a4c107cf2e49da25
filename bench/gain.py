"""What compiling gains: our two rows of a scene, side by side."""

from collections.abc import Iterator, Mapping
from typing import Final

from bench.options import Results

SCENES: Final = ("http", "https", "slow-api", "receivers")


def compiled_and_plain(
    results: Results, *, titles: Mapping[str, str], compiled: str, plain: str
) -> Iterator[str]:
    """Write the section of the page, of the scenes with a ratio of these rows."""
    lines = []
    for scene in SCENES:
        rows = {row["name"]: row for row in results[scene]["rows"]} if scene in results else {}
        # Older results have no ratio, which is taken within each round.
        if "to_plain" in (ours := rows.get(compiled, {})):
            rates = f"{rows[plain]['cpu_rate']:,.0f} | {ours['cpu_rate']:,.0f}"
            lines.append(f"| {titles[scene]} | {rates} | {ours['to_plain']:.2f} |")
    yield "## Compiled and plain"
    if lines:
        heading = "| per CPU second, of the tables above | plain | compiled | compiled to plain |"
        yield "\n".join((heading, "| --- | ---: | ---: | ---: |", *lines))
    else:
        yield "No scene above has run both: see `make compiled`."
