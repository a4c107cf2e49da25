"""Simulates workers: the cost of a revoked key, and the accuracy of a shared rate limit.

Run it with `make simulate`. The seed makes random decisions reproducible.
"""

import argparse
import asyncio
import logging
import sys
from typing import Final, NamedTuple

from bridge.worker.cluster.membership import MAX_HEARTBEAT_SECONDS
from tests.simulation.windows import fewest_in, most_in
from tests.simulation.world import World

SLOTS: Final = 10
MESSAGES: Final = 5000
REVOKED_SECONDS: Final = 60.0
# Seconds for each number of workers.
PHASE_SECONDS: Final = 15.37
# Seconds during which messages of the exchange are counted: two heartbeats.
COUNTED_SECONDS: Final = 2.0 * MAX_HEARTBEAT_SECONDS
BURST_SECONDS: Final = 0.05
# Average delay of timers and requests, on an idle and on a busy machine. The busy one runs as many
# workers as fit on one machine.
IDLE_SECONDS: Final = 0.0
BUSY_SECONDS: Final = 0.01
MOST_BUSY: Final = 8


def revoked_key(workers: int, *, slots: int = SLOTS, seed: int = 1) -> tuple[int, int, int]:
    world = World(seed=seed, concurrency=slots)

    async def story() -> None:
        world.start(workers)
        await asyncio.sleep(2)
        world.queue.publish(max(MESSAGES, 20 * workers * slots))
        await asyncio.sleep(0.1)
        world.service.answer = lambda *_: (401, None)
        await asyncio.sleep(REVOKED_SECONDS)

    world.play(story())
    world.close()
    refused = world.posts(401)
    later = sum(at > refused[0] + 0.5 for at in refused)
    return len(refused) - later, later, world.queue.dead


class Used(NamedTuple):
    """Used share of a limit."""

    fullest_second: float
    fullest_come_in: float
    emptiest_ten: float


def shared_limit(most: int, *, kill: bool, late_seconds: float, seed: int = 1) -> Used:
    """Scale from 1 to 3, to 1 and to `most` workers. Every eight workers add 100 to the limit."""
    limit = 100 * max(1, most / 8)
    settings = {"per_second": limit, "burst": int(limit * BURST_SECONDS), "scope": "cluster"}
    # Enough that one worker can use the whole limit.
    slots = max(20, int(limit / 10))
    world = World(seed=seed, limit=settings, concurrency=slots, late_seconds=late_seconds)

    async def story() -> None:
        world.queue.publish(int(limit * PHASE_SECONDS * 4))
        for number in (1, 3, 1, most):
            world.scale(number, kill=kill)
            await asyncio.sleep(PHASE_SECONDS)

    world.play(story())
    world.close()
    posts = world.posts()
    come_in = sorted(post.arrived_at for post in world.service.posts)
    return Used(
        fullest_second=most_in(posts, 1) / limit,
        fullest_come_in=most_in(come_in, 1) / limit,
        emptiest_ten=fewest_in(posts, 10) / (10 * limit),
    )


def handed_out(workers: int, *, seed: int = 1) -> float:
    """Return the exchange's messages per second while nothing happens."""
    world = World(seed=seed)
    counts = []

    async def story() -> None:
        world.start(workers)
        for seconds in (PHASE_SECONDS, COUNTED_SECONDS):
            await asyncio.sleep(seconds)
            counts.append(world.exchange.carried)

    world.play(story())
    world.close()
    return (counts[1] - counts[0]) / COUNTED_SECONDS


def say(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """Print both for several numbers of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[3, 8, 100])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    say("| workers | POSTs refused at once | probes of a minute | dead |")
    say("|---:|---:|---:|---:|")
    for number in (1, *args.workers):
        at_once, later, dead = revoked_key(number, seed=args.seed)
        say(f"| {number} | {at_once} | {later} | {dead} |")
    say()
    say(
        "| workers | late by | fullest second, as sent | as it comes in "
        "| emptiest ten, stopped | killed | handed out a second |"
    )
    say("|---:|---:|---:|---:|---:|---:|---:|")
    for number in args.workers:
        told = handed_out(number, seed=args.seed)
        for late in (IDLE_SECONDS, BUSY_SECONDS) if number <= MOST_BUSY else (IDLE_SECONDS,):
            stopped = shared_limit(number, kill=False, late_seconds=late, seed=args.seed)
            killed = shared_limit(number, kill=True, late_seconds=late, seed=args.seed)
            say(
                f"| {number} | {late * 1000:.0f} ms "
                f"| {max(stopped.fullest_second, killed.fullest_second):.1%} "
                f"| {max(stopped.fullest_come_in, killed.fullest_come_in):.1%} "
                f"| {stopped.emptiest_ten:.1%} | {killed.emptiest_ten:.1%} "
                f"| {told:.0f} |"
            )


if __name__ == "__main__":
    main()
