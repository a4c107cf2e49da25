"""Rate limits on a real queue: who exceeds one waits, and nobody else does."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bench import Bench, eventually, make_numbers

# What is sent in a second is measured.
pytestmark = pytest.mark.serial

SENDER = "Acme"


async def publish(bench: Bench, numbers: Sequence[str], sender: str) -> None:
    for number in numbers:
        body = json.dumps({"to": number, "from": sender, "text": "Hi"}).encode()
        await bench.amqp.publish(bench.queue, body, message_id=f"id-{number}")


async def test_a_sender_over_its_limit_makes_no_other_wait(bench: Bench) -> None:
    await bench.declare_main()
    many, (urgent,) = make_numbers(80), make_numbers(1)
    await publish(bench, many, SENDER)
    await publish(bench, [urgent], "Other")
    limits = {"worker.rate_limit.per_sender": 20, "worker.rate_limit.burst": 1}
    async with bench.worker(**limits) as live:
        await bench.until_taken([*many, urgent])
        await bench.until_settled(live)

    posts = [post.received_at for post in bench.service.posts(many)]
    places = [post.to for post in bench.service.posts([*many, urgent])]
    # What the limit lets through in two seconds.
    assert places.index(urgent) <= 2 * 20
    assert bench.extra_posts([*many, urgent]) == {}
    # Exactly at its rate: never above it, and not far below it either.
    assert min(b - a for a, b in zip(posts, posts[20:], strict=False)) > 0.95
    assert max(posts) - min(posts) < 1.5 * len(many) / 20


async def test_who_waits_for_a_limit_takes_up_no_slot(bench: Bench) -> None:
    many, (other,) = make_numbers(20), make_numbers(1)
    limits = {"worker.rate_limit.per_sender": 5, "worker.rate_limit.burst": 1}
    async with bench.worker(worker__concurrency=2, worker__retry_delays=["2s"], **limits) as live:
        await publish(bench, many, SENDER)
        await eventually(lambda: live.logged("delivery"), what="the first one")
        await publish(bench, [other], "Other")
        await bench.until_taken([other], seconds=1)
        held = live.metric("sms_bridge_worker_messages_in_progress")
        await bench.until_taken(many)

    assert held > 2
    assert len(bench.service.posts(many)) == len(many)


async def test_a_shared_limit_holds_from_the_first_second(bench: Bench, tmp_path: Path) -> None:
    await bench.declare_main()
    numbers = make_numbers(100)
    await publish(bench, numbers, SENDER)
    limits: dict[str, Any] = {
        "worker.rate_limit.per_second": 20,
        "worker.rate_limit.scope": "cluster",
    }
    logs = [tmp_path / f"worker-{number}.log" for number in range(3)]
    with ExitStack() as stack:
        for log in logs:
            stack.enter_context(bench.worker_process(log, **limits))
        await bench.until_taken(numbers)

    posts = sorted(post.received_at for post in bench.service.posts(numbers))
    most = max(sum(start <= post < start + 1 for post in posts) for start in posts)
    # A worker that stood still for a moment makes up for it: the burst is a second's worth.
    assert most <= 30
    assert posts[-1] - posts[0] < 1.5 * len(posts) / 20
    # Each of them had its share.
    assert all('"event":"delivery"' in log.read_text() for log in logs)
