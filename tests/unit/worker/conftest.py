"""Fixtures for the parts of a worker."""

import pytest

from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    """Return a clock that stands still until a test moves it."""
    return Clock()
