"""The way to settings: the file, the environment laid over it, the whole checked by the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bridge.config.environment import read_environment
from bridge.config.faults import describe
from bridge.config.settings import Settings
from bridge.config.yaml_file import read_yaml
from bridge.errors import ConfigError


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the file, lay the environment over it, and check the whole.

    Raises ConfigError with one line for each fault. Secret files are not opened here: what a
    role needs is read when it starts, and again whenever the file changes.
    """
    of_file, lines = ({}, {}) if path is None else read_yaml(path)
    of_environment, faults = read_environment(environ)
    try:
        settings = Settings.model_validate(_merge(of_file, of_environment))
    except ValidationError as error:
        raise ConfigError(*faults, *describe(error, lines)) from None
    if faults:
        raise ConfigError(*faults)
    return settings


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key) or {}
        if not isinstance(value, dict):
            merged[key] = value
        elif isinstance(below, dict):
            merged[key] = _merge(below, value)
    return merged
