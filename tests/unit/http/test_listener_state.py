"""The limits of a listener: connections leave the open files that others need."""

import resource
from dataclasses import replace

import pytest

from bridge.http.listener_state import fit_open_files
from tests.ears import Ears
from tests.unit.http.raw import (
    LIMITS,
)


@pytest.mark.parametrize(
    ("limits", "places"),
    [((1500, 1500), 500), ((512, 2048), 1000), ((1024, 1024), 256), ((-1, -1), 1000)],
    ids=["too few", "may ask for more", "hardly any", "no limit"],
)
def test_places_fit_the_open_files(
    monkeypatch: pytest.MonkeyPatch, ears: Ears, limits: tuple[int, int], places: int
) -> None:
    """Connections leave the open files that others need, and the log says what that costs."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    fitted = fit_open_files(replace(LIMITS, max_connections=1000), reserved=1000, setting="a.b")
    told = [(line["setting"], line["connections"]) for line in ears.heard("connections_limited")]

    assert fitted.max_connections == places
    assert told == ([("a.b", places)] if places < 1000 else [])
