"""The configuration that the sandbox prints is one with which the bridge can speak to it."""

import pytest
import yaml

from bridge.config import Settings
from bridge.config.presets import PRESETS, Preset
from bridge.sandbox.configuration import write_configuration
from bridge.sandbox.signing import Signer
from bridge.worker.service.shape import shape_from

HOOK = "http://127.0.0.1:8080/hooks/twilio"
URL = "http://127.0.0.1:8025"


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_all_that_the_worker_needs(preset: Preset) -> None:
    """Copied as it is, it lacks nothing, and leads to the sandbox."""
    settings = Settings.model_validate(
        yaml.safe_load(write_configuration(preset, URL, Signer(preset, HOOK, None), has_key=False))
    )

    assert settings.sms_api.missing == []
    assert settings.sms_api.preset == preset
    assert shape_from(settings.sms_api).login.key.current == "any-key"
    assert settings.sms_api.base_url == URL


def test_the_users_secrets_are_not_shown() -> None:
    """Where an option has given a secret, the option is named in its place."""
    signer = Signer("twilio", HOOK, "the-users-secret")
    written = write_configuration("twilio", URL, signer, has_key=True)

    assert yaml.safe_load(written) == {
        "sms_api": {
            "preset": "twilio",
            "base_url": URL,
            "account": "any-account",
            "key": "what --key says",
        },
        "webhook": {
            "endpoints": [
                {
                    "path": "/hooks/twilio",
                    "preset": "twilio",
                    "public_url": HOOK,
                    "secrets": ["what --webhook-secret says"],
                }
            ]
        },
    }
