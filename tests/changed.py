"""Which tests are concerned by what differs from a commit: a plain rule, not a trace.

python -m tests.changed COMMIT prints their paths:

- a test file that was changed itself,
- the tests that mirror a file: `bridge/outbound/ledger.py` has `tests/outbound`, `bridge/logs.py`
  has `tests/test_logs.py`, the chart `tests/chart`, an example the test that runs them all, a page
  of docs `tests/test_docs.py`, `tests/test_site.py` and the folder of tests with its folder's
  name, and what tests read is in their folder,
- those that run its wing as a process, which no import shows,
- of data in a folder beside a module of its name, those of the module,
- each test file that imports it, or names it if it is no module, directly or through others of
  `tests`; through a folder's `conftest.py` all of the folder.

Dependencies, and what is set for all tests, concern all of them.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
ALL = "tests"
CONCERNS_ALL = {"pyproject.toml", "uv.lock", "tests/conftest.py"}
AS_PROCESSES = {
    "bridge/commands": ["tests/integration/test_cli.py"],
    "bridge/inbound": ["tests/integration/test_webhook.py"],
    "bridge/operators": ["tests/integration/test_check_online.py", "tests/integration/test_dlq.py"],
    "bridge/outbound": ["tests/integration/test_worker.py"],
    "bridge/topology": ["tests/integration/test_topology_cli.py"],
}


def concerned_by(changed: Iterable[str], texts: Mapping[str, str]) -> set[str]:
    """Return the paths to run; `texts` are the Python files below `tests`, by path."""
    found: set[str] = set()
    seen: set[str] = set()
    left = list(changed)
    while left:
        path = left.pop()
        if path in CONCERNS_ALL:
            return {ALL}
        if path in seen:
            continue
        seen.add(path)
        place = PurePosixPath(path)
        if place.match("tests/*/conftest.py"):
            found.add(str(place.parent))
        elif is_test(path):
            found |= {path} & texts.keys()
        else:
            found |= _mirrors(place, texts)
            if place.parts[0] == "bridge" and place.suffix != ".py" and len(place.parts) > 2:
                left.append(f"{place.parent}.py")
            word = _named(place)
            left += [other for other in texts.keys() - CONCERNS_ALL if word in texts[other]]
    folders = {path for path in found if not is_test(path)}
    return folders | {path for path in found if not any(f"{f}/" in path for f in folders - {path})}


def is_test(path: str) -> bool:
    """Say whether pytest collects a file."""
    place = PurePosixPath(path)
    return place.parts[0] == ALL and place.match("test_*.py")


def _mirrors(place: PurePosixPath, texts: Mapping[str, str]) -> set[str]:
    """Return what tests a file, going by the names of folders."""
    if place.parts[0] == "helm":
        return {"tests/chart"}
    if place.parts[0] == "docs" and place.suffix == ".md":
        folder = f"tests/{place.parts[1]}"
        of_pages = {folder} if any(path.startswith(f"{folder}/") for path in texts) else set()
        return {"tests/test_docs.py", "tests/test_site.py", *of_pages}
    if place.parts[0] == "examples":
        return {"tests/integration/test_examples.py"}
    if place.parts[0] == ALL and len(place.parts) > 2 and place.suffix != ".py":
        return {"/".join(place.parts[:2])}
    if place.parts[0] != "bridge":
        return set()
    wing = place.parts[1].removesuffix(".py")
    folder = f"tests/{wing}"
    of_processes = AS_PROCESSES.get(f"bridge/{wing}", [])
    mirrored = {folder} if any(is_test(p) and p.startswith(f"{folder}/") for p in texts) else set()
    return {*mirrored, *({f"tests/test_{wing}.py"} & texts.keys()), *of_processes}


def _named(place: PurePosixPath) -> str:
    """Return the word by which a test names a file: a module as it is imported, or its name."""
    if place.suffix != ".py":
        return place.name
    return ".".join(place.with_suffix("").parts).removesuffix(".__init__")


def _git(*args: str) -> list[str]:
    command = ["git", *args]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def main(commit: str) -> None:
    """Print the tests that what differs from a commit concerns, committed or not."""
    changed = _git("diff", "--name-only", "--no-renames", "--merge-base", commit)
    changed += _git("ls-files", "--others", "--exclude-standard")
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / ALL).rglob("*.py")
    }
    print(*sorted(concerned_by(changed, texts)))  # noqa: T201  that is what it is for


if __name__ == "__main__":
    main(*sys.argv[1:])
