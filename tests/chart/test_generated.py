"""What is made from the chart is up to date: `make chart-files` writes it anew."""

import pytest

from tests.chart.generate import GOLDEN, README, golden, readme
from tests.chart.rendering import CI


def test_the_readme_lists_every_value_as_it_is() -> None:
    """The README's table says what values.yaml says."""
    assert README.read_text() == readme()


@pytest.mark.parametrize("name", CI)
def test_the_examples_render_as_reviewed(name: str) -> None:
    """A change of any object, name or selector shows in a file that is reviewed."""
    assert (GOLDEN / f"{name}.yaml").read_text() == golden(name)


def test_no_golden_render_is_left_over() -> None:
    """There is one golden render for each example."""
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == CI.keys()
