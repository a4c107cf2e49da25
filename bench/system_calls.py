"""Counts the system calls per message of each worker, and per webhook of each receiver.

`perf` counts in the kernel, at a small cost. Under load, the count falls, because acks, confirms
and requests share calls.
"""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bench.inbound import WARM_UP, receiving
from bench.lineup import RECEIVERS, WORKERS, Contestant, present
from bench.outbound import IN_FLIGHT, check_posts, longest, task_of, wait_for_count
from bench.rig import Program, Rig
from bench.rounds import BenchError, Options, Row, Runs, Tell, interleave, medians

PERF_SECONDS: Final = 10
ATTACH_SECONDS: Final = 0.2


def system_calls(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Count for every worker at the instant API, and for every receiver with 64 connections."""

    def of_a_message(contestant: Contestant) -> Row:
        messages = round(options.messages * contestant.share)
        return {"calls": _of_a_message(rig, contestant, messages)}

    def of_a_webhook(contestant: Contestant) -> Row:
        return {"calls": _of_a_webhook(rig, contestant, options.messages)}

    workers = interleave(present(WORKERS), options.rounds, of_a_message, tell)
    receivers = interleave(present(RECEIVERS), options.rounds, of_a_webhook, tell)
    return [*_rows("worker", workers), *_rows("receiver", receivers)]


def _rows(role: str, runs: Runs) -> Iterator[Row]:
    for row in medians(runs).values():
        yield {"role": role, **row}


def _of_a_message(rig: Rig, contestant: Contestant, messages: int) -> float:
    rig.queues.make_outbound(messages)
    with rig.api() as api:
        with rig.running(contestant, task_of(rig, api, "http", IN_FLIGHT)) as program:
            deadline = time.monotonic() + longest(messages)
            wait_for_count(api, program, round(messages * WARM_UP), deadline)
            with _counting(program) as counts:
                # Send more webhooks until perf counts.
                first = api.count()
                last = wait_for_count(api, program, messages, deadline)
            program.settle()
        posts = api.posts(messages)
    check_posts(rig, contestant, posts, messages)
    return counts[0] / (last - first)


def _of_a_webhook(rig: Rig, contestant: Contestant, webhooks: int) -> float:
    with receiving(rig, contestant) as (h2load, program):
        h2load.send(round(webhooks * WARM_UP))
        with _counting(program) as counts:
            h2load.send(webhooks)
    return counts[0] / webhooks


@contextmanager
def _counting(program: Program) -> Iterator[list[int]]:
    """Count the system calls of all threads and processes of a program during the block."""
    found = shutil.which("perf")
    if found is None:
        raise BenchError("No perf is installed: install linux-perf with apt-get.")
    pids = ",".join(str(pid) for pid in program.family())
    perf = subprocess.Popen(
        [found, "stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p", pids],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    counts: list[int] = []
    try:
        time.sleep(ATTACH_SECONDS)
        yield counts
    finally:
        perf.send_signal(signal.SIGINT)
        _, told = perf.communicate(timeout=PERF_SECONDS)
    counted = re.search(r"^(\d+),,raw_syscalls:sys_enter", told, re.MULTILINE)
    if counted is None:
        raise BenchError(f"perf could not count system calls, which requires root.\n{told}")
    counts.append(int(counted[1]))
