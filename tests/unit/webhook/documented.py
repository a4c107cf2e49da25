"""The webhooks that the presets document, as parameters of tests."""

from typing import Any

import pytest

from bridge.config.presets import PRESETS, documented_webhooks


def documented() -> list[Any]:
    return [
        pytest.param(preset, webhook, id=f"{preset}: {webhook['means']}")
        for preset in PRESETS
        for webhook in documented_webhooks(preset)
    ]
