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


def test_targets_that_are_named_exist() -> None:
    """Every `make` command that the documents tell people to run has its target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    pages = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
    commands = {
        command
        for page in pages
        for command in re.findall(r"(?:^|`| )make ((?:[a-z-]+ ?)+)", _code(page), re.MULTILINE)
    }
    named = {word for command in commands for word in command.split()}

    assert {"demo", "test", "image", "release-image"} <= named
    assert named <= targets


def _code(page: Path) -> str:
    """Return what a page shows as code, without the comments beside it."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    spans = [f"`{span}`" for span in re.findall(r"`([^`\n]+)`", text)]
    return "\n".join(re.sub(r"#.*", "", line) for line in [*"".join(blocks).splitlines(), *spans])


def _tests_in(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}
