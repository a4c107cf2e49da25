"""The part of the bridge's configuration that has it speak to the sandbox, to be copied."""

from typing import Any, Final

import yaml

from bridge.config.presets import Preset, needed_settings

# In place of what the user gave, which is printed nowhere.
_GIVEN: Final = "what {} says"


def write_configuration(preset: Preset, url: str, *, has_key: bool) -> str:
    """Write the settings, in YAML, with which the bridge sends its messages to a URL.

    Where the sandbox takes any value, one is made up; `has_key` says that it takes only the key
    of `--key`.
    """
    api: dict[str, Any] = {"preset": preset, "base_url": url}
    for name in needed_settings(preset):
        match name:
            case "account":
                api["account"] = "any-account"
            case "auth.username":
                api["auth"] = {"username": "any-user"}
            case _:
                continue
    api["key"] = _GIVEN.format("--key") if has_key else "any-key"
    return yaml.safe_dump({"sms_api": api}, sort_keys=False)
