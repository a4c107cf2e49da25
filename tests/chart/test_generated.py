"""What is made from the chart is up to date: `make chart-files` writes it anew."""

from pathlib import Path

import pytest

from tests.chart.generate import GOLDEN, changes, files_of_the_chart, golden
from tests.chart.rendering import CI

FILES = files_of_the_chart()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_the_chart_is_up_to_date(path: Path) -> None:
    assert path.read_text() == FILES[path]


def test_a_change_of_the_chart_is_found_in_the_change_log() -> None:
    """What is listed has a kind that Artifact Hub knows."""
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}

    assert changes()
    assert {change["kind"] for change in changes()} <= kinds


@pytest.mark.parametrize("name", CI)
def test_the_examples_render_as_reviewed(name: str) -> None:
    """A change of any object, name or selector shows in a file that is reviewed."""
    assert (GOLDEN / f"{name}.yaml").read_text() == golden(name)


def test_no_golden_render_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == CI.keys()
