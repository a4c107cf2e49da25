"""The usual ways to lose or double messages beside ours, measured on one private RabbitMQ.

    python soak/side_by_side.py --write

The usual ways are `naive_worker.py`, a real process like ours; `sms-bridge worker` has the
defaults of its configuration. `--write` puts the table into docs/guarantees.md.
Exit code 1: ours has lost or doubled something, or a comparison could not be made.
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from bridge.config import WorkerSettings
from bridge.topology.declarations import dead_queue, retry_queue, worker_topology
from bridge.topology.upkeep import provide
from soak.figures import PAGE, Cells, conclude, format_table, tell
from soak.naive_worker import PREFETCH
from soak.rig import SESSION_SECONDS, Process, Rig, Stand, open_stand, run
from tests.faults.amqp_proxy import DELIVER
from tests.faults.bench import Amqp, eventually, make_numbers, open_amqp, open_link

MARK: Final = "side by side"
HEAD: Final[Cells] = ("what happens", "the usual way", "there", "sms-bridge")
MAX_SECONDS: Final = 360

WAITING: Final = 200
REPEATS: Final = 3
TTL_SECONDS: Final = 3.0
QUORUM: Final[dict[str, Any]] = {"x-queue-type": "quorum"}
LATER: Final[dict[str, Any]] = {"status": 503, "headers": {"Retry-After": "1"}}
USUAL_LADDERS: Final = {
    "classic": "a TTL on a classic queue",
    "quorum": "a TTL on a quorum queue, default dead-lettering",
}
STORM_SECONDS: Final = 3.0
# RabbitMQ's own default since 4.0.
DELIVERY_LIMIT: Final = 20
# Longer than the disconnects take, mostly.
SLOW_SECONDS: Final = 40
CUTS: Final = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `broken` says what ours did that it never may."""

    cells: Cells
    broken: str = ""


@asynccontextmanager
async def naive(stand: Stand, style: str) -> AsyncIterator[tuple[Rig, Callable[[], Process]]]:
    """Lend a rig, and what starts a worker of the usual way on it."""
    async with stand.rig() as rig:
        yield rig, lambda: rig.start_naive(style)


@asynccontextmanager
async def ours(stand: Stand, **changed: Any) -> AsyncIterator[tuple[Rig, Callable[[], Process]]]:
    """Lend a rig, and what starts a worker of ours on it, with as many messages in flight."""
    changed = {"worker__concurrency": PREFETCH, **changed}
    async with stand.rig() as rig:
        yield rig, lambda: rig.start(**changed)


# Waiting messages and a restart of the broker


async def compare_ladders(stand: Stand) -> list[Row]:
    """Let the time of waiting messages run out while the broker is down."""
    rows: list[Row] = []
    for how in ("killed (`kill -9`)", "restarted in good order"):
        lost: defaultdict[str, list[int]] = defaultdict(list)
        stop = stand.broker.kill if "kill" in how else stand.broker.stop
        for repeat in range(REPEATS):
            for name, count in (await _restart(stand, f"l{len(rows)}{repeat}", stop)).items():
                lost[name].append(count)
        broken = "a retry queue of ours lost messages" if any(lost["ours"]) else ""
        what = (
            f"{WAITING} messages wait for a retry; their time runs out while the broker "
            f"is {how}; {REPEATS} times"
        )
        rows += [
            Row((what, way, _lost(lost[name]), _lost(lost["ours"])), broken)
            for name, way in USUAL_LADDERS.items()
        ]
    return rows


def _lost(counts: Sequence[int]) -> str:
    return f"lost {', '.join(map(str, counts))}"


async def _restart(stand: Stand, prefix: str, stop: Callable[[], None]) -> dict[str, int]:
    """Return how many messages each kind of retry queue lost in one restart."""
    broker = stand.broker
    settings = WorkerSettings(queue=f"{prefix}.ours", retry_delays=(TTL_SECONDS,))
    ladders = {
        "classic": (f"{prefix}.classic", f"{prefix}.classic.retry"),
        "quorum": (f"{prefix}.quorum", f"{prefix}.quorum.retry"),
        "ours": (settings.queue, retry_queue(settings.queue, TTL_SECONDS)),
    }
    async with stand.rig() as rig, open_link(rig, "side by side") as link:
        await provide(link, worker_topology(settings), "declare")
        await _declare_usual(rig.amqp, *ladders["classic"], {})
        await _declare_usual(rig.amqp, *ladders["quorum"], QUORUM)
        await asyncio.to_thread(broker.flush)
        bodies = [b"%d" % number for number in range(WAITING)]
        for _, waiting in ladders.values():
            await asyncio.gather(*(rig.amqp.publish(waiting, body) for body in bodies))
    published = time.monotonic()
    await asyncio.to_thread(stop)
    await asyncio.sleep(max(0.0, published + TTL_SECONDS + 0.2 - time.monotonic()))
    await asyncio.to_thread(broker.start)
    lost = {}
    async with open_amqp(broker.url) as amqp:
        for name, (main, waiting) in ladders.items():
            lost[name] = WAITING - await _count_left(amqp, main, waiting)
        for queue in (*(q for pair in ladders.values() for q in pair), dead_queue(settings.queue)):
            await amqp.channel.queue_delete(queue)
    return lost


async def _declare_usual(amqp: Amqp, main: str, waiting: str, arguments: dict[str, Any]) -> None:
    back: dict[str, Any] = {
        "x-message-ttl": round(TTL_SECONDS * 1000),
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": main,
    }
    await amqp.channel.declare_queue(main, durable=True, arguments=QUORUM)
    await amqp.channel.declare_queue(waiting, durable=True, arguments={**back, **arguments})


async def _count_left(amqp: Amqp, main: str, waiting: str) -> int:
    """Take out what arrives until all is there, or nothing more comes for some seconds."""
    bodies: set[bytes] = set()
    last = time.monotonic()
    while len(bodies) < WAITING and time.monotonic() - last < 5:
        found = {message.body for message in await amqp.take_all(main)}
        if found - bodies or await amqp.count(waiting):
            last = time.monotonic()
        bodies |= found
        await asyncio.sleep(0.1)
    return len(bodies)


# SIGTERM


async def compare_sigterm(stand: Stand) -> list[Row]:
    """End a worker while requests are in flight that the API is going to answer 503."""
    async with naive(stand, "process") as (rig, start):
        usual = await _end_in_flight(rig, start)
    async with ours(stand) as (rig, start):
        own = await _end_in_flight(rig, start)
    what = (
        f"SIGTERM with {PREFETCH} requests in flight, which the API answers 503 two seconds later"
    )
    way = "`async with message.process()`, tasks cancelled at SIGTERM"
    broken = "messages in flight at SIGTERM were lost" if own else ""
    return [Row((what, way, f"lost {usual}", f"lost {own}"), broken)]


async def _end_in_flight(rig: Rig, start: Callable[[], Process]) -> int:
    """Return how many messages the API never accepts, though it does from the restart on."""
    process = start()
    await process.until_consuming()
    rig.service.misbehave({**LATER, "latency_seconds": 2})
    numbers = await rig.publish(PREFETCH)
    await eventually(lambda: rig.posted == PREFETCH, what="all in flight")
    await process.end()
    rig.service.behave()
    await start().until_consuming()
    await rig.until_through(numbers)
    return len(numbers) - len(rig.service.taken(numbers))


# A connection that dies


async def compare_cuts(stand: Stand) -> list[Row]:
    """Cut the connections to the broker while requests are in flight."""
    async with naive(stand, "callback") as (rig, start):
        usual = await _cut_in_flight(rig, start)
    async with ours(stand) as (rig, start):
        own = await _cut_in_flight(rig, start)
    what = f"the connection to the broker is cut {CUTS} times with up to {PREFETCH} POSTs in flight"
    way = "POST inside aio-pika's callback, ack after it"
    cells = (f"lost {lost}, texts doubled {doubled}" for lost, doubled in (usual, own))
    return [Row((what, way, *cells), "a cut connection cost or doubled texts" if any(own) else "")]


async def _cut_in_flight(rig: Rig, start: Callable[[], Process]) -> tuple[int, int]:
    rig.service.misbehave({"latency_seconds": 0.5})
    await start().until_consuming()
    publishing = asyncio.create_task(rig.publish(300))
    for _ in range(CUTS):
        await rig.until_accepted(PREFETCH)
        rig.proxy.cut()
    numbers = await publishing
    await rig.until_through(numbers)
    lost = len(numbers) - len({message.to for message in rig.service.taken(numbers)})
    return lost, sum(rig.sent_twice(numbers).values()) - len(rig.sent_twice(numbers))


# An API that answers 503


async def compare_storms(stand: Stand) -> list[Row]:
    """Answer 503 to one message for some seconds, without and with a delivery limit."""
    async with naive(stand, "requeue") as (rig, start):
        usual, _ = await _answer_503(rig, start)
    async with ours(stand) as (rig, start):
        own, own_taken = await _answer_503(rig, start)
    what = f"one message, and an API that answers 503 for {STORM_SECONDS:g} s"
    way = "`nack(requeue=True)`"
    shown = (f"{posts / STORM_SECONDS:.0f} POSTs a second" for posts in (usual, own))
    rows = [
        Row(
            (what, way, next(shown), f"{own} POST in all, sent {own_taken}"),
            "" if own_taken and own <= STORM_SECONDS else "one 503 made a storm or lost a message",
        )
    ]
    async with naive(stand, "requeue") as (rig, start):
        await _limit_deliveries(rig)
        await _answer_503(rig, start)
        posts = [attempt.received_at for attempt in rig.service.memory.requests]
        gone = f"gone after {1000 * (posts[-1] - posts[0]):.0f} ms, {len(posts)} POSTs"
        assert not rig.accepted, "the delivery limit has not dropped the message"
    async with ours(stand) as (rig, start):
        await _limit_deliveries(rig)
        own, own_taken = await _answer_503(rig, start)
    what = f"the same with a delivery limit of {DELIVERY_LIMIT}, RabbitMQ's default since 4.0"
    broken = "" if own_taken else "the delivery limit dropped a message of ours"
    rows.append(Row((what, way, gone, f"lost {1 - own_taken}"), broken))
    return rows


async def _answer_503(rig: Rig, start: Callable[[], Process]) -> tuple[int, int]:
    """Return how many POSTs one message made of the 503s, and whether it was accepted after."""
    rig.service.misbehave({"status": 503})
    await start().until_consuming()
    numbers = await rig.publish(1)
    await eventually(lambda: rig.posted, what="the first POST")
    await asyncio.sleep(STORM_SECONDS)
    posts = rig.posted
    rig.service.behave()
    await rig.until_through(numbers)
    return posts, len(rig.service.taken(numbers))


async def _limit_deliveries(rig: Rig) -> None:
    policy = f'{{"delivery-limit":{DELIVERY_LIMIT}}}'
    pattern = rf"^{rig.queue.replace('.', '[.]')}$"
    await asyncio.to_thread(
        rig.broker.ctl, "set_policy", rig.queue, pattern, policy, "--apply-to", "queues"
    )


# Disconnects and a delivery limit


async def compare_disconnects(stand: Stand) -> list[Row]:
    """Cut connections more often than a delivery limit allows."""
    async with naive(stand, "callback") as (rig, start):
        usual = await _disconnect_often(rig, start)
    async with ours(stand, sms_api__timeout_seconds=120) as (rig, start):
        own = await _disconnect_often(rig, start)
    what = (
        f"{PREFETCH} messages prefetched from an API that is slow, then answers 503; "
        f"{DELIVERY_LIMIT + 1} disconnects; delivery limit {DELIVERY_LIMIT}"
    )
    way = "POST inside aio-pika's callback, ack after it"
    broken = "the delivery limit dropped messages of ours" if own else ""
    return [Row((what, way, f"lost {usual}", f"lost {own}"), broken)]


async def _disconnect_often(rig: Rig, start: Callable[[], Process]) -> int:
    await _limit_deliveries(rig)
    rig.service.misbehave({**LATER, "latency_seconds": SLOW_SECONDS})
    await start().until_consuming()
    delivered = rig.proxy.trap("broker", DELIVER, "pass", nth=PREFETCH, again=True)
    numbers = await rig.publish(PREFETCH)
    for _ in range(DELIVERY_LIMIT + 1):
        await eventually(delivered.sprung.is_set, what="all are delivered")
        delivered.sprung.clear()
        await asyncio.sleep(SESSION_SECONDS)
        rig.proxy.cut()
    rig.service.behave()
    first = rig.service.posts(numbers)[0].received_at
    await asyncio.sleep(max(0.0, first + SLOW_SECONDS + 2 - time.time()))
    await rig.until_through(numbers)
    return len(numbers) - len({message.to for message in rig.service.taken(numbers)})


# A copy that no queue takes


async def compare_unroutable(stand: Stand) -> list[Row]:
    """Send retries to a queue that is not there."""
    count = 100
    async with naive(stand, "copy") as (rig, start):
        usual = await _retry_into_nowhere(rig, start, count)
    async with ours(stand) as (rig, start):
        own = await _retry_into_nowhere(rig, start, count)
    what = f"{count} retries published while their queue is missing"
    way = "`publish()` without `on_return_raises`, then ack"
    broken = "copies that no queue took were lost" if own else ""
    return [Row((what, way, f"lost {usual}", f"lost {own}"), broken)]


async def _retry_into_nowhere(rig: Rig, start: Callable[[], Process], count: int) -> int:
    await start().until_consuming()
    for queue in rig.ladder:
        await rig.amqp.channel.queue_delete(queue)
    numbers = make_numbers(count)
    rig.service.misbehave(*({**LATER, "to": number, "count": 1} for number in numbers))
    await rig.publish(numbers)
    await rig.until_through(numbers)
    return len(numbers) - len({message.to for message in rig.service.taken(numbers)})


Compare = Callable[[Stand], Awaitable[list[Row]]]
COMPARISONS: Final[dict[str, Compare]] = {
    "ladders": compare_ladders,
    "sigterm": compare_sigterm,
    "cuts": compare_cuts,
    "storms": compare_storms,
    "disconnects": compare_disconnects,
    "unroutable": compare_unroutable,
}


async def main(names: Sequence[str], *, write: bool) -> int:
    """Compare, print, and return the exit code."""
    rows: list[Row] = []
    failures: list[str] = []
    try:
        async with asyncio.timeout(MAX_SECONDS), open_stand() as stand:
            for name in names:
                started = time.monotonic()
                try:
                    rows += await COMPARISONS[name](stand)
                except AssertionError as error:
                    failures.append(f"{name}: {error}")
                tell(f"{name}: {time.monotonic() - started:.0f} s")
    except TimeoutError:
        failures.append(f"not over after {MAX_SECONDS} s")
    table = format_table(HEAD, [row.cells for row in rows])
    problems = [*failures, *(row.broken for row in rows if row.broken)]
    return conclude(table, problems, page=PAGE if write else None, mark=MARK)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The usual ways to lose messages beside ours.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    if unknown := set(options.names) - set(COMPARISONS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if options.write and options.names:
        parser.error("--write needs all comparisons")
    return options


if __name__ == "__main__":
    arguments = _parse_arguments()
    sys.exit(run(main(arguments.names or [*COMPARISONS], write=arguments.write)))
