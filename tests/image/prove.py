"""Builds the image's tree without a container engine, and starts both roles from it.

    python -m tests.image.prove

It runs the Dockerfile's steps of both stages in a new root. Then the final command runs there as
the image's user, with a read-only root, no capabilities, its own network and the chart's
configuration. Python is this computer's, laid out as in a base image. Requires Linux, root and
util-linux (unshare, setpriv). Exit status 0: both roles passed the image's health check, and
stopped cleanly after SIGTERM.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from tests.chart.rendering import (
    MINIMAL,
    MOUNTED,
    ROLES,
    config,
    container,
    deployment,
    secret_files,
)
from tests.image.dockerfile import PROJECT, Stage, build_context, read_dockerfile

START_SECONDS = 60
STOP_SECONDS = 60
# Parts of a base image, taken from this computer.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")
PATH = "/usr/local/bin:/usr/bin:/bin"
# The Makefile's own uv, and the path of uv in the build stage.
OWN_UV = PROJECT / ".uv" / "bin" / "uv"
UV_INSIDE = "/uv"
# This computer's Python moves to its path in a base image, away from its libraries.
MOVED = {"LD_LIBRARY_PATH": "/usr/local/lib"}
IS_MOVED = not sys.base_prefix.startswith("/usr")
STDLIB = Path(sysconfig.get_path("stdlib"))
# Path of the standard library in the image.
MODULES = str(Path("/usr/local", STDLIB.relative_to(sys.base_prefix)) if IS_MOVED else STDLIB)
# Parts that the official images leave out, such as installers.
NOT_IN_BASE = ("*.pyc", "test", "tests", "idle_test", "site-packages", "config-*")
# Flags of bytecode that is used without checking its source.
UNCHECKED_HASH = 1
DEVICES = ("null", "zero", "urandom", "random")


class ProofError(Exception):
    """The result of the Dockerfile is wrong."""


def say(text: str) -> None:
    """Print a step."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def mounts(
    root: Path, *, writable: Sequence[str], files: Mapping[str, Path], tmp: str = "16m"
) -> list[str]:
    lines = ["set -e", f"mount -t tmpfs tmpfs {root}"]
    for name in SYSTEM:
        source = Path("/", name)
        if source.is_symlink():
            lines.append(f"ln -s {source.readlink()} {root}/{name}")
        elif source.is_dir():
            lines += [f"mkdir {root}/{name}", *mount_read_only(source, f"{root}/{name}")]
    # A copy, in which the pod's folders are mounted.
    lines.append(f"cp -a /etc {root}/etc")
    if IS_MOVED:
        # Python's path in the base image.
        lines += mount_read_only(Path(sys.base_prefix), f"{root}/usr/local")
    lines += [f"mkdir -p {root}/proc {root}/dev", f"mount -t proc proc {root}/proc"]
    for name in DEVICES:
        lines += [f"touch {root}/dev/{name}", f"mount --bind /dev/{name} {root}/dev/{name}"]
    for target, source in files.items():
        lines.append(f"mkdir -p {root}{target}")
        if target in writable:
            lines.append(f"mount --bind {source} {root}{target}")
        else:
            lines += mount_read_only(source, f"{root}{target}")
    lines += [
        f"mkdir -m 1777 {root}/tmp",
        f"mount -t tmpfs -o size={tmp},mode=1777 tmpfs {root}/tmp",
    ]
    return lines


def mount_read_only(source: Path, target: str) -> list[str]:
    """Return the shell lines that mount a folder read-only."""
    return [f"mount --bind {source} {target}", f"mount -o remount,bind,ro {target}"]


def writable_places(pid: int) -> set[str]:
    """List the writable paths of a process."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    places = [line.split()[4:6] for line in lines]
    return {place for place, options in places if "rw" in options.split(",")}


def build(stage: Stage, scratch: Path) -> None:
    allowed = build_context()
    environment = {"PATH": f"{UV_INSIDE}:{PATH}", "HOME": "/tmp", **stage.environment}
    passed = ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY")
    environment |= {name: os.environ[name] for name in passed if name in os.environ}
    environment["UV_PYTHON_PREFERENCE"] = "only-system"
    uv = find_uv()
    shutil.copy(uv, scratch / "uv")
    cache = subprocess.run([uv, "cache", "dir"], check=True, capture_output=True, text=True)
    files = {
        UV_INSIDE: scratch / "uv",
        "/src": scratch / "src",
        "/opt": scratch / "opt",
        environment["UV_CACHE_DIR"]: Path(cache.stdout.strip()),
    }
    writable = [place for place in files if place != UV_INSIDE]
    # A compiler needs more space here than the bridge.
    prepare = mounts(scratch / "root", writable=writable, files=files, tmp="512m")
    for name, text in stage.steps:
        if name == "COPY" and not text.startswith("--from"):
            *sources, target = text.split()
            for source in sources:
                if source not in allowed:
                    raise ProofError(f"COPY {source}: .dockerignore keeps it out")
                # COPY copies a folder's content, but a file itself.
                to = target if (PROJECT / source).is_dir() else f"{target}/{source}"
                copy(PROJECT / source, scratch / "src" / to)
        elif name == "RUN":
            command = re.sub(r"--mount=\S+\s+", "", text)
            run_step(f"cd /src && {command}", prepare, scratch, environment)


def find_uv() -> Path:
    """Find a uv instead of the one that the build stage copies."""
    found = shutil.which("uv") or shutil.which(OWN_UV)
    if found is None:
        raise ProofError("there is no uv: neither on PATH nor in .uv/bin, where `make env` puts it")
    return Path(found)


def finish(stage: Stage, scratch: Path) -> None:
    """Run the final stage's steps, which may change the standard library."""
    prepare = mounts(scratch / "root", writable=[MODULES], files={MODULES: scratch / "modules"})
    for command in stage.texts("RUN"):
        run_step(command, prepare, scratch, {"PATH": PATH})


def run_step(
    command: str, prepare: Sequence[str], scratch: Path, environment: dict[str, str]
) -> None:
    """Run a step of a stage in its root."""
    say(f"build: {command}")
    run_inside([*prepare, enter(scratch / "root", environment, ["sh", "-c", command])])


def enter(root: Path, environment: dict[str, str], words: Sequence[str]) -> str:
    """Return the shell line that executes a program inside a root, with only these variables."""
    variables = [f"{name}={value}" for name, value in (MOVED | environment).items()]
    return f"exec chroot {root} env -i {shlex.join([*variables, *words])}"


def copy(source: Path, target: Path) -> None:
    """Copy a file or folder of the context, except ignored files."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]"))
    else:
        shutil.copy(source, target)


def run_inside(lines: Sequence[str]) -> None:
    """Run shell lines in a new mount namespace."""
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", "\n".join(lines)],
        check=False,
        timeout=900,
    )
    if done.returncode:
        raise ProofError(f"exit {done.returncode}")


def check_tree(tree: Path) -> None:
    """Check that the tree is compiled, and contains no tests and no build tools."""
    unwanted = [
        name
        for name in ("pytest", "mypy", "ruff", "uv", "hatchling")
        if (tree / "bin" / name).exists()
    ]
    if unwanted:
        raise ProofError(f"unwanted: {unwanted}")
    (package,) = tree.glob("lib/python*/site-packages/bridge")
    check_compiled(package)
    check_machine_code(package)
    files = [path for path in tree.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    say(f"tree: {size / 1e6:.0f} MB, {compressed_bytes(files) / 1e6:.1f} MB compressed")


def check_machine_code(package: Path) -> None:
    """Check that the modules in `pyproject.toml` are compiled."""
    hooks = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    modules = hooks["targets"]["wheel"]["hooks"]["mypyc"]["include"]
    plain = [
        path
        for path in modules
        if not any((package.parent / path).parent.glob(f"{Path(path).stem}.*.so"))
    ]
    if plain:
        raise ProofError(f"not compiled to machine code: {plain}")
    say(f"compiled to machine code: {len(modules)} modules")


def check_modules(modules: Path) -> None:
    """Check the bytecode of the standard library."""
    check_compiled(modules)
    size = compressed_bytes(modules.rglob("*.pyc"))
    say(f"compiled modules of Python: {size / 1e6:.1f} MB compressed")


def check_compiled(folder: Path) -> None:
    """Check that every module has bytecode that does not depend on file times."""
    compiled = {
        path.parent.parent / path.name.partition(".")[0]
        for path in folder.rglob("*.pyc")
        if path.read_bytes()[4] == UNCHECKED_HASH
    }
    sources = {path.with_suffix("") for path in folder.rglob("*.py")}
    if not sources or sources - compiled:
        raise ProofError(f"{len(sources)} sources, not compiled: {sorted(sources - compiled)[:5]}")


def compressed_bytes(files: Iterable[Path]) -> int:
    """Return the compressed size, as in a registry."""
    with tempfile.TemporaryFile() as layer:
        with tarfile.open(fileobj=layer, mode="w:gz", compresslevel=6) as tar:
            for path in sorted(files):
                tar.add(path)
        return layer.tell()


def mounted_files(role: str, folder: Path) -> dict[str, Path]:
    """Write the files that a pod mounts: the rendered config and the secrets."""
    for path in secret_files(deployment(MINIMAL, role)["spec"]["template"]):
        file = folder / Path(path).relative_to(MOUNTED)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("secret")
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(config(MINIMAL)))
    return {MOUNTED: folder}


@contextmanager
def started(stage: Stage, role: str, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a role as the image does, with the chart's variables."""
    user, _, group = stage.texts("USER")[-1].partition(":")
    files = {
        "/opt/app": scratch / "opt" / "app",
        MODULES: scratch / "modules",
        **mounted_files(role, scratch / f"etc-{role}"),
    }
    found = container(MINIMAL, role)
    environment = {
        name: value.replace("$PATH", PATH).replace("${REVISION}", "proof")
        for name, value in stage.environment.items()
    } | {variable["name"]: variable["value"] for variable in found["env"]}
    root = scratch / "root"
    drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    drop += ["--bounding-set=-all", "--inh-caps=-all"]
    words = [*drop, *stage.command("ENTRYPOINT"), *found["args"]]
    lines = [
        *mounts(root, writable=[], files=files),
        "ip link set lo up",
        f"mount -o remount,ro {root}",
        f"cd {root}/tmp",
        # As in a container, the program is process 1 of its namespace.
        enter(root, environment, words),
    ]
    namespaces = ["--mount", "--pid", "--fork", "--net", "--kill-child"]
    process = subprocess.Popen(["unshare", *namespaces, "sh", "-c", "\n".join(lines)])
    try:
        yield process
    finally:
        # Kill the program itself, because after the change of user it does not end with `unshare`.
        if process.poll() is None:
            with suppress(IndexError, OSError):
                os.kill(inner_pid(process), signal.SIGKILL)
            process.kill()
        process.wait(timeout=STOP_SECONDS)


def inner_pid(process: subprocess.Popen[bytes]) -> int:
    """Return the process id of the program under `unshare`."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def is_healthy(stage: Stage, pid: int) -> bool:
    """Run the image's health check inside, as the image's user."""
    user, _, group = stage.texts("USER")[-1].partition(":")
    inside = ["nsenter", "--target", str(pid), "--mount", "--net", "--root", "--wd"]
    done = subprocess.run(
        [*inside, "--setuid", user, "--setgid", group, "--", *stage.command("HEALTHCHECK")],
        check=False,
        env=MOVED | {"PATH": stage.environment["PATH"].replace("$PATH", PATH)},
        capture_output=True,
        timeout=30,
    )
    return done.returncode == 0


def wait_until_healthy(stage: Stage, process: subprocess.Popen[bytes]) -> int:
    """Wait until the health check passes, and return the program's process id."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ProofError(f"ended with {process.returncode}")
        with suppress(IndexError, OSError):
            pid = inner_pid(process)
            if is_healthy(stage, pid):
                return pid
        time.sleep(0.2)
    raise ProofError(f"not healthy within {START_SECONDS} s")


def prove_role(stage: Stage, role: str, scratch: Path) -> None:
    """Check that a role becomes healthy, cannot write, and stops cleanly."""
    user = stage.texts("USER")[-1].partition(":")[0]
    since = time.monotonic()
    with started(stage, role, scratch) as process:
        pid = wait_until_healthy(stage, process)
        seconds = time.monotonic() - since
        status = Path(f"/proc/{pid}/status").read_text()
        (uids,) = [line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")]
        if set(uids) != {user}:
            raise ProofError(f"runs as {uids}")
        open_places = writable_places(pid) - {"/tmp", "/proc", *(f"/dev/{d}" for d in DEVICES)}
        if open_places:
            raise ProofError(f"can be written: {sorted(open_places)}")
        os.kill(pid, signal.SIGTERM)
        code = process.wait(timeout=STOP_SECONDS)
        if code != 0:
            raise ProofError(f"ended with {code} after SIGTERM")
    say(
        f"{role}: healthy by the image's own check within {seconds:.1f} s, user {user}, "
        "read-only root, ended clean"
    )


def main() -> int:
    """Build, check the tree, and start each role."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        say("image-proof needs Linux, root and util-linux: it mounts a root of its own")
        return 2
    stages = read_dockerfile()
    with tempfile.TemporaryDirectory(prefix="sms-bridge-image-") as folder:
        scratch = Path(folder)
        scratch.chmod(0o755)
        for name in ("root", "src", "opt", "uv"):
            (scratch / name).mkdir()
        shutil.copytree(STDLIB, scratch / "modules", ignore=shutil.ignore_patterns(*NOT_IN_BASE))
        try:
            build(next(stage for stage in stages if stage.name == "build"), scratch)
            check_tree(scratch / "opt" / "app")
            finish(stages[-1], scratch)
            check_modules(scratch / "modules")
            for role in ROLES:
                prove_role(stages[-1], role, scratch)
        except ProofError as error:
            say(f"failed: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
