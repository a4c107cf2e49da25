"""How many instructions the parts of a message take in our worker, as callgrind counts them.

Counts do not depend on what else the machine does, and differ by less than a hundredth from run to
run. What the kernel does for the process is not in them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.bench.errors import BenchError
from tests.bench.message_parts import ALL, MESSAGES
from tests.bench.options import Options, Row, Tell
from tests.bench.rig import Rig

COUNT_SECONDS: Final = 600
REST: Final = "the stages between, and the event loop"


def instructions(rig: Rig, _options: Options, tell: Tell) -> list[Row]:
    """Count the parts of the way of a message, and all of it; raises BenchError if it cannot."""
    rows: list[Row] = [
        {"name": name, "runs": 1, "instructions": count}
        for name, count in _count(rig.folder("count"))
    ]
    (whole,) = (row for row in rows if row["name"] == ALL)
    parts = [row for row in rows if row is not whole]
    rest = whole["instructions"] - sum(part["instructions"] for part in parts)
    table: list[Row] = [*parts, {"name": REST, "runs": 1, "instructions": rest}, whole]
    for row in table:
        tell(f"{row['name']}: {row['instructions']:,.0f} instructions")
        row["share"] = row["instructions"] / whole["instructions"]
    return table


def has_valgrind() -> bool:
    """Say whether there is something to count with."""
    return shutil.which("valgrind") is not None


def _count(folder: Path) -> list[tuple[str, float]]:
    if not has_valgrind():
        raise BenchError("No valgrind is installed: install it with apt-get, dnf or brew.")
    folder.mkdir()
    result = subprocess.run(
        [
            *("valgrind", "--tool=callgrind", "--dump-before=getpriority"),
            *(f"--callgrind-out-file={folder}/out", f"--log-file={folder}/log"),
            *(sys.executable, "-m", "tests.bench.message_parts"),
        ],
        stdout=subprocess.PIPE,
        # The order in which sets and dictionaries are laid out is the same in each run.
        env={**os.environ, "PYTHONHASHSEED": "0"},
        timeout=COUNT_SECONDS,
        check=True,
    )
    names: list[str | None] = json.loads(result.stdout)
    return [
        (name, _total(folder / f"out.{number}") / MESSAGES)
        for number, name in enumerate(names, 1)
        if name is not None
    ]


def _total(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)", dump.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise BenchError("callgrind's count cannot be read")
    return int(found[1])
