"""The command line, before a command runs."""

import subprocess
import sys

# Each takes longer to import than all that the help needs.
SLOW = {"aio_pika", "httpx", "prometheus_client", "pydantic", "rich", "starlette", "uvloop", "yaml"}


def test_the_help_imports_nothing_slow() -> None:
    """What a command needs is imported when it runs, so that `--help` and completion are quick."""
    program = "import sys, bridge.__main__; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )

    assert SLOW & set(run.stdout.split()) == set()
