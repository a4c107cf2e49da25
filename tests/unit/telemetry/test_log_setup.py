"""The writer before standard output never blocks, and drops whole lines only."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bridge.telemetry.log_setup import MAX_LINES, LineWriter
from tests.ears import Ears


@dataclass
class Pipe:
    """A pipe, the writer at its end, and the numbers of dropped lines."""

    read_end: int
    writer: LineWriter
    dropped: list[int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    read_end, write_end = os.pipe()
    dropped: list[int] = []
    with open(write_end, "w", encoding="utf-8") as stream:  # noqa: PTH123  a descriptor, no path
        writer = LineWriter(stream, dropped=dropped.append)
        yield Pipe(read_end, writer, dropped)
        os.close(read_end)
        # Before the number of the descriptor is reused.
        writer.finish()


def read_lines(descriptor: int, count: int) -> list[str]:
    with open(descriptor, encoding="utf-8", closefd=False) as stream:
        return [stream.readline() for _ in range(count)]


def test_lines_stay_in_order(pipe: Pipe) -> None:
    """All lines arrive in order when the writer is finished."""
    for number in range(1000):
        pipe.writer.write(f"{number}\n")
    pipe.writer.finish()

    assert read_lines(pipe.read_end, 1000) == [f"{number}\n" for number in range(1000)]


def test_dropped_lines_are_reported(pipe: Pipe, ears: Ears) -> None:
    """A warning has the number of missing lines as soon as there is room again."""
    for _ in range(3 * MAX_LINES):
        pipe.writer.write("x" * 200 + "\n")
    missing = sum(pipe.dropped)
    read_lines(pipe.read_end, 3 * MAX_LINES - missing)
    pipe.writer.write("y\n")

    told = ears.heard("log_lines_dropped")
    assert missing
    assert sum(facts["lines"] for facts in told) == missing


def test_a_closed_pipe_costs_its_lines_only(ears: Ears) -> None:
    """Lines to a broken pipe are lost, and no warning follows."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    dropped: list[int] = []
    with open(write_end, "w", encoding="utf-8") as stream:  # noqa: PTH123
        writer = LineWriter(stream, dropped=dropped.append)
        writer.write("lost\n")
        writer.finish()
        writer.write("lost, too\n")

    assert (dropped, ears.heard("log_lines_dropped")) == ([1], [])


FULL_DISK = """
import itertools, resource, sys, time
from bridge.telemetry.log_setup import LineWriter

most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
lost, numbers = [], itertools.count()
with open(sys.argv[1], "w") as stream:
    writer = LineWriter(stream, dropped=lost.append)
    for room in (1000, 1010, 3333, 3334):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
        told = len(lost)
        while len(lost) == told:
            writer.write(f"line {next(numbers):4} {'x' * 50}\\n")
            time.sleep(0.001)
    # The next line reports the last failure.
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    while not writer._is_writable:
        writer.write(f"line {next(numbers):4} {'x' * 50}\\n")
        time.sleep(0.001)
    writer.write(f"line {next(numbers):4} {'x' * 50}\\n")
    writer.finish()
print(next(numbers), sum(lost))
"""


def test_full_disk_tears_no_line(tmp_path: Path) -> None:
    """A disk that fills up in the middle of a line, again and again, loses whole lines only."""
    file = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(file)], capture_output=True, check=True, timeout=30
    )
    written, lost = map(int, ran.stdout.split())
    lines = file.read_text(encoding="utf-8").splitlines()
    numbers = [int(line[5:9]) for line in lines]

    assert all(re.fullmatch("line [ 0-9]{4} x{50}", line) for line in lines)
    assert numbers == sorted(set(numbers))
    assert lost > 0
    assert len(lines) + lost == written
