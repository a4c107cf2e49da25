"""Runs workers: drains a queue with one or several, and measures the first POST."""

import time
from dataclasses import dataclass
from typing import Final

from bench.api import Api, Kind, Post
from bench.lineup import Contestant, Task
from bench.queues import OUTBOUND
from bench.rig import Program, Rig
from bench.rounds import BenchError

# Warm-up, which does not count: connections are opened, and caches filled.
WARM_UP: Final = 0.1
POLL_SECONDS: Final = 0.02
START_SECONDS: Final = 60
# Every worker is much faster than this, on any machine.
SLOWEST_PER_SECOND: Final = 10
IN_FLIGHT: Final = 100


@dataclass(frozen=True, slots=True)
class Drain:
    """Figures of a run.

    Rates are messages per second, per second of its CPU time, and per second of the broker's.
    """

    messages: int
    wall_rate: float
    cpu_rate: float
    broker_cpu_rate: float
    peak_mib: float
    connections: int


@dataclass(frozen=True, slots=True)
class Share:
    """Figures of several processes on one queue.

    Rates are messages per second, per second of their CPU time, and per second of the broker's.
    """

    wall_rate: float
    cpu_rate: float
    broker_cpu_rate: float
    peak_mib: float


def drain(
    rig: Rig,
    contestant: Contestant,
    *,
    kind: Kind,
    in_flight: int,
    messages: int,
    warm_up: float = WARM_UP,
) -> Drain:
    """Fill the queue, start the worker, and measure until the API has every message.

    The CPU time excludes the first share `warm_up` of the messages. Raises BenchError if a message
    is not POSTed exactly once, or not acked.
    """
    rig.queues.make_outbound(messages)
    with rig.api() as api:
        with rig.running(contestant, task_of(rig, api, kind, in_flight)) as program:
            cpu_rate, broker_cpu_rate = _follow(rig, api, program, messages, warm_up)
            program.settle()
            peak_mib = program.usage().peak_mib
        posts = api.posts(messages)
    check_posts(rig, contestant, posts, messages)
    return Drain(
        messages=messages,
        wall_rate=_wall_rate(posts),
        cpu_rate=cpu_rate,
        broker_cpu_rate=broker_cpu_rate,
        peak_mib=peak_mib,
        connections=len({post.connection for post in posts}),
    )


def share(
    rig: Rig,
    contestant: Contestant,
    *,
    kind: Kind,
    in_flight: int,
    messages: int,
    processes: int,
) -> Share:
    """Start all processes on an empty queue, fill it, and measure until the API has every message.

    The processes are frozen while the queue is filled, so that all begin at the same time.
    Raises BenchError if a message is not POSTed exactly once, or not acked.
    """
    rig.queues.make_outbound()
    with rig.api() as api:
        task = task_of(rig, api, kind, in_flight // processes)
        with rig.running(contestant, task, times=processes) as program:
            wait_for_consumers(rig, contestant, processes)
            with program.frozen():
                rig.queues.fill_outbound(messages)
                before, broker_before = program.usage(), rig.broker_usage()
            wait_for_count(api, program, messages, time.monotonic() + longest(messages))
            program.settle()
            after, broker_after = program.usage(), rig.broker_usage()
        posts = api.posts(messages)
    check_posts(rig, contestant, posts, messages)
    return Share(
        wall_rate=_wall_rate(posts),
        cpu_rate=messages / (after.cpu_seconds - before.cpu_seconds),
        broker_cpu_rate=messages / (broker_after.cpu_seconds - broker_before.cpu_seconds),
        peak_mib=after.peak_mib,
    )


def consume(rig: Rig, contestant: Contestant, *, messages: int, processes: int) -> Share:
    """Fill the queue, and measure a program that only consumes and acks.

    The rates exclude the first tenth of the messages.
    """
    rig.queues.make_outbound(messages)
    task = Task(amqp_url=rig.broker.url)
    with rig.running(contestant, task, times=processes) as program:
        deadline = time.monotonic() + longest(messages)
        first = _wait_until_left(rig, program, round(messages * (1 - WARM_UP)), deadline)
        begun, before, broker_before = time.monotonic(), program.usage(), rig.broker_usage()
        last = _wait_until_left(rig, program, 0, deadline)
        seconds, after, broker_after = time.monotonic() - begun, program.usage(), rig.broker_usage()
    taken = first - last
    return Share(
        wall_rate=taken / seconds,
        cpu_rate=taken / (after.cpu_seconds - before.cpu_seconds),
        broker_cpu_rate=taken / (broker_after.cpu_seconds - broker_before.cpu_seconds),
        peak_mib=after.peak_mib,
    )


def first_post(rig: Rig, contestant: Contestant) -> float:
    """Start a worker with one message in the queue, and return the seconds until its POST.

    Metrics are not scraped meanwhile.
    """
    rig.queues.make_outbound(1)
    with rig.api() as api:
        started = time.time()
        task = task_of(rig, api, "http", 1)
        with rig.running(contestant, task, is_scraped=False) as program:
            wait_for_count(api, program, 1, time.monotonic() + START_SECONDS)
            program.settle()
        return api.posts(1)[0].at - started


def task_of(rig: Rig, api: Api, kind: Kind, in_flight: int) -> Task:
    """Return the task of a worker."""
    return Task(
        amqp_url=rig.broker.url,
        api_url=api.url(kind),
        ca_file=rig.certificate.ca_file if kind == "https" else None,
        in_flight=in_flight,
    )


def _follow(
    rig: Rig, api: Api, program: Program, messages: int, warm_up: float
) -> tuple[float, float]:
    """Return the messages per second of CPU time and of the broker's, after the warm-up."""
    deadline = time.monotonic() + longest(messages)
    first = wait_for_count(api, program, round(messages * warm_up), deadline)
    before, broker_before = program.usage(), rig.broker_usage()
    last = wait_for_count(api, program, messages, deadline)
    after, broker_after = program.usage(), rig.broker_usage()
    return (
        (last - first) / (after.cpu_seconds - before.cpu_seconds),
        (last - first) / (broker_after.cpu_seconds - broker_before.cpu_seconds),
    )


def longest(messages: int) -> float:
    """Return the timeout in seconds, which suits the slowest worker."""
    return START_SECONDS + messages / SLOWEST_PER_SECOND


def wait_for_consumers(rig: Rig, contestant: Contestant, count: int = 1) -> None:
    """Wait until this many processes consume. Raise BenchError after the timeout."""
    if not rig.queues.wait_for_consumers(count, seconds=START_SECONDS):
        raise BenchError(f"{contestant.name} does not consume")


def _wait_until_left(rig: Rig, program: Program, wanted: int, deadline: float) -> int:
    while (count := rig.queues.count(OUTBOUND)) > wanted:
        program.usage()
        if time.monotonic() > deadline:
            raise BenchError(f"{program.name} left {count} messages in the queue")
        time.sleep(POLL_SECONDS)
    return count


def wait_for_count(api: Api, program: Program, wanted: int, deadline: float) -> int:
    """Wait until the API has this many messages, and return its count, or raise BenchError."""
    while (count := api.count()) < wanted:
        program.usage()
        if time.monotonic() > deadline:
            raise BenchError(f"{program.name} POSTed {count} of {wanted} messages")
        time.sleep(POLL_SECONDS)
    return count


def check_posts(
    rig: Rig, contestant: Contestant, posts: list[Post], messages: int, *, queue: str = OUTBOUND
) -> None:
    """Raise BenchError if a message was not POSTed exactly once, accepted and acked."""
    ids = {post.message_id for post in posts}
    accepted = sum(post.status in range(200, 300) for post in posts)
    left = rig.queues.count(queue)
    if not len(ids) == len(posts) == accepted == messages or left:
        raise BenchError(
            f"{contestant.name}: of {messages} messages {len(ids)} were POSTed, "
            f"in {len(posts)} POSTs, {accepted} accepted; {left} are left in the queue"
        )


def _wall_rate(posts: list[Post]) -> float:
    warm = _warm(posts)
    return (len(warm) - 1) / (warm[-1].at - warm[0].at)


def _warm(posts: list[Post]) -> list[Post]:
    posts = sorted(posts, key=lambda post: post.at)
    return posts[round(len(posts) * WARM_UP) :]
