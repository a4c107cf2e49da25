"""What compiling gains."""

import pytest

from bench.gain import compiled_and_plain
from bench.options import Results

TITLES = {"http": "Workers", "receivers": "Receivers"}


def _section(results: Results) -> list[str]:
    return [*compiled_and_plain(results, titles=TITLES, compiled="compiled", plain="plain")]


PLAIN = {"name": "plain", "cpu_rate": 1000.0}
COMPILED = {"name": "compiled", "cpu_rate": 1310.0}


def test_compiled_stands_beside_plain() -> None:
    """A scene that has run both is in the table; one that has run before is left out."""
    both = {"rows": [COMPILED | {"to_plain": 1.27}, PLAIN]}

    heading, table = _section({"http": both, "receivers": {"rows": [COMPILED]}})

    assert heading == "## Compiled and plain"
    assert table.splitlines()[2:] == ["| Workers | 1,000 | 1,310 | 1.27 |"]


@pytest.mark.parametrize(
    "results",
    [{}, {"http": {"rows": [PLAIN]}}, {"http": {"rows": [COMPILED, PLAIN]}}],
    ids=["nothing has run", "no compiler", "older results"],
)
def test_what_has_no_ratio_is_no_empty_table(results: Results) -> None:
    """The section, which other pages link to, then says so."""
    _, text = _section(results)

    assert text.startswith("No scene above has run both")
