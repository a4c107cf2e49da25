"""Draws the summary of the demo: `make pictures` writes docs/img/demo.svg.

The demo runs as in `make demo`, and its output is drawn unchanged. A dark terminal with a border is
readable on light and dark pages.
"""

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parent / "img" / "demo.svg"
TITLE = "make demo"
# First line of the tables, after the progress.
CORNER = "┏"
# The demo's own deadline is shorter.
SECONDS = 180
# rich's terminal without its link to a font on another host.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace; \
line-height: {line_height}px; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">\
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Run the demo, and draw its summary. Fails if the demo fails."""
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "demo"],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    summary = done.stdout[done.stdout.index(CORNER) :].rstrip()
    width = max(len(line) for line in summary.splitlines())
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text(summary))
    svg = console.export_svg(title=TITLE, theme=MONOKAI, code_format=SVG, unique_id="demo")
    PICTURE.write_text(svg, encoding="utf-8")
    size = PICTURE.stat().st_size
    print(f"{PICTURE.relative_to(PICTURE.parents[2])}: {size / 1000:.0f} kB")  # noqa: T201


if __name__ == "__main__":
    main()
