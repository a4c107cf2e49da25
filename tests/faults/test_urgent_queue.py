"""The urgent queue: its messages pass the others, starve nobody, and are as safe as any."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from bridge.admin.checks.broker import check_consumers
from bridge.admin.checks.findings import CheckedBroker
from bridge.admin.drain import count_waiting
from bridge.admin.status import StatusReader
from tests.amqp_client import open_amqp
from tests.faults.amqp_proxy import ACK
from tests.faults.bench import (
    PROGRAM,
    Bench,
    eventually,
    make_environ,
    make_numbers,
    make_settings,
    open_link,
    running,
)
from tests.faults.traffic import REFUSED, TOO_EARLY, WITH_AND_WITHOUT_IDS, once_each

if TYPE_CHECKING:
    from bridge.admin.management import Management

# Seconds that each POST takes: there is always something that waits.
SLOW: dict[str, Any] = {"latency_seconds": 0.05, "count": None}
SLOWER: dict[str, Any] = {"latency_seconds": 1, "count": None}


def places_of(bench: Bench, numbers: Sequence[str]) -> list[int]:
    posted, wanted = [attempt.to for attempt in bench.service.memory.requests], set(numbers)
    return [place for place, to in enumerate(posted) if to in wanted]


async def test_urgent_messages_pass_a_campaign(bench: Bench) -> None:
    """Behind 400 waiting ordinary messages they are posted before almost all of them."""
    bench.service.misbehave(SLOWER)
    async with bench.worker() as live:
        campaign = await bench.publish(400)
        await eventually(lambda: len(bench.service.posts(campaign)) >= 10, what="a beginning")
        codes = await bench.publish(10, urgent=True)
        posted_before = len(bench.service.posts(campaign))
        await bench.until_taken(codes)

        # In flight, or just about to go: three times the slots at most.
        assert places_of(bench, codes)[-1] <= posted_before + len(codes) + 3 * 10
        bench.service.behave()
        await bench.until_taken(campaign)
        await bench.until_settled(live)
        assert bench.extra_posts([*campaign, *codes]) == {}
        sent = "sms_bridge_worker_messages_processed_total"
        assert live.metric(sent, queue=bench.urgent_queue, outcome="sent") == 10
        assert live.metric(sent, queue=bench.queue, outcome="sent") == 400


async def test_of_nine_requests_one_is_ordinary(bench: Bench) -> None:
    bench.service.misbehave(SLOW)
    await bench.declare_main()
    await bench.declare_queue(bench.urgent_queue)
    codes, campaign = await bench.publish(300, urgent=True), await bench.publish(300)
    async with bench.worker() as live:
        await bench.until_taken([*campaign, *codes])
        await bench.until_settled(live)

    # From when some dozens of codes were posted until the last dozens.
    first, last = places_of(bench, codes)[50], places_of(bench, codes)[-50]
    between = [place for place in places_of(bench, campaign) if first < place < last]
    assert len(between) >= (last - first) // 9 - 1
    assert len(between) <= (last - first) / 4


async def test_a_retry_comes_back_to_its_queue(bench: Bench) -> None:
    async with bench.worker() as live:
        codes = make_numbers(5)
        bench.service.misbehave(*once_each(codes, TOO_EARLY), SLOWER)
        await bench.publish(codes, urgent=True)
        await eventually(lambda: len(bench.service.posts(codes)) == 5, what="the first tries")
        campaign = await bench.publish(300)
        await bench.until_taken(codes)
        waiting = len(campaign) - len(bench.service.taken(campaign))
        bench.service.behave()
        await bench.until_taken(campaign)
        await bench.until_settled(live)

        assert waiting > 100
        stored = "sms_bridge_worker_ladder_messages_total"
        assert live.metric(stored, queue=bench.urgent_queue, event="stored") == 5
        assert live.metric(stored, queue=bench.urgent_queue, event="returned") == 5


async def test_a_dead_letter_goes_back_to_its_queue(bench: Bench) -> None:
    code, other = make_numbers(2)
    bench.service.misbehave(*once_each([code, other], REFUSED))
    async with bench.worker() as live:
        await bench.publish([code], urgent=True)
        await bench.publish([other])
        await bench.until_dead(2)
        assert await live.stop() == 0
    command = (*PROGRAM, "dlq", "replay", "--yes")
    replay = await asyncio.create_subprocess_exec(*command, env=make_environ(bench.values()))
    assert await replay.wait() == 0
    counts = [await bench.amqp.count_if_there(queue) for queue in (bench.urgent_queue, bench.queue)]
    assert counts == [1, 1]
    (message,) = await bench.amqp.take_all(bench.urgent_queue)
    assert json.loads(message.body)["to"] == code
    assert "sms-bridge-queue" not in message.headers


async def test_urgent_messages_pass_at_a_rate_limit(bench: Bench) -> None:
    async with bench.worker(worker__rate_limit={"per_sender": 20.0, "burst": 1}):
        campaign = await bench.publish(200)
        await eventually(lambda: len(bench.service.posts(campaign)) >= 5, what="a beginning")
        codes = await bench.publish(5, urgent=True)
        posted_before = len(bench.service.posts(campaign))
        await bench.until_taken(codes)

        # What the limit lets through in two seconds.
        assert places_of(bench, codes)[-1] <= posted_before + len(codes) + 2 * 20


async def test_urgent_messages_go_first_after_a_pause(bench: Bench) -> None:
    """What was published while the service refused the key is sent in its order of urgency."""
    bench.service.misbehave({"status": 401, "count": None})
    async with bench.worker() as live:
        campaign = await bench.publish(300)
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="a pause")
        codes = await bench.publish(10, urgent=True)
        bench.service.misbehave(SLOWER)
        await bench.until_taken(codes)
        waiting = len(campaign) - len(bench.service.taken(campaign))
        bench.service.behave()
        await bench.until_taken(campaign)
        await bench.until_settled(live)

        assert waiting > 150
        assert await bench.dead_letters() == []


# Nothing is lost, and nothing is doubled


@WITH_AND_WITHOUT_IDS
async def test_a_cut_of_the_connection(bench: Bench, *, ids: bool) -> None:
    """The worker knows what the broker delivers again from either queue."""
    async with bench.worker() as live:
        trap = bench.proxy.trap("client", ACK, "cut", nth=100)
        numbers = [
            *await bench.publish(200, ids=ids),
            *await bench.publish(200, ids=ids, urgent=True),
        ]
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert trap.sprung.is_set()
        assert bench.extra_posts(numbers) == {}


async def test_a_restart_of_the_broker(bench: Bench) -> None:
    """Nothing is lost or sent twice of either queue."""
    bench.service.misbehave(SLOW)
    async with bench.worker() as live:
        numbers = [*await bench.publish(150), *await bench.publish(150, urgent=True)]
        await eventually(lambda: len(bench.service.taken(numbers)) >= 20, what="a beginning")
        await asyncio.to_thread(bench.broker.stop)
        await asyncio.to_thread(bench.broker.start)
        async with open_amqp(bench.broker.url) as bench.amqp:
            await bench.until_taken(numbers, seconds=120)
            await bench.until_settled(live)

        assert bench.extra_posts(numbers) == {}


async def test_a_worker_that_is_killed(bench: Bench, tmp_path: Path) -> None:
    await bench.declare_main()
    await bench.declare_queue(bench.urgent_queue)
    bench.service.misbehave(SLOW)
    numbers = [*await bench.publish(200), *await bench.publish(200, urgent=True)]
    with bench.worker_process(tmp_path / "log"):
        await eventually(lambda: len(bench.service.taken(numbers)) >= 100, what="a part")
    async with bench.worker() as live:
        await bench.until_taken(numbers, seconds=60)
        await bench.until_settled(live)

    # In flight at the kill, and those whose ack was on its way.
    assert len(Counter(bench.extra_posts(numbers))) <= 2 * 11
    keys = {(post.to, post.idempotency_key) for post in bench.service.posts(numbers)}
    assert len(keys) == len(numbers)


async def test_the_same_message_in_both_queues(bench: Bench) -> None:
    """A message is known by its id, whichever queue it comes from."""
    async with bench.worker() as live:
        numbers = await bench.publish(5)
        await bench.until_taken(numbers)
        await bench.publish(numbers, urgent=True)
        await bench.until_settled(live)

        assert bench.extra_posts(numbers) == {}


async def test_order_holds_within_each_queue(bench: Bench) -> None:
    (number,) = make_numbers(1)
    bench.service.misbehave({"latency_seconds": 0.2})

    async def publish(queue: str, text: str) -> None:
        body = json.dumps({"to": number, "from": "Acme", "text": text}).encode()
        await bench.amqp.publish(queue, body, message_id=text)

    async with bench.worker(worker__ordering="recipient") as live:
        for n in range(5):
            await publish(bench.queue, f"text {n}")
        await eventually(lambda: bench.service.posts([number]), what="a beginning")
        for n in range(2):
            await publish(bench.urgent_queue, f"code {n}")
        await eventually(lambda: len(bench.service.taken([number])) == 7, what="all seven")
        await bench.until_settled(live)

    texts = [message.text for message in bench.service.taken([number])]
    assert [text for text in texts if text.startswith("text")] == [f"text {n}" for n in range(5)]
    assert [text for text in texts if text.startswith("code")] == ["code 0", "code 1"]
    assert texts.index("code 1") < texts.index("text 4")


# The set-up


async def test_without_an_urgent_queue(bench: Bench) -> None:
    """With null there is no such queue, and the header of earlier releases is refused, with why."""
    async with bench.worker(worker__urgent_queue=None) as live:
        numbers = await bench.publish(5)
        await bench.publish(1, headers={"sms-bridge-priority": "urgent"})
        await bench.until_taken(numbers)
        await bench.until_dead(1)
        (letter,) = await bench.dead_letters()

        assert "there is no urgent queue" in str(letter.headers["sms-bridge-detail"])
        assert await bench.amqp.count_if_there(f"{bench.urgent_queue}.retry.1s") == 0
        assert await live.stop() == 0


async def test_the_header_of_earlier_releases_names_the_queue(bench: Bench) -> None:
    """Sent as an ordinary message, a one-time code could be late."""
    async with bench.worker():
        await bench.publish(1, headers={"sms-bridge-priority": "urgent"})
        await bench.until_dead(1)
        (letter,) = await bench.dead_letters()

    assert letter.headers["sms-bridge-reason"] == "invalid"
    assert bench.urgent_queue in str(letter.headers["sms-bridge-detail"])
    assert letter.headers["sms-bridge-queue"] == bench.queue


async def test_an_urgent_queue_of_others_is_taken_as_it_is(bench: Bench) -> None:
    await bench.amqp.channel.declare_queue(
        bench.urgent_queue, durable=True, arguments={"x-max-length": 1000}
    )
    async with bench.worker() as live:
        await bench.until_taken(await bench.publish(5, urgent=True))

        (warning,) = live.logged("topology_differs")
        assert bench.urgent_queue in warning["why"]


@pytest.mark.parametrize("topology", ["verify", "off"])
async def test_a_missing_urgent_queue_is_told(bench: Bench, topology: str) -> None:
    await bench.declare_main()
    async with bench.worker():
        pass
    await bench.amqp.channel.queue_delete(bench.urgent_queue)
    settings = make_settings(bench.values(rabbitmq__topology=topology))
    event = {"verify": "topology_unusable", "off": "urgent_queue_unusable"}[topology]
    async with running(settings, "worker") as live:
        await eventually(lambda: live.logged(event), what="a warning")
        said = json.dumps(live.logged(event)[0])
        assert bench.urgent_queue in said
        assert "worker.urgent_queue to null" in said
        await bench.declare_queue(bench.urgent_queue)
        await bench.until_taken(await bench.publish(3, urgent=True))


async def test_an_urgent_queue_that_is_deleted_is_made_again(bench: Bench) -> None:
    async with bench.worker():
        await bench.amqp.channel.queue_delete(bench.urgent_queue)
        numbers = make_numbers(3)

        async def publish() -> bool:
            try:
                await bench.publish(numbers, urgent=True)
            except Exception:  # noqa: BLE001  there is no queue yet
                return False
            return True

        await eventually(publish, what="a queue")
        await bench.until_taken(numbers)


async def test_operators_see_both_queues(bench: Bench, tmp_path: Path) -> None:
    values = bench.values()
    settings = make_settings(values)
    async with bench.worker() as live:
        pause = await asyncio.create_subprocess_exec(*PROGRAM, "pause", env=make_environ(values))
        assert await pause.wait() == 0
        await eventually(lambda: not live.worker.consumer.is_registered, what="a pause")
        numbers = [*await bench.publish(30), *await bench.publish(20, urgent=True)]
        reader = StatusReader(settings, [])
        try:
            shown = (await reader.read()).queues
        finally:
            await reader.aclose()
        async with open_link(bench, "check") as connection:
            waiting = await count_waiting(connection, settings.worker)
            broker = CheckedBroker(
                settings=settings,
                roles=["worker"],
                url=settings.rabbitmq.url[0],
                connection=connection,
                management=cast("Management", None),
            )
            findings = {one.subject: one for one in await check_consumers(broker)}

        assert bench.service.posts(numbers) == []
        assert {one.name: one.ready for one in shown if one.role == "requests"} == {
            bench.queue: 30,
            bench.urgent_queue: 20,
        }
        assert (waiting.total, waiting.ready[bench.urgent_queue]) == (50, 20)
        assert "20 messages wait" in findings[f"queue {bench.urgent_queue}"].text
        command = (*PROGRAM, "drain", "--reason", "wrong text", "--yes")
        drain = await asyncio.create_subprocess_exec(
            *command, env=make_environ(values), cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL
        )
        assert await drain.wait() == 0
        letters = await bench.dead_letters()

    assert Counter(str(letter.headers["sms-bridge-queue"]) for letter in letters) == {
        bench.queue: 30,
        bench.urgent_queue: 20,
    }
