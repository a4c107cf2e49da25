"""When a connection counts as dead, without a broker."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from bridge.amqp import link
from bridge.amqp.wire import Wire


@pytest.mark.parametrize(
    ("seen", "looks"),
    [
        pytest.param([21.0, 21.5, 22.0], 2, id="silent"),
        pytest.param([19.0, 20.0, 20.5, 21.0], 4, id="silent-for-just-long-enough"),
        pytest.param([30.0, 0.1, 0.6, 20.1, 20.6], 5, id="a-stall-of-this-process"),
    ],
)
async def test_silence_is_seen_twice(
    seen: list[float], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker is given up when it is silent at two looks in a row, not after a stall of ours."""
    monkeypatch.setattr(link, "SILENCE_LOOK_SECONDS", 0)
    left = iter(seen)

    class Looked(SimpleNamespace):
        @property
        def silent_seconds(self) -> float:
            return next(left)

    async with asyncio.timeout(10):
        await link._until_silent(cast("Wire", Looked()), 20)

    assert len(seen) - len(list(left)) == looks
