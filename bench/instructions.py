"""Counts the instructions of each part of a message's or webhook's path, with callgrind.

The counts do not depend on the load of the machine, and vary by less than 1 % between runs. They
exclude the kernel.
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
    """Count the parts of a message's path, and the whole path. Raise BenchError if that fails."""
    return _count_parts("bench.message_parts", rig, tell)


def of_a_webhook(rig: Rig, _options: Options, tell: Tell) -> list[Row]:
    """Count the parts of a webhook's path, and the whole path. Raise BenchError if that fails."""
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
    """Return whether valgrind is installed."""
    return shutil.which("valgrind") is not None


def _count(module: str, folder: Path, python: str) -> Mapping[str, float]:
    """Return the count of each part, of the rest, and of the whole."""
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
        # A fixed hash seed gives every run the same layout of sets and dictionaries. Import the
        # installed package, not the checkout.
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
