"""Child processes end with us, however we end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from bridge.sandbox.processes import Child, guarded, wait_until

DEADLINE_SECONDS = 10

# Starts a child, tells its id, and dies without a chance to clean up.
DOOMED = """
import os, signal, sys
from pathlib import Path
from bridge.sandbox.processes import Child, guarded

with guarded() as guard:
    log = Path(sys.argv[1])
    child = Child(["sleep", "60"], guard=guard, log=log, environ=os.environ)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

# Ignores SIGTERM, so that only SIGKILL ends it.
STUBBORN = ["/bin/sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    # Where nobody reaps orphans, an ended process stays in the table.
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_children_end_with_a_killed_parent(tmp_path: Path) -> None:
    """A child does not outlive a parent that was ended by SIGKILL."""
    parent = subprocess.run(
        [sys.executable, "-c", DOOMED, str(tmp_path / "child.log")],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )
    pid = int(parent.stdout)

    assert parent.returncode == -signal.SIGKILL
    assert wait_until(lambda: _is_gone(pid), seconds=DEADLINE_SECONDS)


def test_a_deaf_child_is_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    """SIGTERM comes first, SIGKILL after the grace."""
    with guarded() as guard:
        child = Child(STUBBORN, guard=guard, log=tmp_path / "deaf.log", environ=os.environ)
        assert wait_until(lambda: child.tail() == "deaf", seconds=DEADLINE_SECONDS)
        child.end(grace_seconds=0.1)

        assert child.exit_code == -signal.SIGKILL


def test_waiting_ends_early_for_a_child_that_is_gone() -> None:
    """Nobody waits for the readiness of what runs no more."""
    assert not wait_until(lambda: False, seconds=60, running=lambda: False)
