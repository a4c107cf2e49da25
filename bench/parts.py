"""Parts of our programs beside others': each in a process of its own, in CPU time."""

import json
import subprocess
import sys
from statistics import median
from typing import IO, Final

from bench.options import Options, Row, Tell
from bench.rig import Rig

LOG_SECONDS: Final = 120
PART_SECONDS: Final = 120


def log_line(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Log deliveries, our way and with the standard library alone: the CPU time of a line."""
    with rig.folder("lines").open("wb") as lines:
        runs = [_time_log_lines(lines) for _ in range(options.rounds)]
    return _in_microseconds(runs, tell)


def post(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Post to the instant API over our transport and over httpx's: the CPU time of one POST."""
    with rig.api() as api:
        url = f"{api.url('http')}/v1/messages"
        runs = [_time_in("bench.post", url) for _ in range(options.rounds)]
    return _in_microseconds(runs, tell)


def _in_microseconds(runs: list[dict[str, float]], tell: Tell) -> list[Row]:
    rows = [
        {"name": name, "runs": len(runs), "microseconds": median(run[name] for run in runs)}
        for name in runs[0]
    ]
    for row in rows:
        tell(f"{row['name']}: {row['microseconds']:.1f} us")
    return rows


def _time_log_lines(lines: IO[bytes]) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, "-m", "bench.log_line"],
        stdout=lines,
        stderr=subprocess.PIPE,
        timeout=LOG_SECONDS,
        check=True,
    )
    figures: dict[str, float] = json.loads(result.stderr)
    return figures


def _time_in(module: str, *arguments: str) -> dict[str, float]:
    """Measure parts of ours and others' in a process of their own: microseconds by name."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        timeout=PART_SECONDS,
        check=True,
    )
    figures: dict[str, float] = json.loads(result.stdout)
    return figures
