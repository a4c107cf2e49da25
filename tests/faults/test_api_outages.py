"""An SMS service that fails for a while, and what is in doubt meanwhile."""

import time
from functools import partial
from typing import Any

import pytest

from tests.faults.bench import Bench, Live, eventually, make_numbers
from tests.faults.http_proxy import HttpProxy, Point
from tests.faults.traffic import NOT_SENT, has_taken, once_each


@pytest.mark.parametrize(
    ("point", "posts", "taken"),
    [("head", 1, 1), ("body", 2, 2), ("status", 2, 2), ("headers", 1, 1), ("answer", 1, 1)],
)
async def test_api_cuts_the_connection(
    bench: Bench, api: HttpProxy, point: Point, posts: int, taken: int
) -> None:
    """An accepted request is POSTed again, with its key, only when no status line was read."""
    api.cuts = [point]
    async with bench.worker(sms_api__base_url=api.url) as live:
        numbers = await bench.publish(1)
        await bench.until_taken(numbers)
        await eventually(
            lambda: live.metric("sms_bridge_worker_messages_processed_total", outcome="sent"),
            what="settled as sent",
        )

        assert len(bench.service.posts(numbers)) == posts
        keys = [message.idempotency_key for message in bench.service.taken(numbers)]
        assert keys == [f"id-{numbers[0]}"] * taken


OUTAGES: dict[str, dict[str, Any]] = {
    "hang": {"mode": "hang"},
    "error": {"status": 500},
    "accepted": {"mode": "accept_then_cut"},
}


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        # Its requests time out after a second, and others may not, however busy the computer is.
        pytest.param("hang", 300, marks=pytest.mark.serial),
        ("error", 150),
        ("refused", 150),
        ("accepted", 150),
    ],
)
async def test_api_outage(bench: Bench, api: HttpProxy, kind: str, count: int) -> None:
    """An outage costs a handful of dead letters, and its end starts slowly.

    What the service takes without saying so is repeated with its key, no more than allowed.
    """
    await bench.declare_main()
    numbers = await bench.publish(count)
    await _begin_outage(kind, bench, api)
    async with bench.worker(
        worker__outage_after="1s",
        worker__concurrency=50,
        sms_api__base_url=api.url,
        sms_api__timeout_seconds=1 if kind == "hang" else 20,
    ) as live:
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        bench.service.behave()
        await api.accept()
        mended = time.time()
        await eventually(lambda: not live.paused, what="resumed")
        await bench.until_settled(live, seconds=60)

        taken = bench.service.taken(numbers)
        times = [message.received_at for message in taken if message.received_at > mended]
        assert len([moment for moment in times if moment < times[0] + 1]) <= 75
        assert len({message.to for message in taken}) >= count - 5
        assert len(await bench.dead_letters()) <= 5
        if kind == "accepted":
            assert all(message.idempotency_key == f"id-{message.to}" for message in taken)
            assert 1 < max(bench.sent_twice(numbers).values()) <= 3
        else:
            assert bench.sent_twice(numbers) == {}


async def test_what_is_in_flight_when_an_outage_is_seen_burns_nothing(bench: Bench) -> None:
    await bench.declare_main()
    numbers = await bench.publish(50)
    bench.service.misbehave(NOT_SENT | {"latency_seconds": 1.5})
    async with bench.worker(
        worker__outage_after="1s", worker__concurrency=50, worker__max_attempts=1
    ) as live:
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        bench.service.behave()
        # Ten had to fail.
        await eventually(partial(has_taken, bench, numbers, 40), what="all others")
        await bench.until_settled(live)

        assert {letter.headers["sms-bridge-reason"] for letter in await bench.dead_letters()} == {
            "exhausted"
        }
        assert bench.sent_twice(numbers) == {}


async def _begin_outage(kind: str, bench: Bench, api: HttpProxy) -> None:
    if kind == "refused":
        await api.refuse()
    else:
        bench.service.misbehave(OUTAGES[kind])


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ({"worker__on_uncertain": "park"}, {"mode": "accept_then_cut"}),
        ({"worker__max_uncertain_attempts": 1}, {"status": 500}),
    ],
    ids=["park", "one_attempt"],
)
async def test_last_uncertain_attempt_in_an_outage(
    bench: Bench, policy: dict[str, Any], fault: dict[str, Any]
) -> None:
    await bench.declare_main()
    numbers = await bench.publish(400)
    # Slow enough that the queue outlasts the time after which it counts as an outage.
    bench.service.misbehave({**fault, "latency_seconds": 0.5})
    async with bench.worker(worker__outage_after="1s", worker__concurrency=50, **policy) as live:
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        before = len(bench.service.posts(numbers))
        await eventually(lambda: len(bench.service.posts(numbers)) >= before + 2, what="2 probes")
        assert live.logged("resumed") == []
        bench.service.behave()
        await has_posted(bench, numbers)
        await bench.until_settled(live)

        posts = bench.service.posts(numbers)
        in_doubt = {f"id-{post.to}" for post in posts if post.status != 202}
        letters = await bench.dead_letters()
        assert bench.extra_posts(numbers) == {}
        assert {post.to for post in posts} == set(numbers)
        assert {letter.message_id for letter in letters} == in_doubt
        assert {letter.headers["sms-bridge-reason"] for letter in letters} == {"uncertain"}
        assert len(letters) < len(numbers) / 2


async def has_posted(bench: Bench, numbers: list[str]) -> None:
    wanted = set(numbers)
    await eventually(
        lambda: {post.to for post in bench.service.posts(numbers)} == wanted, what="POSTs"
    )


def was_put_off(live: Live, number: str) -> bool:
    lines = live.logged("delivery")
    return any(x["message_id"].endswith(number[1:]) and x["reason"] == "paused" for x in lines)


async def test_uncertain_attempts_count_in_an_outage(bench: Bench) -> None:
    (in_flight,) = make_numbers(1)
    cut = {"to": in_flight, "mode": "accept_then_cut"}
    away = {"status": 503, "headers": {"Retry-After": "1"}}
    bench.service.misbehave({**cut, "latency_seconds": 3}, away)
    async with bench.worker(
        worker__max_uncertain_attempts=2, worker__outage_after="1s", worker__concurrency=50
    ) as live:
        await bench.publish([in_flight])
        await eventually(lambda: bench.service.posts([in_flight]), what="it is in flight")
        others = await bench.publish(20)
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        assert len(bench.service.posts([in_flight])) == 1
        await eventually(lambda: was_put_off(live, in_flight), what="it is put off")
        assert live.paused
        bench.service.misbehave({**cut, "count": 1})
        await bench.until_taken(others)
        await bench.until_dead(1)
        await bench.until_settled(live)

        assert len(bench.service.posts([in_flight])) == 2
        (letter,) = await bench.dead_letters()
        assert letter.headers["sms-bridge-reason"] == "uncertain"


async def test_a_probe_that_reaches_nobody_ends_no_pause(bench: Bench, api: HttpProxy) -> None:
    await bench.declare_main()
    numbers = await bench.publish(100)
    bench.service.misbehave({"status": 401})
    async with bench.worker(sms_api__base_url=api.url, worker__concurrency=20) as live:
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="paused")
        await api.refuse()
        refused = "sms_bridge_worker_provider_requests_total"
        await eventually(
            lambda: live.metric(refused, result="connection_error") >= 3, what="a refused probe"
        )
        assert live.logged("resumed") == []
        bench.service.behave()
        await api.accept()
        await bench.until_taken(numbers)


async def test_no_delivery_is_held_for_a_long_retry_after(bench: Bench) -> None:
    """While the service wants a wait of minutes everything waits on the ladder."""
    await bench.declare_main()
    numbers = await bench.publish(20)
    bench.service.misbehave({"status": 429, "headers": {"Retry-After": "900"}})
    # One POST is made, and what is held beside it waits for the next token.
    changed: dict[str, Any] = {"worker__rate_limit": {"per_second": 1, "burst": 1}}
    async with bench.worker(worker__concurrency=10, **changed) as live:
        await eventually(lambda: live.paused == {"rate_limited"}, what="paused")
        # One number's answer does not show that the wait is for all.
        await eventually(lambda: len(bench.service.posts(numbers)) == 2, what="asked for another")
        held = "sms_bridge_worker_messages_in_progress"
        await eventually(lambda: live.metric(held) == 0, what="nothing held")
        await eventually(lambda: not live.worker.consumer.is_registered, what="nothing taken")

        assert len(bench.service.posts(numbers)) == 2


async def test_a_probe_whose_connection_ends_makes_room(bench: Bench) -> None:
    """The next probe goes on with the back-off where the lost one was."""
    bench.service.misbehave({"status": 401})
    async with bench.worker() as live:
        numbers = await bench.publish(3)
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="paused")
        first = len(bench.service.posts(numbers))
        await eventually(lambda: len(bench.service.posts(numbers)) >= first + 2, what="2 probes")
        released = "sms_bridge_worker_messages_processed_total"
        bench.proxy.reset()

        await eventually(
            lambda: live.metric(released, outcome="released") >= 1, what="room", seconds=3
        )
        bench.service.behave()
        await bench.until_taken(numbers)


async def test_retries_are_spread(bench: Bench) -> None:
    """Messages that fail at the same moment do not come back at the same moment."""
    numbers = make_numbers(10)
    bench.service.misbehave(*once_each(numbers, {"status": 425}))
    async with bench.worker(worker__retry_delays=["2s"]) as live:
        await bench.publish(numbers)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

    posts = bench.service.posts(numbers)
    again = [post.received_at for post in posts[len(numbers) :]]
    assert max(again) - min(again) > 0.1
