"""What is made from the chart is up to date: `make chart-files` writes it anew."""

import pytest

from tests.chart.generate import (
    DASHBOARDS,
    GOLDEN,
    LICENSE,
    METADATA,
    PROJECT,
    README,
    RUNBOOKS,
    SMS_APIS,
    changes,
    golden,
    metadata,
    on_call,
    readme,
    runbooks,
    sms_apis,
)
from tests.chart.rendering import CI


def test_the_readme_lists_every_value_as_it_is() -> None:
    assert README.read_text() == readme()


def test_the_metadata_has_the_icon_and_the_changes() -> None:
    """Chart.yaml holds the icon as it is drawn, and what CHANGELOG.md says of the chart."""
    assert METADATA.read_text() == metadata()


def test_the_chart_brings_the_runbooks() -> None:
    """Each alert leads to its section of docs/runbooks.md, as it is there."""
    assert RUNBOOKS.read_text() == runbooks()


def test_grafana_shows_the_runbooks() -> None:
    assert (DASHBOARDS / "on-call.json").read_text() == on_call()


def test_the_chart_knows_the_addresses_that_presets_know() -> None:
    assert SMS_APIS.read_text() == sms_apis()


def test_a_change_of_the_chart_is_found_in_the_change_log() -> None:
    """What is listed has a kind that Artifact Hub knows."""
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}

    assert changes()
    assert {change["kind"] for change in changes()} <= kinds


def test_the_chart_brings_its_licence() -> None:
    """A package without the repository around it has the same licence."""
    assert LICENSE.read_text() == (PROJECT / "LICENSE").read_text()


@pytest.mark.parametrize("name", CI)
def test_the_examples_render_as_reviewed(name: str) -> None:
    """A change of any object, name or selector shows in a file that is reviewed."""
    assert (GOLDEN / f"{name}.yaml").read_text() == golden(name)


def test_no_golden_render_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == CI.keys()
