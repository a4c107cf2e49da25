"""The demo, whole: real broker, real processes, faults, and the account of every message."""

import subprocess
import sys


def test_the_demo_accounts_for_every_message() -> None:
    """A short demo ends with exit code 0 and says that nothing is unaccounted for."""
    command = [sys.executable, "-m", "bridge", "demo", "--messages", "50", "--events", "20"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Every message is accounted for, none was sent twice." in ended.stdout
