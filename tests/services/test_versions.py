"""The versions of the services' clients: what is said was read is what is compared."""

import re
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from bridge.config.presets import Preset
from tests.providers.pages import CLIENTS

ROOT = Path(__file__).parents[2]
CLAIM = re.compile(r"([a-z-]+) (\d+\.\d+\.\d+)\b")
INSTALLED = {name for names in packages_distributions().values() for name in names}


@pytest.mark.parametrize("preset", CLIENTS)
def test_preset_names_the_version_that_is_compared(preset: Preset) -> None:
    text = (ROOT / "bridge/config/presets" / f"{preset}.yaml").read_text(encoding="utf-8")
    comments = re.findall(r"^# (.*)$", text, re.MULTILINE)
    claims = [
        (word if word in INSTALLED else CLIENTS[preset], number)
        for word, number in CLAIM.findall(" ".join(comments))
    ]

    assert claims
    assert claims == [(package, version(package)) for package, _ in claims]


def test_every_client_is_in_the_group() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {re.split("[<>=]", one)[0] for one in project["dependency-groups"]["clients"]}

    assert names == set(CLIENTS.values())
