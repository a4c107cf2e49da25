"""A private RabbitMQ finds its code without a search through all plugins."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bridge.sandbox.broker import shorten_code_path

# RabbitMQ's plugins and Erlang's own applications, each with what it needs.
PLUGINS = {
    "rabbit-3.13.7": ["kernel", "ra"],
    "ra-2.2.0": ["kernel"],
    "rabbitmq_management-3.13.7": ["rabbit", "ra", "cowboy"],
    "cowboy-2.8.0": ["kernel", "cowlib"],
    "cowlib-2.9.1": ["kernel"],
    "rabbitmq_stomp-3.13.7": ["rabbit"],
}
ERLANG = {"kernel-8.5.3": [], "mnesia-4.21.3": ["kernel"], "wx-2.2": ["kernel"]}


def install(folder: Path, name: str, needs: Sequence[str], modules: int = 1) -> None:
    ebin = folder / name / "ebin"
    ebin.mkdir(parents=True)
    (name, *_) = name.split("-")
    listed = f"{{application, {name}, [{{vsn, []}}, {{applications, [{', '.join(needs)}]}}]}}."
    (ebin / f"{name}.app").write_text(listed)
    for number in range(modules):
        (ebin / f"{name}_{number}.beam").touch()


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install Erlang and RabbitMQ as packages do, scripts by links; return their folder."""
    server, erlang, scripts = (tmp_path / name for name in ("server", "erlang", "bin"))
    for number, (name, needs) in enumerate(PLUGINS.items()):
        install(server / "plugins", name, needs, modules=10 - number)
    for name, needs in ERLANG.items():
        install(erlang / "lib", name, needs)
    for program in (erlang / "bin" / "erl", server / "sbin" / "rabbitmq-env"):
        program.parent.mkdir()
        program.touch(mode=0o700)
    scripts.mkdir()
    (scripts / "erl").symlink_to(erlang / "bin" / "erl")
    (scripts / "rabbitmq-env").symlink_to(server / "sbin" / "rabbitmq-env")
    monkeypatch.setenv("PATH", str(scripts))
    return scripts


@pytest.mark.parametrize(
    ("enabled", "linked"),
    [
        ([], {"rabbit"}),
        (["rabbitmq_management"], {"rabbit", "rabbitmq_management", "cowboy", "cowlib"}),
    ],
)
def test_of_all_plugins_only_those_enabled_are_shown(
    scripts: Path, tmp_path: Path, enabled: list[str], linked: set[str]
) -> None:
    """RabbitMQ sees itself, what is enabled, and what that needs and RabbitMQ does not."""
    variables = shorten_code_path(tmp_path / "code", scripts, enabled)

    shown = Path(variables["RABBITMQ_PLUGINS_DIR"])
    assert {path.name.split("-")[0] for path in shown.iterdir()} == linked
    assert all((path / "ebin").is_dir() for path in shown.iterdir())


@pytest.mark.parametrize("missing", ["erl", "rabbitmq-env"])
def test_an_installation_of_another_kind_is_left_as_it_is(
    scripts: Path, tmp_path: Path, missing: str
) -> None:
    """Where the folders are not found, nothing is changed."""
    (scripts / missing).unlink()

    assert shorten_code_path(tmp_path / "code", scripts, []) == {}
    assert not (tmp_path / "code").exists()
