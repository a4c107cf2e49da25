"""A limit, or a refusal, that is one message's or one sender's: all others go on.

How long is waited at most is judged, with room for a machine that is busy.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from tests.faults.bench import Bench, eventually, make_numbers
from tests.faults.choosy_api import ChoosyApi, Said, open_choosy_api
from tests.faults.test_one_pace import open_crew

OTHERS = 160
# Each message has two attempts, so that what is singled out ends soon.
TWO_TRIES = {"worker__max_attempts": 2}


@pytest.fixture
async def choosy() -> AsyncIterator[ChoosyApi]:
    """Run an SMS service that answers by number and sender."""
    async with open_choosy_api() as api:
        yield api


async def until_all_are_taken(api: ChoosyApi, numbers: Collection[str], *, seconds: float) -> None:
    """Return when a message to each of the numbers is accepted."""
    deadline = time.monotonic() + seconds
    while len(taken := api.taken(numbers)) < len(numbers):
        assert time.monotonic() < deadline, f"{len(taken)} of {len(numbers)} sent"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("wait", [86400, None], ids=["long", "none"])
async def test_one_numbers_limit_holds_up_no_other(
    bench: Bench, choosy: ChoosyApi, wait: int | None
) -> None:
    (bad,) = make_numbers(1)
    choosy.answer = lambda to, _: Said(429, retry_after=wait) if to == bad else None
    await bench.declare_main()
    await bench.publish([bad])
    others = await bench.publish(OTHERS)
    async with bench.worker(sms_api__base_url=choosy.url, **TWO_TRIES) as live:
        await until_all_are_taken(choosy, others, seconds=12)
        assert len(choosy.asked(others)) == OTHERS
        # It goes alone, and its attempts are used up.
        await bench.until_dead(1)
        (letter,) = await bench.dead_letters()
        assert letter.message_id == f"id-{bad}"
        assert letter.headers["sms-bridge-reason"] == "exhausted"
        assert letter.headers["sms-bridge-status"] == 429
        assert not live.paused
        singled_out = live.metric(
            "sms_bridge_worker_messages_processed_total", outcome="retried", reason="singled_out"
        )
        assert singled_out == 1


async def test_a_refusal_of_one_number_is_one_pause(bench: Bench, choosy: ChoosyApi) -> None:
    (bad,) = make_numbers(1)
    choosy.answer = lambda to, _: Said(401) if to == bad else None
    await bench.declare_main()
    for _ in range(5):
        await bench.publish([bad], ids=False)
    others = await bench.publish(OTHERS)
    async with bench.worker(sms_api__base_url=choosy.url, **TWO_TRIES) as live:
        await until_all_are_taken(choosy, others, seconds=12)
        await bench.until_dead(5)

        assert len(live.logged("paused")) == 1
        assert not live.paused
        assert {one.headers["sms-bridge-reason"] for one in await bench.dead_letters()} == {
            "exhausted"
        }


async def test_one_senders_limit_holds_that_sender_only(bench: Bench, choosy: ChoosyApi) -> None:
    is_full = True

    def answer(_to: str, sender: str) -> Said | None:
        is_refused = is_full and sender == "+12025550106"
        return Said(400, {"code": 21611}) if is_refused else None

    choosy.answer = answer
    await bench.declare_main()
    slow = await bench.publish(40, sender="+12025550106")
    others = await bench.publish(OTHERS, sender="+12025550109")
    async with bench.worker(
        sms_api__preset="twilio",
        sms_api__account="AC00000000000000000000000000000000",
        sms_api__base_url=choosy.url,
        worker__max_attempts=1,
    ) as live:
        await until_all_are_taken(choosy, others, seconds=10)
        assert not live.paused
        assert live.metric("sms_bridge_worker_throttled_seconds_total", cause="retry_after") == 0
        # One request for each slot, then after each wait; not one for each message and moment.
        assert len(choosy.asked(slow)) <= 60
        is_full = False
        await until_all_are_taken(choosy, slow, seconds=60)
        assert await bench.dead_letters() == []


async def test_a_senders_limit_without_a_code_of_its_own(bench: Bench, choosy: ChoosyApi) -> None:
    is_full = True
    choosy.answer = lambda _, sender: (
        Said(429, retry_after=2) if is_full and sender == "Slow" else None
    )
    await bench.declare_main()
    slow = await bench.publish(5, sender="Slow")
    others = await bench.publish(OTHERS)
    async with bench.worker(sms_api__base_url=choosy.url, worker__max_attempts=1) as live:
        await until_all_are_taken(choosy, others, seconds=15)
        later = await bench.publish(OTHERS)
        await until_all_are_taken(choosy, later, seconds=6)
        is_full = False
        await until_all_are_taken(choosy, slow, seconds=30)
        await bench.until_settled(live)
        assert await bench.dead_letters() == []


@pytest.mark.parametrize(("concurrency", "bulk"), [(1, 60), (10, 150)])
async def test_a_limited_senders_bulk_makes_room(
    bench: Bench, choosy: ChoosyApi, *, concurrency: int, bulk: int
) -> None:
    is_full = True
    choosy.answer = lambda _, sender: (
        Said(429, retry_after=2) if is_full and sender == "Slow" else None
    )
    choosy.latency_seconds = 0.02
    await bench.declare_main()
    slow = await bench.publish(bulk, sender="Slow")
    others = await bench.publish(20)
    changed = {"worker__concurrency": concurrency, "worker__max_attempts": 1}
    async with bench.worker(sms_api__base_url=choosy.url, **changed) as live:
        await until_all_are_taken(choosy, others, seconds=25)
        is_full = False
        await until_all_are_taken(choosy, slow, seconds=60)
        assert not live.paused
        assert await bench.dead_letters() == []


async def test_a_limit_for_all_burns_no_attempt(bench: Bench, choosy: ChoosyApi) -> None:
    await bench.declare_main()
    numbers = await bench.publish(100)
    taken_at: list[float] = []

    def answer(_to: str, _sender: str) -> Said | None:
        now = time.monotonic()
        if len([at for at in taken_at if at > now - 1]) >= 20:
            return Said(429)
        taken_at.append(now)
        return None

    choosy.answer = answer
    async with bench.worker(sms_api__base_url=choosy.url, **TWO_TRIES) as live:
        await until_all_are_taken(choosy, numbers, seconds=60)
        assert await bench.dead_letters() == []
        assert live.metric("sms_bridge_worker_provider_responses_total", code="429") > 0


async def test_a_code_that_nobody_knows_pauses(bench: Bench, choosy: ChoosyApi) -> None:
    """The same unknown code to ten messages in a row is the set-up's: at most nine are dead."""
    is_broken = True
    choosy.answer = lambda *_: Said(400, {"code": "4711"}) if is_broken else None
    await bench.declare_main()
    numbers = await bench.publish(OTHERS)
    async with bench.worker(sms_api__base_url=choosy.url) as live:
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        assert live.logged("paused")[0]["code"] == "4711"
        before = len(choosy.posts)
        await eventually(lambda: len(choosy.posts) >= before + 2, what="2 probes")
        assert live.paused == {"misconfigured"}
        assert len(choosy.posts) <= 30
        is_broken = False
        await eventually(lambda: not live.paused, what="resumed")
        await bench.until_settled(live, seconds=60)
        letters = await bench.dead_letters()
        assert {one.headers["sms-bridge-reason"] for one in letters} == {"refused"}
        assert len(letters) <= 9
        assert len(choosy.taken(numbers)) == OTHERS - len(letters)


async def test_refusals_of_bad_numbers_are_no_fault_of_the_setup(
    bench: Bench, choosy: ChoosyApi
) -> None:
    bad = make_numbers(12)
    choosy.answer = lambda to, _: Said(400, {"code": "4711"}) if to in bad else None
    async with bench.worker(sms_api__base_url=choosy.url) as live:
        await bench.publish(bad)
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        others = await bench.publish(20)
        # Two probes are bad at most, after one second and two.
        await until_all_are_taken(choosy, others, seconds=15)
        while await bench.amqp.count_if_there(bench.dead_queue) < len(bad):
            (other,) = await bench.publish(1)
            await until_all_are_taken(choosy, [other], seconds=20)
        letters = await bench.dead_letters()
        assert {one.headers["sms-bridge-reason"] for one in letters} == {"refused"}


async def test_several_workers_single_out_one_number(
    bench: Bench, choosy: ChoosyApi, tmp_path: Path
) -> None:
    """One number's 429 holds up two workers for its wait, once, and another worker knows of it."""
    (bad,) = make_numbers(1)
    choosy.answer = lambda to, _: Said(429, retry_after=4) if to == bad else None
    choosy.latency_seconds = 0.05
    await bench.declare_main()
    await bench.publish([bad])
    others = await bench.publish(300)
    values = {"sms_api__base_url": choosy.url, "worker__max_attempts": 3}
    async with open_crew(bench, tmp_path, 2, **values):
        await until_all_are_taken(choosy, others, seconds=20)
        later = await bench.publish(100)
        await until_all_are_taken(choosy, later, seconds=10)
        await bench.until_dead(1)
        (letter,) = await bench.dead_letters()
    assert letter.headers["sms-bridge-reason"] == "exhausted"


async def test_several_workers_pause_for_a_code_that_nobody_knows(
    bench: Bench, choosy: ChoosyApi, tmp_path: Path
) -> None:
    """Two workers lose no more than nine each, and none while they probe in turns."""
    is_broken = True
    choosy.answer = lambda *_: Said(400, {"code": "4711"}) if is_broken else None
    choosy.latency_seconds = 0.05
    await bench.declare_main()
    numbers = await bench.publish(OTHERS)
    async with open_crew(bench, tmp_path, 2, sms_api__base_url=choosy.url) as crew:
        await eventually(lambda: all(crew.logged("paused")), what="paused")
        before = len(choosy.posts)
        dead = await bench.amqp.count_if_there(bench.dead_queue)
        await eventually(lambda: len(choosy.posts) >= before + 3, what="3 probes")
        is_broken = False
        await eventually(
            lambda: len(choosy.taken(numbers)) >= OTHERS - 18, what="all others", seconds=60
        )
        letters = await bench.dead_letters()
        assert dead <= len(letters) <= 18
        await until_all_are_taken(
            choosy,
            [number for number in numbers if f"id-{number}" not in {m.message_id for m in letters}],
            seconds=30,
        )


async def test_a_suspected_outage_holds_a_message_for_one_step(
    bench: Bench, choosy: ChoosyApi
) -> None:
    choosy.answer = lambda *_: Said(500)
    await bench.declare_main()
    numbers = await bench.publish(15)
    async with bench.worker(sms_api__base_url=choosy.url, worker__outage_after="1h") as live:
        suspected = "sms_bridge_worker_outage_suspected"
        await eventually(lambda: live.metric(suspected) == 1, what="suspected")
        assert live.paused == set()
        facts = live.bridge.wiring.health.facts["worker"]()
        assert isinstance(facts, dict)
        assert facts["outage_suspected"] is True
        assert len(live.logged("outage_suspected")) == 1
        await bench.until_dead(15)
        letters = await bench.dead_letters()
        assert {one.headers["sms-bridge-reason"] for one in letters} == {"uncertain"}
        assert [len(choosy.asked([number])) for number in numbers] == [3] * 15
        choosy.answer = lambda *_: None
        more = await bench.publish(1)
        await until_all_are_taken(choosy, more, seconds=10)
        await eventually(lambda: live.metric(suspected) == 0, what="refuted")
