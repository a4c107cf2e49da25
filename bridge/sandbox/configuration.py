"""The part of the bridge's configuration that has it speak to the sandbox, to be copied."""

from typing import Any, Final

import yaml

from bridge.config.presets import Preset, needed_settings
from bridge.sandbox.signing import Signer

# In place of what the user gave, which is printed nowhere.
_GIVEN: Final = "what {} says"


def write_configuration(preset: Preset, url: str, signer: Signer, *, has_key: bool) -> str:
    """Write the settings, in YAML, with which the bridge speaks to the sandbox at a URL.

    Where the sandbox takes any value, one is made up; `has_key` says that it takes only the key
    of `--key`.
    """
    api: dict[str, Any] = {"preset": preset, "base_url": url}
    needed = needed_settings(preset)
    if "account" in needed:
        api["account"] = "any-account"
    if "auth.username" in needed:
        api["auth"] = {"username": "any-user"}
    api["key"] = _GIVEN.format("--key") if has_key else "any-key"
    endpoint: dict[str, Any] = {"path": signer.path, "preset": preset}
    if signer.scheme_name is not None:
        endpoint["signature"] = {"preset": signer.scheme_name}
    if signer.public_url is not None:
        endpoint["public_url"] = signer.public_url
    endpoint["secrets"] = [signer.shown_secret or _GIVEN.format("--webhook-secret")]
    settings = {"sms_api": api, "webhook": {"endpoints": [endpoint]}}
    return yaml.safe_dump(settings, sort_keys=False)
