"""The demo, whole: real broker, real processes, faults, and the account of every message."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.config import load_settings
from bridge.sandbox.demo import addresses
from bridge.sandbox.processes import guarded
from bridge.sandbox.reachability import URL_VARIABLE
from bridge.sandbox.stage import Place, Stage, queues_of

URL = "amqp://guest:guest@127.0.0.1:29000/"
NAMES = {"WORKER__QUEUE": "demo.outbound", "WEBHOOK__QUEUE": "demo.inbound"}


@pytest.mark.slow
def test_the_demo_accounts_for_every_message() -> None:
    """A short demo ends with exit code 0 and says that nothing is unaccounted for.

    Takes a whole demo: a broker, four processes and all messages.
    """
    command = [sys.executable, "-m", "bridge", "demo", "--messages", "50", "--events", "20"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Every message is accounted for, none was sent twice." in ended.stdout


@pytest.mark.parametrize("names", [{}, NAMES], ids=["private", "own-names"])
def test_the_demo_tells_how_to_check_its_queues(names: dict[str, str], tmp_path: Path) -> None:
    """The command that is printed names the broker, the queues and the ladder of the demo."""
    place = Place(is_private=not names, environ={URL_VARIABLE: URL}, names=names)
    with guarded() as guard:
        stage = Stage(place, tmp_path, guard)
        (line,) = [line for line in addresses(stage) if line.endswith(" topology verify")]
    words = shlex.split(line.partition(" env ")[2])
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    meant = load_settings(None, {URL_VARIABLE: URL, **environ})

    assert queues_of(meant) == queues_of(stage.settings)
    assert len(queues_of(meant)) != len(queues_of(load_settings(None, {})))
    assert (URL_VARIABLE in environ) == (not names)
