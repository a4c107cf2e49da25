"""CPU time and memory of processes."""

import os
import subprocess
import sys

from bench.usage import read_run_delay, read_usage

_BURN = """
import sys, time
while time.process_time() < float(sys.argv[1]):
    pass
print("done", flush=True)
sys.stdin.read()
"""
_START = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[2], "0.3"])
"""


def test_counts_the_time_and_memory_of_all_that_a_process_started() -> None:
    """The CPU time of a child counts for its parent, even after the child has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", _START, "0", _BURN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        usage = read_usage([parent.pid])
        parent.stdin.close()

    assert usage.cpu_seconds >= 0.25
    assert 5 < usage.peak_mib < 500


def test_a_process_that_has_ended_adds_nothing() -> None:
    """An unknown process id is not an error."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass

    usage = read_usage([process.pid])

    assert usage.cpu_seconds == 0
    assert usage.peak_mib == 0


def test_waiting_for_a_cpu_is_told() -> None:
    """Two processes on one core wait for each other."""
    (cpu, *_) = os.sched_getaffinity(0)
    pinned = f"import os; os.sched_setaffinity(0, [{cpu}])\n{_BURN}"
    command = [sys.executable, "-c", pinned, "0.3"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"done\n"
        waited = read_run_delay(one.pid) + read_run_delay(other.pid)
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.close()

    assert waited >= 0.1
