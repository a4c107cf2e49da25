"""How many instructions the parts of a message or a webhook take, as callgrind counts them.

Counts do not depend on what else the machine does, and differ by less than a hundredth from run to
run. What the kernel does for the process is not in them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench.lineup import COMPILED
from bench.message_parts import ALL, MESSAGES
from bench.rig import Rig
from bench.rounds import BenchError, Options, Row, Tell

COUNT_SECONDS: Final = 600
REST: Final = "event loop and the rest"


def of_a_message(rig: Rig, _options: Options, tell: Tell) -> list[Row]:
    """Count the parts of the way of a message, and all of it; raises BenchError if it cannot."""
    return _count_parts("bench.message_parts", rig, tell)


def of_a_webhook(rig: Rig, _options: Options, tell: Tell) -> list[Row]:
    """Count the parts of the way of a webhook, and all of it; raises BenchError if it cannot."""
    return _count_parts("bench.webhook_parts", rig, tell)


def _count_parts(module: str, rig: Rig, tell: Tell) -> list[Row]:
    plain = _count(module, rig.folder("plain"), sys.executable)
    compiled = _count(module, rig.folder("compiled"), str(COMPILED)) if COMPILED.exists() else {}
    rows: list[Row] = []
    for name, count in plain.items():
        tell(f"{name}: {count:,.0f} instructions, plain")
        row: Row = {"name": name, "runs": 1, "plain": count}
        if compiled:
            tell(f"{name}: {compiled[name]:,.0f} instructions, compiled")
            row["instructions"] = compiled[name]
            row["share"] = compiled[name] / compiled[ALL]
        rows.append(row)
    return rows


def has_valgrind() -> bool:
    """Say whether there is something to count with."""
    return shutil.which("valgrind") is not None


def _count(module: str, folder: Path, python: str) -> Mapping[str, float]:
    """Return the count of each part, of what is left, and of all."""
    if not has_valgrind():
        raise BenchError("No valgrind is installed: install it with apt-get, dnf or brew.")
    folder.mkdir()
    result = subprocess.run(
        [
            *("valgrind", "--tool=callgrind", "--dump-before=getpriority"),
            *(f"--callgrind-out-file={folder}/out", f"--log-file={folder}/log"),
            *(python, "-m", module),
        ],
        stdout=subprocess.PIPE,
        # The order in which sets and dictionaries are laid out is the same in each run. What is
        # installed is found, not what is in the directory.
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1"},
        timeout=COUNT_SECONDS,
        check=True,
    )
    names: list[str | None] = json.loads(result.stdout)
    counts = {
        name: _total(folder / f"out.{number}") / MESSAGES
        for number, name in enumerate(names, 1)
        if name is not None
    }
    whole = counts.pop(ALL)
    return {**counts, REST: whole - sum(counts.values()), ALL: whole}


def _total(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)", dump.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise BenchError("callgrind's count cannot be read")
    return int(found[1])
