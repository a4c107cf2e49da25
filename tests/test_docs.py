"""The documents against the code: what they name is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    """Every test that a document names is in the file that it names."""
    named = set(NAMED.findall(document.read_text(encoding="utf-8")))
    missing = {f"{file}::{test}" for file, test in named if test not in _tests_in(ROOT / file)}

    assert missing == set()


def test_faults_name_tests() -> None:
    """The page of faults names tests at all, so that the test above looks at something."""
    assert len(NAMED.findall((ROOT / "docs/faults.md").read_text(encoding="utf-8"))) > 50


def _tests_in(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}
