"""Measures the cost per message and the memory of the worker, for queues of increasing length.

Of a million messages, RabbitMQ keeps only the newest in memory. Reading the others from disk takes
twice its CPU time, so the million is drained again with a broker that keeps all in memory.
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

from bench.lineup import MAIN, named
from bench.outbound import IN_FLIGHT, drain
from bench.rig import Rig, rigged
from bench.rounds import Options, Row, Tell, medians, tell_run

# Warm-up messages, or a short queue would only measure the start.
WARM_UP_MESSAGES: Final = 2_000
# A run with a million takes four minutes.
MAX_ROUNDS: Final = 3
# RabbitMQ keeps the last file of the quorum queues' log in memory.
IN_MEMORY: Final = ("raft.wal_max_size_bytes = 4000000000",)


@dataclass(frozen=True, slots=True)
class _Length:
    """A queue length. Short queues are drained several times in a round."""

    messages: int
    times: int = 1
    is_in_memory: bool = False

    @property
    def name(self) -> str:
        return f"{self.messages:,}{', in the memory of the broker' * self.is_in_memory}"


CURVE: Final = (_Length(1_000, times=5), _Length(10_000, times=3), _Length(100_000))
MILLION: Final = (_Length(1_000_000), _Length(1_000_000, is_in_memory=True))


def long_queues(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Drain queues of every length in each round, so that slow minutes affect all of them."""
    lengths = (*CURVE, *(MILLION if options.million else ()))
    runs: dict[_Length, list[Row]] = {length: [] for length in lengths}
    for _ in range(min(options.rounds, MAX_ROUNDS)):
        for length in lengths:
            runs[length] += _drained(rig, length, tell)
    return [_summed_up(length, ours) for length, ours in runs.items()]


def _drained(rig: Rig, length: _Length, tell: Tell) -> list[Row]:
    its_own = rigged(configuration=IN_MEMORY) if length.is_in_memory else nullcontext(rig)
    with its_own as fitting:
        return [_drain(fitting, length, tell) for _ in range(length.times)]


def _drain(rig: Rig, length: _Length, tell: Tell) -> Row:
    total = WARM_UP_MESSAGES + length.messages
    warm_up = WARM_UP_MESSAGES / total
    run = drain(rig, named(MAIN), kind="http", in_flight=IN_FLIGHT, messages=total, warm_up=warm_up)
    row = asdict(run) | {"messages": length.messages}
    tell_run(tell, length.name, row)
    return row


def _summed_up(length: _Length, runs: list[Row]) -> Row:
    costs = [1000 / run["cpu_rate"] for run in runs]
    spread = {"cpu_ms": median(costs), "cpu_ms_min": min(costs), "cpu_ms_max": max(costs)}
    return medians({length.name: runs})[length.name] | spread
