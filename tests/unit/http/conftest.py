"""The listener of most tests."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.http.raw import (
    BODY_SECONDS,
    IDLE_SECONDS,
    App,
    Served,
    listening,
)


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    """Serve with a short idle timeout."""
    app = App()
    async with listening(
        app,
        idle_timeout_seconds=IDLE_SECONDS,
        body_timeout_seconds=BODY_SECONDS,
        keep_alive_seconds=IDLE_SECONDS,
    ) as listener:
        yield Served(app, listener)
