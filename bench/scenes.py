"""The scenes of the benchmark: contestants, tasks, rounds and medians."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Final

from bench import instructions
from bench.adaptive import adaptive
from bench.api import LATE_SECONDS, Kind
from bench.beside import drain_beside
from bench.inbound import load
from bench.latency import receiver_latency, worker_latency
from bench.lineup import (
    BARE,
    BROKER_LIMIT,
    DEFAULT_PRESET,
    HERE,
    MAIN,
    OURS,
    PERF_TEST,
    PLAIN,
    RECEIVERS,
    SHAPES,
    STARLETTE,
    TRACED,
    UNTRACED,
    WORKERS,
    Contestant,
    named,
    present,
)
from bench.long_queues import long_queues
from bench.outbound import IN_FLIGHT, consume, drain, first_post, share
from bench.parts import log_line, post
from bench.pauses import pauses
from bench.rig import Rig
from bench.rounds import (
    Options,
    Row,
    Runs,
    Tell,
    compared,
    interleave,
    medians,
    rate_ratios,
    rotated,
    tell_run,
)
from bench.system_calls import system_calls

LATE_IN_FLIGHT: Final = 200
PROCESSES: Final = (1, 2, 4, 8)
BARE_PROCESSES: Final = (1, 2)
# A consumer that only acks is faster.
BARE_SHARE: Final = 2
# A round takes two minutes.
MAX_SHARED_ROUNDS: Final = 2
# With the slow API, each process gets work for 6 s.
SLOW_SECONDS: Final = 6
# Per worker, with several workers and the slow API.
SHARED_IN_FLIGHT: Final = 40
# CPU time has a resolution of 10 ms, which matters in runs of few messages.
MIN_MESSAGES: Final = 500
HELP_SECONDS: Final = 60
MIN_GUARD_ROUNDS: Final = 3


def workers_over_http(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure every worker at the instant API with 100 in flight."""
    return _drain_all(rig, options, tell, kind="http", in_flight=IN_FLIGHT)


def workers_over_https(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure every worker at the instant API over TLS 1.3 with 100 in flight."""
    return _drain_all(rig, options, tell, kind="https", in_flight=IN_FLIGHT)


def workers_with_slow_api(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure every worker at an API that takes 100 ms, with 200 in flight."""
    rows = _drain_all(rig, options, tell, kind="late", in_flight=LATE_IN_FLIGHT)
    limit = LATE_IN_FLIGHT / LATE_SECONDS
    return [row | {"of_limit": row["wall_rate"] / limit} for row in rows]


def shapes(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure the worker with the request shapes of several presets."""

    def run(contestant: Contestant) -> Row:
        messages = options.messages
        return asdict(drain(rig, contestant, kind="http", in_flight=IN_FLIGHT, messages=messages))

    rows = compared(interleave(SHAPES, options.rounds, run, tell), DEFAULT_PRESET)
    return [row | {"what": shape.what} for row, shape in zip(rows, SHAPES, strict=True)]


def tracing(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure workers that trace no messages, 10 % and 100 %, in parallel."""
    runs: Runs = {one.name: [] for one in TRACED}
    for number in range(options.rounds):
        rows = drain_beside(
            rig, rotated(TRACED, number), in_flight=IN_FLIGHT, messages=options.messages
        )
        for name, row in rows.items():
            runs[name].append(row)
            tell_run(tell, f"{number + 1}/{options.rounds} {name}", row)
    return compared(runs, UNTRACED)


def several_workers(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure one to eight worker processes on one queue.

    With the slow API, each process has its own limit, and cores stay free. With the instant API,
    they share the cores with the broker and the API. Consumers that only ack, if installed, show
    the broker's maximum.
    """
    runs: Runs = {}
    for _ in range(min(options.rounds, MAX_SHARED_ROUNDS)):
        for processes in PROCESSES:
            runs.setdefault(f"{processes}", []).append(_shared(rig, tell, options, processes))
        for processes in BARE_PROCESSES if PERF_TEST.exists() else ():
            run = consume(
                rig, BROKER_LIMIT, messages=BARE_SHARE * options.messages, processes=processes
            )
            tell_run(tell, f"{BROKER_LIMIT.name}, {processes}", figures := asdict(run))
            runs.setdefault(f"{BROKER_LIMIT.name}, {processes}", []).append(figures)
    return [*medians(runs).values()]


def _shared(rig: Rig, tell: Tell, options: Options, processes: int) -> Row:
    in_flight = processes * SHARED_IN_FLIGHT
    limit = in_flight / LATE_SECONDS
    run = partial(share, rig, named(MAIN), processes=processes)
    slow = run(kind="late", in_flight=in_flight, messages=round(limit * SLOW_SECONDS))
    instant = run(kind="http", in_flight=IN_FLIGHT, messages=options.messages)
    added = {"slow_wall_rate": slow.wall_rate, "of_limit": slow.wall_rate / limit}
    figures = asdict(instant) | added
    tell_run(tell, f"{MAIN}, {processes}", figures)
    return figures


def receivers(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure every receiver with 64 connections."""
    runs = interleave(
        present(RECEIVERS),
        options.rounds,
        lambda one: asdict(load(rig, one, webhooks=options.messages)),
        tell,
    )
    return _with_gain(runs, STARLETTE)


def start_up(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure from the start of a worker to its first POST, and the duration of --help."""
    runs = interleave(
        present(WORKERS),
        options.rounds,
        lambda one: {"seconds": first_post(rig, one)},
        tell,
    )
    rows = list(medians(runs).values())
    helps = [_time_help() for _ in range(options.rounds)]
    tell(f"--help: {median(helps):.2f} s")
    return [*rows, {"name": "`sms-bridge --help`", "runs": len(helps), "seconds": median(helps)}]


SCENES: Final[dict[str, Callable[[Rig, Options, Tell], list[Row]]]] = {
    "http": workers_over_http,
    "https": workers_over_https,
    "slow-api": workers_with_slow_api,
    "receivers": receivers,
    "worker-latency": worker_latency,
    "receiver-latency": receiver_latency,
    "pauses": pauses,
    "shapes": shapes,
    "tracing": tracing,
    "long-queues": long_queues,
    "several-workers": several_workers,
    "adaptive": adaptive,
    "start-up": start_up,
    "log-line": log_line,
    "post": post,
    "system-calls": system_calls,
    "instructions": instructions.of_a_message,
    "webhook-instructions": instructions.of_a_webhook,
}


def guard(rig: Rig, *, messages: int, seconds: float, tell: Tell) -> list[float]:
    """Run the worker and the bare loop in turn until the time is up.

    Return the ratio of their messages per second of CPU time, for each round.
    """

    def run(contestant: Contestant) -> Row:
        return asdict(drain(rig, contestant, kind="http", in_flight=IN_FLIGHT, messages=messages))

    deadline = time.monotonic() + seconds
    ratios: list[float] = []
    while len(ratios) < MIN_GUARD_ROUNDS or time.monotonic() < deadline:
        pair = [named(HERE), named(BARE)]
        if len(ratios) % 2:
            pair.reverse()
        ratios += rate_ratios(interleave(pair, 1, run, tell), HERE, BARE)
    return ratios


def _drain_all(rig: Rig, options: Options, tell: Tell, *, kind: Kind, in_flight: int) -> list[Row]:
    def run(contestant: Contestant) -> Row:
        messages = max(MIN_MESSAGES, round(options.messages * contestant.share))
        return asdict(drain(rig, contestant, kind=kind, in_flight=in_flight, messages=messages))

    return _with_gain(interleave(present(WORKERS), options.rounds, run, tell), BARE)


def _with_gain(runs: Runs, yardstick: str) -> list[Row]:
    """Compare all, and add the ratio to the plain build to the compiled row."""
    rows = compared(runs, yardstick)
    if OURS not in runs:
        return rows
    gain = {"to_plain": median(rate_ratios(runs, OURS, PLAIN))}
    return [row | gain if row["name"] == OURS else row for row in rows]


def _time_help() -> float:
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "bridge", "--help"],
        stdout=subprocess.DEVNULL,
        timeout=HELP_SECONDS,
        check=True,
    )
    return time.perf_counter() - begun
