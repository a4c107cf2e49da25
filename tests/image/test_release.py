"""`make image` builds for this computer; `make release-image` builds, pushes and signs, or refuses.

They run in a repository of their own, with stand-ins for docker and cosign that write down what
they are asked.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.image.dockerfile import PROJECT

# What the targets call, besides docker and cosign.
PROGRAMS = ("awk", "git", "grep", "make", "mktemp", "rm", "sed", "sh")
PYTHON_DIGEST = "sha256:" + "a" * 64
COMPILER_DIGEST = "sha256:" + "e" * 64
UV_DIGEST = "sha256:" + "b" * 64
IMAGE_DIGEST = "sha256:" + "c" * 64
REPOSITORY = "registry.example.com:5000/sms-bridge"
SOURCE = "https://git.example.com/sms-bridge"
DATE_SECONDS = 1_700_000_000
DATE = "2023-11-14T22:13:20Z"
COMPLETE = {
    "IMAGE": f"{REPOSITORY}:1.2.3",
    "PYTHON_TAG": f"3.13-slim-trixie@{PYTHON_DIGEST}",
    "COMPILER_TAG": f"3.13-trixie@{COMPILER_DIGEST}",
    "UV_TAG": f"0.13.8@{UV_DIGEST}",
    "SOURCE_URL": SOURCE,
}
# They take their exit codes from the environment; docker gives the digest as buildx does.
DOCKER = """#!/bin/sh
[ "$*" = "buildx version" ] && exit "$BUILDX_VERSION_EXIT"
echo docker "$@" >> "$CALLS"
while [ $# -gt 0 ]; do
    [ "$1" = --metadata-file ] && echo "$METADATA" > "$2"
    shift
done
exit "$DOCKER_EXIT"
"""
COSIGN = """#!/bin/sh
echo cosign "$@" >> "$CALLS"
exit "$COSIGN_EXIT"
"""
METADATA = f"""{{
  "containerimage.config.digest": "sha256:{"d" * 64}",
  "containerimage.digest": "{IMAGE_DIGEST}",
  "image.name": "{REPOSITORY}:1.2.3"
}}"""


class Checkout:
    """A clean repository with the version 1.2.3, and a PATH that has nothing but what is needed."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        self.tree.mkdir()
        self.bin.mkdir()
        for name in PROGRAMS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.add_program("docker", DOCKER)
        self.add_program("cosign", COSIGN)
        for name in ("Makefile", "Dockerfile"):
            shutil.copy(PROJECT / name, self.tree)
        (self.tree / "pyproject.toml").write_text('version = "1.2.3"\n')
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "CALLS": str(self.calls),
            "METADATA": METADATA,
            "BUILDX_VERSION_EXIT": "0",
            "DOCKER_EXIT": "0",
            "COSIGN_EXIT": "0",
            # Nothing of the person whose computer it is.
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_COMMITTER_DATE": f"@{DATE_SECONDS} +0500",
        }
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        self.git("init", "--quiet")
        self.git("add", ".")
        self.git(*identity, "commit", "--quiet", "--message=a")

    def add_program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.bin / "git", *arguments],
            check=True,
            cwd=self.tree,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def make(
        self, target: str, arguments: dict[str, str], **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "make", target, *(f"{name}={text}" for name, text in arguments.items())],
            check=False,
            cwd=self.tree,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def build_arguments(call: str) -> dict[str, str]:
    return dict(re.findall(r"--build-arg (\w+)=(\S*)", call))


def without(name: str) -> dict[str, str]:
    return {key: text for key, text in COMPLETE.items() if key != name}


def test_a_local_image_needs_no_digest(checkout: Checkout) -> None:
    done = checkout.make("image", {})
    (call,) = checkout.called()
    recipe = (PROJECT / "Dockerfile").read_text()
    given = build_arguments(call)

    assert done.returncode == 0, done.stderr
    assert call.startswith("docker build --tag sms-bridge ")
    assert given.keys() == set(re.findall(r"^ARG (\w+)", recipe, re.MULTILINE))
    tags = ("PYTHON_TAG", "COMPILER_TAG", "UV_TAG")
    assert all(f"ARG {name}={given[name]}\n" in recipe for name in tags)
    assert given["VERSION"] == "1.2.3"


def test_a_release_is_built_pushed_and_signed_by_digest(checkout: Checkout) -> None:
    done = checkout.make("release-image", COMPLETE | {"COSIGN_FLAGS": "--yes --key=k"})
    build, sign = checkout.called()
    options, _, _ = build.partition(" --metadata-file ")

    assert done.returncode == 0, done.stderr
    assert options == (
        "docker buildx build --platform linux/amd64,linux/arm64"
        " --sbom=true --provenance=mode=max --push"
    )
    assert f" --tag {COMPLETE['IMAGE']} " in build
    assert build.endswith(" .")
    assert build_arguments(build) == {
        "PYTHON_TAG": COMPLETE["PYTHON_TAG"],
        "COMPILER_TAG": COMPLETE["COMPILER_TAG"],
        "UV_TAG": COMPLETE["UV_TAG"],
        "BASE_DIGEST": PYTHON_DIGEST,
        "VERSION": "1.2.3",
        "SOURCE_URL": SOURCE,
        "REVISION": checkout.git("rev-parse", "HEAD"),
        "CREATED": DATE,
        "SOURCE_DATE_EPOCH": str(DATE_SECONDS),
    }
    assert sign == f"cosign sign --yes --key=k {REPOSITORY}@{IMAGE_DIGEST}"
    assert f"image.digest={IMAGE_DIGEST}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (without("IMAGE"), "IMAGE=registry.example.com/sms-bridge:1.2.3"),
        (COMPLETE | {"IMAGE": REPOSITORY}, "Name the registry and this version"),
        (COMPLETE | {"IMAGE": "sms-bridge:1.2.3"}, "Name the registry and this version"),
        (without("PYTHON_TAG"), "PYTHON_TAG=3.13-slim-trixie@sha256:..."),
        (without("UV_TAG"), "UV_TAG=0.13.8@sha256:..."),
        (without("SOURCE_URL"), "SOURCE_URL=https://git.example.com/sms-bridge"),
    ],
    ids=[
        *("no image", "no version", "no registry"),
        *("Python not pinned", "uv not pinned", "no source"),
    ],
)
def test_an_incomplete_release_is_refused(
    checkout: Checkout, arguments: dict[str, str], sentence: str
) -> None:
    """What is missing is named with its remedy, in one sentence, before anything is built."""
    assert_refused(checkout, checkout.make("release-image", arguments), sentence)


@pytest.mark.parametrize("name", ["Makefile", "bridge.py"], ids=["changed", "new"])
def test_a_tree_that_is_not_committed_is_refused(checkout: Checkout, name: str) -> None:
    with (checkout.tree / name).open("a") as file:
        file.write("\n")

    assert_refused(checkout, checkout.make("release-image", COMPLETE), "Commit or remove")


@pytest.mark.parametrize(("target", "missing"), [("image", "docker"), ("release-image", "buildx")])
def test_without_docker_a_sentence_says_so(checkout: Checkout, target: str, missing: str) -> None:
    """Neither Docker nor its plugin is taken for granted."""
    if missing == "docker":
        (checkout.bin / "docker").unlink()
    done = checkout.make(target, COMPLETE, BUILDX_VERSION_EXIT="1")

    assert_refused(checkout, done, "Install Docker with its plugin buildx")


def test_without_cosign_nothing_is_built(checkout: Checkout) -> None:
    """What cannot be signed is not pushed."""
    (checkout.bin / "cosign").unlink()

    assert_refused(checkout, checkout.make("release-image", COMPLETE), "Install cosign")


@pytest.mark.parametrize(
    ("environment", "calls"),
    [
        ({"DOCKER_EXIT": "1"}, ["docker"]),
        ({"METADATA": "{}"}, ["docker"]),
        ({"COSIGN_EXIT": "1"}, ["docker", "cosign"]),
    ],
    ids=["build failed", "no digest", "signing failed"],
)
def test_a_failure_ends_the_release(
    checkout: Checkout, environment: dict[str, str], calls: list[str]
) -> None:
    done = checkout.make("release-image", COMPLETE, **environment)

    assert done.returncode == 2
    assert "Pushed and signed" not in done.stdout
    assert [call.split()[0] for call in checkout.called()] == calls


def assert_refused(
    checkout: Checkout, done: subprocess.CompletedProcess[str], sentence: str
) -> None:
    said, *rest = done.stderr.splitlines()

    assert done.returncode == 2
    assert sentence in said
    assert all(line.startswith("make: ***") for line in rest)
    assert done.stdout == ""
    assert checkout.called() == []
