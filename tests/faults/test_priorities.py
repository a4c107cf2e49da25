"""Requests of two classes: the urgent pass the others, and sorting loses and doubles nothing."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.admin.checks.consumers import check_consumers
from bridge.admin.checks.set_up import ConnectedBroker, SetUp
from bridge.admin.draining.waiting import find_waiting
from bridge.admin.status.look import Looker
from bridge.sandbox.processes import guarded
from bridge.worker.sorting.mover import PREFETCH
from tests.faults.amqp_proxy import ACK, DELIVER, PUBLISH
from tests.faults.bench import (
    PROGRAM,
    PUBLISH_LINK,
    Bench,
    Live,
    eventually,
    make_environ,
    make_numbers,
    make_settings,
    open_amqp,
    open_link,
)
from tests.faults.traffic import TOO_EARLY, WITH_AND_WITHOUT_IDS, once_each
from tests.forked import ForkedChild

SORT_LINK = "worker sort"
URGENT: dict[str, Any] = {"headers": {"sms-bridge-priority": "urgent"}}
ON: dict[str, Any] = {"worker__priorities": "on"}
# Seconds that each POST takes: there is always something that waits, with the second one however
# long a busy computer needs for what a test does meanwhile.
SLOW: dict[str, Any] = {"latency_seconds": 0.05, "count": None}
SLOWER: dict[str, Any] = {"latency_seconds": 1, "count": None}


async def until_sorted(bench: Bench, live: Live, count: int) -> None:
    """Return when so many have been sorted, and nothing is left in the main queue."""

    async def is_sorted() -> bool:
        done = live.metric("sms_bridge_worker_messages_sorted_total")
        return done >= count and not await bench.amqp.count(bench.queue)

    await eventually(is_sorted, what="all sorted")


async def until_all_settled(bench: Bench, live: Live) -> None:
    """Return when nothing is left in any queue, those behind the main one included."""

    async def is_empty() -> bool:
        behind = [f"{bench.queue}.{name}" for name in ("urgent", "normal")]
        return not any([await bench.amqp.count(queue) for queue in behind])

    await bench.until_settled(live)
    await eventually(is_empty, what="nothing behind the main queue")
    await bench.until_settled(live)


async def publish_behind(bench: Bench, name: str, numbers: Sequence[str]) -> None:
    """Publish a request to each of the numbers to the queue of a class."""
    properties = URGENT if name == "urgent" else {}

    async def publish(number: str) -> None:
        body = json.dumps({"to": number, "from": "Acme", "text": "Hi"}).encode()
        await bench.amqp.publish(f"{bench.queue}.{name}", body, message_id=number, **properties)

    await asyncio.gather(*map(publish, numbers))


def places_of(bench: Bench, numbers: Sequence[str]) -> list[int]:
    """Return the places of these numbers' POSTs among all that were made, in order."""
    posted = [attempt.to for attempt in bench.service.memory.attempts]
    return [place for place, to in enumerate(posted) if to in set(numbers)]


@pytest.mark.parametrize(
    "urgent",
    [
        pytest.param(URGENT, id="header"),
        pytest.param({"priority": 5}, id="property"),
        pytest.param({"priority": 0, **URGENT}, id="header before property"),
    ],
)
async def test_the_urgent_pass_a_campaign(bench: Bench, urgent: dict[str, Any]) -> None:
    """What is published behind hundreds of texts is posted before almost all of them."""
    bench.service.misbehave({"latency_seconds": 0.3})
    async with bench.worker(**ON) as live:
        campaign = await bench.publish(400)
        codes = await bench.publish(10, **urgent)
        posted_before = len(bench.service.posts(campaign))
        await bench.until_taken(codes)
        bench.service.behave()
        await bench.until_taken(campaign)
        await until_all_settled(bench, live)

        # In flight, or just about to go: three times the slots at most.
        assert places_of(bench, codes)[-1] <= posted_before + len(codes) + 3 * 10
        assert bench.extra_posts([*campaign, *codes]) == {}
        assert live.metric("sms_bridge_worker_messages_sorted_total", **{"class": "urgent"}) == 10


async def test_a_flood_of_urgent_ones_starves_nobody(bench: Bench) -> None:
    """While both wait, one in nine that are sent is not urgent."""
    bench.service.misbehave(SLOW)
    async with bench.worker(**ON):
        pass
    # Where they go once they are sorted, so that both wait from the beginning.
    campaign, codes = make_numbers(300), make_numbers(300)
    await publish_behind(bench, "normal", campaign)
    await publish_behind(bench, "urgent", codes)
    async with bench.worker(**ON) as live:
        await bench.until_taken([*campaign, *codes])
        await until_all_settled(bench, live)

    # From when some dozens of codes wait until the last dozens.
    first, last = places_of(bench, codes)[50], places_of(bench, codes)[-50]
    between = [place for place in places_of(bench, campaign) if first < place < last]
    assert (last - first) / 20 <= len(between) <= (last - first) / 4


async def test_a_retry_keeps_its_class(bench: Bench) -> None:
    """What comes back from the ladder is sorted again, and passes what waits then."""
    async with bench.worker(**ON) as live:
        codes = make_numbers(5)
        bench.service.misbehave(*once_each(codes, TOO_EARLY), SLOWER)
        await bench.publish(codes, **URGENT)
        await eventually(lambda: len(bench.service.posts(codes)) == 5, what="the first tries")
        campaign = await bench.publish(300)
        await bench.until_taken(codes)
        waiting = len(campaign) - len(bench.service.taken(campaign))
        bench.service.behave()
        await bench.until_taken(campaign)
        await until_all_settled(bench, live)

        assert waiting > 100
        assert live.metric("sms_bridge_worker_messages_sorted_total", **{"class": "urgent"}) == 10


async def test_codes_may_be_published_behind_the_queue(bench: Bench) -> None:
    """They pass what is not sorted yet, and are sorted only when they come back from a retry."""
    bench.service.misbehave(SLOW)
    async with bench.worker(**ON) as live:
        campaign = await bench.publish(200)
        first, second = codes = make_numbers(2)
        bench.service.misbehave(*once_each([second], TOO_EARLY), SLOW)
        await publish_behind(bench, "urgent", codes)
        await bench.until_taken(codes)
        await bench.until_taken(campaign)
        await until_all_settled(bench, live)

        assert len(bench.service.posts([first])) == 1
        assert len(bench.service.posts([second])) == 2
        assert bench.extra_posts(campaign) == {}
        assert live.metric("sms_bridge_worker_messages_sorted_total", **{"class": "urgent"}) == 1


@pytest.mark.parametrize("per", ["per_second", "per_sender"])
async def test_the_urgent_pass_at_a_rate_limit(bench: Bench, per: str) -> None:
    """A limit's line is passed as the queue is, that of their own sender too.

    Takes the seconds in which the limit lets them through.
    """
    limit = {per: 20.0, "burst": 1}
    async with bench.worker(**ON, worker__rate_limit=limit) as live:
        campaign = await bench.publish(300)
        await until_sorted(bench, live, 300)
        codes = await bench.publish(5, **URGENT)
        posted_before = len(bench.service.posts(campaign))
        await bench.until_taken(codes)

        # What the limit lets through in two seconds, in which a busy computer sorts them.
        assert places_of(bench, codes)[-1] <= posted_before + len(codes) + 2 * 20


# Nothing is lost, and what is doubled is known again


@WITH_AND_WITHOUT_IDS
@pytest.mark.parametrize(
    ("sender", "method", "nth"),
    [
        # An ack is one for many, for a hundred at most: there are four of them.
        pytest.param("client", ACK, 3, id="at an ack"),
        pytest.param("broker", DELIVER, 150, id="at a delivery"),
    ],
)
async def test_cut_while_sorting(
    bench: Bench, sender: Any, method: Any, nth: int, *, ids: bool
) -> None:
    """What the broker delivers again to the sorter, it knows: nobody gets a second text."""
    async with bench.worker(**ON) as live:
        trap = bench.proxy.trap(sender, method, "cut", nth=nth, link=SORT_LINK)
        numbers = await bench.publish(400, ids=ids)
        await bench.until_taken(numbers)
        await until_all_settled(bench, live)
        assert trap.sprung.is_set()

        assert bench.extra_posts(numbers) == {}
        assert await bench.dead_letters() == []
        sorted_again = live.metric("sms_bridge_worker_messages_sorted_total") - len(numbers)
        assert sorted_again == 0


@WITH_AND_WITHOUT_IDS
async def test_cut_while_copies_wait_for_their_confirm(bench: Bench, *, ids: bool) -> None:
    """Copies of which it is not known whether they are stored are written again, with one key."""
    async with bench.worker(**ON) as live:
        trap = bench.proxy.trap("client", PUBLISH, "cut", nth=150, link=PUBLISH_LINK)
        numbers = await bench.publish(400, ids=ids)
        await bench.until_taken(numbers)
        await until_all_settled(bench, live)
        assert trap.sprung.is_set()

        assert bench.extra_posts(numbers) == {}


@WITH_AND_WITHOUT_IDS
async def test_cut_while_one_of_two_sorts(bench: Bench, *, ids: bool) -> None:
    """What the other sorter is given then, it asks for: nobody gets a second text."""
    two = ON | {"worker__concurrency": 5}
    async with bench.worker(**two) as live, bench.worker(**two) as other:
        for one in (live, other):
            await eventually(partial(one.metric, "sms_bridge_worker_peers"), what="a peer")
        # It comes: an ack is for no more than the hundred that either has.
        trap = bench.proxy.trap("client", ACK, "cut", nth=3, link=SORT_LINK)
        numbers = await bench.publish(1000, ids=ids)
        await bench.until_taken(numbers)
        await until_all_settled(bench, live)
        await until_all_settled(bench, other)

        assert trap.sprung.is_set()
        assert bench.extra_posts(numbers) == {}
        told = [one.metric("sms_bridge_worker_messages_sorted_total") for one in (live, other)]
        assert sum(told) == len(numbers)


@WITH_AND_WITHOUT_IDS
async def test_a_restart_of_the_broker_while_two_sort(bench: Bench, *, ids: bool) -> None:
    """Whoever is back first asks for what it is given again: nobody gets a second text.

    Takes the seconds of the restart.
    """
    bench.service.misbehave(SLOW)
    async with bench.worker(**ON) as live, bench.worker(**ON) as other:
        for one in (live, other):
            await eventually(partial(one.metric, "sms_bridge_worker_peers"), what="a peer")
        numbers = await bench.publish(300, ids=ids)
        await eventually(lambda: len(bench.service.taken(numbers)) >= 20, what="a beginning")
        await asyncio.to_thread(bench.broker.stop)
        await asyncio.to_thread(bench.broker.start)
        async with open_amqp(bench.broker.url) as bench.amqp:
            await bench.until_taken(numbers, seconds=120)
            for one in (live, other):
                await until_all_settled(bench, one)

        assert bench.extra_posts(numbers) == {}


async def test_beside_a_worker_without_priorities(bench: Bench) -> None:
    """As in an upgrade: one takes from the main queue what the other would sort, and none is lost.

    Cut off, what either had is with the other one, which asks for it.
    """
    bench.service.misbehave(SLOW)
    async with bench.worker(**ON) as live, bench.worker() as other:
        for one in (live, other):
            await eventually(partial(one.metric, "sms_bridge_worker_peers"), what="a peer")
        await eventually(partial(live.metric, "sms_bridge_worker_sorter_up"), what="a sorter")
        # The first one: how many are acked with it nobody knows.
        trap = bench.proxy.trap("client", ACK, "cut", link=SORT_LINK)
        numbers = [*await bench.publish(280), *await bench.publish(20, **URGENT)]
        await bench.until_taken(numbers)
        for one in (live, other):
            await until_all_settled(bench, one)

        assert trap.sprung.is_set()
        assert bench.extra_posts(numbers) == {}
        processed = "sms_bridge_worker_messages_processed_total"
        assert all(one.metric(processed, outcome="sent") for one in (live, other))


def keys_of(bench: Bench, numbers: Sequence[str]) -> dict[str, set[str | None]]:
    """Return the idempotency keys with which each number was posted."""
    keys: dict[str, set[str | None]] = {}
    for attempt in bench.service.posts(numbers):
        keys.setdefault(str(attempt.to), set()).add(attempt.idempotency_key)
    return keys


@WITH_AND_WITHOUT_IDS
async def test_killed_while_sorting(bench: Bench, tmp_path: Path, *, ids: bool) -> None:
    """A worker that is killed loses nothing, and doubles at most what was on its way.

    What has an id keeps its key; of what has none a copy more, with another key, may be left.
    """
    environ = make_environ(bench.values(**ON))
    await bench.declare_main()
    numbers = await bench.publish(1000, ids=ids)
    with guarded() as guard:
        child = ForkedChild(["worker"], guard=guard, log=tmp_path / "log", environ=environ)
        try:
            trap = bench.proxy.trap(
                *("client", PUBLISH, "pass"), nth=500, link=PUBLISH_LINK, also=child.kill
            )
            await eventually(trap.sprung.is_set, what="half of them sorted")
        finally:
            child.kill()
    assert await bench.amqp.count(bench.queue)
    async with bench.worker(**ON) as live:
        await bench.until_taken(numbers, seconds=60)
        await until_all_settled(bench, live)

    extra = Counter(bench.extra_posts(numbers))
    # In flight at the kill, and, without an id, those whose ack the broker has not read.
    assert len(extra) <= 10 + (0 if ids else PREFETCH)
    if ids:
        assert all(len(keys) == 1 for keys in keys_of(bench, numbers).values())


async def test_a_full_queue_of_a_class_holds_up_no_sending(bench: Bench) -> None:
    """The sorter waits until the senders have taken from it, and the senders do not wait."""
    await bench.amqp.channel.declare_queue(
        f"{bench.queue}.normal",
        durable=True,
        arguments={"x-queue-type": "quorum"},
    )
    policy = json.dumps({"max-length": 20, "overflow": "reject-publish"})
    pattern = f"^{bench.queue}[.]normal$".replace(".", "[.]", 1)
    bench.broker.ctl("set_policy", "short", pattern, policy, "--apply-to", "queues")
    try:
        async with bench.worker(**ON) as live:
            numbers = await bench.publish(300)
            await bench.until_taken(numbers)
            await until_all_settled(bench, live)
    finally:
        bench.broker.ctl("clear_policy", "short")

    assert bench.extra_posts(numbers) == {}


async def test_a_missing_queue_of_a_class_is_made_again(bench: Bench) -> None:
    """What was in it is gone with it; what comes then waits, and is sent."""
    async with bench.worker(**ON) as live:
        await bench.amqp.channel.queue_delete(f"{bench.queue}.urgent")
        codes = await bench.publish(5, **URGENT)
        await bench.until_taken(codes)
        await until_all_settled(bench, live)


# Stopping, and switching off


@WITH_AND_WITHOUT_IDS
async def test_a_drain_while_sorting(bench: Bench, *, ids: bool) -> None:
    """A worker that stops leaves no message in doubt, and the next one goes on."""
    async with bench.worker(**ON) as live:
        numbers = await bench.publish(500, ids=ids)
        await eventually(lambda: len(bench.service.taken(numbers)) >= 50, what="a beginning")
        assert await live.stop() == 0
    async with bench.worker(**ON) as live:
        await bench.until_taken(numbers)
        await until_all_settled(bench, live)

    assert bench.extra_posts(numbers) == {}


async def test_a_drain_that_times_out_while_sorting(bench: Bench) -> None:
    """What goes back then, its copies unconfirmed, is moved by another worker with the same key."""
    alone = ON | {"worker__shutdown_timeout_seconds": 1}
    async with bench.worker(**alone) as live:
        bench.proxy.trap("broker", ACK, "drop", again=True, link=PUBLISH_LINK)
        numbers = await bench.publish(20, ids=False)
        await bench.until_taken(numbers)
        async with bench.worker(**ON, rabbitmq__url=[bench.broker.url]) as other:
            for one in (live, other):
                await eventually(partial(one.metric, "sms_bridge_worker_peers"), what="a peer")
            assert await live.stop() != 0
            await until_all_settled(bench, other)

            answers = partial(other.metric, "sms_bridge_worker_redelivery_questions_total")
            assert answers(answer="kept") >= len(numbers)
            keys = {(post.to, post.idempotency_key) for post in bench.service.posts(numbers)}
            assert len(keys) == len(numbers)
            assert bench.sent_twice(numbers) == {}


async def test_switched_off_again(bench: Bench) -> None:
    """A worker without priorities takes what was sorted before, and says what to do."""
    bench.service.misbehave(SLOWER)
    async with bench.worker(**ON) as live:
        numbers = [*await bench.publish(300), *await bench.publish(20, **URGENT)]
        await until_sorted(bench, live, len(numbers))
    assert await bench.amqp.count(f"{bench.queue}.normal") > 100
    bench.service.behave()
    async with bench.worker() as live:
        await bench.until_taken([*numbers, *await bench.publish(20)])
        await until_all_settled(bench, live)

        (warning,) = live.logged("queues_left_behind")
        assert warning["queues"] == [f"{bench.queue}.urgent", f"{bench.queue}.normal"]
        for name in warning["queues"]:
            await bench.amqp.channel.queue_delete(name)
        more = await bench.publish(5)
        await bench.until_taken(more)
        await bench.until_settled(live)

    assert bench.extra_posts([*numbers, *more]) == {}


async def test_operators_see_what_is_sorted(bench: Bench) -> None:
    """Status, drain and check know the queues of the classes, the last two when left behind too."""
    bench.service.misbehave(SLOWER)
    async with bench.worker(**ON) as live:
        campaign = await bench.publish(200)
        codes = await bench.publish(5, **URGENT)
        await until_sorted(bench, live, len(campaign) + len(codes))
        await bench.until_taken(codes)
    names = [f"{bench.queue}.{name}" for name in ("urgent", "normal")]
    left = await bench.amqp.count(names[1])
    looker = Looker(make_settings(bench.values(**ON)), [])
    try:
        shown = (await looker.look()).queues
    finally:
        await looker.aclose()
    off = make_settings(bench.values())
    waiting = await find_waiting(off)
    set_up = SetUp(settings=off, roles=["worker"])
    async with open_link(bench, "check") as connection:
        broker = ConnectedBroker(set_up=set_up, url=off.rabbitmq.url[0], connection=connection)
        findings = {one.subject: one for one in await check_consumers(broker)}

    assert left > 50
    assert {one.name: one.ready for one in shown if one.role == "sorted"} == {
        names[0]: 0,
        names[1]: left,
    }
    assert list(waiting.ready)[-3:] == [bench.queue, *names]
    assert waiting.ready[names[1]] == left
    assert findings[f"queue {names[1]}"].result == "warn"
    assert f"{left} messages wait" in findings[f"queue {names[1]}"].text


async def test_a_drain_counts_no_sorter_as_a_worker(bench: Bench) -> None:
    """Else it would advise a pause where there is one: that stops the sending, not the sorting."""
    values = bench.values(**ON)
    settings = make_settings(values)
    async with bench.worker(**ON) as live:
        at_work = await find_waiting(settings)
        pause = await asyncio.create_subprocess_exec(*PROGRAM, "pause", env=make_environ(values))
        assert await pause.wait() == 0
        await eventually(lambda: not live.worker.consumer.is_registered, what="a pause")
        campaign = await bench.publish(30)
        await until_sorted(bench, live, len(campaign))
        paused = await find_waiting(settings)

    assert at_work.workers == 1
    assert (paused.workers, paused.total) == (0, len(campaign))


async def test_without_priorities_nothing_is_declared(bench: Bench) -> None:
    """And the header changes nothing."""
    async with bench.worker() as live:
        numbers = [*await bench.publish(5), *await bench.publish(5, **URGENT)]
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert await bench.amqp.count(f"{bench.queue}.urgent") == 0
        assert live.metric("sms_bridge_worker_messages_sorted_total") == 0
        assert live.metric("sms_bridge_worker_sorter_up") == 0


async def test_a_pause_stops_the_sending_only(bench: Bench) -> None:
    """What comes while the service refuses the key is sorted, and the urgent go first after it."""
    bench.service.misbehave({"status": 401, "count": None})
    async with bench.worker(**ON) as live:
        campaign = await bench.publish(300)
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="a pause")
        codes = await bench.publish(10, **URGENT)
        await until_sorted(bench, live, 310)
        bench.service.misbehave(SLOWER)
        await bench.until_taken(codes)
        waiting = len(campaign) - len(bench.service.taken(campaign))
        bench.service.behave()
        await bench.until_taken(campaign)
        await until_all_settled(bench, live)

        assert waiting > 150
        assert await bench.dead_letters() == []
