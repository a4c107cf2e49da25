"""The webhook receiver as a process, strangers on all sides: good senders notice nothing."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from bridge.sandbox.processes import Guard
from tests.faults.bench import Bench, eventually
from tests.faults.receiver import (
    FORGED,
    Crowd,
    RawClient,
    Target,
    all_hear,
    crowd_at,
    open_target,
    write_request,
)

GOOD: Final = 10
PATIENT: Final = 20
OPEN_FILES: Final = 1024
MIB: Final = 1024 * 1024
BODY_BYTES: Final = 262_144
# As many halves of the largest body as the buffer holds, and one more.
HALVES: Final = 257
BUFFERED_BYTES: Final = 8 * MIB
# What the documents state: half as much again, because not all that is free is one piece, and what
# a connection takes by itself.
MOST_BYTES: Final = BUFFERED_BYTES * 3 // 2 + 1024 * 12 * 1024
IDLE_SECONDS: Final = 1
# A stall for longer than anybody is waited for.
STALL_SECONDS: Final = 2.0
# Time enough to write the events and then stop, on a busy machine too.
RESPONSE_SECONDS: Final = 3.0
FORGERIES: Final = 2000
REQUESTS: Final = "sms_bridge_webhook_http_requests_total"
UNCONFIRMED: Final = "sms_bridge_amqp_unconfirmed_messages"
EVICTIONS: Final = "sms_bridge_webhook_evictions_total"


@pytest.fixture
async def target(bench: Bench, guard: Guard, tmp_path: Path) -> AsyncIterator[Target]:
    """Start a receiver as it is by default."""
    async with open_target(bench, guard, tmp_path / "webhook.log") as ours:
        yield ours


@pytest.fixture
def crowd(target: Target) -> Iterator[Crowd]:
    """Lend raw clients."""
    with crowd_at(target.port) as ours:
        yield ours


async def post(target: Target, clients: list[RawClient]) -> list[int | str]:
    for client in clients:
        client.say(target.write_event())
    return await all_hear(clients)


# Who has to go when there is no room


async def test_old_connections_are_served_while_halves_fill_the_buffer(
    target: Target, crowd: Crowd
) -> None:
    good = await crowd.enter(GOOD)
    first = await post(target, good)
    halves = await crowd.enter(HALVES)
    for half in halves:
        half.say(write_request(bytes(BODY_BYTES - 1), signature=FORGED, length=BODY_BYTES))
    # The last one finds no room.
    assert await halves[0].hear() == 503
    # In pieces, so that they need room before they are complete.
    requests = [target.write_event() for _ in good]
    for client, request in zip(good, requests, strict=True):
        client.say(request[:-10])
        await client.flush()
    for client, request in zip(good, requests, strict=True):
        client.say(request[-10:])
    second = await all_hear(good)
    evicted = await target.metric(EVICTIONS, cause="memory")
    lines = target.logged
    await eventually(
        lambda: evicted == sum(line["count"] for line in lines("connections_evicted")),
        what="every eviction logged",
    )

    assert (first, second) == ([200] * GOOD, [200] * GOOD)
    assert await target.metric(REQUESTS, code="503") == evicted >= 1


async def test_unsigned_bodies_are_never_buffered(target: Target, crowd: Crowd) -> None:
    """Who shows no signature, or has the path or method wrong, is answered at the header."""
    head = write_request(b"", signature=None, length=BODY_BYTES)
    signed = write_request(b"", signature=FORGED, length=BODY_BYTES)
    heads = {
        401: head,
        404: signed.replace(b"/webhooks", b"/nowhere"),
        405: signed.replace(b"POST", b"PUT"),
    }
    clients = await crowd.enter(len(heads))
    for client, begun in zip(clients, heads.values(), strict=True):
        client.say(begun + b"{")
    statuses = await all_hear(clients)
    ends = await all_hear(clients)

    assert statuses == list(heads)
    assert ends == ["closed"] * len(heads)
    assert await target.metric(EVICTIONS) == 0


async def test_good_sender_keeps_its_connections_while_strangers_fill_all_places(
    target: Target, crowd: Crowd
) -> None:
    good = await crowd.enter(GOOD)
    first = await post(target, good)
    for _ in range(15):
        await crowd.enter(100)
    second = await post(target, good)

    assert (first, second) == ([200] * GOOD, [200] * GOOD)
    await eventually(
        lambda: _has_evicted(target, 15 * 100 + GOOD - 1024), what="newcomers that went"
    )


async def _has_evicted(target: Target, count: int) -> bool:
    return await target.metric(EVICTIONS, cause="connections") >= count


# What the process may use


async def test_silent_sockets_leave_descriptors_for_everybody(
    bench: Bench, guard: Guard, tmp_path: Path
) -> None:
    async with open_target(bench, guard, tmp_path / "few.log", open_files=OPEN_FILES) as target:
        with crowd_at(target.port) as crowd, crowd_at(target.facts["admin_port"]) as inside:
            for _ in range(12):
                await crowd.enter(100)
                await inside.enter(25)
            lives = [await target.livez() for _ in range(5)]
            (newcomer,) = await crowd.enter(1)
            newcomer.say(target.write_event())
            heard = await newcomer.hear()
            descriptors = len(os.listdir(f"/proc/{target.child.pid}/fd"))  # noqa: PTH208  no wait
        (told,) = target.logged("connections_limited")

    assert (set(lives), heard) == ({200}, 200)
    assert told["setting"] == "webhook.max_connections"
    assert told["open_files"] == OPEN_FILES
    assert descriptors < OPEN_FILES - 30


HEAD: Final = b"POST /webhooks HTTP/1.1\r\nHost: localhost\r\n"
HALF_BODY: Final = write_request(bytes(BODY_BYTES - 1), signature=FORGED, length=BODY_BYTES)
# What each newcomer sends, in turn, and never ends.
SHAPES: Final[dict[str, list[bytes]]] = {
    "long target": [b"POST /" + b"a" * 16_000],
    "many headers": [HEAD + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 150) for n in range(97))],
    "bodies": [HALF_BODY],
    "requests whose answers are not read": [write_request(bytes(4096), signature=FORGED) * 30],
}
SHAPES["bodies, then headers"] = [HALF_BODY] * 260 + SHAPES["many headers"] * 940


@pytest.mark.parametrize("shape", SHAPES)
async def test_memory_stays_within_its_bound(
    bench: Bench, guard: Guard, tmp_path: Path, shape: str
) -> None:
    """Whatever strangers fill memory with, it stays within what the documents state."""
    log = tmp_path / "memory.log"
    async with open_target(
        bench, guard, log, is_measured=True, webhook__max_buffered_bytes=BUFFERED_BYTES
    ) as target:
        before = target.memory_bytes
        pieces = itertools.cycle(SHAPES[shape])
        with crowd_at(target.port) as crowd:
            for _ in range(24):
                clients = await crowd.enter(50)
                for client in clients:
                    client.say(next(pieces))
                await asyncio.gather(*(client.flush() for client in clients))
            # Who comes last is read last.
            (newcomer,) = await crowd.enter(1)
            assert await post(target, [newcomer]) == [200]
        grown = target.peak_memory_bytes - before
    print(f"{shape}: {before / MIB:.0f} MiB, and {grown / MIB:.0f} MiB")  # noqa: T201

    assert grown < MOST_BYTES


# When the process stands still, and when it ends


async def stalled(target: Target) -> None:
    """Stop the process and return when it stands still."""
    target.child.signal(signal.SIGSTOP)
    stat = Path(f"/proc/{target.child.pid}/stat")
    await eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="a stop")


async def test_requests_that_came_during_a_stall_are_not_late(
    bench: Bench, guard: Guard, tmp_path: Path
) -> None:
    """After a stall what has come meanwhile is read and answered, whatever the clock says."""
    async with open_target(
        bench,
        guard,
        tmp_path / "stalled.log",
        webhook__idle_timeout_seconds=IDLE_SECONDS,
        webhook__body_timeout_seconds=IDLE_SECONDS,
    ) as target:
        with crowd_at(target.port) as crowd:
            clients = await crowd.enter(PATIENT)
            requests = [target.write_event() for _ in clients]
            # Some have said nothing yet, some are in their header, some in their body.
            cuts = [(0, 30, len(requests[0]) - 10)[n % 3] for n in range(PATIENT)]
            for client, request, cut in zip(clients, requests, cuts, strict=True):
                client.say(request[:cut])
                await client.flush()
            await stalled(target)
            for client, request, cut in zip(clients, requests, cuts, strict=True):
                client.say(request[cut:])
                await client.flush()
            await asyncio.sleep(STALL_SECONDS)
            target.child.signal(signal.SIGCONT)
            statuses = await all_hear(clients)

    assert statuses == [200] * PATIENT


async def test_confirms_that_came_during_a_stall_are_not_late(
    bench: Bench, guard: Guard, tmp_path: Path
) -> None:
    async with open_target(
        bench, guard, tmp_path / "stalled.log", webhook__response_timeout_seconds=RESPONSE_SECONDS
    ) as target:
        with crowd_at(target.port) as crowd:
            clients = await crowd.enter(PATIENT)
            before = await bench.amqp.count_if_there(bench.exchange)
            bench.broker.pause()
            for client in clients:
                client.say(target.write_event())
                await client.flush()
            in_flight = partial(target.metric, UNCONFIRMED)

            async def are_written() -> bool:
                return await in_flight() == PATIENT

            try:
                await eventually(are_written, what="events that wait for their confirm")
                await stalled(target)
            finally:
                bench.broker.resume()

            async def are_stored() -> bool:
                return await bench.amqp.count_if_there(bench.exchange) == before + PATIENT

            await eventually(are_stored, what="events in the queue")
            await asyncio.sleep(RESPONSE_SECONDS)
            target.child.signal(signal.SIGCONT)
            statuses = await all_hear(clients)

    assert statuses == [200] * PATIENT


async def test_who_is_in_the_accept_queue_is_served_at_sigterm(
    bench: Bench, guard: Guard, tmp_path: Path
) -> None:
    """Connections that nobody has accepted yet when SIGTERM comes are accepted and answered."""
    async with open_target(bench, guard, tmp_path / "drained.log") as target:
        with crowd_at(target.port) as crowd:
            idle = await crowd.enter(PATIENT)
            kept = await post(target, idle)
            await stalled(target)
            queued = await crowd.enter(PATIENT)
            for client in (*idle, *queued):
                client.say(target.write_event())
                await client.flush()
            target.child.ask_to_end()
            target.child.signal(signal.SIGCONT)
            statuses = await all_hear([*idle, *queued])
        await eventually(lambda: target.child.exit_code is not None, what="the end")

    assert (kept, statuses) == ([200] * PATIENT, [200] * 2 * PATIENT)
    assert target.child.exit_code == 0


# What strangers may write into the log


async def test_strangers_do_not_fill_the_log(target: Target, crowd: Crowd) -> None:
    clients = await crowd.enter(GOOD)
    started = asyncio.get_running_loop().time()
    for n in range(FORGERIES // GOOD):
        for client in clients:
            client.say(write_request(b"{}", signature=FORGED if n % 2 else None))
        assert set(await all_hear(clients)) == {401}
    good = await post(target, clients)
    seconds = asyncio.get_running_loop().time() - started

    # The end must not cost the last count.
    target.child.ask_to_end()
    await eventually(lambda: target.child.exit_code is not None, what="the end")
    lines = refused_lines(target)
    assert {line["why"] for line in lines} == {"missing", "mismatch"}
    assert sum(line["count"] for line in lines) == FORGERIES
    # One at once and one a second for each of both causes.
    assert len(lines) <= 2 * (seconds + 3)
    assert good == [200] * GOOD
    published = [line for line in target.logged("webhook") if line["outcome"] == "published"]
    assert len(published) >= GOOD


def refused_lines(target: Target) -> list[dict[str, Any]]:
    return [line for line in target.logged("webhook") if line["outcome"] == "invalid_signature"]
