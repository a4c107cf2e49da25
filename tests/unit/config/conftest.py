"""Shared by the tests of the configuration: loading a text, and paths of keys."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.config import Settings, load_settings
from bridge.errors import ConfigError

CANARY = "Canary7Secret"


Load = Callable[..., Settings]


Faults = Callable[..., tuple[str, ...]]


def env_name(key: str) -> str:
    """Return the environment variable of a key."""
    return "SMS_BRIDGE_" + key.upper().replace(".", "__")


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = values
    for part in key.split("."):
        value = value[part]
    return value


def nested(key: str, value: object) -> dict[str, Any]:
    """Convert a dotted key and its value to nested sections."""
    section, _, rest = key.partition(".")
    return {section: nested(rest, value) if rest else value}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a file's text or values, and an environment."""

    def loaded(text: str | dict[str, Any] = "", **environ: str) -> Settings:
        path = tmp_path / "config.yaml"
        path.write_text(text if isinstance(text, str) else yaml.safe_dump(text), encoding="utf-8")
        return load_settings(path, environ)

    return loaded


@pytest.fixture
def faults(load: Load) -> Faults:
    """Load an invalid configuration, and return its errors."""

    def refused(text: str | dict[str, Any] = "", **environ: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            load(text, **environ)
        return caught.value.faults

    return refused
