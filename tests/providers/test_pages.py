"""The pages of docs/providers against the presets: what they show and set is so, and works."""

import re
from pathlib import Path

import pytest
import yaml

from bridge.config.presets import Preset, documented_answers, needed_settings
from bridge.webhook.signatures.schemes import scheme_from
from bridge.worker.service.shape import shape_from
from tests.providers.pages import (
    CLIENTS,
    FOLDER,
    INDEX,
    PROJECT,
    SERVICES,
    page_of,
    pages,
    rendering_of,
    settings_of,
    yaml_blocks,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    return pages(tmp_path_factory.mktemp("secrets"))


@pytest.mark.parametrize("path", [INDEX, *map(page_of, SERVICES)], ids=lambda path: path.stem)
def test_pages_say_what_the_presets_do(path: Path, made: dict[Path, str]) -> None:
    """What is posted, and what becomes of each answer, is as the page shows it."""
    assert path.read_text(encoding="utf-8") == made[path]


def test_every_preset_has_a_page() -> None:
    own = {FOLDER / "your-own-service.md", FOLDER / "plain-text.md"}
    wanted = {INDEX, *own, *map(page_of, SERVICES)}

    assert set(FOLDER.glob("*.md")) == wanted


@pytest.mark.parametrize("preset", SERVICES)
def test_what_a_page_sets_is_all_that_the_worker_needs(preset: Preset, tmp_path: Path) -> None:
    blocks = yaml_blocks(page_of(preset).read_text(encoding="utf-8"))
    settings = [settings_of(block, tmp_path).sms_api for block in blocks if "sms_api:" in block]

    # Which raises where something is missing.
    for api in settings:
        shape_from(api)

    assert {api.preset for api in settings} == {preset}


@pytest.mark.parametrize("preset", SERVICES)
def test_a_page_sets_little(preset: Preset) -> None:
    first = yaml_blocks(page_of(preset).read_text(encoding="utf-8"))[0]
    given = yaml.safe_load(first)["sms_api"]
    if "auth" in given:
        given["auth.username"] = given.pop("auth")["username"]

    assert given.keys() - {"preset"} == {
        "key_file" if key == "key" else key for key in needed_settings(preset)
    }
    assert len(first.splitlines()) <= 5


@pytest.mark.parametrize("preset", SERVICES)
def test_the_endpoint_of_a_page_can_be_served(preset: Preset, tmp_path: Path) -> None:
    blocks = yaml_blocks(page_of(preset).read_text(encoding="utf-8"))
    served = [settings_of(one, tmp_path).webhook for one in blocks if "webhook:" in one]
    endpoints = [endpoint for webhook in served for endpoint in webhook.all_endpoints]

    assert endpoints[0].preset == preset
    for endpoint in endpoints:
        assert endpoint.has_secrets
        assert endpoint.knows_signature
        assert scheme_from(endpoint.signature, endpoint.public_url).header


@pytest.mark.parametrize("preset", SERVICES)
def test_the_answer_to_try_is_one_of_the_services(preset: Preset, tmp_path: Path) -> None:
    """The fault that a page orders is one that the sandbox plays for this preset."""
    text = page_of(preset).read_text(encoding="utf-8")
    (named,) = re.findall(r'\{"answer": "([^"]+)"\}', text)
    codes = {answer.code for answer in rendering_of(preset, tmp_path).answers}
    fates = {answer["fate"] for answer in documented_answers(preset)}

    assert named in codes | fates


def test_clients_are_those_that_the_tests_use() -> None:
    compared = {path.stem for path in (PROJECT / "tests" / "services").glob("*.py")}

    assert {preset.replace("-", "_") for preset in CLIENTS} <= compared
