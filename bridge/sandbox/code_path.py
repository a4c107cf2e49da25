"""Where a private RabbitMQ looks for its code, so that it starts in half of the CPU time.

Erlang tries the folders of its code path one after the other for each of the thousand modules that
a node loads. RabbitMQ has a hundred: those of all its plugins, enabled or not, come first.
"""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def shorten_code_path(folder: Path, scripts: Path, plugins: Sequence[str]) -> dict[str, str]:
    """Return the variables of the environment with which a node finds its code at once.

    RabbitMQ has its plugins beside its own `scripts`; `folder` gets links to those of them that are
    enabled as `plugins`. Nothing is done where Erlang or RabbitMQ is installed in another way.
    """
    erlang = shutil.which("erl")
    if erlang is None:
        return {}
    theirs = _applications((scripts / "rabbitmq-env").resolve().parents[1] / "plugins")
    every = _applications(Path(erlang).resolve().parents[1] / "lib") | theirs
    if "rabbit" not in theirs or "kernel" not in every:
        return {}
    # It starts Mnesia without naming it as a dependency.
    needed = _with_dependencies(["rabbit", "mnesia"], every)
    # RabbitMQ puts every folder that it finds here before all others.
    found = ((_with_dependencies(plugins, every) - needed) | {"rabbit"}) & theirs.keys()
    folder.mkdir()
    for name in found:
        (folder / theirs[name].name).symlink_to(theirs[name])
    # Erlang turns them round, so that it tries those with the most modules first.
    paths = sorted((every[name] / "ebin" for name in needed), key=_count_modules)
    arguments = " ".join(["-pa", *map(str, paths)])
    return {"RABBITMQ_PLUGINS_DIR": str(folder), "ERL_AFLAGS": arguments}


def _applications(folder: Path) -> dict[str, Path]:
    # A folder is called as the application and, mostly, its version: `rabbit-3.13.7`.
    named = {path.name.partition("-")[0]: path for path in sorted(folder.glob("*"))}
    return {name: path for name, path in named.items() if (path / "ebin" / f"{name}.app").is_file()}


def _with_dependencies(names: Iterable[str], every: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    left = [*names]
    while left:
        name = left.pop()
        if name in every and name not in found:
            found.add(name)
            text = (every[name] / "ebin" / f"{name}.app").read_text(encoding="utf-8")
            listed = re.search(r"\{\s*applications\s*,\s*\[([^\]]*)\]", text)
            left += re.findall(r"\w+", listed[1]) if listed else []
    return found


def _count_modules(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.beam"))
