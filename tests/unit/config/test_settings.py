"""The keys and their defaults, what may stand together, and secrets that nothing shows."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bridge.config import Settings, WorkerSettings, load_settings
from bridge.config.presets import PRESETS
from bridge.config.settings import known_keys
from tests.reference_pages import comments_of
from tests.unit.config.conftest import CANARY, Faults, Load

EXAMPLE = Path(__file__).parents[3] / "config.example.yaml"


def paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{name}.")


# --- The example ----------------------------------------------------------------------------------


EXAMPLES = re.compile(r"^  # .*For example:\n((?:  #   .*\n)+)", re.MULTILINE)


@pytest.mark.parametrize("text", EXAMPLES.findall(EXAMPLE.read_text(encoding="utf-8")))
def test_examples_of_services_can_be_loaded(text: str, tmp_path: Path) -> None:
    """What a comment shows of a service works when the marks before it are taken out."""
    block = re.sub("^  #", "", text, flags=re.MULTILINE)
    section = "webhook" if "endpoints:" in block else "sms_api"
    file = tmp_path / "config.yaml"
    file.write_text(f"{section}:\n{block}", encoding="utf-8")

    assert "preset" in block
    assert load_settings(file, {}).masked() != load_settings(EXAMPLE, {}).masked()


def test_the_example_shows_services() -> None:
    """There is an example of sending and one of endpoints, and each preset is named."""
    text = EXAMPLE.read_text(encoding="utf-8")
    (names,) = re.findall(r"# Preset of the SMS service: ((?:[a-z, -]|\n  # )+)\.", text)

    assert len(EXAMPLES.findall(text)) == 2
    assert re.split(r",\s+(?:# )?", names) == list(PRESETS)


def test_example_lists_every_key() -> None:
    example = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))

    assert set(paths(example)) == set(known_keys())


def test_example_fits_the_schema() -> None:
    """An editor that is given `sms-bridge schema config` finds no fault in the example."""
    text = EXAMPLE.read_text(encoding="utf-8")
    # As YAML 1.2 reads it, which editors use.
    example = yaml.safe_load(text.replace("coordination: on", 'coordination: "on"'))

    jsonschema.validate(example, Settings.model_json_schema())


def test_example_explains_every_setting() -> None:
    """Each key has a comment of its own, from which docs/configuration.md is made."""
    comments, settings = comments_of(EXAMPLE.read_text(encoding="utf-8"))

    assert {key for key in settings if not comments[key]} == set()


def test_example_shows_the_defaults() -> None:
    """The example gives each key its default, so that it changes nothing as it is."""
    assert load_settings(EXAMPLE, {}).masked() == load_settings(None, {}).masked()


# --- Sections and keys ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "most"),
    [
        ({"concurrency": 300}, 300),
        ({"concurrency": 7, "max_concurrency": 5}, 7),
        ({"concurrency": "auto"}, 200),
        ({"concurrency": "auto", "max_concurrency": 5}, 5),
    ],
)
def test_most_in_flight(worker: dict[str, Any], most: int) -> None:
    """The maximum is for `auto` alone; a number says itself how much may be in flight."""
    assert Settings.model_validate({"worker": worker}).worker.most_in_flight == most


@pytest.mark.parametrize("delays", [["30s", "5s"], ["60s", "1m"]], ids=["order", "repeated"])
def test_retry_delays_ascend(faults: Faults, delays: list[str]) -> None:
    """The ladder must ascend, because each step is a queue of its own."""
    (fault,) = faults({"worker": {"retry_delays": delays}})

    assert "retry_delays must ascend" in fault


def test_equal_texts_have_a_window(faults: Faults) -> None:
    """A choice that would do nothing alone is refused, with what is missing."""
    (fault,) = faults({"worker": {"deduplicate_by": "text"}})

    assert "needs deduplicate" in fault


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ({"queue": "a"}, "a.urgent"),
        ({"queue": "a", "urgent_queue": "b"}, "b"),
        ({"urgent_queue": None}, None),
    ],
)
def test_the_urgent_queue_follows_the_main_one(
    worker: dict[str, object], expected: str | None
) -> None:
    """Unless it has a name of its own, or there is none."""
    assert WorkerSettings.model_validate(worker).urgent_queue == expected


@pytest.mark.parametrize("name", ["a.dead", "a.retry.5s", "a.paused"])
def test_the_urgent_queue_is_another_one(faults: Faults, name: str) -> None:
    """One that the worker uses for something else is refused."""
    (fault,) = faults({"worker": {"queue": "a", "urgent_queue": name}})

    assert "urgent_queue: must differ from the worker's other queues" in fault


def test_requests_and_events_have_a_queue_each(faults: Faults, load: Load) -> None:
    """One queue for both is refused: the worker would take the events for requests."""
    (fault,) = faults("worker: {queue: sms.inbound}")
    loaded = load("worker: {queue: sms.inbound}\nwebhook: {queue: null}")

    assert fault.startswith("worker.queue: must differ from webhook.queue, ")
    assert loaded.worker.queue == "sms.inbound"


# --- Secrets --------------------------------------------------------------------------------------

SECRETS: dict[str, dict[str, Any]] = {
    "rabbitmq.url": {"rabbitmq": {"url": f"amqp://u:{CANARY}@h/"}},
    "rabbitmq.url list": {"rabbitmq": {"url": ["amqp://a/", f"amqp://u:{CANARY}@h/"]}},
    "rabbitmq.password": {"rabbitmq": {"password": CANARY}},
    "sms_api.key": {"sms_api": {"key": CANARY}},
    "sms_api.proxy": {"sms_api": {"proxy": f"http://u:{CANARY}@h:1"}},
    "webhook.secrets": {"webhook": {"secrets": [CANARY]}},
}


VIEWS: dict[str, Callable[[Settings], object]] = {
    "repr": repr,
    "format": lambda s: f"{s} {s.rabbitmq} {s.sms_api!r} {s.webhook}",
    "model_dump": lambda s: s.model_dump(),
    "model_dump_json": lambda s: s.model_dump_json(),
    "masked": lambda s: s.masked(),
    "masked as YAML": lambda s: yaml.safe_dump(s.masked()),
}


@pytest.mark.parametrize("secret", SECRETS)
def test_secret_is_masked(load: Load, secret: str) -> None:
    """No way to show the settings shows a secret."""
    loaded = load(SECRETS[secret])

    assert [name for name, view in VIEWS.items() if CANARY in str(view(loaded))] == []
