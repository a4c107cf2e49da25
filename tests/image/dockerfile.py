"""Reads the Dockerfile, so that tests and the proof follow it."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[2]


@dataclass
class Stage:
    """A stage: its instructions in order, as (name, text), and its environment."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def texts(self, instruction: str) -> list[str]:
        """Return the texts of an instruction."""
        return [text for name, text in self.steps if name == instruction]

    def command(self, instruction: str) -> list[str]:
        """Return the words of the last ENTRYPOINT, CMD or HEALTHCHECK, in exec form."""
        text = self.texts(instruction)[-1]
        words: list[str] = json.loads(text[text.index("[") :])
        return words

    @property
    def environment(self) -> dict[str, str]:
        """The variables of ENV, in order. $PATH stays unexpanded."""
        pairs = [word for text in self.texts("ENV") for word in shlex.split(text)]
        return dict(pair.split("=", 1) for pair in pairs)

    @property
    def files(self) -> Iterator[tuple[str | None, list[str], str]]:
        """Yield each COPY: its stage, sources and target."""
        for text in self.texts("COPY"):
            words = text.split()
            origins = [w.removeprefix("--from=") for w in words if w.startswith("--from=")]
            origin = origins[0] if origins else None
            paths = [word for word in words if not word.startswith("--")]
            yield origin, paths[:-1], paths[-1]


def read_dockerfile(path: Path = PROJECT / "Dockerfile") -> list[Stage]:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            stages.append(Stage(alias, base))
        elif stages:
            stages[-1].steps.append((name, rest.strip()))
    return stages


def build_context(dockerignore: Path = PROJECT / ".dockerignore") -> list[str]:
    """Return the build context: .dockerignore excludes everything except these."""
    lines = dockerignore.read_text().splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]
