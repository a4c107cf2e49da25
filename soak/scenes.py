"""Long proofs of single promises, against a worker process, a private broker and a service.

    python soak/scenes.py sigterm kill --write

Without names all scenes are played, one after the other. `--write` puts the figures of those that
kept their promise into docs/guarantees.md. Exit code 1: a promise was broken.
"""

import argparse
import asyncio
import bisect
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from bridge.worker.service.breaker_states import MAX_PROBE_SECONDS
from soak.figures import PAGE, Cells, format_table, merge_rows, replace_table, tell
from soak.rig import (
    CONCURRENCY,
    LATENCY_SECONDS,
    SESSION_SECONDS,
    Account,
    Process,
    Rig,
    Stand,
    open_stand,
    run,
)
from tests.faults.amqp_proxy import ACK, DELIVER, Deed, Method, Sender
from tests.faults.bench import CONSUME_LINK, eventually
from tests.faults.http_proxy import open_http_proxy

MARK: Final = "scenes"
HEAD: Final[Cells] = ("scene", "what is done", "what was measured")

PER_SECOND: Final = 100.0
READ_SECONDS: Final = 0.2
# A worker that lives for a second or two leaves a backlog all the same.
PER_SECOND_OF_MANY: Final = 30.0
SLOW: Final[dict[str, Any]] = {"latency_seconds": LATENCY_SECONDS}
SOON_SECONDS: Final = 10.0
DEEDS: Final[tuple[Deed, Deed]] = ("cut", "cut_after")
# What was on its way when the service closed its window has arrived by then.
ON_ITS_WAY_SECONDS: Final = 1.0
WINDOW_SECONDS: Final = 3
WINDOWS: Final = 8
CAPACITY_PER_SECOND: Final = 10.0
# A pause probes with one message at a time, and each probe may be the last for its message.
HANDFUL: Final = 20
# So long the broker is up, at least, so that a worker's connections are of use again.
UP_SECONDS: Final = 5
WARM_UP_SECONDS: Final = 20
WATCH_SECONDS: Final = 60
# The ledger remembers each message for a while; what a lost connection leaves comes on top.
MAX_GROWTH_BYTES_PER_MESSAGE: Final = 2048


@dataclass(slots=True)
class Finding:
    """What a scene has shown: its figures, and the promises that were broken."""

    figures: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def show(self, figure: str, *, kept: bool = True) -> None:
        """Add a figure; `kept` says whether it is as promised."""
        self.figures.append(figure)
        if not kept:
            self.broken.append(figure)

    def show_account(self, account: Account, *, max_dead: int = 0) -> None:
        """Add what became of the messages; none may be lost, wait still, or have two keys."""
        self.show(f"{account.confirmed:,} messages")
        if account.repeated:
            self.show(f"published twice {account.repeated}, which count in no repeat")
        self.show(f"lost {account.lost}", kept=account.lost == 0)
        self.show(f"dead letters {account.dead}", kept=account.dead <= max_dead)
        if account.waiting:
            self.show(f"still waiting {account.waiting}", kept=False)
        self.show(f"POSTs with a new key {account.new_keys}", kept=account.new_keys == 0)

    def show_no_extra(self, account: Account) -> None:
        """Add how many POSTs were one too many; none may be."""
        self.show(f"extra POSTs {account.extra_posts}", kept=account.extra_posts == 0)

    def show_no_double(self, account: Account) -> None:
        """Add how many texts were sent twice; none may be."""
        self.show(f"texts doubled {account.sent_twice}", kept=account.sent_twice == 0)

    async def show_end(self, process: Process) -> None:
        """End the worker; it has to leave nothing undone."""
        await process.end()
        code = process.child.exit_code
        if code:
            self.show(f"exit code {code}", kept=False)


# A fault of the set-up


async def revoke_key_until_replaced(stand: Stand) -> Finding:
    """Revoke the key for a minute, then put a new one into its file."""
    key = stand.folder / "key"
    return await _revoke_key(
        stand, lambda: key.write_text("second", encoding="ascii"), within_seconds=SOON_SECONDS
    )


async def revoke_key_until_restored(stand: Stand) -> Finding:
    """Revoke the key for a minute, then take it again."""

    def restore() -> None:
        stand.service.played.api_key = "first"

    # Nothing tells the worker; its probe comes once a minute by then.
    return await _revoke_key(stand, restore, within_seconds=MAX_PROBE_SECONDS + SOON_SECONDS)


async def _revoke_key(
    stand: Stand, repair: Callable[[], object], *, within_seconds: float
) -> Finding:
    finding, service = Finding(), stand.service
    key = stand.folder / "key"
    key.write_text("first", encoding="ascii")
    try:
        async with stand.rig() as rig:
            service.played.api_key = "first"
            await rig.declare_main()
            numbers = await rig.publish(5_200)
            process = rig.start(sms_api__key_file=str(key))
            await rig.until_accepted(200)
            service.played.api_key = "second"
            await asyncio.sleep(60)
            refused = sum(attempt.status == 401 for attempt in service.memory.requests)
            seconds = await _seconds_to_next(rig, repair, most=120)
            await rig.until_through(numbers)
            await finding.show_end(process)
            account = await rig.account(numbers)
    finally:
        service.played.api_key = None
    finding.show_account(account)
    finding.show_no_double(account)
    finding.show(f"{refused} POSTs while it was revoked")
    finding.show(f"accepted again {seconds:.1f} s after the repair", kept=seconds < within_seconds)
    return finding


async def _seconds_to_next(rig: Rig, repair: Callable[[], object], *, most: float) -> float:
    """Repair something; return after how many seconds the next message was accepted."""
    before, repaired = rig.accepted, time.time()
    repair()
    await rig.until_accepted(1, seconds=most)
    return max(0.0, rig.service.memory.messages[before].received_at - repaired)


# The worker's end


async def end_worker_often(stand: Stand) -> Finding:
    """End the worker in good order, again and again; the next one starts at once."""
    finding, drains, times = Finding(), [], 100
    async with stand.rig() as rig:
        rig.service.misbehave(SLOW)
        process = rig.start()
        await process.until_consuming()
        async with rig.load(PER_SECOND_OF_MANY) as load:
            for _ in range(times):
                await rig.until_accepted(20)
                successor = rig.start()
                drains.append(await process.end())
                if process.child.exit_code:
                    finding.show(f"exit code {process.child.exit_code}", kept=False)
                process = successor
                await process.until_consuming()
        numbers = load.confirmed()
        await rig.until_through(numbers)
        await finding.show_end(process)
        account = await rig.account(numbers, repeated=load.repeated())
    finding.show(f"{times} times")
    finding.show_account(account)
    finding.show_no_extra(account)
    finding.show(f"longest drain {max(drains):.2f} s", kept=max(drains) < SOON_SECONDS)
    return finding


async def kill_worker_often(stand: Stand) -> Finding:
    """Kill the worker, again and again."""
    finding, killed, times = Finding(), [], 50
    async with stand.rig() as rig:
        rig.service.misbehave(SLOW)
        await rig.declare_main()
        async with rig.load(PER_SECOND_OF_MANY) as load:
            for _ in range(times):
                process = rig.start()
                await process.until_consuming()
                await rig.until_accepted(20)
                process.kill()
                # The service reads what the worker had sent before it died.
                await asyncio.sleep(READ_SECONDS)
                killed.append(time.time())
        process = rig.start()
        numbers = load.confirmed()
        await rig.until_through(numbers)
        await finding.show_end(process)
        account = await rig.account(numbers, repeated=load.repeated())
        worst = max(_count_repeats(rig, killed, load.repeated()).values(), default=0)
    finding.show(f"{times} times")
    finding.show_account(account)
    finding.show(f"extra POSTs {account.extra_posts}, at most {worst} by one kill")
    if worst > CONCURRENCY:
        finding.show(f"more than the {CONCURRENCY} that were in flight", kept=False)
    return finding


def _count_repeats(rig: Rig, killed: Sequence[float], repeated: Collection[str]) -> Counter[int]:
    """Count the POSTs that were made again, by the first kill after the earlier one."""
    posts: defaultdict[str, list[float]] = defaultdict(list)
    for attempt in rig.service.memory.requests:
        if attempt.to not in repeated:
            posts[str(attempt.to)].append(attempt.received_at)
    return Counter(bisect.bisect(killed, at) for times in posts.values() for at in times[:-1])


# Connections to the broker


async def cut_at_acks(stand: Stand) -> Finding:
    """Cut the connection when an ack passes, in turn before and behind it."""
    finding, times = Finding(), 100
    async with stand.rig() as rig:
        rig.service.misbehave(SLOW)
        process = rig.start()
        await process.until_consuming()
        async with rig.load(PER_SECOND) as load:
            for done in range(times):
                await _await_frame(rig, "broker", DELIVER, "pass")
                await asyncio.sleep(SESSION_SECONDS)
                nth = random.randint(1, 50)
                await _await_frame(rig, "client", ACK, DEEDS[done % 2], nth=nth)
        numbers = load.confirmed()
        await rig.until_through(numbers)
        await finding.show_end(process)
        account = await rig.account(numbers)
    finding.show(f"{times} times")
    finding.show_account(account)
    finding.show_no_extra(account)
    return finding


async def _await_frame(
    rig: Rig, sender: Sender, method: Method, deed: Deed, *, nth: int = 1
) -> None:
    """Do something to the nth next frame of a kind, and return when it was done."""
    trap = rig.proxy.trap(sender, method, deed, nth=nth, link=CONSUME_LINK)
    await eventually(trap.sprung.is_set, what="a frame", seconds=60)
    rig.proxy.traps.remove(trap)


async def restart_broker_often(stand: Stand) -> Finding:
    """Kill the broker and shut it down, in turn; it is started again at once."""
    finding, seconds, away, times = Finding(), [], [], 10
    broker = stand.broker
    async with stand.rig() as rig:
        # All that is ever in flight is in flight at each restart, and no publisher has to recover.
        rig.service.misbehave({"latency_seconds": 1})
        await rig.declare_main()
        numbers = await rig.publish(6_000)
        process = rig.start(rabbitmq__url=[broker.url])
        await process.until_consuming()
        await asyncio.to_thread(broker.flush)
        for done in range(times):
            await rig.until_accepted(CONCURRENCY)
            await asyncio.sleep(UP_SECONDS)
            down = time.monotonic()
            await asyncio.to_thread(broker.stop if done % 2 else broker.kill)
            await asyncio.to_thread(broker.start)
            away.append(time.monotonic() - down)
            seconds.append(await _seconds_to_next(rig, lambda: None, most=120))
        await rig.until_through(numbers)
        await finding.show_end(process)
        account = await rig.account(numbers)
    finding.show(f"{times} restarts, broker away for {min(away):.0f} to {max(away):.0f} s")
    finding.show_account(account)
    finding.show_no_extra(account)
    finding.show(
        f"from its return to the next accepted POST at most {max(seconds):.1f} s, "
        f"median {statistics.median(seconds):.1f} s",
        kept=max(seconds) < SOON_SECONDS,
    )
    return finding


async def watch_memory(stand: Stand) -> Finding:
    """Watch the worker's memory for a minute of load in which every five seconds all is cut."""
    finding, sizes = Finding(), []
    async with stand.rig() as rig:
        rig.service.misbehave(SLOW)
        process = rig.start()
        await process.until_consuming()
        async with rig.load(PER_SECOND) as load:
            for second in range(1, WARM_UP_SECONDS + WATCH_SECONDS + 1):
                await asyncio.sleep(1)
                sizes.append(process.rss_bytes / 1024)
                if second % 5 == 0:
                    rig.proxy.cut()
        numbers = load.confirmed()
        await rig.until_through(numbers)
        await finding.show_end(process)
        account = await rig.account(numbers)
    warm = sizes[WARM_UP_SECONDS:]
    slope = statistics.linear_regression(range(len(warm)), warm).slope
    per_message = slope * 1024 / PER_SECOND
    finding.show_account(account)
    finding.show_no_extra(account)
    finding.show(
        f"memory {warm[0] / 1024:.0f} MiB after {WARM_UP_SECONDS} s, {warm[-1] / 1024:.0f} MiB "
        f"{WATCH_SECONDS} s later: {slope:.0f} KiB a second, {per_message:.0f} bytes a message",
        kept=per_message < MAX_GROWTH_BYTES_PER_MESSAGE,
    )
    return finding


# The API


async def close_windows(stand: Stand) -> Finding:
    """Answer 429 with Retry-After for some seconds, again and again."""
    finding, early = Finding(), []
    closed = {"status": 429, "headers": {"Retry-After": str(WINDOW_SECONDS)}}
    async with stand.rig() as rig:
        rig.service.misbehave(SLOW)
        process = rig.start()
        await process.until_consuming()
        async with rig.load(PER_SECOND) as load:
            for _ in range(WINDOWS):
                await rig.until_accepted(200)
                early.append(await _close_window(rig, closed))
        numbers = load.confirmed()
        await rig.until_through(numbers)
        await finding.show_end(process)
        account = await rig.account(numbers)
        refused = sum(attempt.status == 429 for attempt in rig.service.memory.requests)
    finding.show(f"{WINDOWS} windows, {refused} answers 429")
    finding.show_account(account)
    finding.show_no_double(account)
    finding.show(f"requests inside a closed window at most {max(early)}", kept=max(early) <= 1)
    return finding


async def _close_window(rig: Rig, closed: dict[str, Any]) -> int:
    """Return how many requests came although the service had said when to come again."""
    before = rig.posted
    rig.service.misbehave(closed)
    await eventually(lambda: rig.posted > before, what="a POST")
    begin = rig.service.memory.requests[before].received_at
    await asyncio.sleep(max(0.0, begin + WINDOW_SECONDS - time.time()))
    rig.service.misbehave(SLOW)
    came = [attempt.received_at - begin for attempt in [*rig.service.memory.requests][before:]]
    return sum(ON_ITS_WAY_SECONDS < moment < WINDOW_SECONDS for moment in came)


async def come_back_small(stand: Stand) -> Finding:
    """Refuse all connections for two minutes, then take ten requests a second and answer 429."""
    finding = Finding()
    async with stand.rig() as rig, open_http_proxy(rig.service.url) as api:
        process = rig.start(sms_api__base_url=api.url)
        await process.until_consuming()
        await api.refuse()
        numbers = await rig.publish(300)
        await asyncio.sleep(120)
        rig.limit(CAPACITY_PER_SECOND)
        back = time.time()
        await api.accept()
        await rig.until_through(numbers)
        through = rig.service.memory.messages[-1].received_at - back
        first = rig.service.memory.messages[0].received_at - back
        await finding.show_end(process)
        account = await rig.account(numbers)
        refused = sum(attempt.status == 429 for attempt in rig.service.memory.requests)
    finding.show_account(account)
    finding.show_no_double(account)
    finding.show(f"{refused} answers 429")
    finding.show(f"first accepted after {first:.1f} s, all after {through:.0f} s")
    return finding


async def answer_500(stand: Stand) -> Finding:
    """Answer 500 to everything for three minutes."""
    finding = Finding()
    async with stand.rig() as rig:
        await rig.declare_main()
        numbers = await rig.publish(2_000)
        rig.service.misbehave({"status": 500})
        process = rig.start()
        await process.until_consuming()
        await asyncio.sleep(180)
        failed = rig.posted
        seconds = await _seconds_to_next(rig, rig.service.behave, most=60)
        await rig.until_through(numbers)
        await finding.show_end(process)
        account = await rig.account(numbers)
    finding.show_account(account, max_dead=HANDFUL)
    finding.show_no_double(account)
    finding.show(f"all others sent, {account.sent:,}", kept=account.sent + account.dead == 2_000)
    finding.show(f"{failed:,} POSTs answered 500; accepted again {seconds:.1f} s after the repair")
    return finding


class Scene(NamedTuple):
    """One proof: what is done, how, and how long it may take."""

    what: str
    play: Callable[[Stand], Awaitable[Finding]]
    max_seconds: float


SCENES: Final[dict[str, Scene]] = {
    "revoked-key": Scene(
        "5,000 queued; 401 for a minute, then a new key in the key's file",
        revoke_key_until_replaced,
        420,
    ),
    "restored-key": Scene(
        "5,000 queued; 401 for a minute, then the service takes the key again",
        revoke_key_until_restored,
        480,
    ),
    "sigterm": Scene("SIGTERM under load, the next worker starts at once", end_worker_often, 1500),
    "kill": Scene("`kill -9` of the worker under load", kill_worker_often, 1500),
    "ack-cut": Scene(
        "the connection is cut exactly when an ack passes, in turn before and behind it",
        cut_at_acks,
        900,
    ),
    "broker-restart": Scene(
        "the broker is killed and shut down in turn, 50 requests in flight",
        restart_broker_often,
        900,
    ),
    "retry-after": Scene(
        f"429 with `Retry-After: {WINDOW_SECONDS}` for {WINDOW_SECONDS} s, under load",
        close_windows,
        300,
    ),
    "small-comeback": Scene(
        "the API refuses connections for two minutes, then takes 10 requests a second",
        come_back_small,
        600,
    ),
    "errors": Scene("2,000 queued; 500 to everything for three minutes", answer_500, 720),
    "memory": Scene("a minute of load, all connections cut every 5 s", watch_memory, 240),
}


async def main(names: Collection[str], *, write: bool) -> int:
    """Play the scenes, print the table, and return the exit code."""
    rows: list[Cells] = []
    broken: list[str] = []
    async with open_stand() as stand:
        for name in names:
            started = time.monotonic()
            finding = await _play(SCENES[name], stand)
            tell(f"{name}, {time.monotonic() - started:.0f} s: {', '.join(finding.figures)}")
            for problem in finding.broken:
                tell(f"FAILED: {name}: {problem}")
                broken.append(f"{name}: {problem}")
            if not finding.broken:
                rows.append((name, SCENES[name].what, ", ".join(finding.figures)))
    tell("\n" + format_table(HEAD, rows) + "\n")
    for problem in broken:
        tell(f"FAILED: {problem}")
    if write:
        page = PAGE.read_text(encoding="utf-8")
        table = format_table(HEAD, merge_rows(page, MARK, rows, [*SCENES]))
        PAGE.write_text(replace_table(page, MARK, table), encoding="utf-8")
    return 1 if broken else 0


async def _play(scene: Scene, stand: Stand) -> Finding:
    try:
        async with asyncio.timeout(scene.max_seconds):
            return await scene.play(stand)
    except (AssertionError, TimeoutError) as error:
        why = str(error) or f"not over within {scene.max_seconds:g} s"
        return Finding(broken=[why])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Long proofs of single promises.")
    parser.add_argument("names", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}")
    parser.add_argument("--write", action="store_true", help="put the figures into the docs")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCENES):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    arguments = _parse_arguments()
    sys.exit(run(main(arguments.names or [*SCENES], write=arguments.write)))
