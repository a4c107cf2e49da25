"""The order of file, environment and secret files, and all faults at once."""

from pathlib import Path

import pytest

from bridge.config import load_settings
from bridge.errors import ConfigError
from bridge.webhook.endpoint import endpoints_from
from bridge.worker.service.shape import shape_from
from tests.unit.config.conftest import Faults, Load


@pytest.mark.parametrize("text", ["# nothing\n", "worker:\n", "---\n", "rabbitmq:\n  tls:\n"])
def test_empty_file_or_section_means_defaults(load: Load, text: str) -> None:
    assert load(text) == load_settings(None, {})


def test_environment_overrides_inside_a_deeper_section(load: Load) -> None:
    """A deeper key of the environment leaves its neighbours in the file alone."""
    loaded = load(
        "worker: {rate_limit: {per_second: 5, burst: 9}}",
        SMS_BRIDGE_WORKER__RATE_LIMIT__PER_SECOND="7",
    )

    assert (loaded.worker.rate_limit.per_second, loaded.worker.rate_limit.burst) == (7, 9)


def test_one_line_for_each_fault(faults: Faults) -> None:
    """Every fault is told at once, a line each, from both sources."""
    told = faults(
        "worker: {queu: 1, concurrency: x}\nnothing: {}\nlog: junk\n",
        SMS_BRIDGE_LOG__LEVEL="info",
        SMS_BRIDGE_WORKR__QUEUE="q",
        SMS_BRIDGE_WEBHOOK__PORT="x",
    )

    assert sorted(line.split(":")[0] for line in told) == [
        "SMS_BRIDGE_WORKR__QUEUE",
        "log",
        "nothing",
        "webhook.port",
        "worker.concurrency",
        "worker.queu",
    ]


# --- Secret files go before the file and the environment ------------------------------------------


def test_key_file_overrides_key(load: Load, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-key-file\n", encoding="utf-8")
    loaded = load(
        {
            "sms_api": {
                "base_url": "https://api.example.com",
                "key": "from-file",
                "key_file": str(tmp_path / "key"),
            }
        },
        SMS_BRIDGE_SMS_API__KEY="from-environment",
    )

    assert shape_from(loaded.sms_api).login.key.current == "from-key-file"


@pytest.mark.parametrize(("key", "setting"), [("a b", "key"), (None, "key_file")])
def test_fault_of_the_api_key_names_the_setting_that_gave_it(
    load: Load, tmp_path: Path, key: str | None, setting: str
) -> None:
    file = None if key else str(tmp_path / "nothing")
    api = {"base_url": "https://api.example.com", "key": key, "key_file": file}

    with pytest.raises(ConfigError, match=rf"^sms_api\.{setting}: "):
        shape_from(load({"sms_api": api}).sms_api)


def test_secret_files_override_secrets(load: Load, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-secret-file\n", encoding="utf-8")
    loaded = load({"webhook": {"secrets": ["a"], "secret_files": [str(tmp_path / "secret")]}})
    (endpoint,) = endpoints_from(loaded.webhook)

    assert endpoint.keys == [b"from-secret-file"]
