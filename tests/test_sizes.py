"""Modules and functions of the bridge stay short enough to be read in one go."""

import ast
from pathlib import Path

import pytest

BRIDGE = Path(__file__).parent.parent / "bridge"
MAX_MODULE_LINES = 350
MAX_FUNCTION_LINES = 60
# Lists of metrics, a declaration each: nothing in them branches.
CATALOGUES = {"metrics.py: __init__", "outbound/metrics.py: _flow"}


@pytest.mark.parametrize(
    "module", sorted(BRIDGE.rglob("*.py")), ids=lambda path: str(path.relative_to(BRIDGE))
)
def test_modules_and_functions_are_short(module: Path) -> None:
    """No module has more than 350 lines, and no function more than 60 but a catalogue."""
    text = module.read_text(encoding="utf-8")
    functions = {
        f"{module.relative_to(BRIDGE)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name for name, lines in functions.items() if lines > MAX_FUNCTION_LINES}

    assert text.count("\n") <= MAX_MODULE_LINES
    assert long <= CATALOGUES
