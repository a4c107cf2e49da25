"""The table of several workers: short soaks with one, two, three and eight, each with its account.

    python soak/table.py --workers 1 2 3 8 --seed 1

Each number of workers meets faults of the broker, then of the workers; half of the messages have no
`message_id`. Exit code 0: every soak has passed, and no fault of the broker made another worker
POST again. 1: one did not. 2: bad usage.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from soak.figures import PAGE, Cells, conclude, format_table, tell

MARK: Final = "workers"
RUN: Final = Path(__file__).with_name("run.py")
GROUPS: Final = ("broker", "worker")
FAULTS: Final = 5
MESSAGES: Final = 1500
# What one soak may take at most, of which it keeps five minutes for its end.
CELL_SECONDS: Final = 420
HEAD: Final = (
    "workers",
    "faults of",
    "messages",
    "lost",
    "new keys",
    "POSTed again by another worker",
    "most by one kill",
    "most by one freeze",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One soak: how many workers, what breaks, its report, and what is wrong with it."""

    workers: int
    group: str
    report: dict[str, Any]
    problems: Sequence[str]

    def row(self) -> Cells:
        """Write it as a row of the table."""
        report = self.report
        kinds = sorted({fault["kind"] for fault in report["timeline"]})
        return (
            str(self.workers),
            f"{self.group}: {', '.join(kinds)}",
            f"{report['confirmed']:,}",
            str(len(report["lost"])),
            str(len(report["new_keys"])),
            str(report["extra_posts"].get("other_worker", 0)),
            str(report["worst_kill"]),
            str(report["worst_freeze"]),
        )


def play(workers: int, group: str, seed: int, folder: Path) -> Cell | str:
    """Run one soak; return why there is no report where there is none."""
    path = folder / f"{workers}-{group}.json"
    command = [sys.executable, str(RUN), "--json", str(path), "--ids", "half", "--only", group]
    command += ["--workers", str(workers), "--seed", str(seed), "--faults", str(FAULTS)]
    command += ["--messages", str(MESSAGES), "--max-seconds", str(CELL_SECONDS)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if not path.exists():
        return f"{workers} workers, {group}: {ended.stdout[-500:]}{ended.stderr[-500:]}"
    report = json.loads(path.read_text(encoding="utf-8"))
    problems = [f"{workers} workers, {group}: {problem}" for problem in report["problems"]]
    return Cell(workers, group, report, problems)


def play_all(workers: Sequence[int], seed: int) -> Iterator[Cell | str]:
    """Run all soaks, one after the other, and say how each went."""
    with tempfile.TemporaryDirectory(prefix="sms-bridge-table-") as folder:
        for count in workers:
            for group in GROUPS:
                began = time.monotonic()
                cell = play(count, group, seed, Path(folder))
                how = "no report" if isinstance(cell, str) else f"{len(cell.problems)} problems"
                tell(f"{count} workers, {group}: {how}, {time.monotonic() - began:.0f} s")
                yield cell


def main() -> int:
    """Make the table and return the exit code."""
    parser = argparse.ArgumentParser(description="Short soaks with several numbers of workers.")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 8])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    cells = list(play_all(options.workers, options.seed))
    problems = [cell for cell in cells if isinstance(cell, str)]
    played = [cell for cell in cells if isinstance(cell, Cell)]
    problems += [problem for cell in played for problem in cell.problems]
    table = format_table(HEAD, [cell.row() for cell in played])
    return conclude(table, problems, page=PAGE if options.write else None, mark=MARK)


if __name__ == "__main__":
    sys.exit(main())
