"""Measures the latency of single messages, at shares of each contestant's maximum rate.

The maximum is measured first, while messages are fed: broker, feeder and API share the cores.
"""

from collections.abc import Callable
from typing import Final

from bench.api import Api
from bench.inbound import receiving
from bench.lineup import RECEIVERS, WORKERS, Contestant, present
from bench.outbound import IN_FLIGHT, START_SECONDS, task_of, wait_for_consumers
from bench.rig import Rig
from bench.rounds import BenchError, Options, Row, Tell, interleave, medians
from bridge.sandbox.processes import wait_until

PERCENTS: Final = (10, 50, 80)
CAPACITY_SECONDS: Final = 6.0
EACH_SECONDS: Final = 5.0
# Webhooks for a first estimate of the rate.
FIRST_WEBHOOKS: Final = 1_000
# Warm-up, which does not count.
WARM_UP: Final = 0.1
# A round takes two to three minutes.
MAX_ROUNDS: Final = 2


def worker_latency(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure from publishing to the API's answer, for workers that are fast enough for a p99."""
    fast = [one for one in present(WORKERS) if one.share == 1]
    return _measure(fast, options, tell, lambda one: _worker_delays(rig, one))


def receiver_latency(rig: Rig, options: Options, tell: Tell) -> list[Row]:
    """Measure from request to answer, for every receiver."""
    return _measure(present(RECEIVERS), options, tell, lambda one: _receiver_delays(rig, one))


def _measure(
    contestants: list[Contestant],
    options: Options,
    tell: Tell,
    run: Callable[[Contestant], Row],
) -> list[Row]:
    rounds = min(options.rounds, MAX_ROUNDS)
    return [*medians(interleave(contestants, rounds, run, tell)).values()]


def _worker_delays(rig: Rig, contestant: Contestant) -> Row:
    rig.queues.make_outbound()
    published: list[dict[str, float]] = []
    with rig.api() as api:
        with rig.running(contestant, task_of(rig, api, "http", IN_FLIGHT)):
            wait_for_consumers(rig, contestant)
            total, capacity = rig.queues.keep_outbound_filled(api.count, seconds=CAPACITY_SECONDS)
            _wait_for_posts(api, contestant, total)
            for percent in PERCENTS:
                rate = capacity * percent / 100
                fed = rig.queues.feed_outbound(per_second=rate, seconds=EACH_SECONDS, first=total)
                published.append(fed)
                total += len(fed)
                _wait_for_posts(api, contestant, total)
        posted = {post.message_id: post.at for post in api.posts(total)}
    if len(posted) < total:
        raise BenchError(f"{contestant.name} POSTed {len(posted)} of {total} messages")
    row: Row = {"capacity": capacity}
    for percent, fed in zip(PERCENTS, published, strict=True):
        warm = list(fed.items())[round(len(fed) * WARM_UP) :]
        row |= _quantiles(percent, [(posted[name] - at) * 1000 for name, at in warm])
    return row


def _receiver_delays(rig: Rig, contestant: Contestant) -> Row:
    with receiving(rig, contestant) as (h2load, _):
        first = h2load.send(FIRST_WEBHOOKS)
        capacity = h2load.send(max(FIRST_WEBHOOKS, round(first * CAPACITY_SECONDS / 2)))
        row: Row = {"capacity": capacity}
        for percent in PERCENTS:
            rate = capacity * percent / 100
            row |= _quantiles(percent, h2load.send_evenly(per_second=rate, seconds=EACH_SECONDS))
    return row


def _quantiles(percent: int, milliseconds: list[float]) -> Row:
    ascending = sorted(milliseconds)
    return {
        f"{name}_ms_at_{percent}": ascending[min(len(ascending) - 1, int(len(ascending) * share))]
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def _wait_for_posts(api: Api, contestant: Contestant, total: int) -> None:
    if not wait_until(lambda: api.count() >= total, seconds=START_SECONDS):
        raise BenchError(f"{contestant.name} POSTed {api.count()} of {total} messages")
