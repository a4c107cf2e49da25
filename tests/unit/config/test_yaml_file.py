"""The configuration file: what YAML is read, and what is refused with its line."""

import time
from pathlib import Path

import pytest

from bridge.config import load_settings
from bridge.errors import ConfigError
from tests.unit.config.conftest import Faults, Load


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "worker: {queue: 'a",
            "line 1: is not YAML for one configuration: check for unbalanced quotes",
        ),
        ("worker:\n  queue: a\n bad: b\n", "line 3: is not YAML for one configuration"),
        ("worker: {queue: a,\n  queue: b}", "line 2: the key `queue` appears twice; keep one"),
        ("worker:\n  {{ queue }}: a\n", "line 2: a list or a map cannot be a key"),
        ("worker: {queue: 2026-13-45}", "is not YAML: it contains an invalid character, date"),
        ("worker: {queue: \0}", "is not YAML: it contains an invalid character"),
        ("worker: {}\n---\nworker: {}\n", "line 2: is not YAML for one configuration"),
        ("- worker", "must hold sections"),
        ("1: 2", "the top, line 1: unknown key"),
    ],
)
def test_file_that_is_no_configuration(faults: Faults, text: str, says: str) -> None:
    """A file that cannot be read as sections is one line that says where and what is wrong."""
    (fault,) = faults(text)

    assert says in fault


def test_key_that_is_there_twice_and_may_be_a_secret(faults: Faults) -> None:
    (said,) = faults("worker: {491713920012: x, 491713920012: y}")

    assert said.endswith(", line 1: a key appears twice; keep one")


@pytest.mark.parametrize("key", ["webhook.port", "worker.concurrency"])
def test_yes_is_no_number(faults: Faults, key: str) -> None:
    """YAML's `yes` is refused where a number is meant, and does not become 1."""
    section, name = key.split(".")

    assert faults(f"{section}:\n  {name}: yes\n")


@pytest.mark.parametrize("mode", ["declare", "verify", "off"])
def test_topology_of_the_file(load: Load, mode: str) -> None:
    """Each mode can be written in the file as it stands in the documents, also `off`."""
    assert load(f"rabbitmq:\n  topology: {mode}\n").rabbitmq.topology == mode


def test_file_that_is_not_utf_8(tmp_path: Path) -> None:
    """A file in another encoding is told, not guessed."""
    path = tmp_path / "config.yaml"
    path.write_bytes("worker: {queue: é}".encode("latin-1"))

    with pytest.raises(ConfigError, match="is not UTF-8 text; save it as UTF-8"):
        load_settings(path, {})


def test_file_that_is_missing(tmp_path: Path) -> None:
    """A file that is not there is told by its name."""
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "missing.yaml", {})


# --- What is too much -----------------------------------------------------------------------------


def _bomb(line: str, count: int) -> str:
    first = line.format(0, "1, 1").replace("*1, *1", "1")
    return first + "".join(line.format(n, f"*x{n - 1}, *x{n - 1}") for n in range(1, count))


BOMBS: dict[str, tuple[str, str]] = {
    "flow": ("worker: " + "[" * 100_000, "line 1: is nested more than 20 levels deep"),
    "maps": ("{a: " * 50_000, "line 1: is nested more than 20 levels deep"),
    "block": (
        "".join(f"{' ' * n}a:\n" for n in range(600)),
        "line 20: is nested more than 20 levels",
    ),
    "dashes": ("- " * 100_000 + "x", "line 1: is nested more than 20 levels deep"),
    "aliases": (_bomb("x{0}: &x{0} [{1}]\n", 60), "holds more than 10,000 values"),
    "merges": (
        "x0: &x0 {a: 1}\n"
        + "".join(f"x{n}: &x{n} {{<<: [*x{n - 1}, *x{n - 1}]}}\n" for n in range(1, 60)),
        "holds more than 10,000 values",
    ),
    "in itself": ("worker: &a {queue: *a}", "line 1: an alias (*) is inside the value"),
    "values": ("worker: {retry_delays: [" + "1s," * 20_000 + "]}", "holds more than 10,000 values"),
    "size": ("worker: {queue: " + "x" * 300_000 + "}", "is larger than 256 KiB"),
    "keys": ("worker:\n" + "".join(f"  k{n}: 1\n" for n in range(4000)), "worker, line 2: unknown"),
}


@pytest.mark.parametrize(("text", "says"), BOMBS.values(), ids=BOMBS)
def test_file_that_is_too_much(faults: Faults, text: str, says: str) -> None:
    """What is too deep, too large or multiplied by aliases is refused, and in no time."""
    started = time.process_time()
    found = faults(text)
    seconds = time.process_time() - started

    assert says in found[0]
    assert len(found) <= 21
    assert seconds < 5
